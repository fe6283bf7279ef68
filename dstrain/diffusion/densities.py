"""Distributions of a flow's training times. Each maps uniform numbers to times, by the inverse of its distribution.

t in [0, 1], 1 is noise (the direction of Stable Diffusion 3). A time is a function of its sample's own uniform number,
so it does not depend on ranks or batches. Sources: Esser et al. 2024 (SD3), section 3.1 (logit-normal, mode, cosmap);
Zheng et al. 2025 (RAE; truncation, shift by dimension).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dstrain import rng

_LARGEST = 1 - 2**-24  # the largest float32 below 1
REFERENCE_VALUES = 4096  # of a latent whose shift by dimension is 1 (RAE, after SD3)


def draw_logit_normal_times(uniforms: Tensor, mean: float, std: float, highest: float = 1.0) -> Tensor:
    """Returns times (B,) from uniform numbers (B,) in [0, 1): sigmoid(mean + std * n) for standard normal n, truncated
    at `highest`.

    On a straight path EDM's sigma, noise over signal, is then exp(mean + std * n).
    """
    if highest < 1:
        share = torch.special.ndtr(torch.tensor((math.log(highest / (1 - highest)) - mean) / std).double())
        uniforms = uniforms * share.to(uniforms.dtype)
    return torch.sigmoid(mean + std * torch.special.ndtri(uniforms))


def draw_uniform_times(uniforms: Tensor, mean: float, std: float, highest: float = 1.0) -> Tensor:
    """Returns times (B,) spread evenly over [0, `highest`), from uniform numbers (B,). mean and std have no effect."""
    return uniforms * highest if highest < 1 else uniforms


def draw_mode_times(uniforms: Tensor, mean: float, std: float, highest: float = 1.0) -> Tensor:
    """Returns times (B,) of SD3's mode density, which has heavy tails, from uniform numbers (B,): 1 - u - std *
    (cos^2(pi u / 2) - 1 + u), where u = 1 - `uniforms`. `mean` and `highest` have no effect.
    """
    u = 1 - uniforms
    return 1 - u - std * (torch.cos(math.pi / 2 * u).square() - 1 + u)


def draw_cosmap_times(uniforms: Tensor, mean: float, std: float, highest: float = 1.0) -> Tensor:
    """Returns times (B,) of SD3's cosmap density from uniform numbers (B,), truncated at `highest`. Under it log(signal
    / noise) is distributed as under the cosine schedule. `mean` and `std` have no effect.
    """
    share = 2 / math.pi * math.atan2(highest, 1 - highest)  # of times at most `highest`
    return 1 - 1 / (torch.tan(math.pi / 2 * share * uniforms) + 1)


DENSITIES: dict[str, Callable[..., Tensor]] = {
    "logit_normal": draw_logit_normal_times,
    "uniform": draw_uniform_times,
    "mode": draw_mode_times,
    "cosmap": draw_cosmap_times,
}


def stratify_uniforms(uniforms: Tensor, position: Tensor, step: Tensor | None, strata: int) -> Tensor:
    """Moves each uniform number (B,) into one of `strata` equal parts of [0, 1), and returns them. Of any `strata`
    samples in a row, each part gets one.

    The part depends on the sample's `position` in the global batch and on the `step`, int64 (B,) each, so that a
    position gets other parts in other steps. If step is None, the part depends on the position alone. Consecutive
    positions get parts about 0.618 apart (modulo 1), so that a micro-batch, too, is spread over [0, 1). A sample's own
    uniform number chooses the place within the part. Results are below 1. Source: Kingma et al. 2021 (VDM), appendix I.
    """
    stride = round(strata * (math.sqrt(5) - 1) / 2)
    while math.gcd(stride, strata) > 1:
        stride += 1
    number = position * max(stride, 1)
    if step is not None:
        number = number + rng.integers(step, "strata", strata)
    return ((number % strata + uniforms) / strata).clamp(max=_LARGEST)


def compute_dimension_shift(num_values: int) -> float:
    """Returns the time shift for an input of `num_values` values: sqrt(num_values / 4096)."""
    return math.sqrt(num_values / REFERENCE_VALUES)
