"""Terms of the variational bound: divergence of two Gaussians, and the likelihood of 8-bit data under one.

Source: Ho et al. 2020 (DDPM), section 3.3 and appendix A. All in nats, elementwise; mean_flat makes them per dimension.
"""

import math

import torch
from torch import Tensor


def mean_flat(x: Tensor) -> Tensor:
    """Mean over all but the batch: (B, ...) -> (B,)."""
    return x.flatten(1).mean(dim=1)


def normal_kl(mean: Tensor, log_variance: Tensor, other_mean: Tensor | float, other_log: Tensor | float) -> Tensor:
    """KL(N(mean, e^log_variance) || N(other_mean, e^other_log)) in nats, elementwise."""
    other_log = torch.as_tensor(other_log, dtype=mean.dtype, device=mean.device)
    difference = log_variance - other_log
    return 0.5 * (-1.0 - difference + difference.exp() + (mean - other_mean).square() * torch.exp(-other_log))


def discretized_log_likelihood(x: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """Log probability (nats) of x in [-1, 1] as one of 256 levels under a Gaussian; the end levels take the tails.

    DDPM, Equation 13, with the tanh approximation of the normal CDF that published bits/dim were computed with.
    """
    centered, inverse = x - mean, torch.exp(-log_scale)
    above = _normal_cdf(inverse * (centered + 1 / 255))
    below = _normal_cdf(inverse * (centered - 1 / 255))
    probability = torch.where(x < -0.999, above, torch.where(x > 0.999, 1 - below, above - below))
    return probability.clamp(min=1e-12).log()


def _normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
