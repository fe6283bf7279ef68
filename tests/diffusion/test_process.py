"""What systems see of chains and flows: SDEs by SiT's samplers, stratified times, and the weights of min-SNR."""

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import kstest, norm

from dstrain import rng
from dstrain.diffusion.densities import stratify_uniforms
from dstrain.diffusion.flow import COEFFICIENTS, FlowMatching
from dstrain.diffusion.gaussian import GaussianDiffusion
from dstrain.diffusion.process import Flow
from dstrain.diffusion.schedule import make_betas
from dstrain.recipe import ConfigError

GOLDEN = Path(__file__).parents[1] / "golden" / "dit" / "sit_samplers.safetensors"
DRAWN = {key: value.double() for key, value in load_file(GOLDEN).items()}
OURS = {"velocity": "velocity", "noise": "eps", "score": "score"}  # SiT's words for predictions


def toy(target):
    """The network of the golden file, which counts time from the noise."""
    sign = -1 if target == "velocity" else 1

    def network(x, t):
        return sign * torch.tanh(DRAWN["toy/a"] * x + DRAWN["toy/b"] * (1 - t).view(-1, 1, 1, 1) + DRAWN["toy/c"])

    return network


def assert_close(found, expected):
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("key", [key for key in sorted(DRAWN) if key.startswith("out/sde/")])
def test_sit_sdes(key):
    """Oracle: what SiT's Euler-Maruyama and Heun draw, by its forms of the diffusion coefficient and its last steps;
    its norm 1 is our eta 2.
    """
    _, _, path, target, method, form, last, size, count = key.split("/")
    choices = {"coefficient": form.lower(), "last": last.lower(), "last_size": float(size)}
    flow = FlowMatching(path=path.lower(), prediction=OURS[target], time_scale=1.0, **choices)
    steps = int(count) - (last == "None")
    sampler, calls = ("sde-heun", 2 * steps - 1) if method == "Heun" else ("sde", steps)
    met = []
    network = toy(target)
    drawn = flow.sample(
        lambda x, t: met.append(t) or network(x, t),
        DRAWN["in/start"],
        lambda step: DRAWN["in/noises"][step],
        sampler,
        calls,
        eta=2.0,
    )
    assert_close(drawn, DRAWN[key])
    assert len(met) == calls


@pytest.mark.parametrize("key", [key for key in sorted(DRAWN) if key.startswith("out/ode/") and "dopri5" not in key])
def test_sit_odes(key):
    """Oracle: what SiT's Euler and Heun draw over its own times, which stop before the ends where it divides by 0; it
    has an adaptive solver beside them, and this has none.
    """
    _, _, path, target, method, count = key.split("/")
    first = 0.0 if path == "VP" or target == "velocity" else 1e-3
    last = 1.0 if path != "VP" and target == "velocity" else 1 - 1e-3
    flow = FlowMatching(path=path.lower(), prediction=OURS[target], time_scale=1.0)
    grid = 1 - torch.linspace(first, last, int(count), dtype=torch.float64)
    drawn = flow.integrate_ode(toy(target), DRAWN["in/start"], grid, method.removesuffix("2"))
    assert_close(drawn, DRAWN[key])


def test_an_sde_without_noise():
    """Oracle: the ODE's methods: Euler's for sde, Heun's for sde-heun, whose last step is Euler's."""
    flow, start, network = FlowMatching(time_scale=1.0), DRAWN["in/start"], toy("velocity")
    euler = flow.sample(network, start, torch.randn, "euler", 5)
    assert torch.equal(flow.sample(network, start, torch.randn, "sde", 5, eta=0.0), euler)
    grid = flow.make_time_grid(4, start)
    heun = flow.integrate_ode(network, flow.integrate_ode(network, start, grid[:-1], "heun"), grid[-2:], "euler")
    torch.testing.assert_close(flow.sample(network, start, torch.randn, "sde-heun", 7, eta=0.0), heun)


MEAN, STD = 0.3, 0.2  # of Gaussian data


@pytest.mark.parametrize("coefficient", COEFFICIENTS)
@pytest.mark.parametrize("sampler", ["sde", "sde-heun"])
def test_every_coefficient_keeps_the_marginals(coefficient, sampler):
    """Oracle: mean and deviation of the data, whatever the noise of the SDE."""

    def optimal(x, t):
        t = t.view(-1, 1)
        variance = ((1 - t) * STD) ** 2 + t**2
        return (t - (1 - t) * STD**2) / variance * (x - (1 - t) * MEAN) - MEAN

    def randn(step):
        return torch.randn(20000, 1, generator=torch.Generator().manual_seed(step + 1), dtype=torch.float64)

    flow = FlowMatching(time_scale=1.0, coefficient=coefficient)
    drawn = flow.sample(optimal, randn(-1), randn, sampler, 400)
    assert float(drawn.mean()) == pytest.approx(MEAN, abs=0.01)
    assert float(drawn.std()) == pytest.approx(STD, rel=0.06)


@pytest.mark.parametrize("last, t_last", [("euler", 0.0), ("none", 0.0), ("none", 0.02), ("mean", 0.02)])
@pytest.mark.parametrize("num_calls", [2, 3, 8, 9])
def test_calls_of_an_sde(last, t_last, num_calls):
    """Oracle: the calls counted: never more than are asked for, and at most one fewer."""
    calls = []

    def network(x, t):
        calls.append(1)
        return x

    for sampler in ("sde", "sde-heun"):
        calls.clear()
        flow = FlowMatching(time_scale=1.0, last=last, t_last=t_last)
        flow.sample(network, torch.ones(1, 1), lambda step: torch.ones(1, 1), sampler, num_calls)
        assert num_calls - 1 <= len(calls) <= num_calls


