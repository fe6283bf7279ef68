"""Flow matching on straight paths: a velocity that carries noise to data.

Notation: t in [0, 1], 0 is data and 1 is noise (the direction of Stable Diffusion 3; SiT counts the other way),

    x_t = (1 - t) x_start + t eps            velocity = dx_t / dt = eps - x_start

Sources: Lipman et al. 2022; Liu et al. 2022 (rectified flow); Esser et al. 2024 (SD3): logit-normal times, section 3.1,
and the shift of times for higher resolutions, Equation 23.
"""

import torch
from torch import Tensor

from dstrain.diffusion.gaussian import Network, Progress, at_boundary
from dstrain.diffusion.likelihood import mean_flat


class FlowMatching:
    """One distribution of training times and one grid of sampling times.

    logit_mean, logit_std   training times are sigmoid(mean + std * normal); std None means uniform times.
    shift                   times t become shift t / (1 + (shift - 1) t): above 1 more noise. 1 is none.
    time_scale              the network sees t * time_scale, so that its sinusoids vary as those of diffusion do.
    """

    def __init__(self, logit_mean: float = 0.0, logit_std: float | None = 1.0, shift: float = 1.0,
                 time_scale: float = 1000.0) -> None:
        self.logit_mean, self.logit_std = logit_mean, logit_std
        self.shift, self.time_scale = shift, time_scale

    def times(self, uniforms: Tensor) -> Tensor:
        """Training times by the inverse of their distribution: (B,) in [0, 1) -> (B,) in [0, 1]."""
        if self.logit_std is None:
            return self._shifted(uniforms)
        return self._shifted(torch.sigmoid(self.logit_mean + self.logit_std * torch.special.ndtri(uniforms)))

    def _shifted(self, t: Tensor) -> Tensor:
        return self.shift * t / (1 + (self.shift - 1) * t)

    def velocity(self, network: Network, x_t: Tensor, t: Tensor) -> Tensor:
        """The network's velocity; channels beyond those of x_t (variances of a diffusion network) are left unused."""
        return at_boundary(network(x_t, t * self.time_scale))[:, : x_t.shape[1]]

    def training_losses(self, network: Network, x_start: Tensor, t: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """Per-sample terms (B,): loss (with gradient) and mse, its detached value."""
        x_t = torch.lerp(x_start, noise, t.to(x_start.dtype).view(-1, *(1,) * (x_start.ndim - 1)))
        mse = mean_flat((self.velocity(network, x_t, t) - (noise - x_start)).square())
        return {"loss": mse, "mse": mse.detach()}

    def grid(self, num_steps: int, like: Tensor) -> Tensor:
        """Sampling times from 1 to 0: (num_steps + 1,)."""
        return self._shifted(torch.linspace(1, 0, num_steps + 1, dtype=like.dtype, device=like.device))

    @torch.no_grad()
    def euler(self, network: Network, x: Tensor, num_steps: int, progress: Progress = iter) -> Tensor:
        """x_start from noise x by Euler's method: num_steps calls of the network."""
        grid = self.grid(num_steps, x)
        for step in progress(range(num_steps)):
            x = x + (grid[step + 1] - grid[step]) * self.velocity(network, x, grid[step].expand(len(x)))
        return x

    @torch.no_grad()
    def heun(self, network: Network, x: Tensor, num_steps: int, progress: Progress = iter) -> Tensor:
        """x_start from noise x by Heun's method of second order: 2 * num_steps calls of the network."""
        grid = self.grid(num_steps, x)
        for step in progress(range(num_steps)):
            length = grid[step + 1] - grid[step]
            first = self.velocity(network, x, grid[step].expand(len(x)))
            second = self.velocity(network, x + length * first, grid[step + 1].expand(len(x)))
            x = x + length * (first + second) / 2
        return x
