"""Quantizers whose codebooks are fixed or learn by gradient, without a moving average: lookup-free, and unit vectors.

Lookup-free (Yu et al. 2023, MAGVIT-v2, arXiv:2310.05737): a vector is projected to log2(K) numbers z, and the token is
the binary code of their signs. Cosine (Yu et al. 2021, ViT-VQGAN, arXiv:2110.04627): the nearest of K unit vectors.

Notation: B samples, N tokens of each, d = log2(K) bits, p(c|z) the softmax of 4 lambda z_i over the two signs of each
bit, q(c) the share of code c among recent tokens. Everything from z on is float32.

The package vector-quantize-pytorch is not used. Its codebook is a buffer, which each forward pass moves by an average
over the rank's samples (with sync_codebook: over the micro-batch of all ranks); dead entries are drawn again from
torch's generator. Master weights, EMA and sharding would ignore such a buffer, and runs would depend on how a batch is
split. The entropy of its lookup-free quantizer is that of a micro-batch, too.

The entropy of the mean, H(E p), is not a mean over samples, so no sample has a share of it. But H(E p) is the smallest
cross-entropy, min_q -E sum_c p(c) log q(c). The minimum lies at q = E p, where both have the same gradient. So each
sample's loss is its own cross-entropy to a fixed q (`CodeUsage.compute_cross_entropy`), and q, a mean over recent
global batches, moves once a step (`CodeUsage`). So the loss of a sample does not depend on its rank or micro-batch. For
more than 2^10 codes p and q are taken over groups of bits: the sum of the groups' entropies bounds the whole entropy
(equal for d <= 10).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dstrain.nn.layers import Linear
from dstrain.nn.quantize import upcast_to_float32
from dstrain.recipe import ConfigError

_GROUP = 10  # most bits of a group
_UNIFORM = 0.01  # share of a uniform distribution in q, so that log q stays finite
_CELLS = 1 << 24  # entries of the similarity matrix that are in memory at once


class Quantized(NamedTuple):
    """The result of quantizing vectors (B, ..., dim). The loss terms are weighted means over a sample's tokens."""

    x: Tensor  # the quantized vectors, gradient straight through: (B, ..., dim)
    tokens: Tensor  # int64 (B, ...)
    commitment: Tensor  # square of z - code, with gradient to z alone: (B,)
    codebook: Tensor  # the same, with gradient to the code; 0 where codes are fixed: (B,)
    entropy: Tensor  # of p(c|z), in nats a token; 0 where there is no p(c|z): (B,)
    shares: Tensor  # of codes by group, from p(c|z): (B, sum of the groups' codes or 0)


class LookupFree(nn.Module):
    """Quantizes vectors to the signs of log2(codebook_size) projections. inv_temperature is lambda of p(c|z).

    Raises ConfigError if codebook_size is no power of two.
    """

    def __init__(self, dim: int, codebook_size: int, inv_temperature: float = 1.0) -> None:
        super().__init__()
        self.bits, self.inv_temperature = compute_codebook_bits(codebook_size), inv_temperature
        self.project_in, self.project_out = Linear(dim, self.bits), Linear(self.bits, dim)

    def forward(self, x: Tensor, weight: Tensor) -> Quantized:
        """Quantizes vectors x (B, ..., dim). Returns a Quantized: the quantized vectors, their tokens, and loss terms
        (B,). A loss term is a mean over a sample's tokens, weighted by `weight` (B, ...).
        """
        z = upcast_to_float32(self.project_in(x))  # (B, ..., d)
        code = torch.where(z > 0, 1.0, -1.0).to(z.dtype)  # the sign of 0 is -1
        through = z + (code - z).detach()
        commitment = compute_weighted_mean((z - code).square().mean(-1), weight)
        logits = (4 * self.inv_temperature * z).flatten(1, -2)  # (B, N, d)
        of_bits = F.softplus(logits) - logits * logits.sigmoid()  # entropies, from logits of a bit's being set
        entropy = compute_weighted_mean(of_bits.sum(-1), weight.flatten(1))
        return Quantized(
            self.project_out(through.to(x.dtype)),
            convert_signs_to_tokens(code),
            commitment,
            torch.zeros_like(commitment),
            entropy,
            average_code_probabilities(logits, weight.flatten(1)),
        )

    def encode(self, x: Tensor) -> Tensor:
        """Returns the tokens of vectors: (B, ..., dim) -> int64 (B, ...)."""
        return convert_signs_to_tokens(upcast_to_float32(self.project_in(x)))

    def decode(self, tokens: Tensor) -> Tensor:
        """Returns the quantized vectors of tokens: int64 (B, ...) -> (B, ..., dim)."""
        return self.project_out(convert_tokens_to_signs(tokens, self.bits).to(self.project_out.weight.dtype))


