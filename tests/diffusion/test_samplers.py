"""Chains over data whose optimal network is known in closed form."""

import math

import pytest
import torch
from diffusers import DDIMScheduler

from dstrain.diffusion import samplers, schedule
from dstrain.diffusion.flow import FlowMatching
from dstrain.diffusion.gaussian import GaussianDiffusion

MEAN, STD = 0.3, 0.2  # of the data: a Gaussian


def chain(count, **kwargs):
    full = GaussianDiffusion(schedule.make_betas("linear", 1000), **{"variance": "fixed_small"} | kwargs)
    return full.respace(str(count))


def optimal(diffusion):
    """E[eps | x_t] for Gaussian data: x_t is Gaussian, too."""
    table = torch.cumprod(1 - schedule.make_betas("linear", 1000), 0)

    def network(x, t):
        a = table[t].view(-1, 1)
        return (1 - a).sqrt() * (x - a.sqrt() * MEAN) / (a * STD**2 + 1 - a)

    return network


def randn(seed, shape=(4000, 1)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("sampler", ["ancestral", "ddim", "ddim eta 1"])
def test_gaussian_data(sampler):
    """Oracle: mean and deviation of the data, up to the chain's discretization and the number of samples."""
    diffusion = chain(1000)
    if sampler == "ancestral":
        x = samplers.sample_ancestral(diffusion, optimal(diffusion), randn(0), lambda i: randn(i + 1))
    else:
        x = samplers.sample_ddim(
            diffusion, optimal(diffusion), randn(0), lambda i: randn(i + 1), eta=float("eta" in sampler)
        )
    assert float(x.mean()) == pytest.approx(MEAN, abs=0.01)
    assert float(x.std()) == pytest.approx(STD, rel=0.05)


def test_ddim_with_eta_one_is_ancestral():
    """Oracle: the ancestral chain with the posterior's variance (Song et al. 2020, section 4.1)."""
    diffusion, noise = chain(50), lambda i: randn(i + 1)
    torch.testing.assert_close(
        samplers.sample_ddim(diffusion, optimal(diffusion), randn(0), noise, eta=1.0),
        samplers.sample_ancestral(diffusion, optimal(diffusion), randn(0), noise),
    )


def test_encode_inverts_ddim():
    """Oracle: the noise that was decoded."""
    diffusion, x = chain(1000), randn(0, (64, 1))
    network = optimal(diffusion)
    back = samplers.invert_ddim(diffusion, network, samplers.sample_ddim(diffusion, network, x))
    assert float((back - x).abs().max()) < 0.05


def test_clipping():
    """Oracle: the range of pixels."""
    diffusion = chain(20)

    def wild(x, t):
        return 3 * x

    out = samplers.sample_ddim(diffusion, wild, randn(0, (64, 1)), clip_denoised=True)
    assert float(out.abs().max()) <= 1 + 1e-9


def test_latents_are_not_clipped():
    """Oracle: by hand: a network that is sure of x_start = 3 leads there, and to 1 where the range of pixels is asked
    for; noise is encoded as the same function decodes it.
    """
    diffusion, x, noise = chain(20, prediction="x_start"), randn(0, (8, 1)), lambda i: randn(i + 1, (8, 1))
    network, timesteps = lambda x, t: torch.full_like(x, 3.0), range(20)
    for clip, end in (({}, 3.0), ({"clip_denoised": True}, 1.0)):
        for name in ("ddpm", "ddim", "dpm++"):
            out = samplers.sample_chain(diffusion, network, x, noise, name, timesteps, **clip)
            torch.testing.assert_close(out, torch.full_like(x, end))
        for out in (
            samplers.sample_ancestral(diffusion, network, x, noise, **clip),
            samplers.sample_ddim(diffusion, network, x, **clip),
            samplers.ChainDenoiser(diffusion, network, **clip)(x, samplers.Level(1.0, 0.0, 5)),
            diffusion.p_mean_variance(network, x, torch.full((8,), 5), **clip)[2],
        ):
            torch.testing.assert_close(out, torch.full_like(x, end))
        encoded = samplers.invert_ddim(diffusion, network, x, **clip)
        decoded = samplers.sample_ddim(diffusion, network, encoded, **clip)
        torch.testing.assert_close(decoded, torch.full_like(x, end))
    ends = diffusion.tables["sqrt_alphas_cumprod"][0], diffusion.tables["sqrt_one_minus_alphas_cumprod"][0]
    torch.testing.assert_close(samplers.invert_ddim(diffusion, network, x), (x - ends[0] * 3) / ends[1])


def test_noise_and_calls():
    """Oracle: one draw and one call a step, in order, also at t = 0; no draw where eta is 0."""
    diffusion, drawn, called = chain(5), [], []

    def network(x, t):
        called.append((tuple(x.shape), t.unique().tolist()))
        return x * 0

    def noise(i):
        return drawn.append(i) or randn(i, (3, 1))

    samplers.sample_ancestral(diffusion, network, randn(0, (3, 1)), noise)
    assert drawn == list(range(5)) and called == [((3, 1), [t]) for t in (999, 749, 500, 250, 0)]
    samplers.sample_ddim(diffusion, network, randn(0, (3, 1)), noise)
    assert drawn == list(range(5)) and len(called) == 10
    with pytest.raises(ValueError, match="eta"):
        samplers.sample_ddim(diffusion, network, randn(0, (3, 1)), eta=0.5)


@pytest.mark.parametrize("channels", [None, 3])
def test_guidance(channels):
    """Oracle: the formula, written out: null + scale (conditional - null) on the guided channels."""

    def out(x, y):
        return torch.cat((x * (1 + y.view(-1, 1, 1, 1)), x - y.view(-1, 1, 1, 1)), dim=1)

    calls = []

    def network(x, t, y):
        calls.append(len(x))
        return out(x, y)

    x, y, null = randn(0, (2, 4, 2, 2)), torch.tensor([1.0, 2.0]), torch.tensor([5.0, 5.0])
    found = samplers.make_guided_network(network, {"y": y}, {"y": null}, 4.0, channels)(x, torch.zeros(2))
    count = channels or 4
    conditional, without = out(x, y), out(x, null)
    torch.testing.assert_close(found[:, :count], (without + 4 * (conditional - without))[:, :count])
    assert torch.equal(found[:, count:], conditional[:, count:]) and calls == [4]
    plain = samplers.make_guided_network(network, {"y": y}, {"y": null}, 1.0)(x, torch.zeros(2))
    assert torch.equal(plain, conditional) and calls == [4, 2]


def test_bfloat16_network():
    """Oracle: the chain's own precision: float32 in, float32 out."""
    diffusion = chain(5)
    network = samplers.make_guided_network(
        lambda x, t, y: x.bfloat16(), {"y": torch.ones(2)}, {"y": torch.zeros(2)}, 2.0
    )
    assert samplers.sample_ddim(diffusion, network, randn(0, (2, 1)).float()).dtype == torch.float32
    assert math.isfinite(
        float(
            samplers.sample_ancestral(
                diffusion, network, randn(0, (2, 1)).float(), lambda i: randn(i, (2, 1)).float()
            ).sum()
        )
    )


def test_guidance_is_rescaled():
    """Oracle: Lin et al. 2023, Equations 15 and 16, by numpy, sample by sample."""

    def network(x, t, y):
        return x * y.view(-1, 1, 1, 1)

    x, y, null = randn(0, (2, 4, 3, 3)), torch.tensor([1.0, 2.0]), torch.tensor([0.5, 3.0])

    def rescaled(share):
        return samplers.make_guided_network(network, {"y": y}, {"y": null}, 5.0, rescale=share)(x, torch.zeros(2))

    plain, strong = network(x, None, y).numpy(), rescaled(0.0).numpy()
    for sample in range(2):
        ratio = plain[sample].std() / strong[sample].std()
        expected = 0.7 * ratio * strong[sample] + 0.3 * strong[sample]
        torch.testing.assert_close(rescaled(0.7)[sample], torch.from_numpy(expected))


@pytest.mark.parametrize("sampler", ["ddim", "dpm++"])
@pytest.mark.parametrize("guide", [None, lambda x, t, y: 0 * x])
def test_guidance_interval(sampler, guide):
    """Oracle: the noise levels of the timesteps that are called: the outputs, and the samples of each call, there."""
    diffusion, guided_at, calls = GaussianDiffusion(schedule.make_betas("linear", 1000), variance="fixed_small"), {}, {}

    def counted(network):
        def call(x, t, **conditions):
            calls[int(t[0])] = calls.get(int(t[0]), 0) + len(x)
            return network(x, t, **conditions)

        return call

    network = samplers.make_guided_network(
        counted(lambda x, t, y: 0 * x + y.view(-1, 1)),
        {"y": torch.ones(3)},
        {"y": torch.zeros(3)},
        3.0,
        guide=guide and counted(guide),
        active=samplers.make_guidance_mask_function((0.2, 5.0), diffusion.compute_noise_ratio),
    )

    def watched(x, t):
        out = network(x, t)
        guided_at[int(t[0])] = float(out[0])
        return out

    timesteps = samplers.choose_timesteps(diffusion, sampler, 10, "trailing")
    samplers.sample_chain(diffusion, watched, randn(0, (3, 1)), None, sampler, timesteps)
    alphas = torch.cumprod(1 - schedule.make_betas("linear", 1000), 0)
    inside = {t: 0.2 <= float((1 / alphas[t] - 1).sqrt()) <= 5.0 for t in timesteps}
    assert guided_at == {t: 3.0 if inside[t] else 1.0 for t in timesteps} and len(set(inside.values())) == 2
    assert calls == {t: 6 if inside[t] else 3 for t in timesteps}


@pytest.mark.parametrize("rescaled", [False, True])
def test_the_noise_of_a_chain(rescaled):
    """Oracle: the definition, sigma / alpha of the betas' products, at every time as the network
    of the chain sees it.
    """
    betas = schedule.make_betas("cosine", 400)
    diffusion, kept = GaussianDiffusion(betas, rescale_timesteps=rescaled), torch.cumprod(1 - betas, 0)
    t = torch.arange(400)
    found = diffusion.compute_noise_ratio(torch.zeros(400, 2, 3), diffusion.convert_timesteps_for_network(t))
    assert found.shape == (400, 1, 1) and (float(diffusion.convert_timesteps_for_network(t)[4]) == 10.0) == rescaled
    torch.testing.assert_close(found.flatten(), (1 / kept - 1).sqrt().float())


def test_guidance_where_a_batch_lies_on_both_sides():
    """Oracle: by hand: samples within the interval are guided, and their neighbours outside it are not."""
    network = samplers.make_guided_network(
        lambda x, t, y: 0 * x + y.view(-1, 1),
        {"y": torch.ones(2)},
        {"y": torch.zeros(2)},
        3.0,
        active=lambda x, t: (t > 5).view(-1, 1),
    )
    assert network(randn(0, (2, 1)), torch.tensor([3, 9])).flatten().tolist() == [1.0, 3.0]


def test_autoguidance():
    """Oracle: Karras et al. 2024, Equation 3: weak + scale (strong - weak), both with the labels, each called once."""
    calls = []

    def of(factor, channels):
        return lambda x, t, y: calls.append(len(x)) or (factor * x * y.view(-1, 1)).repeat(1, channels)

    x, y = randn(0, (3, 2)), torch.tensor([1.0, 2.0, 3.0])
    out = samplers.make_guided_network(of(1.0, 2), {"y": y}, {"y": y * 0}, 2.5, guide=of(0.2, 1))(x, torch.zeros(3))
    conditional = x * y.view(-1, 1)
    torch.testing.assert_close(out[:, :2], 0.2 * conditional + 2.5 * 0.8 * conditional)
    assert torch.equal(out[:, 2:], conditional) and calls == [3, 3]


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("count", [2, 8, 10, 50])
def test_spacings(spacing, count):
    """Oracle: the timesteps of diffusers' DDIMScheduler."""
    scheduler = DDIMScheduler(timestep_spacing=spacing)
    scheduler.set_timesteps(count)
    diffusion = chain(1000)
    found = samplers.choose_timesteps(diffusion, "dpm++", count, spacing)
    assert found == [int(t) for t in scheduler.timesteps.flip(0)]


@pytest.mark.parametrize("name, count", [("linear", 10), ("cosine", 10), ("cosine", 100), ("linear", 1)])
def test_karras_spacing(name, count):
    """Oracle: Karras et al. 2022, Equation 5, from sigma 80 to the chain's lowest; all are different timesteps."""
    diffusion = GaussianDiffusion(schedule.make_betas(name, 1000), variance="fixed_small")
    found = samplers.choose_timesteps(diffusion, "dpm++", count, "karras")
    assert found == sorted(set(found)) and len(found) == count and found[-1] == 999 and found[0] >= 0
    if count == 10:
        sigma = diffusion.tables["sqrt_recipm1_alphas_cumprod"].numpy()
        low, high = sigma[0] ** (1 / 7), min(80.0, sigma[-1]) ** (1 / 7)
        expected = [(low + i / 8 * (high - low)) ** 7 for i in range(9)]
        for t, value in list(zip(found, expected))[4:-1]:  # below the chain is coarser
            assert abs(math.log(sigma[t] / value)) <= max(abs(math.log(sigma[t] / sigma[t + step])) for step in (-1, 1))


@pytest.mark.parametrize("sampler", samplers.SAMPLERS)
@pytest.mark.parametrize("spacing", [None, *schedule.SPACINGS])
def test_one_step(sampler, spacing):
    """Oracle: the timestep that noise alone belongs to."""
    assert samplers.choose_timesteps(chain(1000), sampler, 1, spacing) == [999]


def test_few_steps():
    """Oracle: `trailing` written out; for karras Equation 5 without its ends; for both, exact samples of Gaussian data,
    from which steps at almost pure noise and almost data end further away.
    """
    diffusion = GaussianDiffusion(schedule.make_betas("linear", 1000), variance="fixed_small")
    noise = diffusion.tables["sqrt_recipm1_alphas_cumprod"].numpy()
    for sampler, calls, visited in (
        ("dpm++", 2, [499, 999]),
        ("unipc", 3, [332, 666, 999]),
        ("heun", 3, [499, 999]),
        ("edm", 4, [499, 999]),
        ("dpm++sde", 5, [199, 399, 599, 799, 999]),
    ):
        assert samplers.choose_timesteps(diffusion, sampler, calls) == visited
    assert samplers.choose_timesteps(diffusion, "dpm++", 6) == samplers.choose_timesteps(
        diffusion, "dpm++", 6, "karras"
    )
    low, high = noise[0] ** (1 / 7), 80 ** (1 / 7)
    for count in (2, 3, 5):
        *inner, last = samplers.choose_timesteps(diffusion, "dpm++", count, "karras")
        expected = [(low + i / count * (high - low)) ** 7 for i in range(1, count)]
        assert last == 999 and noise[inner] == pytest.approx(expected, rel=0.02)

    def error(timesteps):
        out = samplers.sample_chain(diffusion, optimal(diffusion), randn(0), None, "dpm++", timesteps)
        return float((out - MEAN - STD * randn(0)).square().mean().sqrt()) / STD

    for count in (2, 3):
        for spacing in (None, "karras"):
            timesteps = samplers.choose_timesteps(diffusion, "dpm++", count, spacing)
            assert error(timesteps) < 0.95 * error([0, 991, 999][-count:])


def test_few_steps_of_a_flow():
    """Oracle: Equation 5 from 80 to 0.002 without its ends, in t / (1 - t)."""
    for count in (1, 2, 4):
        first, *inner, last = (
            FlowMatching().make_time_grid(count, torch.zeros(1, dtype=torch.float64), "karras").tolist()
        )
        low, high = 0.002 ** (1 / 7), 80 ** (1 / 7)
        expected = [(high + i / count * (low - high)) ** 7 for i in range(1, count)]
        assert (first, last) == (1, 0) and [t / (1 - t) for t in inner] == pytest.approx(expected)


def test_timesteps_of_a_chain():
    """Oracle: by hand: DDIM's strides from 0 on, where there are such; else evenly from one end to the other."""
    diffusion = chain(1000)
    assert samplers.choose_timesteps(diffusion, "ddim", 10) == [*range(0, 1000, 100)]
    assert samplers.choose_timesteps(diffusion, "ddpm", 10) == [*range(0, 1000, 111)]


def test_inverted_by_name():
    """Oracle: invert_ddim over the chain of these timesteps; sampled again, it comes back."""
    diffusion, x_start = chain(1000), MEAN + STD * randn(0, (16, 1))
    network, timesteps = optimal(diffusion), samplers.choose_timesteps(diffusion, "ddim", 100)
    noise = samplers.invert_chain(diffusion, network, x_start, "ddim", timesteps)
    assert torch.equal(noise, samplers.invert_ddim(diffusion.respace_to_timesteps(timesteps), network, x_start))
    again = samplers.sample_chain(diffusion, network, noise, None, "ddim", timesteps)
    assert float((again - x_start).abs().max()) < 0.1


def test_the_level_nearest():
    """Oracle: the least difference in sigma / alpha over all timesteps, below them and above them, too."""
    diffusion = chain(1000)
    denoiser = samplers.ChainDenoiser(diffusion, None)
    noise = diffusion.tables["sqrt_recipm1_alphas_cumprod"]
    for s in (1e-3, 0.0101, 0.3, 1.0, 79.5, 150.0, 1e4):
        assert denoiser.find_nearest_noise_level(s).time == int((noise - s).abs().argmin())


def test_wrong_choices():
    """Oracle: one line that names the value and what there is."""
    diffusion = chain(1000)
    for call, words in (
        (lambda: samplers.choose_timesteps(diffusion, "ddim", 5, "karas"), "spacing=karas is none of"),
        (lambda: samplers.choose_timesteps(diffusion, "dpm++", 1001), "1001 is not between 1 and the 1000"),
        (lambda: samplers.sample_chain(diffusion, None, randn(0), None, "unipc", [0], 0.5), "eta=0.5.*unipc"),
        (lambda: samplers.invert_chain(diffusion, None, randn(0), "ddpm", [0]), "sampler=ddpm cannot be inv"),
        (lambda: samplers.invert_chain(diffusion, None, randn(0), "ddim", [0], 0.5), "ddim, eta=0.5 cannot"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
