"""Flow matching on Gaussian data, whose velocity is known in closed form."""

import itertools
import math

import pytest
import torch

from dstrain.diffusion.flow import SAMPLERS, FlowMatching, _Denoiser, require_known_spacing
from dstrain.recipe import ConfigError

MEAN, STD = 0.3, 0.2  # of the data


def optimal(x, scaled):
    """E[eps - x_start | x_t] for Gaussian data."""
    t = scaled.view(-1, 1) / 1000
    variance = ((1 - t) * STD) ** 2 + t**2
    centered = x - (1 - t) * MEAN
    return (t - (1 - t) * STD**2) / variance * centered - MEAN


def randn(seed, shape=(20000, 1)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_the_flow_of_gaussian_data(shift):
    """Oracle: x_start = mean + std * x; Heun's error falls with the square of the step, Euler's with the step."""
    flow, x = FlowMatching(shift=shift), randn(0, (64, 1))
    exact = MEAN + STD * x

    def error(out):
        return float((out - exact).abs().max())

    euler = [error(flow.sample_euler(optimal, x, steps)) for steps in (50, 100)]
    heun = [error(flow.integrate_ode(optimal, x, flow.make_time_grid(steps, x), "heun")) for steps in (50, 100)]
    assert euler[1] < 0.05 and 1.7 < euler[0] / euler[1] < 2.3
    assert heun[1] < 0.003 and 3.4 < heun[0] / heun[1] < 4.6


def test_optimal_velocity_has_the_least_loss():
    """Oracle: the conditional expectation; its loss is the conditional variance, anything added costs its square."""
    flow = FlowMatching()
    x_start, noise, t = MEAN + STD * randn(1), randn(2), torch.full((20000,), 0.4, dtype=torch.float64)
    least = flow.training_losses(optimal, x_start, t, noise)["loss"]
    more = flow.training_losses(lambda x, s: optimal(x, s) + 0.1, x_start, t, noise)["loss"]
    variance = STD**2 / ((0.6 * STD) ** 2 + 0.4**2)
    assert float(least.mean()) == pytest.approx(variance, rel=0.05)
    assert float((more - least).mean()) == pytest.approx(0.01, rel=0.2)


@pytest.mark.parametrize("shape", [(3, 1), (3, 2), (3, 2, 4, 4)])
def test_every_sample_has_its_own_time(shape):
    """Oracle: the formulas by hand: (1 - t) x_start + t eps at 1000 t; the mean square of velocity
    - (eps - x_start).
    """
    x_start, noise, t = randn(1, shape), randn(2, shape), torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
    met = []
    terms = FlowMatching().training_losses(lambda x, s: met.append((x, s)) or 2 * x, x_start, t, noise)
    ((x_t, scaled),) = met
    assert scaled.tolist() == [0.0, 250.0, 1000.0] and x_t.shape == shape
    for i, (a, b) in enumerate(((1.0, 0.0), (0.75, 0.25), (0.0, 1.0))):
        torch.testing.assert_close(x_t[i], a * x_start[i] + b * noise[i])
        expected = (2 * x_t[i] - noise[i] + x_start[i]).square().mean()
        torch.testing.assert_close(terms["loss"][i], expected)
        torch.testing.assert_close(terms["mse"][i], expected)


def test_times():
    """Oracle: the median and a quantile of a logit-normal, the shift's formula, uniform times as they came; a standard
    logit-normal where nothing is chosen.
    """
    uniforms = torch.tensor([0.0, 0.5, 0.8413447, 1 - 2**-24])
    t = FlowMatching(logit_mean=0.5, logit_std=2.0).draw_times(uniforms)
    assert t[0] == 0 and t[1] == pytest.approx(1 / (1 + math.exp(-0.5)))
    assert t[2] == pytest.approx(1 / (1 + math.exp(-2.5)), rel=1e-5) and t[3] <= 1
    shifted = FlowMatching(logit_mean=0.5, logit_std=2.0, shift=3.0).draw_times(uniforms)
    torch.testing.assert_close(shifted, 3 * t / (1 + 2 * t))
    assert torch.equal(FlowMatching(logit_std=None).draw_times(uniforms), uniforms)
    assert FlowMatching().draw_times(uniforms)[1:3].tolist() == pytest.approx([0.5, 1 / (1 + math.exp(-1))], rel=1e-5)


def test_noise_of_a_time():
    """Oracle: by hand: t / (1 - t) at the times that the network sees, a number for each sample of any shape."""
    for scale in (1000.0, 10.0):
        for shape in ((3, 2), (3, 2, 4, 4)):
            noise = FlowMatching(time_scale=scale).compute_noise_ratio(
                torch.zeros(shape), scale * torch.tensor([0.0, 0.5, 0.8])
            )
            assert noise.shape == (3, *[1] * (len(shape) - 1)) and noise.flatten().tolist() == pytest.approx([0, 1, 4])


def test_extra_channels_are_unused():
    """Oracle: the same loss without them."""
    x_start, noise, t = randn(1, (3, 2, 4)), randn(2, (3, 2, 4)), torch.rand(3)
    flow = FlowMatching()
    one = flow.training_losses(lambda x, s: x, x_start, t, noise)
    two = flow.training_losses(lambda x, s: torch.cat((x, x + 1), 1), x_start, t, noise)
    assert torch.equal(one["loss"], two["loss"]) and one["loss"].shape == (3,)


@pytest.mark.parametrize("calls, made", [(1, 2), (2, 2), (3, 2), (4, 4), (7, 6)])
def test_calls_of_heun(calls, made):
    """Oracle: by hand: two calls a step, as many steps as the calls allow, and one at least."""
    times = []

    def velocity(x, t):
        return times.append(float(t[0])) or optimal(x, t)

    FlowMatching().sample(velocity, randn(0, (2, 1)), randn, "heun", calls)
    assert len(times) == made and times[0] == 1000.0
    times.clear()
    FlowMatching().invert(velocity, randn(0, (2, 1)), "heun", calls)
    assert len(times) == made and times[0] == 0.0


@pytest.mark.parametrize("eta", [0.5, 1.0])
def test_steps_of_the_sde(eta):
    """Oracle: the SDE of Ma et al. 2024 in its own terms, the score -eps / t and the coefficient w = eta t, step by
    step. The last step is the ODE's, which ends in the predicted x_start. eta 1 is the default of `integrate_sde`.
    """
    flow, start, noise = FlowMatching(shift=2.0), randn(0, (4, 1)), lambda step: randn(step + 1, (4, 1))

    def velocity(x, scaled):
        return 0.3 * x + scaled.view(-1, 1) / 2000

    x, grid = start, [float(t) for t in flow.make_time_grid(3, start)]
    for step, (t, following) in enumerate(itertools.pairwise(grid)):
        v, w, length = 0.3 * x + t / 2, eta * t * (following > 0), t - following
        score = -(x + (1 - t) * v) / t
        x = x - (v - w / 2 * score) * length + math.sqrt(w * length) * noise(step)
    torch.testing.assert_close(flow.sample(velocity, start, noise, "sde", 3, eta=eta), x)
    if eta == 1:
        torch.testing.assert_close(flow.integrate_sde(velocity, start, flow.make_time_grid(3, start), noise), x)


def test_the_last_step_adds_no_noise():
    """Oracle: the pictures without noise: equal where the noise is of the last step alone, others
    where it is of both.
    """
    flow, x = FlowMatching(), randn(0, (2, 1))
    drawn = {
        (steps, size): flow.integrate_sde(
            optimal, x, flow.make_time_grid(steps, x), lambda step: size * torch.ones_like(x)
        )
        for steps in (1, 2)
        for size in (0, 1)
    }
    assert torch.equal(drawn[1, 0], drawn[1, 1]) and not torch.equal(drawn[2, 0], drawn[2, 1])
    assert torch.equal(
        drawn[2, 1],
        flow.integrate_sde(
            optimal, x, flow.make_time_grid(2, x), lambda step: torch.full_like(x, 1.0 if step == 0 else torch.nan)
        ),
    )


def test_levels_that_solvers_may_take():
    """Oracle: sigma / alpha = t / (1 - t) of the level that the network is called with, which is the one asked for."""
    denoiser = _Denoiser(FlowMatching(), optimal)
    for s in (0.05, 1.0, 7.0):
        level = denoiser.find_nearest_noise_level(s)
        assert level.noise_ratio == pytest.approx(s) and level.time / (1 - level.time) == pytest.approx(s)


def test_names_of_spacings():
    """Oracle: by hand: the two names and none at all are taken, another is refused with them."""
    for spacing in (None, "linspace", "karras"):
        require_known_spacing(spacing)
    with pytest.raises(ConfigError, match="spacing=trailing: a flow's times are spaced by linspace or karras"):
        require_known_spacing("trailing")


LOUD = 2.0  # deviation of the noise


def optimal_of_loud_noise(x, scaled):
    """E[noise - x_start | x_t] for Gaussian data and noise of deviation LOUD."""
    t = scaled.view(-1, 1) / 1000
    variance = ((1 - t) * STD) ** 2 + (LOUD * t) ** 2
    return (LOUD**2 * t - (1 - t) * STD**2) / variance * (x - (1 - t) * MEAN) - MEAN


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_of_loud_noise(sampler):
    """Oracle: mean and deviation of the data, whatever the deviation of the noise."""
    drawn = FlowMatching(noise_scale=LOUD).sample(optimal_of_loud_noise, randn(0), lambda i: randn(i + 1), sampler, 200)
    assert float(drawn.mean()) == pytest.approx(MEAN, abs=0.01)
    assert float(drawn.std()) == pytest.approx(STD, rel=0.06)


def test_the_way_back_of_loud_noise():
    """Oracle: the noise that was drawn from, of deviation 1."""
    flow, x = FlowMatching(noise_scale=LOUD), randn(0, (64, 1))
    drawn = flow.sample(optimal_of_loud_noise, x, randn, "heun", 400)
    torch.testing.assert_close(flow.invert(optimal_of_loud_noise, drawn, "heun", 400), x, rtol=0, atol=2e-3)


@pytest.mark.parametrize("shift", [0.27, 0.33, 0.4, 0.54, 0.66, 0.91, 6.93])
def test_shifted_times_stay_within(shift):
    """Oracle: the interval: in float32 a shift of 1 may come out above it, where a path has no alpha."""
    flow = FlowMatching(shift=shift, path="gvp")
    grid = flow.make_time_grid(20, torch.zeros(1))
    assert grid[0] <= 1 and grid[-1] == 0 and (grid.diff() < 0).all()
    assert flow.draw_times(torch.tensor([0.0, 0.5, 1 - 2**-24])).max() <= 1
    drawn = flow.sample(lambda x, t: -x, torch.ones(2, 1), lambda i: torch.ones(2, 1), "dpm++", 8)
    assert drawn.isfinite().all()
