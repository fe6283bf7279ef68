"""Vectors to tokens and back without a moving average: lookup-free, and by a codebook of unit vectors.

Lookup-free (Yu et al. 2023, MAGVIT-v2, arXiv:2310.05737): a vector is projected to log2(K) numbers z, and a token is
the binary code of their signs. Cosine (Yu et al. 2021, ViT-VQGAN, arXiv:2110.04627): the nearest of K unit vectors.

Notation: B samples, N tokens of each, d = log2(K) bits, p(c|z) the softmax of 4 lambda z_i over the two signs of each
bit, q(c) the share of code c among recent tokens. Everything from z on is float32.

The package vector-quantize-pytorch does not serve here. Its codebook is a buffer that each forward moves by an average
over what the rank (or, with sync_codebook, the micro-batch of all ranks) holds, with dead entries drawn anew from
torch's generator: no master, no EMA and no sharding of ours would know of it, and runs would depend on how a batch is
split. Its lookup-free entropy, too, is that of a micro-batch.

The entropy of the mean, H(E p), is no mean over samples, so that no sample has its share of it. But H(E p) is the least
cross-entropy, min_q -E sum_c p(c) log q(c), reached at q = E p; there the gradients of the two are equal. So each
sample takes its own cross-entropy to a fixed q (`diversity`), and q, the mean over the global batches of the recent
past, is moved once a step (`Usage`). With that a loss belongs to its sample, on any rank and in any micro-batch. Where
there are more than 2^10 codes, p and q are taken over groups of bits: the sum of the groups' entropies bounds the
entropy of all from above, and is exact for d <= 10.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dstrain.nn.layers import Linear
from dstrain.nn.quantize import wide
from dstrain.recipe import ConfigError

_GROUP = 10                                       # bits whose codes are told apart jointly
_UNIFORM = 0.01                                   # share of the uniform in q: log q stays finite
_CELLS = 1 << 24                                  # similarities that are held at once


class Quantized(NamedTuple):
    """What a quantizer makes of vectors (B, ..., dim); the terms are means over a sample's tokens, weighted."""

    x: Tensor                                     # what stands for them, gradient straight through: (B, ..., dim)
    tokens: Tensor                                # int64 (B, ...)
    commitment: Tensor                            # mean square between z and its code, by which z is moved: (B,)
    codebook: Tensor                              # alike, by which the code is moved; 0 where codes are fixed: (B,)
    entropy: Tensor                               # of p(c|z), in nats a token; 0 where nothing is relaxed: (B,)
    shares: Tensor                                # of codes by group, from p(c|z): (B, sum of the groups' codes or 0)


class LookupFree(nn.Module):
    """Signs of log2(codebook_size) projections. inv_temperature is lambda.

    ConfigError: codebook_size is no power of two.
    """

    def __init__(self, dim: int, codebook_size: int, inv_temperature: float = 1.0) -> None:
        super().__init__()
        self.bits, self.inv_temperature = bits_of(codebook_size), inv_temperature
        self.project_in, self.project_out = Linear(dim, self.bits), Linear(self.bits, dim)

    def forward(self, x: Tensor, weight: Tensor) -> Quantized:
        """(B, ..., dim), and how much each token counts in the terms, (B, ...)."""
        z = wide(self.project_in(x))                                                              # (B, ..., d)
        code = signs(z)
        through = z + (code - z).detach()
        commitment = weighted((z - code).square().mean(-1), weight)
        logits = (4 * self.inv_temperature * z).flatten(1, -2)                                    # (B, N, d)
        entropy = weighted(_binary_entropy(logits).sum(-1), weight.flatten(1))
        return Quantized(self.project_out(through.to(x.dtype)), tokens_of(code), commitment,
                         torch.zeros_like(commitment), entropy, shares_of(logits, weight.flatten(1)))

    def encode(self, x: Tensor) -> Tensor:
        """(B, ..., dim) -> int64 (B, ...)."""
        return tokens_of(wide(self.project_in(x)))

    def decode(self, tokens: Tensor) -> Tensor:
        """int64 (B, ...) -> (B, ..., dim)."""
        return self.project_out(code_of(tokens, self.bits).to(self.project_out.weight.dtype))


class CosineQuantizer(nn.Module):
    """The nearest of codebook_size unit vectors of codebook_dim entries, which learn by gradient."""

    def __init__(self, dim: int, codebook_size: int, codebook_dim: int = 32) -> None:
        super().__init__()
        self.project_in, self.project_out = Linear(dim, codebook_dim), Linear(codebook_dim, dim)
        self.codebook = UnitCodebook(codebook_size, codebook_dim)

    def forward(self, x: Tensor, weight: Tensor) -> Quantized:
        """(B, ..., dim), and how much each token counts in the terms, (B, ...)."""
        z = F.normalize(wide(self.project_in(x)), dim=-1)                                         # (B, ..., D)
        tokens, code = self.codebook(z)
        through = z + (code - z).detach()
        commitment, codebook = (weighted((one - other.detach()).square().sum(-1), weight)
                                for one, other in ((z, code), (code, z)))
        return Quantized(self.project_out(through.to(x.dtype)), tokens, commitment, codebook,
                         torch.zeros_like(commitment), commitment.new_zeros(len(x), 0))

    def encode(self, x: Tensor) -> Tensor:
        """(B, ..., dim) -> int64 (B, ...)."""
        return self.codebook(F.normalize(wide(self.project_in(x)), dim=-1))[0]

    def decode(self, tokens: Tensor) -> Tensor:
        """int64 (B, ...) -> (B, ..., dim)."""
        return self.project_out(self.codebook(tokens)[1].to(self.project_out.weight.dtype))


