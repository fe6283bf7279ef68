"""Chooses which tokens are masked: the cosine schedule of MaskGIT (Chang et al. 2022, arXiv:2202.04200, section 3.3).

Notation: a clip has N real tokens, of which the share r = cos(pi/2 u) is masked. In training u is drawn uniformly from
[0, 1); in decoding it is the share of steps that are done. The mean of r over u is 2 / pi.
"""

import math

import torch
from torch import Tensor

MEAN_RATIO = 2 / math.pi


def compute_masked_share(u: Tensor) -> Tensor:
    """Returns the share of masked tokens, cos(pi/2 u): (B,) -> float64 (B,); 1 at u = 0, 0 at u = 1."""
    return torch.cos(u.double() * (math.pi / 2))


def count_tokens_to_mask(u: Tensor, real: Tensor) -> Tensor:
    """Returns the number of tokens of each clip that are masked in training, max(1, round(real * cos(pi/2 u))), int64
    (B,). u: float (B,) in [0, 1); real: int64 (B,), the number of the clip's real tokens.
    """
    return (real * compute_masked_share(u)).round().long().clamp(min=1)


def mark_lowest_scores(scores: Tensor, count: Tensor) -> Tensor:
    """Returns bool (B, N), True at the `count` int64 (B,) lowest scores of each row of (B, N). Of equal scores the
    first ones count as lower.
    """
    order = scores.argsort(dim=1, stable=True)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(scores.shape[1], device=scores.device).expand_as(order)
    )
    return rank < count[:, None]


def draw_mask(u: Tensor, noise: Tensor, real: Tensor) -> Tensor:
    """Returns bool (B, N), True for the tokens that are masked in training: of each clip the real tokens with the
    lowest `noise` (B, N) in [0, 1), as many as `count_tokens_to_mask` returns for u (B,).

    real bool (B, N), False for padding, which is never masked.
    """
    return mark_lowest_scores(torch.where(real, noise, 2.0), count_tokens_to_mask(u, real.sum(1)))
