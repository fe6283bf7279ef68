"""Solvers on Gaussian data, whose score and probability flow are known in closed form, and against diffusers' own."""

import math

import pytest
import torch

from dstrain.diffusion import flow, samplers, schedule
from dstrain.diffusion.gaussian import GaussianDiffusion
from dstrain.diffusion.solvers import DATA, Level, SOLVERS, solve, steps_of

MEAN, STD = 0.3, 0.2                              # of the data


def randn(seed, shape=(64, 1)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Exact:
    """E[x_start | x] of Gaussian data, at any level of a variance-preserving path; counts its calls."""

    def __init__(self):
        self.calls = 0

    def level(self, half_log_snr):
        snr = math.exp(2 * half_log_snr)
        return Level(math.sqrt(snr / (1 + snr)), math.sqrt(1 / (1 + snr)), 0.0)

    def nearest(self, s):
        return self.level(-math.log(s))

    def __call__(self, x, level):
        self.calls += 1
        return denoised(x, level)


def denoised(x, level):
    share = level.alpha * STD ** 2 / (level.alpha ** 2 * STD ** 2 + level.sigma ** 2)
    return MEAN + share * (x - level.alpha * MEAN)


def on_path(z, level):
    """Where the probability flow carries what is z deviations from the mean."""
    return level.alpha * MEAN + math.hypot(level.alpha * STD, level.sigma) * z


def error_of(solver, steps, last):
    """Largest error over levels evenly spaced in lambda, but for the step to data, which a solver of order 1 makes."""
    model, z = Exact(), randn(0)
    lambdas = torch.linspace(-2.0, last, steps + 1, dtype=torch.float64).tolist()
    levels = [model.level(value) for value in lambdas]
    out = SOLVERS[solver](model, levels, on_path(z, levels[0]), None)
    return float((out - on_path(z, levels[-1])).abs().max())


@pytest.mark.parametrize("solver, order", [("dpm++", 2), ("unipc", 2), ("heun", 2)])
def test_orders(solver, order):
    """Oracle: the probability flow of a Gaussian in closed form; halving the steps divides the error by 2^order."""
    errors = [error_of(solver, steps, 2.0) for steps in (40, 80, 160)]
    orders = [math.log2(coarse / fine) for coarse, fine in zip(errors, errors[1:])]
    print(solver, errors, orders)