STRATA = 12


def test_each_part_has_one_time():
    """Oracle: the parts counted: of as many samples in a row each has one, of a quarter of them each quarter has some;
    a sample's number is a function of its key, place and step, whatever batch it stands in.
    """
    for step in (0, 1, 7):
        position = torch.arange(3 * STRATA)
        uniforms = rng.uniform(rng.keys(0, step, position), "timestep")
        found = stratify_uniforms(uniforms, position, torch.full_like(position, step), STRATA)
        for begin in (0, 5, STRATA):
            assert sorted((found[begin : begin + STRATA] * STRATA).long().tolist()) == list(range(STRATA))
        assert len(set((found[:4] * 4).long().tolist())) >= 3
        parts = [
            stratify_uniforms(uniforms[ranks], position[ranks], torch.full((len(ranks),), step), STRATA)
            for ranks in position.split(9)
        ]
        assert torch.equal(torch.cat(parts), found)
    largest = torch.tensor([1 - 2**-24])
    assert max(float(stratify_uniforms(largest, torch.tensor([place]), None, 1000)) for place in range(1000)) < 1


def test_times_keep_their_density():
    """Oracle: the density: a place's numbers over many steps are uniform, and all times logit-normal
    (Kolmogorov-Smirnov).
    """
    steps = torch.arange(2000)
    keys = torch.stack([rng.keys(0, int(step), torch.tensor([5]))[0] for step in steps])
    place = stratify_uniforms(rng.uniform(keys, "timestep"), torch.full_like(steps, 5), steps, STRATA)
    assert kstest(place.numpy(), "uniform").pvalue > 0.01

    process = Flow(strata=STRATA, logit_mean=0.4, logit_std=1.2).make_process((1, 2, 2))
    position, met = torch.arange(2400), []
    example = {"key": rng.keys(3, 0, position), "position": position, "x_start": torch.zeros(2400, 1, 2, 2)}
    process.compute_losses_at_drawn_times(lambda x, t: met.append(t / 1000) or x, example)
    found = torch.special.logit(met[0]).numpy()
    assert kstest(found, norm(0.4, 1.2).cdf).pvalue > 0.01
    alone = Flow(logit_mean=0.4, logit_std=1.2).make_process((1, 2, 2))
    alone.compute_losses_at_drawn_times(lambda x, t: met.append(t / 1000) or x, example)
    assert abs(found.mean() - 0.4) < abs(torch.special.logit(met[1]).mean() - 0.4)


@pytest.mark.parametrize("prediction, gamma", [*itertools.product(("eps", "x_start", "v"), (0.5, 5.0))])
def test_min_snr(prediction, gamma):
    """Oracle: Hang et al. 2023 in one line for all predictions: the error of the x_start that a prediction means,
    weighed by min(SNR, gamma); mse stays as predicted.
    """
    betas = make_betas("cosine", 20)
    chosen = {"prediction": prediction, "variance": "fixed_small"}
    diffusion = GaussianDiffusion(betas, min_snr=gamma, **chosen)
    generator = torch.Generator().manual_seed(0)
    x_start, noise, out = torch.randn(3, 20, 2, 4, 4, generator=generator, dtype=torch.float64)
    t = torch.arange(20)
    terms = diffusion.training_losses(lambda x, t: out, x_start, t, noise)
    x_t = diffusion.q_sample(x_start, t, noise)
    signal2 = torch.cumprod(1 - betas, 0)
    error = (diffusion.predict_x_start(out, x_t, t) - x_start).square().flatten(1).mean(1)
    torch.testing.assert_close(terms["loss"], (signal2 / (1 - signal2)).clamp(max=gamma) * error)
    plain = GaussianDiffusion(betas, **chosen).training_losses(lambda x, t: out, x_start, t, noise)
    torch.testing.assert_close(terms["mse"], plain["loss"])
    learned = GaussianDiffusion(betas, min_snr=gamma, prediction=prediction, variance="learned_range")
    both = learned.training_losses(lambda x, t: torch.cat((out, out), 1), x_start, t, noise)
    torch.testing.assert_close(both["loss"], terms["loss"] + both["vb"])
    assert diffusion.respace("5").min_snr == gamma


@pytest.mark.parametrize("choice", [{"loss": "kl"}, {"prediction": "previous_x"}])
def test_what_min_snr_does_not_weigh(choice):
    """Oracle: a ConfigError that names it."""
    with pytest.raises(ConfigError, match="min_snr: it weighs"):
        GaussianDiffusion(make_betas("cosine", 20), min_snr=5.0, **choice)


def test_choices_of_a_flow():
    """Oracle: messages that name the entry: a last step within the part that is not sampled, strata that do not divide
    a batch.
    """
    with pytest.raises(ValueError, match=r"flow.sde.last_size: 0.01 is not above flow.t_last 0.02"):
        Flow(t_last=0.02, sde={"last_size": 0.01})
    assert Flow(strata=8).list_strata_conflicts(64) == [] == Flow().list_strata_conflicts(3)
    assert Flow(strata=24).list_strata_conflicts(64) == [
        "model.flow.strata=24 does not divide batch.global=64: take 64, or 0"
    ]