class CosineQuantizer(nn.Module):
    """Quantizes vectors to the nearest of codebook_size unit vectors (codebook_dim,), which learn by gradient."""

    def __init__(self, dim: int, codebook_size: int, codebook_dim: int = 32) -> None:
        super().__init__()
        self.project_in, self.project_out = Linear(dim, codebook_dim), Linear(codebook_dim, dim)
        self.codebook = UnitCodebook(codebook_size, codebook_dim)

    def forward(self, x: Tensor, weight: Tensor) -> Quantized:
        """Quantizes vectors x (B, ..., dim). Returns a Quantized: the quantized vectors, their tokens, and loss terms
        (B,). A loss term is a mean over a sample's tokens, weighted by `weight` (B, ...).
        """
        z = F.normalize(upcast_to_float32(self.project_in(x)), dim=-1)  # (B, ..., D)
        tokens, code = self.codebook(z)
        through = z + (code - z).detach()
        commitment, codebook = (
            compute_weighted_mean((moved - fixed.detach()).square().sum(-1), weight)
            for moved, fixed in ((z, code), (code, z))
        )
        return Quantized(
            self.project_out(through.to(x.dtype)),
            tokens,
            commitment,
            codebook,
            torch.zeros_like(commitment),
            commitment.new_zeros(len(x), 0),
        )

    def encode(self, x: Tensor) -> Tensor:
        """Returns the tokens of vectors: (B, ..., dim) -> int64 (B, ...)."""
        return self.codebook(F.normalize(upcast_to_float32(self.project_in(x)), dim=-1))[0]

    def decode(self, tokens: Tensor) -> Tensor:
        """Returns the quantized vectors of tokens: int64 (B, ...) -> (B, ..., dim)."""
        return self.project_out(self.codebook(tokens)[1].to(self.project_out.weight.dtype))


