"""Terms of the variational bound: divergence of two Gaussians, and the likelihood of 8-bit data under one.

Elementwise and in nats. Source: Ho et al. 2020 (DDPM), section 3.3, appendix A.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor


def average_each_sample(x: Tensor) -> Tensor:
    """Returns the mean over all axes but the first: (B, ...) -> (B,)."""
    return x.flatten(1).mean(dim=1)


def compute_normal_kl(
    mean1: Tensor, log_variance1: Tensor, mean2: Tensor | float, log_variance2: Tensor | float
) -> Tensor:
    """Returns KL(N(mean1, e^log_variance1) || N(mean2, e^log_variance2)) in nats, for each element."""
    log_variance2 = torch.as_tensor(log_variance2, dtype=mean1.dtype, device=mean1.device)
    difference = log_variance1 - log_variance2
    return 0.5 * (-1.0 - difference + difference.exp() + (mean1 - mean2).square() * torch.exp(-log_variance2))


def compute_discretized_log_likelihood(x: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """Returns the log probability in nats of each element of x, an 8-bit value scaled to [-1, 1]: of the interval of
    width 2 / 255 about it, under a Gaussian with this mean and log standard deviation. For the lowest and the highest
    value the interval has no end on the outer side.

    DDPM, Equation 13, with the tanh approximation of the normal distribution that published figures use.
    """
    centered, inverse = x - mean, torch.exp(-log_scale)
    above = _compute_normal_cdf(inverse * (centered + 1 / 255))
    below = _compute_normal_cdf(inverse * (centered - 1 / 255))
    probability = torch.where(x < -0.999, above, torch.where(x > 0.999, 1 - below, above - below))
    return probability.clamp(min=1e-12).log()


def _compute_normal_cdf(x: Tensor) -> Tensor:
    """Returns the standard normal distribution function at x, by the tanh approximation."""
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def compute_expm1(x: Tensor) -> Tensor:
    """Returns e^x - 1 for each element, precise also for small x."""
    return _HostExpm1.apply(x) if can_read_without_device_sync(x) else torch.expm1(x)


def can_read_without_device_sync(x: Tensor) -> bool:
    """Returns whether Python can read the values of x without waiting for a device: x is a plain tensor on the CPU, and
    torch.compile is not tracing.
    """
    return type(x) is Tensor and x.device.type == "cpu" and not torch.compiler.is_compiling()


class _HostExpm1(torch.autograd.Function):
    """Computes e^x - 1 by numpy. On a CPU with AVX-512 torch takes 3 times as long, in some runs 50 times: most of a
    loss's time.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Returns e^x - 1, computed by numpy; x is a tensor on the CPU."""
        with np.errstate(over="ignore"):  # the result is infinite, as torch's is
            out = torch.from_numpy(np.expm1(x.numpy()))
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Returns the gradient with respect to x: gradient * e^x."""
        (out,) = ctx.saved_tensors
        return torch.addcmul(gradient, gradient, out)
