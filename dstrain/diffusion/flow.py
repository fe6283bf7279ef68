"""Flow matching: a velocity that carries noise to data, by its ODE or by an SDE of equal marginals.

Notation: t in [0, 1], 0 is data and 1 is noise (the direction of Stable Diffusion 3; SiT counts the other way). The
path between them, what the network predicts and its loss are those of interpolant.py; as usual a straight path and its
velocity,

    x_t = (1 - t) x_start + t eps            velocity = dx_t / dt = eps - x_start

Sources: Lipman et al. 2022; Liu et al. 2022 (rectified flow); Esser et al. 2024 (SD3): logit-normal times, section 3.1,
and the shift of times for higher resolutions, Equation 23; Ma et al. 2024 (SiT): the SDE, Equation 5 and section 3.
"""

import math
from typing import Any

import torch
from torch import Tensor

from dstrain.diffusion.densities import DENSITIES
from dstrain.diffusion.gaussian import Network, Noise, Progress, cast_output
from dstrain.diffusion.interpolant import PATHS, Interpolant, find_time_of_noise
from dstrain.diffusion.schedule import LARGEST_NOISE, make_noise_levels_after_first_step
from dstrain.diffusion.solvers import SOLVERS, Level, choose_eta, count_solver_steps, solve_levels
from dstrain.recipe import ConfigError

SAMPLERS = (*(name for name in SOLVERS if name != "heun"), "sde-heun", "sde", "euler", "heun")  # the usual one last
COEFFICIENTS = ("constant", "sigma", "sbdm", "linear", "decreasing", "increasing-decreasing")
LAST_STEPS = ("euler", "mean", "tweedie", "none")
SPACINGS = ("linspace", "karras")
_LOWEST = 0.002  # t / (1 - t) where karras ends, as EDM's
_BEGIN = 0.999  # where a path without data at its end begins with the coefficient sbdm, which is infinite there (SiT)