class UnitCodebook(nn.Embedding):
    """Looks up unit vectors: for float32 vectors (..., D) the nearest ones, for int64 tokens (...) those of the tokens.
    Returns the tokens (...) and their vectors, float32 (..., D).

    One call serves both, since under ZeRO-3 the table is gathered only during that call.
    """

    def forward(self, vectors_or_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns tokens (...) and their unit vectors, float32 (..., D). The argument is either vectors, floating-point
        (..., D), whose nearest codebook vectors are looked up, or tokens, int64 (...), which are returned as they are.
        """
        tokens = vectors_or_tokens
        if tokens.is_floating_point():
            with torch.no_grad():
                table = F.normalize(upcast_to_float32(self.weight), dim=-1)
                parts = vectors_or_tokens.flatten(0, -2).split(max(_CELLS // len(table), 1))
                tokens = torch.cat([(part @ table.T).argmax(-1) for part in parts]).view(vectors_or_tokens.shape[:-1])
        return tokens, F.normalize(upcast_to_float32(F.embedding(tokens, self.weight)), dim=-1)


class CodeUsage:
    """Keeps `q`, the shares of codes by group over recent global batches, equal on all ranks. `q` is part of the
    system's state and has no gradient.
    """

    def __init__(self, bits: int, decay: float = 0.9) -> None:
        self.decay = decay
        self._uniform = torch.cat([torch.full((1 << size,), 0.5**size) for size in choose_bit_group_sizes(bits)])
        self.q = self._uniform  # at first; replaced, and never changed in place

    def update_shares(self, shares: Tensor) -> None:
        """Updates the moving average `q` of code shares once a step: q = decay * q + (1 - decay) * mean of `shares`
        over its N rows. `shares` (N, codes) holds the N samples of the global batch, in its order. If the mean is not
        finite, `q` is kept.
        """
        mean = shares.double().mean(0).float()  # a NaN would stay in q forever
        self.q = torch.where(
            mean.isfinite().all(), torch.lerp(mean, self.q.to(mean.device), self.decay), self.q.to(mean.device)
        )

    def compute_cross_entropy(self, shares: Tensor) -> Tensor:
        """Returns each sample's cross-entropy -sum_c p(c) log q(c) in nats, (B,). `shares` (B, codes) is p, the
        sample's own shares of codes; q is the moving average, mixed with 1 % of a uniform distribution to keep log q
        finite.
        """
        self.q, self._uniform = self.q.to(shares.device), self._uniform.to(shares.device)
        return -(shares * ((1 - _UNIFORM) * self.q + _UNIFORM * self._uniform).log()).sum(1)


def compute_codebook_bits(codebook_size: int) -> int:
    """Returns log2 of a codebook's size. Raises ConfigError, with the nearest powers of two, if the size is below 2 or
    no power of two.
    """
    bits = codebook_size.bit_length() - 1
    if codebook_size < 2 or codebook_size != 1 << bits:
        raise ConfigError(
            f"codebook_size: {codebook_size} is no power of two, which lookup-free codes need; take "
            f"{max(1 << bits, 2)} or {max(2 << bits, 4)}, or quantizer cosine"
        )
    return bits


def choose_bit_group_sizes(bits: int) -> list[int]:
    """Splits the bits of a token into the fewest groups of at most 10 bits, and returns the number of bits in each
    group. The groups are as equal as possible: 21 gives [7, 7, 7].
    """
    count = -(-bits // _GROUP)
    return [bits // count + (number < bits % count) for number in range(count)]


def convert_signs_to_tokens(z: Tensor) -> Tensor:
    """Returns the token of each vector z (..., d), int64 (...). Each number gives one bit, 1 if it is above 0, else 0;
    the first number gives the highest bit.
    """
    powers = 1 << torch.arange(z.shape[-1] - 1, -1, -1, device=z.device)
    return ((z > 0) * powers).sum(-1)


def convert_tokens_to_signs(tokens: Tensor, bits: int) -> Tensor:
    """Returns the bits of each token as signs: int64 (...) -> float32 (..., bits), -1 for a bit 0 and 1 for a bit 1.
    The highest bit comes first.
    """
    places = torch.arange(bits - 1, -1, -1, device=tokens.device)
    return ((tokens[..., None] >> places) & 1).float() * 2 - 1


def average_code_probabilities(logits: Tensor, weight: Tensor) -> Tensor:
    """Returns the probabilities p(c|z) of codes c, averaged over the N tokens of each sample with the weights `weight`
    (B, N): (B, codes). `logits` (B, N, d) hold for each of a token's d bits the logit of its being 1.

    `choose_bit_group_sizes` splits the d bits into groups with codes of their own. The result holds the codes of all
    groups, one group after the other; the probabilities of a group sum to 1.
    """
    shares = []
    for part in logits.split(choose_bit_group_sizes(logits.shape[-1]), dim=-1):
        size = part.shape[-1]
        code = convert_tokens_to_signs(torch.arange(1 << size, device=logits.device), size)  # (codes, size)
        p = (part @ code.T.to(part.dtype) / 2).softmax(-1)  # (B, N, codes)
        shares.append(torch.einsum("bn,bnc->bc", (weight / weight.sum(1, keepdim=True)).to(p.dtype), p))
    return torch.cat(shares, dim=1)


def compute_weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Returns the mean of each sample's values, weighted by `weight`: two tensors (B, ...) -> (B,)."""
    return (values * weight).flatten(1).sum(1) / weight.flatten(1).sum(1)