class UnitCodebook(nn.Embedding):
    """Unit vectors by token: z float32 (..., D) or tokens int64 (...) -> tokens (...), their vectors float32 (..., D).

    Both through the one call, since under ZeRO-3 the table is there only within it.
    """

    def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
        tokens = given
        if given.is_floating_point():
            with torch.no_grad():
                table = F.normalize(wide(self.weight), dim=-1)
                rows = max(_CELLS // len(table), 1)
                near = [(part @ table.T).argmax(-1) for part in given.flatten(0, -2).split(rows)]
                tokens = torch.cat(near).view(given.shape[:-1])
        return tokens, F.normalize(wide(F.embedding(tokens, self.weight)), dim=-1)


class Usage:
    """q: the shares of codes by group over recent global batches, equal on all ranks. No weight, but state."""

    def __init__(self, bits: int, decay: float = 0.9) -> None:
        self.decay = decay
        self.q = torch.cat([torch.full((1 << size,), 0.5 ** size) for size in groups(bits)])      # uniform at first

    def observe(self, shares: Tensor) -> None:
        """Moves towards the mean of one step's samples, (N, codes), given in the order of the global batch."""
        mean = shares.double().mean(0).float()                            # what is not finite would stay for ever
        self.q = torch.where(mean.isfinite().all(), torch.lerp(mean, self.q.to(mean.device), self.decay),
                             self.q.to(mean.device))

    def diversity(self, shares: Tensor, bits: int) -> Tensor:
        """-sum_c p(c) log q(c) in nats, whose gradient at q = E p is that of the entropy of the mean: (B,)."""
        self.q = self.q.to(shares.device)
        even = torch.cat([self.q.new_full((1 << size,), 0.5 ** size) for size in groups(bits)])
        return -(shares * ((1 - _UNIFORM) * self.q + _UNIFORM * even).log()).sum(1)


def bits_of(codebook_size: int) -> int:
    """log2 of a power of two. ConfigError: it is none, with the nearest two."""
    bits = codebook_size.bit_length() - 1
    if codebook_size < 2 or codebook_size != 1 << bits:
        raise ConfigError(f"codebook_size: {codebook_size} is no power of two, which lookup-free codes need; take "
                          f"{max(1 << bits, 2)} or {max(2 << bits, 4)}, or quantizer cosine")
    return bits


def groups(bits: int) -> list[int]:
    """How many bits each group has: as few groups as hold at most 10 bits each, as equal as can be."""
    count = -(-bits // _GROUP)
    return [bits // count + (number < bits % count) for number in range(count)]


def signs(z: Tensor) -> Tensor:
    """-1 or 1; 0 counts as below."""
    return torch.where(z > 0, 1.0, -1.0).to(z.dtype)


def tokens_of(z: Tensor) -> Tensor:
    """The binary code of signs, the first bit the highest: (..., d) -> int64 (...)."""
    powers = 1 << torch.arange(z.shape[-1] - 1, -1, -1, device=z.device)
    return ((z > 0) * powers).sum(-1)


def code_of(tokens: Tensor, bits: int) -> Tensor:
    """Signs float32 of tokens: int64 (...) -> (..., d)."""
    places = torch.arange(bits - 1, -1, -1, device=tokens.device)
    return ((tokens[..., None] >> places) & 1).float() * 2 - 1


def shares_of(logits: Tensor, weight: Tensor) -> Tensor:
    """Mean p(c|z) over a sample's tokens by group: logits of each bit's + (B, N, d), (B, N) -> (B, sum of codes)."""
    found = []
    for part in logits.split(groups(logits.shape[-1]), dim=-1):
        size = part.shape[-1]
        code = code_of(torch.arange(1 << size, device=logits.device), size)                       # (codes, size)
        p = (part @ code.T.to(part.dtype) / 2).softmax(-1)                                        # (B, N, codes)
        found.append(torch.einsum("bn,bnc->bc", weight / weight.sum(1, keepdim=True), p))
    return torch.cat(found, dim=1)


def weighted(values: Tensor, weight: Tensor) -> Tensor:
    """Weighted means by sample: two (B, ...) -> (B,)."""
    return (values * weight).flatten(1).sum(1) / weight.flatten(1).sum(1)


def _binary_entropy(logits: Tensor) -> Tensor:
    """In nats, of a bit that is set with the logit's probability."""
    return F.softplus(logits) - logits * logits.sigmoid()

