"""Chains over data whose optimal network is known in closed form."""

import math

import pytest
import torch

from dstrain.diffusion import samplers, schedule
from dstrain.diffusion.gaussian import GaussianDiffusion

MEAN, STD = 0.3, 0.2                              # of the data: a Gaussian


def chain(count, **kwargs):
    full = GaussianDiffusion(schedule.betas("linear", 1000), **{"variance": "fixed_small"} | kwargs)
    return full.respaced(str(count))


def optimal(diffusion):
    """E[eps | x_t] for Gaussian data: x_t is Gaussian, too."""
    table = torch.cumprod(1 - schedule.betas("linear", 1000), 0)
    def network(x, t):
        a = table[t].view(-1, 1)
        return (1 - a).sqrt() * (x - a.sqrt() * MEAN) / (a * STD ** 2 + 1 - a)
    return network


def randn(seed, shape=(4000, 1)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("sampler", ["ancestral", "ddim", "ddim eta 1"])
def test_gaussian_data(sampler):
    """Oracle: mean and deviation of the data, up to the chain's discretization and the number of samples."""
    diffusion = chain(1000)
    if sampler == "ancestral":
        x = samplers.ancestral(diffusion, optimal(diffusion), randn(0), lambda i: randn(i + 1))
    else:
        x = samplers.ddim(diffusion, optimal(diffusion), randn(0), lambda i: randn(i + 1), eta=float("eta" in sampler))
    assert float(x.mean()) == pytest.approx(MEAN, abs=0.01)
    assert float(x.std()) == pytest.approx(STD, rel=0.05)


def test_ddim_with_eta_one_is_ancestral():
    """Oracle: the ancestral chain with the posterior's variance (Song et al. 2020, section 4.1)."""
    diffusion, noise = chain(50), lambda i: randn(i + 1)
    torch.testing.assert_close(samplers.ddim(diffusion, optimal(diffusion), randn(0), noise, eta=1.0),
                               samplers.ancestral(diffusion, optimal(diffusion), randn(0), noise))


def test_encode_inverts_ddim():
    """Oracle: the noise that was decoded."""
    diffusion, x = chain(1000), randn(0, (64, 1))
    network = optimal(diffusion)
    back = samplers.encode_ddim(diffusion, network, samplers.ddim(diffusion, network, x))
    assert float((back - x).abs().max()) < 0.05


def test_clipping():
    """Oracle: the range of pixels."""
    diffusion = chain(20)
    wild = lambda x, t: 3 * x
    out = samplers.ddim(diffusion, wild, randn(0, (64, 1)), clip_denoised=True)
    assert float(out.abs().max()) <= 1 + 1e-9


def test_noise_and_calls():
    """Oracle: one draw and one call a step, in order, also at t = 0; no draw where eta is 0."""
    diffusion, drawn, called = chain(5), [], []
    def network(x, t):
        called.append((tuple(x.shape), t.unique().tolist()))
        return x * 0
    noise = lambda i: drawn.append(i) or randn(i, (3, 1))
    samplers.ancestral(diffusion, network, randn(0, (3, 1)), noise)
    assert drawn == list(range(5)) and called == [((3, 1), [t]) for t in (999, 749, 500, 250, 0)]
    samplers.ddim(diffusion, network, randn(0, (3, 1)), noise)
    assert drawn == list(range(5)) and len(called) == 10
    with pytest.raises(ValueError, match="eta"):
        samplers.ddim(diffusion, network, randn(0, (3, 1)), eta=0.5)


@pytest.mark.parametrize("channels", [None, 3])
def test_guidance(channels):
    """Oracle: the formula, written out: null + scale (conditional - null) on the guided channels."""
    out = lambda x, y: torch.cat((x * (1 + y.view(-1, 1, 1, 1)), x - y.view(-1, 1, 1, 1)), dim=1)
    calls = []
    def network(x, t, y):
        calls.append(len(x))
        return out(x, y)
    x, y, null = randn(0, (2, 4, 2, 2)), torch.tensor([1.0, 2.0]), torch.tensor([5.0, 5.0])
    found = samplers.guided(network, {"y": y}, {"y": null}, 4.0, channels)(x, torch.zeros(2))
    count = channels or 4
    conditional, without = out(x, y), out(x, null)
    torch.testing.assert_close(found[:, :count], (without + 4 * (conditional - without))[:, :count])
    assert torch.equal(found[:, count:], conditional[:, count:]) and calls == [4]
    plain = samplers.guided(network, {"y": y}, {"y": null}, 1.0)(x, torch.zeros(2))
    assert torch.equal(plain, conditional) and calls == [4, 2]


def test_bfloat16_network():
    """Oracle: the chain's own precision: float32 in, float32 out."""
    diffusion = chain(5)
    network = samplers.guided(lambda x, t, y: x.bfloat16(), {"y": torch.ones(2)}, {"y": torch.zeros(2)}, 2.0)
    assert samplers.ddim(diffusion, network, randn(0, (2, 1)).float()).dtype == torch.float32
    assert math.isfinite(float(samplers.ancestral(diffusion, network, randn(0, (2, 1)).float(),
                                                  lambda i: randn(i, (2, 1)).float()).sum()))
