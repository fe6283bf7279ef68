"""Bits per dimension of a flow whose density is known: Gaussian data."""

import math

import pytest
import torch

from dstrain import rng
from dstrain.diffusion.flow import FlowMatching
from dstrain.diffusion.flow_likelihood import measure_likelihood

MEAN, SHAPE = 0.1, (1, 4, 4)
STDS = torch.linspace(0.1, 0.4, 16, dtype=torch.float64)  # of the data, along the columns of TURN
TURN = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]


def network(x, scaled):
    """E[eps - x_start | x_t]: a linear map whose matrix is full, so that one probe does not see its divergence."""
    t = scaled.view(-1, 1) / 1000
    centered = (x.flatten(1) - (1 - t) * MEAN) @ TURN
    velocity = (t - (1 - t) * STDS**2) / (((1 - t) * STDS) ** 2 + t**2) * centered
    return (velocity @ TURN.T - MEAN).view_as(x)


def exact(x):
    """Bits per dimension of x under that density, in levels of 2 / 255."""
    z = ((x.flatten(1) - MEAN) @ TURN) / STDS
    nats = 0.5 * (z.square() + math.log(2 * math.pi)).sum(1) + STDS.log().sum()
    return nats / (16 * math.log(2)) - math.log2(2 / 255)


def test_bits_of_a_gaussian():
    """Oracle: the density in closed form at the dequantized pixels; its mean over many probes, which is exact."""
    keys = rng.keys(0, 0, torch.arange(2000))
    pixels = torch.randint(90, 170, (1, *SHAPE), generator=torch.Generator().manual_seed(1)).double() / 127.5 - 1
    x = pixels.expand(len(keys), *SHAPE)
    terms = measure_likelihood(FlowMatching(), network, x, keys, 200)
    continuous = x + 2 / 255 * (rng.uniform(keys, "dequantize", SHAPE).double() - 0.5)
    difference = terms["bits_per_dim"] - exact(continuous)
    error = float(difference.std()) / math.sqrt(len(keys))
    assert error > 0 and abs(float(difference.mean())) < 4 * error + 1e-3
    torch.testing.assert_close(terms["bits_per_dim"], terms["prior_bits"] - terms["divergence"].mean(dim=1))
    assert terms["timestep"][0].tolist() == [*range(5, 1000, 10)]


def test_a_field_that_one_probe_sees_through():
    """Oracle: the same density with independent pixels, sample by sample: the squares of signs are 1, so that a
    divergence without mixed terms is estimated without error.
    """

    def alone(x, scaled):
        t = scaled.view(-1, 1) / 1000
        factor = (t - (1 - t) * STDS**2) / (((1 - t) * STDS) ** 2 + t**2)
        return (factor * (x.flatten(1) - (1 - t) * MEAN) - MEAN).view_as(x)

    keys, levels = rng.keys(0, 1, torch.arange(4)), torch.linspace(100, 160, 64, dtype=torch.float64).round()
    x = levels[torch.randperm(64, generator=torch.Generator().manual_seed(2))].view(4, *SHAPE) / 127.5 - 1
    continuous = x + 2 / 255 * (rng.uniform(keys, "dequantize", SHAPE).double() - 0.5)
    z = (continuous.flatten(1) - MEAN) / STDS
    nats = 0.5 * (z.square() + math.log(2 * math.pi)).sum(1) + STDS.log().sum()
    found = measure_likelihood(FlowMatching(), alone, x, keys, 400)["bits_per_dim"]
    torch.testing.assert_close(found, nats / (16 * math.log(2)) - math.log2(2 / 255), rtol=0, atol=1e-3)


@pytest.mark.parametrize("num_calls", [None, 1, 2, 11])
def test_calls_and_keys(num_calls):
    """Oracle: two calls a step, one step at least, 100 by default; a sample's figure does not depend on its batch."""
    calls = []

    def counted(x, t):
        calls.append(len(x))
        return network(x, t)

    keys, x = rng.keys(0, 0, torch.arange(3)), torch.zeros(3, *SHAPE, dtype=torch.float64)
    whole = measure_likelihood(FlowMatching(), counted, x, keys, num_calls)["bits_per_dim"]
    assert calls == [3] * ({None: 100, 1: 2, 2: 2, 11: 10}[num_calls])
    torch.testing.assert_close(
        measure_likelihood(FlowMatching(), counted, x[1:2], keys[1:2], num_calls)["bits_per_dim"], whole[1:2]
    )


def test_bits_of_loud_noise():
    """Oracle: the same density in closed form, for a flow whose noise has another deviation."""
    scale = 2.0

    def alone(x, scaled):
        t = scaled.view(-1, 1) / 1000
        factor = (scale**2 * t - (1 - t) * STDS**2) / (((1 - t) * STDS) ** 2 + (scale * t) ** 2)
        return (factor * (x.flatten(1) - (1 - t) * MEAN) - MEAN).view_as(x)

    keys, levels = rng.keys(0, 1, torch.arange(4)), torch.linspace(100, 160, 64, dtype=torch.float64).round()
    x = levels[torch.randperm(64, generator=torch.Generator().manual_seed(2))].view(4, *SHAPE) / 127.5 - 1
    continuous = x + 2 / 255 * (rng.uniform(keys, "dequantize", SHAPE).double() - 0.5)
    z = (continuous.flatten(1) - MEAN) / STDS
    nats = 0.5 * (z.square() + math.log(2 * math.pi)).sum(1) + STDS.log().sum()
    found = measure_likelihood(FlowMatching(noise_scale=scale), alone, x, keys, 1000)["bits_per_dim"]
    torch.testing.assert_close(found, nats / (16 * math.log(2)) - math.log2(2 / 255), rtol=0, atol=2e-3)
