"""Likelihood of 8-bit pixels under a flow, by its ODE: the change of density along the path from data to noise.

Along dx / dt = v the density changes by d log p / dt = -div v, so that

    log p(x_0) = log N(x_1; 0, I) + integral over t from 0 to 1 of div v(x_t, t)

The divergence is Hutchinson's estimate probe . (dv / dx) probe with one probe of signs for a sample and the whole path:
right on average, and the same field at every t, which an integrator needs. Pixels are made continuous by uniform noise
within their level, so that the figure is an upper bound of their bits, as published ones are.

Sources: Chen et al. 2018 (neural ODEs), Grathwohl et al. 2019 (FFJORD), Theis et al. 2016 (uniform dequantization).
"""

import math

import torch
from torch import Tensor

from dstrain import rng
from dstrain.diffusion.flow import FlowMatching
from dstrain.diffusion.gaussian import Network, Progress

USUAL_CALLS = 100
_LEVEL = 2 / 255  # width of a pixel's level in [-1, 1]


@torch.no_grad()
def measure_likelihood(
    flow: FlowMatching,
    network: Network,
    x_start: Tensor,
    key: Tensor,
    num_calls: int | None = None,
    progress: Progress = iter,
) -> dict[str, Tensor]:
    """Returns terms of the likelihood of pixels x_start (B, C, H, W) in [-1, 1], in bits per dimension:

    bits_per_dim  (B,), the result: prior_bits minus the integral of `divergence` over t.
    prior_bits    (B,), the bits of the noise at the end of the path, under a normal distribution.
    divergence    (B, K), the divergence of the velocity in each of the K steps from data to noise.
    timestep      int64 (B, K), 1000 t in the middle of each step.

    The arguments:

    num_calls  calls of the network, two for each step, each with a backward pass; None: 100.
    key        int64 (B,), the samples' keys, from which all noise is drawn.
    """
    shape = tuple(x_start.shape[1:])
    x = x_start + _LEVEL * (rng.uniform(key, "dequantize", shape) - 0.5).to(x_start)
    probe = torch.where(rng.uniform(key, "probe", shape) < 0.5, -1.0, 1.0).to(x_start)
    grid = flow.make_time_grid(max((num_calls or USUAL_CALLS) // 2, 1), x).flip(0)  # 0 to 1
    divergences = []
    for step in progress(range(len(grid) - 1)):
        length = grid[step + 1] - grid[step]
        first, divergence = _estimate_velocity_and_divergence(flow, network, x, grid[step], probe)
        second, later = _estimate_velocity_and_divergence(flow, network, x + length * first, grid[step + 1], probe)
        x = x + length * (first + second) / 2
        divergences.append((divergence + later) / 2)

    def convert_nats_to_bits_per_dim(nats: Tensor) -> Tensor:
        """Converts nats of a whole sample to bits per dimension."""
        return nats / (math.prod(shape) * math.log(2))

    constant = math.log(2 * math.pi) + 2 * math.log(flow.noise_scale)
    normal = 0.5 * ((x / flow.noise_scale).square() + constant).flatten(1).sum(dim=1)  # -log p(x_1)
    prior, curve = (
        convert_nats_to_bits_per_dim(normal) - math.log2(_LEVEL),
        convert_nats_to_bits_per_dim(torch.stack(divergences, dim=1)),
    )  # (B,), (B, K)
    timestep = (500 * (grid[1:] + grid[:-1])).round().long().expand(len(x), -1)
    return {
        "bits_per_dim": prior - (curve * grid.diff()).sum(dim=1),
        "prior_bits": prior,
        "divergence": curve,
        "timestep": timestep,
    }


def _estimate_velocity_and_divergence(
    flow: FlowMatching, network: Network, x: Tensor, t: Tensor, probe: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the velocity (B, ...) at x and time t, and an estimate (B,) of its divergence: probe . (dv / dx) probe,
    where `probe` (B, ...) holds random signs (Hutchinson).
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        velocity = flow.predict_velocity(network, x, t.expand(len(x)))
        (product,) = torch.autograd.grad(velocity, x, probe)
    return velocity.detach(), (product * probe).flatten(1).sum(dim=1)
