"""Chooses which tokens are masked: the cosine schedule of MaskGIT (Chang et al. 2022, arXiv:2202.04200, section 3.3).

Notation: a clip has N real tokens, of which the share r = cos(pi/2 u) is masked. In training u is drawn uniformly from
[0, 1); in decoding it is the share of steps that are done. The mean of r over u is 2 / pi.
"""

import math

import torch
from torch import Tensor

MEAN_RATIO = 2 / math.pi


def compute_masked_share(uniform: Tensor) -> Tensor:
    """Returns the share of tokens that are masked, cos(pi / 2 * uniform): (B,) -> float64 (B,). It falls from 1 at
    0 to 0 at 1.
    """
    return torch.cos(uniform.double() * (math.pi / 2))


def count_tokens_to_mask(uniform: Tensor, num_real: Tensor) -> Tensor:
    """Returns how many tokens of each clip are masked in training, int64 (B,): max(1, round(num_real * cos(pi / 2 *
    uniform))). `uniform`, float (B,), is in [0, 1); `num_real`, int64 (B,), is the number of the clip's tokens without
    padding.
    """
    return (num_real * compute_masked_share(uniform)).round().long().clamp(min=1)


def mark_lowest_scores(scores: Tensor, count: Tensor) -> Tensor:
    """Returns bool (B, N), True at the `count`, int64 (B,), lowest `scores` (B, N) of each row. Of equal scores the
    first ones are taken.
    """
    order = scores.argsort(dim=1, stable=True)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(scores.shape[1], device=scores.device).expand_as(order)
    )
    return rank < count[:, None]


def choose_masked_tokens(uniform: Tensor, noise: Tensor, real: Tensor) -> Tensor:
    """Returns bool (B, N), True for the tokens that are masked in training: those with the lowest `noise`.

    uniform  (B,) in [0, 1), which decides how many tokens of a clip are masked, see count_tokens_to_mask.
    noise    (B, N) in [0, 1).
    real     bool (B, N), False for padding, which is never masked.
    """
    return mark_lowest_scores(torch.where(real, noise, 2.0), count_tokens_to_mask(uniform, real.sum(1)))
