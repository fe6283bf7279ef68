"""Measures how similar two pictures are, sample by sample, and how evenly a codebook is used.

Pictures are float (B, C, H, W) in [0, 1]. PSNR in dB. SSIM after Wang et al. 2004 ("Image quality assessment: from
error visibility to structural similarity"): a Gaussian window of 11 pixels, sigma 1.5, K1 = 0.01, K2 = 0.03; only
windows that lie inside the picture; each channel by itself, then their mean.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_WINDOW, _SIGMA, _C1, _C2 = 11, 1.5, 0.01**2, 0.03**2
_LEAST_ERROR = 1e-10  # mean square: equal pictures have 100 dB


def measure_relative_error(values: Tensor, truth: Tensor) -> float:
    """Returns the largest absolute difference of two tensors, divided by the largest absolute value in `truth`; 0 if
    both tensors are all zeros.
    """
    return float((values - truth).abs().max() / truth.abs().max().clamp(min=torch.finfo(truth.dtype).tiny))


def compute_psnr(picture: Tensor, truth: Tensor) -> Tensor:
    """Returns the peak signal-to-noise ratio of each picture in dB, at most 100: two (B, C, H, W) in [0, 1] -> (B,)."""
    error = (picture - truth).square().flatten(1).mean(1)
    return -10 * error.clamp(min=_LEAST_ERROR).log10()


def compute_ssim(picture: Tensor, truth: Tensor) -> Tensor:
    """Returns the structural similarity (SSIM) of each picture to its truth, 1 if they are equal: two (B, C, H, W) in
    [0, 1] -> (B,). The window is 11 pixels wide and high, or the picture's side where that is smaller.
    """
    channels, height, width = truth.shape[1:]
    down, across = (_make_gaussian_window(min(_WINDOW, side), truth) for side in (height, width))

    def average_under_window(x: Tensor) -> Tensor:
        """Averages each channel of x (B, C, H, W) under the Gaussian window, only where the whole window is inside the
        picture.
        """
        x = F.conv2d(x, down.view(1, 1, -1, 1).expand(channels, -1, -1, -1), groups=channels)
        return F.conv2d(x, across.view(1, 1, 1, -1).expand(channels, -1, -1, -1), groups=channels)

    mean_a, mean_b = average_under_window(picture), average_under_window(truth)
    variance_a, variance_b = (
        average_under_window(picture * picture) - mean_a.square(),
        average_under_window(truth * truth) - mean_b.square(),
    )
    covariance = average_under_window(picture * truth) - mean_a * mean_b
    luminance = (2 * mean_a * mean_b + _C1) / (mean_a.square() + mean_b.square() + _C1)
    structure = (2 * covariance + _C2) / (variance_a + variance_b + _C2)
    return (luminance * structure).flatten(1).mean(1)


def _make_gaussian_window(size: int, like: Tensor) -> Tensor:
    """Returns `size` Gaussian weights (sigma 1.5 pixels) that sum to 1, with the dtype and device of `like`."""
    distance = torch.arange(size, dtype=like.dtype, device=like.device) - (size - 1) / 2
    weight = torch.exp(-distance.square() / (2 * _SIGMA**2))
    return weight / weight.sum()


def measure_psnr_and_ssim(picture: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """Returns {"psnr": (B,) in dB, "ssim": (B,)} of pictures and their truth, (B, C, H, W) each, in [-1, 1]; values
    outside are clamped.
    """
    picture, truth = ((x.clamp(-1, 1) + 1) / 2 for x in (picture, truth))
    return {"psnr": compute_psnr(picture, truth), "ssim": compute_ssim(picture, truth)}


def measure_token_shares(tokens: Tensor, num_tokens: int, counted: Tensor | None = None) -> Tensor:
    """Returns the share of each of `num_tokens` ids among a sample's tokens: int64 (B, ...) -> float32 (B, num_tokens).
    Each row sums to 1. `counted`, bool (B, ...), is False at tokens to ignore, such as padding; None: all tokens count.
    """
    flat = tokens.flatten(1)  # (B, N)
    shares = torch.ones_like(flat, dtype=torch.float32) if counted is None else counted.flatten(1).float()
    shares = shares / shares.sum(1, keepdim=True)
    return torch.zeros(len(flat), num_tokens, device=flat.device).scatter_add_(1, flat, shares)


def compute_perplexity_and_unused_share(shares: Tensor) -> tuple[float, float]:
    """Returns two figures of a token histogram `shares` (K,): its perplexity, exp of the entropy, from 1 to K; and the
    fraction of tokens that are never used.
    """
    shares = shares.double() / shares.double().sum()
    perplexity = torch.special.entr(shares).sum().exp().item()
    return perplexity, (shares == 0).double().mean().item()
