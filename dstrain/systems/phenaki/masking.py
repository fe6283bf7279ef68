"""Which tokens are masked: the cosine schedule of MaskGIT (Chang et al. 2022, arXiv:2202.04200, section 3.3).

Notation: a clip has N real tokens; u is uniform in [0, 1); r = cos(pi/2 u) is the ratio that is masked. In training u
is drawn, in decoding it is the share of steps done. The mean of r over u is 2 / pi.
"""

import math

import torch
from torch import Tensor

MEAN_RATIO = 2 / math.pi


def compute_masked_share(u: Tensor) -> Tensor:
    """Computes cos(pi/2 u), float64, (B,) -> (B,): 1 at u = 0, 0 at u = 1."""
    return torch.cos(u.double() * (math.pi / 2))


def count_masked(u: Tensor, real: Tensor) -> Tensor:
    """Returns how many of `real` int64 (B,) tokens are masked in training: max(1, round(real * r)), int64 (B,)."""
    return (real * compute_masked_share(u)).round().long().clamp(min=1)


def mark_lowest(scores: Tensor, count: Tensor) -> Tensor:
    """Marks the `count` int64 (B,) lowest of scores (B, N), of equal scores the first: bool (B, N)."""
    order = scores.argsort(dim=1, stable=True)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(scores.shape[1], device=scores.device).expand_as(order)
    )
    return rank < count[:, None]


def draw_mask(u: Tensor, noise: Tensor, real: Tensor) -> Tensor:
    """Draws the masked tokens of training, bool (B, N): count_masked(u) of them, where `noise` (B, N) is lowest.

    real  bool (B, N): padding is never masked.
    """
    return mark_lowest(torch.where(real, noise, 2.0), count_masked(u, real.sum(1)))
