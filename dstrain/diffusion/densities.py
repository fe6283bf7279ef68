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
    """Returns times (B,), distributed as sigmoid(mean + std * n) with n standard normal, but all below `highest`.
    `uniforms` (B,) in [0, 1) are the quantiles of the times.
    """
    if highest < 1:
        share = torch.special.ndtr(torch.tensor((math.log(highest / (1 - highest)) - mean) / std).double())
        uniforms = uniforms * share.to(uniforms.dtype)
    return torch.sigmoid(mean + std * torch.special.ndtri(uniforms))


def draw_uniform_times(uniforms: Tensor, mean: float, std: float, highest: float = 1.0) -> Tensor:
    """Returns times (B,) that are uniform in [0, `highest`): `uniforms` (B,) in [0, 1), times `highest`. `mean` and
    `std` have no effect.
    """
    return uniforms * highest if highest < 1 else uniforms


def draw_mode_times(uniforms: Tensor, mean: float, std: float, highest: float = 1.0) -> Tensor:
    """Returns times (B,) of SD3's mode density with scale `std` (Esser et al. 2024, section 3.1), from `uniforms` (B,)
    in [0, 1). `mean` and `highest` have no effect.
    """
    u = 1 - uniforms
    return 1 - u - std * (torch.cos(math.pi / 2 * u).square() - 1 + u)


def draw_cosmap_times(uniforms: Tensor, mean: float, std: float, highest: float = 1.0) -> Tensor:
    """Returns times (B,) of SD3's cosmap density, which imitates the cosine schedule, from `uniforms` (B,) in [0, 1).
    The density is truncated at `highest`. `mean` and `std` have no effect.
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
    """Moves each uniform number (B,) into one of `strata` equal parts of [0, 1), such that any `strata` samples in a
    row get one number in each part. Returns the new numbers, (B,) below 1.

    position  int64 (B,), the sample's place in the global batch, which decides the part.
    step      int64 (B,), the training step, which shifts the choice of the parts; None: no shift.

    The given number sets the place within its part. Source: Kingma et al. 2021 (VDM), appendix I.
    """
    stride = round(strata * (math.sqrt(5) - 1) / 2)
    while math.gcd(stride, strata) > 1:
        stride += 1
    number = position * max(stride, 1)
    if step is not None:
        number = number + rng.integers(step, "strata", strata)
    return ((number % strata + uniforms) / strata).clamp(max=_LARGEST)


def compute_time_shift_by_dimension(num_values: int) -> float:
    """Returns the time shift of a flow whose input has `num_values` numbers: sqrt(num_values / 4096), as in RAE."""
    return math.sqrt(num_values / REFERENCE_VALUES)
