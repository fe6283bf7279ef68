"""Terms of the variational bound: divergence of two Gaussians, and the likelihood of 8-bit data under one.

Source: Ho et al. 2020 (DDPM), section 3.3 and appendix A. All in nats, elementwise; mean_flat makes them per dimension.
"""

import math
from typing import Any

import numpy as np
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


def expm1(x: Tensor) -> Tensor:
    """e^x - 1 without cancellation, elementwise."""
    readable = x.device.type == "cpu" and not torch.compiler.is_compiling()
    return _HostExpm1.apply(x) if readable else torch.expm1(x)


class _HostExpm1(torch.autograd.Function):
    """By numpy: torch's took three times as long on a CPU with AVX-512, in some runs fifty times (most of a loss)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with np.errstate(over="ignore"):                                  # infinite, as torch says it
            out = torch.from_numpy(np.expm1(x.numpy()))
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        out, = ctx.saved_tensors
        return torch.addcmul(gradient, gradient, out)
