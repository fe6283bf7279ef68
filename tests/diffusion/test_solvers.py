"""Solvers on Gaussian data, whose score and probability flow are known in closed form, and against diffusers' own."""

import itertools
import math

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, HeunDiscreteScheduler, UniPCMultistepScheduler

from dstrain.diffusion import flow, samplers
from dstrain.diffusion.gaussian import GaussianDiffusion
from dstrain.diffusion.solvers import ETAS, SOLVERS, Level, choose_eta, count_solver_steps, run_solver

MEAN, STD = 0.3, 0.2  # of the data
CHAIN = GaussianDiffusion(torch.linspace(1e-4, 0.02, 700), prediction="x_start", variance="fixed_small")


def randn(seed, shape=(64, 1)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Exact:
    """E[x_start | x] of Gaussian data, at any level of a variance-preserving path; keeps the levels of its calls."""

    def __init__(self):
        self.calls = []

    def find_nearest_noise_level(self, s):
        return Level(1 / math.sqrt(1 + s * s), s / math.sqrt(1 + s * s), s)

    def __call__(self, x, level):
        self.calls.append(level)
        return denoised(x, level.alpha, level.sigma)


def denoised(x, alpha, sigma):
    return MEAN + alpha * STD**2 / (alpha**2 * STD**2 + sigma**2) * (x - alpha * MEAN)


def on_path(z, level):
    """Where the probability flow carries what is z deviations from the mean."""
    return level.alpha * MEAN + math.hypot(level.alpha * STD, level.sigma) * z


def levels_of(steps, first=7.4, last=0.135):
    return [Exact().find_nearest_noise_level(first * (last / first) ** (i / steps)) for i in range(steps + 1)]


def predict(t, x):
    """The same at a timestep of CHAIN, in the sample's precision."""
    alpha = float(CHAIN.tables["sqrt_alphas_cumprod"][t])
    return denoised(x, alpha, math.sqrt(1 - alpha**2))


@pytest.mark.parametrize("solver, order", [("ddim", 1), ("dpm++", 2), ("heun", 2), ("unipc", 3)])
def test_orders(solver, order):
    """Oracle: the probability flow of a Gaussian in closed form; halving the steps divides the error by 2^order."""

    def error(steps):
        levels, z = levels_of(steps), randn(0)
        x = on_path(z, levels[0])
        if solver == "ddim":  # a chain of single steps, each without memory, is the first order
            for pair in itertools.pairwise(levels):
                x = SOLVERS["dpm++"](Exact(), pair, x, None)
        else:
            x = SOLVERS[solver](Exact(), levels, x, None)
        return float((x - on_path(z, levels[-1])).abs().max())

    errors = [error(steps) for steps in (40, 80, 160)]
    for coarse, fine in itertools.pairwise(errors):
        assert math.log2(coarse / fine) == pytest.approx(order, abs=0.25)


@pytest.mark.parametrize("solver, eta", [("dpm++sde", 1.0), ("dpm++sde", 0.5), ("edm", 1.0), ("edm", 0.3)])
def test_stochastic_solvers_keep_the_distribution(solver, eta):
    """Oracle: mean and deviation of the data, within what 20,000 samples and 100 steps leave."""
    levels = [*levels_of(100, 30.0, 0.01), Level.make_noise_free_level()]
    drawn = []

    def noise(i):
        drawn.append(i)
        return randn(i + 1, (20000, 1))

    out = run_solver(solver, Exact(), levels, on_path(randn(0, (20000, 1)), levels[0]), noise, eta)
    assert float(out.mean()) == pytest.approx(MEAN, abs=0.006)
    assert float(out.std()) == pytest.approx(STD, rel=0.03)
    assert drawn and drawn == sorted(set(drawn)) and max(drawn) < 101


@pytest.mark.parametrize("first, adds", [(0.05, True), (50.0, True), (0.0499, False), (50.1, False)])
def test_the_range_of_added_noise(first, adds):
    """Oracle: Algorithm 2 of the same paper: S_min <= t <= S_max, both ends among them."""
    model = Exact()
    levels = [Level(1.0, first, first), model.find_nearest_noise_level(first / 2)]
    run_solver("edm", model, levels, on_path(randn(0), levels[0]), lambda i: randn(1), 1.0)
    assert (model.calls[0].noise_ratio > first) == adds


def test_no_noise_without_a_higher_level():
    """Oracle: the same algorithm without noise, where the network knows no level above the step's own."""

    class Coarse(Exact):
        def find_nearest_noise_level(self, s):
            return levels[0]

    levels = levels_of(1)
    x = on_path(randn(0), levels[0])
    plain = run_solver("heun", Exact(), levels, x, None, 0.0)
    assert torch.equal(run_solver("edm", Coarse(), levels, x, None, 1.0), plain)  # there is no noise to call


@pytest.mark.parametrize("first, calls", [(160.0, 2), (160.1, 1)])
def test_a_first_step_from_far_above(first, calls):
    """Oracle: by hand: EDM's range ends at 80; from above twice as much the first step is Euler's, with one call."""
    levels, model = [Level(1.0, first, first), Exact().find_nearest_noise_level(80.0)], Exact()
    run_solver("heun", model, levels, on_path(randn(0), levels[0]), None, 0.0)
    assert len(model.calls) == calls


def test_ends_of_the_signal():
    """Oracle: log(alpha / sigma): of noise alone, of data alone, of as much of both."""
    assert [Level(0.0, 1.0, 1).half_log_snr, Level.make_noise_free_level().half_log_snr] == [-math.inf, math.inf]
    assert Level(0.6, 0.6, 1).half_log_snr == 0.0


@pytest.mark.parametrize("count, eta", [(12, 1.0), (150, 1.0), (150, 0.5)])
def test_edm_is_algorithm_2(count, eta):
    """Oracle: Karras et al. 2022, Algorithm 2, written out in their variables, y = x / alpha; eta times their S_churn
    of 40, up to a gamma of sqrt(2) - 1.
    """
    levels, model = [*levels_of(count, 60.0, 0.02), Level.make_noise_free_level()], Exact()
    x = randn(0)
    y, steps = x / levels[0].alpha, len(levels) - 1

    def exact(y, s):
        return denoised(y, 1.0, s)

    for i, (s, following) in enumerate((a.noise_ratio, b.noise_ratio) for a, b in itertools.pairwise(levels)):
        gamma = min(eta * 40 / steps, math.sqrt(2) - 1) if 0.05 <= s <= 50 else 0.0
        raised = s + gamma * s
        y = y + math.sqrt(raised**2 - s**2) * randn(i + 1)
        slope = (y - exact(y, raised)) / raised
        ahead = y + (following - raised) * slope
        if following:
            ahead = y + (following - raised) * (slope + (ahead - exact(ahead, following)) / following) / 2
        y = ahead
    torch.testing.assert_close(run_solver("edm", model, levels, x, lambda i: randn(i + 1), eta), y)


@pytest.mark.parametrize(
    "solver, scheduler, options",
    [
        ("dpm++", DPMSolverMultistepScheduler, {"algorithm_type": "dpmsolver++"}),
        ("dpm++sde", DPMSolverMultistepScheduler, {"algorithm_type": "sde-dpmsolver++"}),
        ("unipc", UniPCMultistepScheduler, {"solver_type": "bh2"}),
        ("heun", HeunDiscreteScheduler, {}),
    ],
)
@pytest.mark.parametrize("steps", [7, 20])
def test_against_diffusers(solver, scheduler, options, steps):
    """Oracle: the scheduler of diffusers with the same betas, timesteps, noise and network."""
    theirs = scheduler(
        700,
        trained_betas=torch.linspace(1e-4, 0.02, 700).tolist(),
        prediction_type="sample",
        timestep_spacing="trailing",
        **options,
    )
    theirs.set_timesteps(steps)
    timesteps = samplers.choose_timesteps(CHAIN, solver, 2 * steps - 1 if solver == "heun" else steps, "trailing")
    assert sorted({int(t) for t in theirs.timesteps}) == timesteps
    x = randn(0).float()
    network, draws = lambda x, t: predict(int(t[0]), x), lambda i: randn(i + 1).float()
    ours = samplers.sample_chain(CHAIN, network, x, draws, solver, timesteps)
    scale = x.new_tensor(float(theirs.init_noise_sigma)) if solver == "heun" else 1.0
    if solver == "heun":  # there the start has the deviation of the noise alone
        x = x / CHAIN.tables["sqrt_alphas_cumprod"][timesteps[-1]].float() / scale
    x, drawn = x * scale, 0
    for t in theirs.timesteps:
        prediction = predict(int(t), theirs.scale_model_input(x, t))
        noise = {}
        if solver == "dpm++sde":
            drawn += 1
            noise = {"variance_noise": randn(drawn).float()}
        x = theirs.step(prediction, t, x, **noise).prev_sample
    torch.testing.assert_close(ours, x, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("sampler", samplers.SAMPLERS)
@pytest.mark.parametrize("spacing", [None, "leading", "trailing", "linspace", "karras"])
def test_calls_of_a_chain(sampler, spacing):
    """Oracle: the number of calls that was asked for, or for two calls a step one or two fewer, whatever the data."""

    def calls(scale):
        times = []

        def network(x, t):
            times.extend(t.unique().tolist())
            return x * scale

        x = samplers.sample_chain(
            CHAIN,
            network,
            randn(0),
            lambda i: randn(i),
            sampler,
            samplers.choose_timesteps(CHAIN, sampler, 15, spacing),
        )
        assert x.isfinite().all()
        return times

    times = calls(0.5)
    assert times == calls(-0.1) and len(times) == 15


@pytest.mark.parametrize("sampler", flow.SAMPLERS)
@pytest.mark.parametrize("spacing", flow.SPACINGS)
def test_samplers_of_a_flow(sampler, spacing):
    """Oracle: data that are MEAN + STD x for a flow without noise; mean and deviation with it; the number of calls."""
    count, calls = 20000 if sampler in ETAS else 64, []

    def velocity(x, scaled):
        t = scaled.view(-1, 1) / 1000
        calls.append(len(x))
        return (t - (1 - t) * STD**2) / (((1 - t) * STD) ** 2 + t**2) * (x - (1 - t) * MEAN) - MEAN

    x, noise = randn(0, (count, 1)), lambda i: randn(i + 1, (count, 1))
    out = flow.FlowMatching().sample(velocity, x, noise, sampler, 101, spacing)
    assert len(calls) in (99, 100, 101)
    if sampler in ETAS:
        assert float(out.mean()) == pytest.approx(MEAN, abs=0.006) and float(out.std()) == pytest.approx(STD, rel=0.06)
    else:
        assert float((out - MEAN - STD * x).abs().max()) < (0.06 if sampler == "euler" else 0.01)


def test_eta_of_a_flows_sde():
    """Oracle: Euler's method, which is the SDE without noise."""
    velocity, process, x = lambda x, t: x * t.view(-1, 1) / 2000, flow.FlowMatching(), randn(0)
    without = process.sample(velocity, x, None, "sde", 9, eta=0.0)
    torch.testing.assert_close(without, process.sample(velocity, x, None, "euler", 9))
    with pytest.raises(ValueError, match="eta=1: the noise of sampler euler cannot be chosen"):
        process.sample(velocity, x, None, "euler", 9, eta=1.0)


@pytest.mark.parametrize("sampler", ["euler", "heun"])
def test_a_flow_is_inverted(sampler):
    """Oracle: the noise that was decoded; a coarser grid comes back less exactly."""
    process = flow.FlowMatching(shift=2.0)

    def velocity(x, scaled):
        return x * (0.5 - scaled.view(-1, 1) / 1000)

    def error(count):
        x_start = process.sample(velocity, randn(0), None, sampler, count)
        return float((process.invert(velocity, x_start, sampler, count) - randn(0)).abs().max())

    assert error(200) < 0.02 and error(200) < error(50)
    with pytest.raises(ValueError, match="sampler=unipc cannot be inverted: take --sampler euler or heun"):
        process.invert(velocity, randn(0), "unipc", 9)


def test_steps():
    """Oracle: 2 n - 1 calls for n steps of two, n else."""
    assert [count_solver_steps(name, 19) for name in ("heun", "edm", "dpm++", "unipc", "ddim")] == [10, 10, 19, 19, 19]


def test_amounts_of_noise():
    """Oracle: by hand: DDIM draws none unless it is asked to, the stochastic samplers as much as they were published
    with, the others none.
    """
    usual = {
        "ddim": 0.0,
        "dpm++sde": 1.0,
        "edm": 1.0,
        "sde": 1.0,
        "sde-heun": 1.0,
        "dpm++": 0.0,
        "unipc": 0.0,
        "heun": 0.0,
        "ddpm": 0.0,
    }
    assert {name: choose_eta(name, None) for name in usual} == usual
    assert [choose_eta(name, eta) for name in ETAS for eta in (0.0, 0.3)] == [0.0, 0.3] * len(ETAS)
