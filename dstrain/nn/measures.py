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
    """Returns the largest absolute difference of two tensors, divided by the largest magnitude in `truth`. If all
    values are zero, returns 0.
    """
    return float((values - truth).abs().max() / truth.abs().max().clamp(min=torch.finfo(truth.dtype).tiny))


def compute_psnr(picture: Tensor, truth: Tensor) -> Tensor:
    """Returns 10 log10(1 / mean square error), at most 100 dB: two (B, C, H, W) -> (B,)."""
    error = (picture - truth).square().flatten(1).mean(1)
    return -10 * error.clamp(min=_LEAST_ERROR).log10()


def compute_ssim(picture: Tensor, truth: Tensor) -> Tensor:
    """Returns the structural similarity, 1 if equal: two (B, C, H, W) -> (B,). Where the picture is smaller than the
    window, the window has the picture's size.
    """
    channels, height, width = truth.shape[1:]
    down, across = (_make_gaussian_window(min(_WINDOW, side), truth) for side in (height, width))

    def smooth(x: Tensor) -> Tensor:
        x = F.conv2d(x, down.view(1, 1, -1, 1).expand(channels, -1, -1, -1), groups=channels)
        return F.conv2d(x, across.view(1, 1, 1, -1).expand(channels, -1, -1, -1), groups=channels)

    mean_a, mean_b = smooth(picture), smooth(truth)
    variance_a, variance_b = smooth(picture * picture) - mean_a.square(), smooth(truth * truth) - mean_b.square()
    covariance = smooth(picture * truth) - mean_a * mean_b
    luminance = (2 * mean_a * mean_b + _C1) / (mean_a.square() + mean_b.square() + _C1)
    structure = (2 * covariance + _C2) / (variance_a + variance_b + _C2)
    return (luminance * structure).flatten(1).mean(1)


def _make_gaussian_window(size: int, like: Tensor) -> Tensor:
    distance = torch.arange(size, dtype=like.dtype, device=like.device) - (size - 1) / 2
    weight = torch.exp(-distance.square() / (2 * _SIGMA**2))
    return weight / weight.sum()


def measure_psnr_and_ssim(picture: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """Returns the terms psnr (dB) and ssim, (B,) each, of pictures and their truth (B, C, H, W) in [-1, 1]; values
    outside are clamped.
    """
    picture, truth = ((x.clamp(-1, 1) + 1) / 2 for x in (picture, truth))
    return {"psnr": compute_psnr(picture, truth), "ssim": compute_ssim(picture, truth)}


def measure_token_shares(tokens: Tensor, num_tokens: int, counted: Tensor | None = None) -> Tensor:
    """Returns the share of each token among the tokens of each sample: int64 (B, ...) -> float32 (B, num_tokens), rows
    that sum to 1.

    counted  bool (B, ...), True at the tokens that are counted, such as those that are no padding; None: all.

    The mean of the rows over samples is the histogram of all samples, however they were batched.
    """
    flat = tokens.flatten(1)  # (B, N)
    shares = torch.ones_like(flat, dtype=torch.float32) if counted is None else counted.flatten(1).float()
    shares = shares / shares.sum(1, keepdim=True)
    return torch.zeros(len(flat), num_tokens, device=flat.device).scatter_add_(1, flat, shares)


def measure_codebook_usage(shares: Tensor) -> tuple[float, float]:
    """Returns, for a histogram of tokens (K,), its perplexity, between 1 and K (exp of the entropy in nats), and the
    fraction of tokens that are never used.
    """
    shares = shares.double() / shares.double().sum()
    perplexity = torch.special.entr(shares).sum().exp().item()
    return perplexity, (shares == 0).double().mean().item()
