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
from dstrain.diffusion.gaussian import Network, Noise, upcast_output_to_float32
from dstrain.diffusion.interpolant import PATHS, Interpolant, compute_time_of_noise_ratio
from dstrain.diffusion.schedule import LARGEST_NOISE, make_noise_levels_after_first_step
from dstrain.diffusion.solvers import SOLVERS, Level, choose_eta, count_solver_steps, run_solver
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
        """Returns training times (B,) in [0, 1], drawn from the flow's density and then shifted, from uniform numbers
        (B,) in [0, 1).
        """
        return self._shift_times(DENSITIES[self.density](uniforms, self.logit_mean, self.logit_std, self.t_max))

    def _shift_times(self, t: Tensor) -> Tensor:
        """Returns shift * t / (1 + (shift - 1) * t) for times t in [0, 1]; the result is in [0, 1], too."""
        return (self.shift * t / (1 + (self.shift - 1) * t)).clamp(max=1)  # rounding may put it above 1

    def call_network(self, network: Network, x_t: Tensor, t: Tensor) -> Tensor:
        """Returns the network's prediction at x_t (B, C, ...) and times t (B,), in x_t's shape. The network gets t *
        time_scale. Output channels beyond C are dropped, and bfloat16 and float16 become float32.
        """
        return upcast_output_to_float32(network(x_t, t * self.time_scale))[:, : x_t.shape[1]]

    def predict_velocity(self, network: Network, x_t: Tensor, t: Tensor) -> Tensor:
        """Returns the velocity at x_t (B, C, ...) and times t (B,), in x_t's shape: calls the network and converts its
        prediction.
        """
        return self.interpolant.convert_prediction(self.call_network(network, x_t, t), x_t, t, "velocity")

    def training_losses(self, network: Network, x_start: Tensor, t: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """Returns {"loss", "mse"}, (B,) each: the loss of each sample at times t (B,), as `loss` with gradient and as
        `mse` without. `noise` is standard normal; it is multiplied by noise_scale here.
        """
        noise = self.scale_noise(noise)
        out = self.call_network(network, self.interpolant.mix_noise(x_start, noise, t), t)
        mse = self.interpolant.compute_losses(out, x_start, noise, t)
        return {"loss": mse, "mse": mse.detach()}

    def scale_noise(self, noise: Tensor) -> Tensor:
        """Returns standard normal noise multiplied by noise_scale."""
        return noise if self.noise_scale == 1 else noise * self.noise_scale

    def compute_noise_ratio(self, x_t: Tensor, scaled_t: Tensor) -> Tensor:
        """Returns sigma / alpha of the path, (B, 1, ...) with as many axes as x_t. `scaled_t` (B,) are times as the
        network sees them, t * time_scale.
        """
        if self.interpolant.path == "linear":
            return (scaled_t / (self.time_scale - scaled_t)).view(-1, *(1,) * (x_t.ndim - 1))
        alpha, sigma, _, _ = self.interpolant.compute_coefficients(scaled_t / self.time_scale, x_t)
        return sigma / alpha

    def make_time_grid(
        self, num_steps: int, like: Tensor, spacing: str | None = None, first: float = 1.0, last_size: float = 0.0
    ) -> Tensor:
        """Returns the times at which `num_steps` sampling steps begin and end, descending from noise: (num_steps + 1,),
        with the dtype and device of `like`.

        spacing    None or linspace: even from `first` to t_last, then shifted. karras: `first`, then EDM's spacing of
                   sigma / alpha, then 0; t_last, the shift and last_size have no effect.
        first      the first time, before the shift.
        last_size  the time at which the last step begins, before the shift; the steps before it are even. 0: all steps
                   are.
        """
        if spacing == "karras":  # pure noise, then ever denser in t / (1 - t)
            noises = make_noise_levels_after_first_step(num_steps, _LOWEST, LARGEST_NOISE)
            inner = [compute_time_of_noise_ratio(self.interpolant.path, noise) for noise in noises]
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
    ) -> Tensor:
        """Returns samples x_start, made from standard normal noise x by the named sampler, one of SAMPLERS.

        noise      noise(i) returns the noise that step i adds; only some samplers use it.
        num_calls  the most calls of the network, but at least one step is made; heun takes two calls a step.
        spacing    see `make_time_grid`.
        eta        how much noise is added; None: the sampler's usual amount.

        Raises ConfigError if eta is given to a sampler that adds no noise.
        """
        x, eta = self.scale_noise(x), choose_eta(sampler, eta)

        def draw_scaled_noise(step: int) -> Tensor:
            """Returns the noise that a step adds, multiplied by noise_scale."""
            return self.scale_noise(noise(step))

        num_steps = max(num_calls // 2, 1) if sampler == "heun" else count_solver_steps(sampler, num_calls)
        if sampler in ("sde", "sde-heun"):
            if sampler == "sde-heun":  # A last step to the data, or of another kind, is one call.
                num_steps = num_calls // 2 if self.last == "none" and self.t_last else (num_calls - 1) // 2 + 1
                num_steps = max(num_steps, 1)
            first = _BEGIN if self.coefficient == "sbdm" and self.interpolant.path != "vp" else 1.0
            grid = self.make_time_grid(num_steps, x, spacing, first, 0.0 if self.last == "none" else self.last_size)
            return self.integrate_sde(network, x, grid, draw_scaled_noise, eta, sampler)
        grid = self.make_time_grid(num_steps, x, spacing)
        if sampler in ("euler", "heun"):
            return self.integrate_ode(network, x, grid, sampler)
        denoise = _Denoiser(self, network)
        levels = [*map(denoise.make_noise_level, grid[:-1].tolist()), Level.make_noise_free_level()]
        return run_solver(sampler, denoise, levels, x, draw_scaled_noise, eta)

    def invert(
        self,
        network: Network,
        x_start: Tensor,
        sampler: str,
        num_calls: int,
        spacing: str | None = None,
        eta: float | None = None,
    ) -> Tensor:
        """Returns the standard normal noise from which `sample`, with the same arguments, makes about x_start. Raises
        ConfigError if the sampler is neither euler nor heun, or if eta is given.
        """
        choose_eta(sampler, eta)
        if sampler not in ("euler", "heun"):
            raise ConfigError(f"sampler={sampler} cannot be inverted: take --sampler euler or heun")
        num_steps = max(num_calls // 2, 1) if sampler == "heun" else num_calls
        x = self.integrate_ode(network, x_start, self.make_time_grid(num_steps, x_start, spacing).flip(0), sampler)
        return x / self.noise_scale

    @torch.no_grad()
    def integrate_ode(self, network: Network, x: Tensor, grid: Tensor, method: str) -> Tensor:
        """Integrates the ODE from x at time grid[0] to time grid[-1], and returns x there. The times `grid` (n + 1,)
        ascend (data to noise) or descend (noise to data).

        method  euler: n calls of the network; heun: 2 n calls. If the network does not predict velocities, heun makes a
                step that begins or ends at t = 0 as euler does.
        """
        times = grid.tolist()
        for step in range(len(grid) - 1):
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

    def sample_euler(self, network: Network, x: Tensor, num_steps: int) -> Tensor:
        """Returns samples x_start, made from noise x by Euler's method in `num_steps` steps of one network
        call each.
        """
        return self.integrate_ode(network, x, self.make_time_grid(num_steps, x), "euler")

    @torch.no_grad()
    def integrate_sde(
        self,
        network: Network,
        x: Tensor,
        grid: Tensor,
        noise: Noise,
        eta: float = 1.0,
        method: str = "sde",
    ) -> Tensor:
        """Integrates the SDE backwards in time along the descending times `grid` (n + 1,), from noise x at the first
        time. Returns x at the last time. The SDE is

            dx = (velocity - w / 2 score) dt + sqrt(w) dW, where w is eta times the flow's `coefficient`

        noise   noise(i) returns the noise that step i adds.
        eta     0: the SDE is the ODE.
        method  sde: Euler-Maruyama, one call of the network a step; sde-heun: the noise is added, then Heun's method
                makes the step, with two calls.

        The flow's attribute `last` says how the last step is made: euler, mean, tweedie or none.
        """
        times = grid.tolist()
        for step in range(len(times) - 1):
            here, there = times[step], times[step + 1]
            length, last = here - there, self.last if step == len(times) - 2 else "none"
            at = grid[step].expand(len(x))
            if last == "tweedie":
                return self.interpolant.convert_prediction(self.call_network(network, x, at), x, at, "x")
            rate = 0.5 * eta * self.compute_sde_coefficient_over_sigma(here) if last != "euler" else 0.0
            added = 0.0
            if rate and last == "none":
                added = math.sqrt(2 * rate * self.interpolant.compute_alpha_and_sigma(here)[1] * length) * noise(step)
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
                change = (change + velocity + 0.5 * eta * self.compute_sde_coefficient_over_sigma(there) * eps) / 2
            x = x - length * change
        return x

    def _predict_velocity_and_eps(self, network: Network, x: Tensor, t: Tensor) -> list[Tensor]:
        """Returns [velocity, eps] at x and times t (B,), in the shape of x each, from one call of the network."""
        out = self.call_network(network, x, t)
        return [self.interpolant.convert_prediction(out, x, t, wanted) for wanted in ("velocity", "eps")]

    def compute_sde_coefficient_over_sigma(self, t: float) -> float:
        """Returns the SDE's coefficient (one of COEFFICIENTS, without eta) divided by sigma, at time t."""
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


def require_known_spacing(spacing: str | None) -> None:
    """Raises ConfigError if `spacing` is given and is neither linspace nor karras, the spacings of a flow's times."""
    if spacing not in (None, *SPACINGS):
        raise ConfigError(
            f"spacing={spacing}: a flow's times are spaced by {' or '.join(SPACINGS)}, which begin with "
            "noise alone: name one of them"
        )


class _Denoiser:
    """Adapts a flow's network to the interface of solvers.Denoiser. Every noise level exists, as t is continuous."""

    def __init__(self, flow: FlowMatching, network: Network) -> None:
        self.flow, self.network = flow, network

    def make_noise_level(self, t: float) -> Level:
        """Returns the noise level at time t in [0, 1]."""
        return Level(*self.flow.interpolant.compute_alpha_and_sigma(t), t)

    def find_nearest_noise_level(self, noise_ratio: float) -> Level:
        """Returns the noise level whose sigma / alpha is `noise_ratio`. A flow has one for every ratio."""
        return self.make_noise_level(compute_time_of_noise_ratio(self.flow.interpolant.path, noise_ratio))

    def __call__(self, x: Tensor, level: Level) -> Tensor:
        t = x.new_full((len(x),), level.time)
        return self.flow.interpolant.convert_prediction(self.flow.call_network(self.network, x, t), x, t, "x")
