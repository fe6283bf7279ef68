"""Categorical latents with a gradient: Gumbel-softmax, straight-through and ReinMax, and their codebook.

Notation: K tokens; theta the logits, pi = softmax(theta), D a one-hot sample of pi; J(p) = diag(p) - p p^T, the
Jacobian of softmax where its value is p. With Gumbel noise g, argmax(theta + g) is such a D (Gumbel 1954), and
softmax((theta + g) / temperature) its relaxation (Jang et al. 2017, Maddison et al. 2017).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dstrain import rng
from dstrain.recipe import ConfigError

SAMPLINGS = ("soft", "straight_through", "reinmax")
_LEAST = 2.0**-25  # below every uniform number but 0, and with a finite logarithm


def upcast_to_float32(x: Tensor) -> Tensor:
    """Returns x in float32; in float64 if it is float64 already."""
    return x if x.dtype == torch.float64 else x.float()


def draw_gumbel_noise(key: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    """Returns standard Gumbel noise, float32 (B, *shape), between -2.9 and 16.7. Row i is determined by key[i] and
    `name`.
    """
    return -torch.log(-torch.log(rng.uniform(key, name, shape).clamp(min=_LEAST)))


def draw_relaxed_tokens(logits: Tensor, noise: Tensor, temperature: Tensor, sampling: str) -> Tensor:
    """Draws one of K tokens at each position, and returns it as weights (B, K, ...), with a gradient to `logits` (B, K,
    ...). `noise` (B, K, ...) is standard Gumbel noise, `temperature` is (B,). `sampling` is one of:

    soft              the Gumbel-softmax softmax((logits + noise) / temperature), a mixture of tokens.
    straight_through  one token with weight 1; the gradient is that of soft.
    reinmax           one token with weight 1; the gradient is of second order (Liu et al. 2023).

    Raises ConfigError for another `sampling`.
    """
    temperature = temperature.view(-1, *(1,) * (logits.ndim - 1)).to(logits.dtype)
    noisy = logits + noise
    if sampling == "soft":
        return (noisy / temperature).softmax(1)
    hard = torch.zeros_like(logits).scatter_(1, noisy.argmax(1, keepdim=True), 1.0)
    if sampling == "straight_through":
        smooth = (noisy / temperature).softmax(1)
    elif sampling == "reinmax":
        smooth = _make_reinmax_surrogate(logits, hard, temperature)
    else:
        raise ConfigError(f"sampling: {sampling!r} is unknown; one of {', '.join(SAMPLINGS)}")
    return hard + (smooth - smooth.detach())  # the value of hard, the gradient of smooth


def _make_reinmax_surrogate(logits: Tensor, hard: Tensor, temperature: Tensor) -> Tensor:
    """Returns a tensor (B, K, ...) whose gradient with respect to the logits is ReinMax's (Liu et al. 2023,
    arXiv:2304.08612), of second order. `hard` (B, K, ...) is the drawn one-hot sample D, `temperature` broadcasts to
    it.

    The Jacobian is 2 J((softmax(logits / temperature) + D) / 2) - J(softmax(logits)) / 2, where J(p) = diag(p) - p p^T.
    """
    pi = logits.detach().softmax(1)
    halfway = ((logits.detach() / temperature).softmax(1) + hard) / 2

    def make_tensor_with_softmax_jacobian(p: Tensor) -> Tensor:
        """Returns a tensor whose Jacobian with respect to the logits is diag(p) - p p^T, for a fixed p."""
        return p * (logits - (p * logits).sum(1, keepdim=True))

    return 2 * make_tensor_with_softmax_jacobian(halfway) - make_tensor_with_softmax_jacobian(pi) / 2


def compute_kl_to_uniform(logits: Tensor) -> Tensor:
    """Returns KL(softmax(logits) || uniform) in nats, with the softmax over axis 1, summed over positions: (B, K, ...)
    -> (B,).
    """
    log_q = logits.log_softmax(1)
    return (log_q.exp() * (log_q + math.log(logits.shape[1]))).flatten(1).sum(1)


class Codebook(nn.Embedding):
    """Looks up the vectors of tokens, int64 (B, h, w), or mixes vectors by weights of the K tokens, (B, K, h, w): ->
    (B, D, h, w).

    One call serves both, since under ZeRO-3 the table is gathered only during that call.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns codebook vectors (B, D, h, w). The argument is either tokens, int64 (B, h, w), whose vectors are
        looked up, or floating-point weights of all K tokens, (B, K, h, w), by which the vectors are summed.
        """
        if tokens.is_floating_point():
            return torch.einsum("bkhw,kd->bdhw", tokens.to(self.weight.dtype), self.weight).contiguous()
        return F.embedding(tokens, self.weight).permute(0, 3, 1, 2).contiguous()
