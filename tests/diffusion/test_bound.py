"""The variational bound of data, term by term."""

import math

import pytest
import torch

from dstrain import rng
from dstrain.diffusion import schedule
from dstrain.diffusion.bound import measure_variational_bound
from dstrain.diffusion.gaussian import GaussianDiffusion
from dstrain.recipe import ConfigError

STEPS, SHAPE = 6, (2, 3, 4)


def network(x, t):
    """Differs by sample, place and timestep."""
    return torch.tanh(torch.cat((0.7 * x, -x), dim=1) + 0.01 * t.view(-1, 1, 1, 1))


@pytest.mark.parametrize("num_steps", [None, STEPS, 3])
def test_every_term(num_steps):
    """Oracle: the loss of each timestep by itself, at the noise of its name, whose bound is that of torch.distributions
    (test_gaussian.py); the errors from x_t by their formulas; the prior by torch.distributions.
    """
    diffusion = GaussianDiffusion(schedule.make_betas("cosine", STEPS), loss="kl")
    key = rng.keys(1, 2, torch.arange(5))
    x_start = (rng.normal(key, "data", SHAPE).double() * 0.4).clamp(-0.9, 0.9)
    calls = []
    found = measure_variational_bound(
        diffusion, network, x_start, key, num_steps, lambda steps: calls.extend(steps) or calls
    )
    count = num_steps or STEPS
    chain = diffusion if count == STEPS else diffusion.respace(str(count))
    assert calls == list(range(count - 1, -1, -1))
    assert found["timestep"].tolist() == [chain.timestep_map] * 5 and chain.timestep_map[0] == 0
    assert found["timestep"][0, -1] == STEPS - 1 and found["vb"].shape == (5, count)
    alphas = chain.tables["alphas_cumprod"]
    for t in range(count):
        times, noise = torch.full((5,), t), rng.normal(key, f"bound/{count - 1 - t}", SHAPE).double()
        x_t = alphas[t].sqrt() * x_start + (1 - alphas[t]).sqrt() * noise
        eps = network(x_t, torch.full((5,), chain.timestep_map[t]))[:, :2]
        predicted = ((x_t - (1 - alphas[t]).sqrt() * eps) / alphas[t].sqrt()).clamp(-1, 1)
        again = (x_t - alphas[t].sqrt() * predicted) / (1 - alphas[t]).sqrt()

        def mean(values):
            return values.square().flatten(1).mean(1)

        torch.testing.assert_close(found["mse"][:, t], mean(again - noise), rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(found["x_start_mse"][:, t], mean(predicted - x_start), rtol=1e-5, atol=1e-9)
        loss = chain.training_losses(lambda x, s: torch.cat((again, network(x, s)[:, 2:]), 1), x_start, times, noise)
        torch.testing.assert_close(found["vb"][:, t], loss["vb"], rtol=1e-5, atol=1e-9)
    last = torch.distributions.Normal(alphas[-1].sqrt() * x_start, (1 - alphas[-1]).sqrt())
    prior = torch.distributions.kl_divergence(last, torch.distributions.Normal(torch.zeros(()).double(), 1.0))
    torch.testing.assert_close(found["prior"], prior.flatten(1).mean(1) / math.log(2), rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(found["total"], found["prior"] + found["vb"].sum(1))


def test_more_steps_than_there_are():
    """Oracle: the contract: the key and the length of the chain."""
    diffusion = GaussianDiffusion(schedule.make_betas("cosine", STEPS))
    with pytest.raises(ConfigError, match="num_steps: 7 is not between 1 and the 6 timesteps"):
        measure_variational_bound(diffusion, network, torch.zeros(1, *SHAPE), rng.keys(0, 0, torch.arange(1)), 7)
