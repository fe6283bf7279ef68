"""Solvers from noise to data in few steps: DPM-Solver++ (2M and its SDE), UniPC, and EDM's Heun, with or without churn.

Notation: x = alpha x_start + sigma eps at a noise level; s = sigma / alpha is its noise ratio, lambda = -log s (half
the log of the signal-to-noise ratio), h the step in lambda. A solver walks down `levels`, from noise to data (alpha 1,
sigma 0), where the last step is the prediction itself. Both ends may be infinite in s or lambda: pure noise is alpha 0.

All coefficients are numbers of the host in float64. A level is the same for the whole batch, so that every rank calls
the network equally often, whatever the data are. The i-th draw of noise, i = 0, 1, ..., belongs to step i.

Sources: Lu et al. 2022 (DPM-Solver++, Algorithm 2 and appendix on SDEs), Zhao et al. 2023 (UniPC, B(h) = e^h - 1),
Karras et al. 2022 (EDM, Algorithms 1 and 2).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dstrain.diffusion.gaussian import Noise, Progress
from dstrain.diffusion.schedule import LARGEST_NOISE
from dstrain.recipe import ConfigError

CHURN, CHURN_RANGE = 40.0, (0.05, 50.0)  # EDM's S_churn, S_min and S_max for ImageNet


@dataclass(frozen=True)
class Level:
    """Holds one noise level: alpha, sigma, and the time by which the network knows it."""

    alpha: float
    sigma: float
    time: float

    @property
    def noise_ratio(self) -> float:
        """Returns sigma / alpha; infinity for pure noise, where alpha is 0."""
        return self.sigma / self.alpha if self.alpha else math.inf

    @property
    def half_log_snr(self) -> float:
        """Returns log(alpha / sigma): infinity for data, minus infinity for pure noise."""
        if not self.alpha or not self.sigma:
            return math.copysign(math.inf, self.alpha - self.sigma)
        return math.log(self.alpha / self.sigma)

    @classmethod
    def make_noise_free_level(cls) -> "Level":
        """Returns the noise level of data, alpha 1 and sigma 0, where every solver ends."""
        return cls(1.0, 0.0, 0.0)


class Denoiser(Protocol):
    """Declares a network together with its noise levels."""

    def __call__(self, x: Tensor, level: Level) -> Tensor:
        """Returns x_start as predicted from x at a noise level."""

    def find_nearest_noise_level(self, noise_ratio: float) -> Level:
        """Returns the noise level whose sigma / alpha is nearest to `noise_ratio`, among those that the network
        knows.
        """


def solve_dpmpp(
    denoise: Denoiser, levels: Sequence[Level], x: Tensor, noise: Noise, eta: float = 0.0, progress: Progress = iter
) -> Tensor:
    """Returns samples x_start, made from noise x at levels[0] by DPM-Solver++(2M), of second order, with one call of
    `denoise` a step. eta 0 solves the ODE, eta 1 the SDE, in which step i adds noise(i).
    """
    earlier, h_earlier = None, math.inf
    for i in progress(range(len(levels) - 1)):
        here, there = levels[i], levels[i + 1]
        h, kept = there.half_log_snr - here.half_log_snr, there.noise_ratio * here.alpha / here.sigma  # e^-h
        x_start = denoise(x, here)
        estimate = x_start
        if earlier is not None and there.sigma:
            estimate = x_start + h / h_earlier / 2 * (x_start - earlier)
        x = there.sigma / here.sigma * kept**eta * x + there.alpha * (1 - kept ** (1 + eta)) * estimate
        if eta and there.sigma:
            x = x + there.sigma * math.sqrt(1 - kept ** (2 * eta)) * noise(i)
        earlier, h_earlier = x_start, h
    return x


def solve_unipc(
    denoise: Denoiser, levels: Sequence[Level], x: Tensor, noise: Noise, eta: float = 0.0, progress: Progress = iter
) -> Tensor:
    """Returns samples x_start, made from noise x at levels[0] by UniPC-2, with one call of `denoise` a step: a
    predictor of second order, corrected to third order. `noise` and `eta` have no effect.
    """
    known: list[tuple[float, Tensor]] = []  # lambda and x_start of the last two levels, the newer one last
    x_before = x
    for i in progress(range(len(levels) - 1)):
        here, there = levels[i], levels[i + 1]
        x_start = denoise(x, here)
        if known:
            x = _apply_unipc_corrector(levels[i - 1], here, x_before, known, x_start)
        known = [*known[-1:], (here.half_log_snr, x_start)]
        estimate = x_start
        if len(known) == 2 and there.sigma:
            ratio = (known[0][0] - known[1][0]) / (there.half_log_snr - known[1][0])
            estimate = x_start + (known[0][1] - x_start) / (2 * ratio)
        x_before = x
        x = there.sigma / here.sigma * x + there.alpha * _compute_x_start_weight(here, there) * estimate
    return x


def _apply_unipc_corrector(
    here: Level, there: Level, x: Tensor, known: list[tuple[float, Tensor]], following: Tensor
) -> Tensor:
    """Makes the step from x at level `here` to level `there` once more, now corrected by the x_start predicted at
    `there`. Returns the new x at `there` (UniPC, Algorithm 1, UniC).

    known      one or two pairs (log(alpha / sigma), predicted x_start): of the level before `here`, if any, and of
               `here`.
    following  the x_start predicted at `there`.
    """
    newest, x_start = known[-1]
    h = there.half_log_snr - newest
    change = (following - x_start) / 2
    if len(known) == 2:  # weights that make the step exact for a quadratic x_start(lambda)
        gain = _compute_x_start_weight(here, there)
        first = (1 - gain / h) / gain
        second = (1 - 2 * first * gain / h) / gain
        ratio = (known[0][0] - newest) / h
        of_earlier = (second - first) / (ratio - 1)
        change = of_earlier * (known[0][1] - x_start) / ratio + (first - of_earlier) * (following - x_start)
    return there.sigma / here.sigma * x + there.alpha * _compute_x_start_weight(here, there) * (x_start + change)


def _compute_x_start_weight(here: Level, there: Level) -> float:
    """Returns 1 - e^-h, where h is the step in log(alpha / sigma) from level `here` to `there`."""
    return 1 - there.noise_ratio * here.alpha / here.sigma


def solve_heun(
    denoise: Denoiser, levels: Sequence[Level], x: Tensor, noise: Noise, eta: float = 0.0, progress: Progress = iter
) -> Tensor:
    """Returns samples x_start, made from noise x at levels[0] by EDM's Heun method, of second order, with two calls of
    `denoise` a step. The last step and steps from sigma / alpha above 160 are Euler steps with one call.

    eta above 0 is EDM's stochastic sampler: where sigma / alpha is between 0.05 and 50, noise(i) is added before step
    i, which then begins at the higher noise level.
    """
    steps = len(levels) - 1
    gamma = min(eta * CHURN / steps, math.sqrt(2) - 1)
    for i in progress(range(steps)):
        here, there = levels[i], levels[i + 1]
        if gamma and CHURN_RANGE[0] <= here.noise_ratio <= CHURN_RANGE[1]:
            raised = denoise.find_nearest_noise_level(here.noise_ratio * (1 + gamma))
            if raised.noise_ratio > here.noise_ratio:
                added = math.sqrt(raised.noise_ratio**2 - here.noise_ratio**2)
                here, x = raised, raised.alpha * (x / here.alpha + added * noise(i))
        x_start = denoise(x, here)
        eps = (x - here.alpha * x_start) / here.sigma  # dy / ds, where y = x / alpha
        x = there.alpha * x_start + there.sigma * eps
        if there.sigma and here.noise_ratio <= 2 * LARGEST_NOISE:
            other = (x - there.alpha * denoise(x, there)) / there.sigma
            x = x + there.alpha * (there.noise_ratio - here.noise_ratio) / 2 * (other - eps)
    return x


# Solvers by name; all take the same arguments. `dpm++sde` and `edm` are `dpm++` and `heun` with an eta above 0.
SOLVERS: dict[str, Callable[..., Tensor]] = {
    "dpm++": solve_dpmpp,
    "dpm++sde": solve_dpmpp,
    "unipc": solve_unipc,
    "heun": solve_heun,
    "edm": solve_heun,
}
# Samplers whose noise `eta` scales, each with its usual eta.
ETAS = {"ddim": 0.0, "dpm++sde": 1.0, "edm": 1.0, "sde": 1.0, "sde-heun": 1.0}


def choose_eta(sampler: str, eta: float | None) -> float:
    """Returns eta; if it is None, the sampler's usual value, or 0 for a sampler that has no eta. Raises ConfigError if
    eta is given to a sampler that has none, such as ddpm, whose noise is fixed.
    """
    if eta is not None and sampler not in ETAS:
        raise ConfigError(
            f"eta={eta:g}: the noise of sampler {sampler} cannot be chosen; leave it out, or take one of "
            f"{', '.join(ETAS)}"
        )
    return ETAS.get(sampler, 0.0) if eta is None else eta


def count_solver_steps(sampler: str, num_calls: int) -> int:
    """Returns how many steps a sampler makes with `num_calls` calls of the network: about half as many for Heun's
    method (heun, edm), as many for all others.
    """
    return (num_calls + 1) // 2 if SOLVERS.get(sampler) is solve_heun else num_calls


@torch.no_grad()
def run_solver(
    sampler: str,
    denoise: Denoiser,
    levels: Sequence[Level],
    x: Tensor,
    noise: Noise,
    eta: float,
    progress: Progress = iter,
) -> Tensor:
    """Returns samples x_start, made from noise x (B, ...) by the solver named `sampler`.

    levels  the noise levels at which its steps begin and end, from the level of x to that of data.
    noise   noise(i) returns the noise that step i adds.
    eta     how much of this noise is added; 0: none.
    """
    return SOLVERS[sampler](denoise, levels, x, noise, eta, progress)
