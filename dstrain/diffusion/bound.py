"""The variational bound of data under a trained chain, in bits by timestep. dstrain evaluate averages it over data.

Notation as in gaussian.py; K timesteps are visited: all T of them, or an evenly spaced subset.
Source: Nichol & Dhariwal 2021, Equations 4 to 7; a shortened chain is their section 4.
"""

import torch
from torch import Tensor

from dstrain import rng
from dstrain.diffusion import schedule
from dstrain.diffusion.gaussian import GaussianDiffusion, Network, Progress


def measure_variational_bound(
    diffusion: GaussianDiffusion,
    network: Network,
    x_start: Tensor,
    key: Tensor,
    num_steps: int | None = None,
    progress: Progress = iter,
) -> dict[str, Tensor]:
    """Returns terms of the variational bound of pixels x_start (B, C, H, W) in [-1, 1]:

    total, prior      (B,) in bits per dimension; total = prior + the sum of vb.
    vb                (B, K) in bits per dimension, the bound's term at each timestep.
    mse, x_start_mse  (B, K), mean squared errors of the predicted eps and x_start.
    timestep          int64 (B, K), ascending: the timestep of each column in the original chain.

    The arguments:

    key        int64 (B,), the samples' keys, from which the noise is drawn.
    num_steps  K, the number of timesteps and of calls of the network; None: the length of the chain.

    Raises ConfigError if num_steps is below 1 or above the chain's length.
    """
    whole = num_steps in (None, diffusion.num_timesteps)
    chain = (
        diffusion if whole else diffusion.respace(schedule.make_even_respacing_spec(diffusion.num_timesteps, num_steps))
    )

    def draw_noise(i: int) -> Tensor:
        """Returns noise (B, C, H, W) from stream i of the samples' keys; i = 0 belongs to the last timestep."""
        return rng.normal(key, f"bound/{i}", tuple(x_start.shape[1:]))

    terms = chain.compute_bits_per_dim(network, x_start, draw_noise, progress=progress)
    terms = {name: values.flip(1) if values.ndim == 2 else values for name, values in terms.items()}
    timestep = torch.tensor(chain.timestep_map, device=x_start.device)
    return {**terms, "timestep": timestep.expand(len(x_start), -1)}
