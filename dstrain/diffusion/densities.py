"""How training times of a flow are distributed: each by the inverse of its distribution at a uniform number.

t in [0, 1], 1 is noise (the direction of Stable Diffusion 3). A time is a function of its sample's own number, so that
it does not depend on ranks or batches. Sources: Esser et al. 2024 (SD3), section 3.1 (logit-normal, mode, cosmap);
Zheng et al. 2025 (RAE; truncation, shift by dimension).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dstrain import rng

_LARGEST = 1 - 2**-24  # the largest float32 below 1
REFERENCE_VALUES = 4096  # of a latent whose shift by dimension is 1 (RAE, after SD3)


def draw_logit_normal(uniforms: Tensor, mean: float, std: float, highest: float = 1.0) -> Tensor:
    """Returns times sigmoid(mean + std normal), truncated at `highest`.

    On a straight path EDM's sigma, noise over signal, is then exp(mean + std normal).
    """
    if highest < 1:
        share = torch.special.ndtr(torch.tensor((math.log(highest / (1 - highest)) - mean) / std).double())
        uniforms = uniforms * share.to(uniforms.dtype)
    return torch.sigmoid(mean + std * torch.special.ndtri(uniforms))


def draw_uniform(uniforms: Tensor, mean: float, std: float, highest: float = 1.0) -> Tensor:
    """Returns times distributed evenly over [0, `highest`); mean and std have no effect."""
    return uniforms * highest if highest < 1 else uniforms


def draw_mode(uniforms: Tensor, mean: float, std: float, highest: float = 1.0) -> Tensor:
    """Returns times by SD3's density with heavy tails: 1 - u - std (cos^2(pi u / 2) - 1 + u) at u = 1 - `uniforms`."""
    u = 1 - uniforms
    return 1 - u - std * (torch.cos(math.pi / 2 * u).square() - 1 + u)


def draw_cosmap(uniforms: Tensor, mean: float, std: float, highest: float = 1.0) -> Tensor:
    """Returns SD3's times under which log(signal / noise) is distributed as under the cosine schedule."""
    share = 2 / math.pi * math.atan2(highest, 1 - highest)  # of times at most `highest`
    return 1 - 1 / (torch.tan(math.pi / 2 * share * uniforms) + 1)


DENSITIES: dict[str, Callable[..., Tensor]] = {
    "logit_normal": draw_logit_normal,
    "uniform": draw_uniform,
    "mode": draw_mode,
    "cosmap": draw_cosmap,
}


def stratify_uniforms(uniforms: Tensor, position: Tensor, step: Tensor | None, strata: int) -> Tensor:
    """Maps uniform numbers (B,) into `strata` equal parts of [0, 1), so that of `strata` samples in a row each part has
    one.

    Which part is a sample's follows from its place `position` in the global batch and from the `step`, int64 (B,) each,
    so that a place meets all parts in turn; neighbours lie about a golden section apart, so that a micro-batch has some
    of all, too. Where in the part it lies is its own uniform number. Source: Kingma et al. 2021 (VDM), appendix I.
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
