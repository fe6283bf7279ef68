"""Reconstruction losses of each sample: means over the values of its image.

logit_laplace is that of Ramesh et al. 2021 (DALL-E, appendix A.3): phi(x) = (1 - 2 eps) x + eps moves pixels from [0,
1] into [eps, 1 - eps], and y = phi(x) has the density exp(-|logit(y) - mu| / b) / (2 b y (1 - y)).
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

_ERRORS = {"l1": F.l1_loss, "mse": F.mse_loss, "smooth_l1": F.smooth_l1_loss}
EPS = 0.1
# A smaller scale would be finer than the 256 levels of a pixel; the density of flat areas would grow without bound.
LEAST_LOG_SCALE = -6.0


def compute_mean_error(error_kind: Literal["l1", "mse", "smooth_l1"], picture: Tensor, truth: Tensor) -> Tensor:
    """Returns the mean error of each sample over its values: absolute (l1), squared (mse) or smooth_l1; two (B, C, H,
    W) -> (B,).
    """
    return _ERRORS[error_kind](picture, truth, reduction="none").flatten(1).mean(1)


def compute_logit_laplace_loss(decoder_output: Tensor, truth: Tensor) -> Tensor:
    """Returns the negative log density of each sample in nats, averaged over its values, (B,), under logit-Laplace
    distributions.

    decoder_output  (B, 2C, H, W), the distributions' means, then their log scales, which are raised to at least -6.
    truth           (B, C, H, W), pixels in [0, 1].
    """
    mean, log_scale = decoder_output.chunk(2, dim=1)
    log_scale = log_scale.clamp(min=LEAST_LOG_SCALE)
    y = (1 - 2 * EPS) * truth + EPS
    nats = math.log(2) + log_scale + torch.log(y * (1 - y)) + (torch.logit(y) - mean).abs() * torch.exp(-log_scale)
    return nats.flatten(1).mean(1)


def convert_logit_laplace_to_pixels(decoder_output: Tensor) -> Tensor:
    """Returns the pixels (B, C, H, W) at the medians of logit-Laplace distributions, whose means and log scales
    `decoder_output` (B, 2C, H, W) holds. The pixels are between -1/8 and 9/8.
    """
    return (decoder_output.chunk(2, dim=1)[0].sigmoid() - EPS) / (1 - 2 * EPS)