class FlowMatching:
    """Trains and samples a flow, with one distribution of training times, one interpolant and one grid of sampling
    times.

    density                 distribution of training times, see densities.py.
    logit_mean, logit_std   its mean and standard deviation; std None means uniform times.
    t_max                   the largest training time, before the shift.
    shift                   times t become shift t / (1 + (shift - 1) t): above 1 more noise; 1 changes nothing.
    t_last                  the last sampling time, before the shift (RAE: 0.001).
    time_scale              the network sees t * time_scale, so that its sinusoids vary as those of diffusion do.
    noise_scale             standard deviation of the noise (JiT: 2 at 512 pixels).
    coefficient             of the SDE's noise (SiT's forms): constant 1, sigma, sbdm (by which the path is a
                            diffusion), linear t, decreasing and increasing-decreasing along the way from noise to data.
    last                    the SDE's last step: euler (the ODE's), mean (without noise), tweedie (returns the predicted
                            x_start) or none (no different from the other steps).
    last_size               time at which the last step begins, before the shift; 0: times are spaced evenly.
    choices                 further keyword arguments of Interpolant: path, prediction, loss, t_min and cosine.
    """

    def __init__(
        self,
        logit_mean: float = 0.0,
        logit_std: float | None = 1.0,
        shift: float = 1.0,
        time_scale: float = 1000.0,
        *,
        density: str = "logit_normal",
        t_max: float = 1.0,
        t_last: float = 0.0,
        noise_scale: float = 1.0,
        coefficient: str = "sigma",
        last: str = "euler",
        last_size: float = 0.0,
        **choices: Any,
    ) -> None:
        self.density = "uniform" if logit_std is None else density
        self.logit_mean, self.logit_std = logit_mean, logit_std
        self.t_max, self.t_last = t_max, t_last
        self.coefficient, self.last, self.last_size = coefficient, last, last_size
        self.shift, self.time_scale, self.noise_scale = shift, time_scale, noise_scale
        self.interpolant = Interpolant(**choices)

    def draw_times(self, uniforms: Tensor) -> Tensor:
        """Maps uniform numbers (B,) in [0, 1) to training times (B,) in [0, 1], by the inverse of the times'
        distribution, and shifts them.
        """
        return self._shift_times(DENSITIES[self.density](uniforms, self.logit_mean, self.logit_std, self.t_max))

    def _shift_times(self, t: Tensor) -> Tensor:
        return (self.shift * t / (1 + (self.shift - 1) * t)).clamp(max=1)  # rounding may put it above 1

    def call_network(self, network: Network, x_t: Tensor, t: Tensor) -> Tensor:
        """Calls the network at x_t and t * time_scale, and returns its prediction, float32 (float64 stays) of x_t's
        shape. Further channels of the output, such as a diffusion network's variances, are left out.
        """
        return cast_output(network(x_t, t * self.time_scale))[:, : x_t.shape[1]]

    def predict_velocity(self, network: Network, x_t: Tensor, t: Tensor) -> Tensor:
        """Calls the network and converts its prediction to a velocity."""
        return self.interpolant.convert_prediction(self.call_network(network, x_t, t), x_t, t, "velocity")

    def training_losses(self, network: Network, x_start: Tensor, t: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """Returns per-sample terms (B,): `loss`, computed by Interpolant.compute_losses, and `mse`, the same values
        detached from the graph. `noise` has deviation 1; this method multiplies it by noise_scale.
        """
        noise = self.scale_noise(noise)
        out = self.call_network(network, self.interpolant.mix_noise(x_start, noise, t), t)
        mse = self.interpolant.compute_losses(out, x_start, noise, t)
        return {"loss": mse, "mse": mse.detach()}

    def scale_noise(self, noise: Tensor) -> Tensor:
        """Scales noise of deviation 1 to the flow's noise_scale."""
        return noise if self.noise_scale == 1 else noise * self.noise_scale

    def compute_noise_ratio(self, x_t: Tensor, scaled: Tensor) -> Tensor:
        """Returns the noise ratio sigma / alpha at times `scaled` (B,), which are t * time_scale, as the network sees
        them. Its shape is (B, 1, ...), with as many axes as x_t.
        """
        if self.interpolant.path == "linear":
            return (scaled / (self.time_scale - scaled)).view(-1, *(1,) * (x_t.ndim - 1))
        alpha, sigma, _, _ = self.interpolant.compute_coefficients(scaled / self.time_scale, x_t)
        return sigma / alpha

    def make_time_grid(
        self, num_steps: int, like: Tensor, spacing: str | None = None, first: float = 1.0, last_size: float = 0.0
    ) -> Tensor:
        """Returns the times of `num_steps` sampling steps, from noise to data: (num_steps + 1,), with dtype and device
        of `like`.

        spacing     None or linspace: evenly spaced from `first` to t_last, then shifted. karras: `first`, then EDM's
                    spacing of the noise ratio sigma / alpha, then 0; t_last and the shift have no effect.
        first       the first time, before the shift.
        last_size   time at which the last step begins, before the shift; 0: times are spaced evenly. Without effect for
                    karras.
        """
        if spacing == "karras":  # pure noise, then ever denser in t / (1 - t)
            noises = make_noise_levels_after_first_step(num_steps, _LOWEST, LARGEST_NOISE)
            inner = [find_time_of_noise(self.interpolant.path, noise) for noise in noises]
            return torch.tensor([first, *inner, 0.0], dtype=like.dtype, device=like.device)
        times = torch.linspace(first, self.t_last, num_steps + 1, dtype=like.dtype, device=like.device)
        if last_size and num_steps > 1:
            times[:-1] = torch.linspace(first, last_size, num_steps, dtype=like.dtype, device=like.device)
        return self._shift_times(times)

    def sample(
        self,
        network: Network,
        x: Tensor,
        noise: Noise,
        sampler: str,
        num_calls: int,
        spacing: str | None = None,
        eta: float | None = None,
        progress: Progress = iter,
    ) -> Tensor:
        """Returns x_start from noise x of deviation 1 by the named sampler, one of SAMPLERS, in as many steps as
        `num_calls` calls of the network allow, and at least one. heun takes two calls a step.

        `spacing` is that of `make_time_grid`. `eta` scales the noise of the samplers that draw some; None takes their
        usual amount. Raises ConfigError for an eta where the sampler has none to choose.
        """
        x, eta = self.scale_noise(x), choose_eta(sampler, eta)

        def draw_scaled_noise(step: int) -> Tensor:
            return self.scale_noise(noise(step))

        num_steps = max(num_calls // 2, 1) if sampler == "heun" else count_solver_steps(sampler, num_calls)
        if sampler in ("sde", "sde-heun"):
            if sampler == "sde-heun":  # A last step to the data, or of another kind, is one call.
                num_steps = num_calls // 2 if self.last == "none" and self.t_last else (num_calls - 1) // 2 + 1
                num_steps = max(num_steps, 1)
            first = _BEGIN if self.coefficient == "sbdm" and self.interpolant.path != "vp" else 1.0
            grid = self.make_time_grid(num_steps, x, spacing, first, 0.0 if self.last == "none" else self.last_size)
            return self.integrate_sde(network, x, grid, draw_scaled_noise, eta, progress, sampler)
        grid = self.make_time_grid(num_steps, x, spacing)
        if sampler in ("euler", "heun"):
            return self.integrate_ode(network, x, grid, sampler, progress)
        denoise = _Denoiser(self, network)
        levels = [*map(denoise.make_level, grid[:-1].tolist()), Level.make_data_level()]
        return solve_levels(sampler, denoise, levels, x, draw_scaled_noise, eta, progress)

    def invert(
        self,
        network: Network,
        x_start: Tensor,
        sampler: str,
        num_calls: int,
        spacing: str | None = None,
        eta: float | None = None,
    ) -> Tensor:
        """Returns the noise that `sample` with these arguments maps to about x_start. Raises ConfigError unless the
        sampler is euler or heun, and if an eta is given.
        """
        choose_eta(sampler, eta)
        if sampler not in ("euler", "heun"):
            raise ConfigError(f"sampler={sampler} cannot be inverted: take --sampler euler or heun")
        num_steps = max(num_calls // 2, 1) if sampler == "heun" else num_calls
        x = self.integrate_ode(network, x_start, self.make_time_grid(num_steps, x_start, spacing).flip(0), sampler)
        return x / self.noise_scale

    @torch.no_grad()
    def integrate_ode(
        self, network: Network, x: Tensor, grid: Tensor, method: str, progress: Progress = iter
    ) -> Tensor:
        """Integrates the ODE along the times `grid` (n + 1,), ascending or descending, from x at the first of them, and
        returns x at the last.

        method  euler, with n calls of the network; or heun, with 2 n. Where the network does not predict velocities,
                heun makes a step to or from the data (t = 0) as euler does.
        """
        times = grid.tolist()
        for step in progress(range(len(grid) - 1)):
            length = grid[step + 1] - grid[step]
            first = self.predict_velocity(network, x, grid[step].expand(len(x)))
            # At the data other predictions say little of the velocity: the step there is Euler's.
            at_data = self.interpolant.prediction != "velocity" and not (times[step] and times[step + 1])
            if method == "euler" or at_data:
                x = x + length * first
                continue
            second = self.predict_velocity(network, x + length * first, grid[step + 1].expand(len(x)))
            x = x + length * (first + second) / 2
        return x

    def sample_euler(self, network: Network, x: Tensor, num_steps: int, progress: Progress = iter) -> Tensor:
        """Returns x_start from noise x by Euler's method with num_steps calls of the network."""
        return self.integrate_ode(network, x, self.make_time_grid(num_steps, x), "euler", progress)

    @torch.no_grad()
    def integrate_sde(
        self,
        network: Network,
        x: Tensor,
        grid: Tensor,
        noise: Noise,
        eta: float = 1.0,
        progress: Progress = iter,
        method: str = "sde",
    ) -> Tensor:
        """Integrates the SDE along the times `grid` (n + 1,), descending, from noise x at the first of them, and
        returns x at the last:

            dx = (velocity - w / 2 score) dt + sqrt(w) dW, backwards in t, where w is eta times the coefficient

        method  sde: Euler-Maruyama, one call of the network a step; sde-heun: Heun's method after the noise has been
                added, two calls a step.

        With the usual coefficient, sigma, w times the score is -eta eps. With eta 0 the SDE is the ODE. The attribute
        `last` chooses the method of the last step.
        """
        times = grid.tolist()
        for step in progress(range(len(times) - 1)):
            here, there = times[step], times[step + 1]
            length, last = here - there, self.last if step == len(times) - 2 else "none"
            at = grid[step].expand(len(x))
            if last == "tweedie":
                return self.interpolant.convert_prediction(self.call_network(network, x, at), x, at, "x")
            rate = 0.5 * eta * self.compute_coefficient_over_sigma(here) if last != "euler" else 0.0
            added = 0.0
            if rate and last == "none":
                added = math.sqrt(2 * rate * self.interpolant.compute_level(here)[1] * length) * noise(step)
            if method == "sde" or last != "none":
                velocity, eps = self._predict_velocity_and_eps(network, x, at)
                x = x - length * velocity
                if rate:
                    x = x - rate * length * eps + added
                continue
            x = x + added
            velocity, eps = self._predict_velocity_and_eps(network, x, at)
            change = velocity + rate * eps
            if there:
                velocity, eps = self._predict_velocity_and_eps(
                    network, x - length * change, grid[step + 1].expand(len(x))
                )
                change = (change + velocity + 0.5 * eta * self.compute_coefficient_over_sigma(there) * eps) / 2
            x = x - length * change
        return x

    def _predict_velocity_and_eps(self, network: Network, x: Tensor, t: Tensor) -> list[Tensor]:
        """Returns velocity and eps at times (B,), from one call of the network."""
        out = self.call_network(network, x, t)
        return [self.interpolant.convert_prediction(out, x, t, wanted) for wanted in ("velocity", "eps")]

    def compute_coefficient_over_sigma(self, t: float) -> float:
        """Returns w / sigma at time t, where w is the SDE's coefficient without eta. Since score = -eps / sigma, w
        times the score is minus this rate times eps.
        """
        alpha, sigma, alpha_slope, sigma_slope = PATHS[self.interpolant.path](torch.tensor(t, dtype=torch.float64))
        if self.coefficient == "sbdm":
            return float(sigma_slope - sigma * alpha_slope / alpha)
        forms = {
            "constant": 1.0,
            "sigma": float(sigma),
            "linear": t,
            "decreasing": (1 - math.cos(math.pi * t)) ** 2 / 4,
            "increasing-decreasing": math.sin(math.pi * t) ** 2,
        }
        return forms[self.coefficient] / float(sigma)


def check_spacing(spacing: str | None) -> None:
    """Raises ConfigError if `spacing` is neither None nor one of SPACINGS, those that a flow has."""
    if spacing not in (None, *SPACINGS):
        raise ConfigError(
            f"spacing={spacing}: a flow's times are spaced by {' or '.join(SPACINGS)}, which begin with "
            "noise alone: name one of them"
        )


class _Denoiser:
    """Adapts a flow's network to the interface of solvers.Denoiser. Every noise level exists, as t is continuous."""

    def __init__(self, flow: FlowMatching, network: Network) -> None:
        self.flow, self.network = flow, network

    def make_level(self, t: float) -> Level:
        return Level(*self.flow.interpolant.compute_level(t), t)

    def find_nearest_level(self, s: float) -> Level:
        return self.make_level(find_time_of_noise(self.flow.interpolant.path, s))

    def __call__(self, x: Tensor, level: Level) -> Tensor:
        t = x.new_full((len(x),), level.time)
        return self.flow.interpolant.convert_prediction(self.flow.call_network(self.network, x, t), x, t, "x")
