"""Building blocks of transformers: norms, MLPs, attention, and modulation by a condition.

Notation: B samples, N tokens, M tokens that are read, D = dim, h heads of d = D / h values. Every layer sets its own
weights, see layers.py. Names of weights are those of the published networks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dstrain.nn.attention import attend
from dstrain.nn.layers import Linear
from dstrain.nn.positions import apply_rotary_embedding
from dstrain.nn.quantize import upcast_to_float32
from dstrain.recipe import ConfigError

EPSILON = 1e-6  # of all norms


class RMSNorm(nn.Module):
    """Divides by the root mean square over the last axis, in float32, and multiplies by weights (Zhang, Sennrich 2019).

    torch's own multiplies before it rounds, and the published networks after it.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weights to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Returns x divided by the root mean square over its last axis, times the weights, in the dtype of x: (...,
        dim) -> (..., dim).
        """
        wide = upcast_to_float32(x)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)).to(x.dtype) * self.weight


def build_norm_layer(kind: str, dim: int) -> nn.Module:
    """Returns a norm over the last axis of `dim` values. `kind`: layer (LayerNorm without weights), layer_affine (with
    weights) or rms (RMSNorm).
    """
    if kind == "rms":
        return RMSNorm(dim)
    return nn.LayerNorm(dim, elementwise_affine=kind == "layer_affine", eps=EPSILON)


class Mlp(nn.Module):
    """Two linear layers with a tanh-approximated GELU between them: (..., dim) -> (..., dim)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = Linear(dim, hidden)
        self.fc2 = Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Returns fc2(gelu(fc1(x))): (..., dim) -> (..., dim)."""
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class SwiGLU(nn.Module):
    """A gated MLP (Shazeer 2020), gate and values from one map: (..., dim) -> (..., dim).

    It is made with the `hidden` of an Mlp, and uses two thirds of that width, so that both have as many weights.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        hidden = int(2 / 3 * hidden)
        self.w12 = Linear(dim, 2 * hidden)
        self.w3 = Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Returns w3(silu(gate) * values), where w12(x) gives gate and values: (..., dim) -> (..., dim)."""
        gate, values = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * values)


MLPS = {"gelu": Mlp, "swiglu": SwiGLU}


class Attention(nn.Module):
    """Multi-head attention of tokens to themselves, or to a context of another width: (B, N, dim) -> (B, N, dim).

    qk_norm       none; rms or layer: of each head's queries and keys; rms_all: of all heads at once, as in Wan.
    context_dim   width of the context; 0: the tokens attend to themselves.
    init          initialization of the output projection.
    project       whether there is an output projection; without it only `project_queries_keys_values` can be called.

    Raises ConfigError if num_heads does not divide dim.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qk_norm: str = "none",
        context_dim: int = 0,
        init: str = "xavier",
        project: bool = True,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ConfigError(f"num_heads: {num_heads} does not divide hidden_size {dim}")
        self.num_heads, self.norms_all = num_heads, qk_norm == "rms_all"
        if context_dim:
            self.q = Linear(dim, dim)
            self.kv = Linear(context_dim, 2 * dim)
        else:
            self.qkv = Linear(dim, 3 * dim)
        if qk_norm != "none":
            width = dim if self.norms_all else dim // num_heads
            kind = {"rms_all": "rms", "layer": "layer_affine"}.get(qk_norm, qk_norm)
            self.q_norm, self.k_norm = build_norm_layer(kind, width), build_norm_layer(kind, width)
        if project:
            self.proj = Linear(dim, dim, init=init)

    def project_queries_keys_values(
        self, x: Tensor, context: Tensor | None = None, rotation: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Returns the queries of x, (B, h, N, d), and the keys and values of `context`, or of x if it is None, (B, h,
        M, d) each. Queries and keys are normalized if the layer has qk_norm, and then rotated if `rotation` is given.
        """
        if context is None:
            projected = self.qkv(x).unflatten(-1, (3, -1)).unbind(2)
        else:
            projected = self.q(x), *self.kv(context).unflatten(-1, (2, -1)).unbind(2)
        normed = hasattr(self, "q_norm")
        if normed and self.norms_all:
            projected = self.q_norm(projected[0]), self.k_norm(projected[1]), projected[2]
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in projected)
        if normed and not self.norms_all:
            query, key = self.q_norm(query), self.k_norm(key)
        if rotation is not None:
            query, key = apply_rotary_embedding(query, rotation), apply_rotary_embedding(key, rotation)
        return query, key, value

    def forward(
        self, x: Tensor, context: Tensor | None = None, rotation: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Returns the output of attention for tokens x (B, N, dim): (B, N, dim). The tokens read `context`, or each
        other if it is None.

        context   (B, M, context_dim); may not be given where ranks share the tokens (sequence.py).
        rotation  (1, 2, N, d), the result of `make_rotary_embedding` (positions.py); None: no rotation.
        mask      bool (B, 1, 1, M), True where a token may be read; None: all may be.
        """
        shared = 1 if context is None else 0
        return self.proj(
            join_heads(attend(*self.project_queries_keys_values(x, context, rotation), mask, shared_stretches=shared))
        )


def join_heads(x: Tensor) -> Tensor:
    """Concatenates the values of all heads of each token: (B, h, N, d) -> (B, N, h d)."""
    return x.transpose(1, 2).flatten(2)


class OwnModulation(nn.Sequential):
    """Maps the condition to `count` vectors of the width D: (B, D) or (B, N, D) -> `count` times (B, 1 or N, D).

    The weights start at zero, and with them the vectors (adaLN-Zero, Peebles & Xie 2022).
    """

    def __init__(self, dim: int, count: int) -> None:
        super().__init__(nn.SiLU(), Linear(dim, count * dim, init="zero"))
        self.count = count

    def forward(self, c: Tensor, shared: Tensor | None = None) -> tuple[Tensor, ...]:
        """Returns `count` vectors for the condition c, (B, D) or (B, N, D): (B, 1, D) or (B, N, D) each. `shared` has
        no effect.
        """
        vectors = super().forward(c)
        if vectors.ndim == 2:
            vectors = vectors[:, None]
        return vectors.chunk(self.count, dim=-1)


class SharedModulation(nn.Module):
    """Adds a table of its own to vectors that all blocks share, (B, count, D) or (B, 1, D), and returns `count` times
    (B, 1, D); the condition `c` is unused.

    Chen et al. 2023 (PixArt-alpha), adaLN-single.
    """

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.count, self.dim = count, dim
        self.table = nn.Parameter(torch.empty(count, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the table from a normal distribution of mean 0 and standard deviation dim ** -0.5."""
        nn.init.normal_(self.table, std=self.dim**-0.5)

    def forward(self, c: Tensor | None, shared: Tensor) -> tuple[Tensor, ...]:
        """Returns `count` vectors (B, 1, D): the module's own table plus `shared`, (B, count, D) or (B, 1, D). `c` has
        no effect.
        """
        return (self.table + shared).chunk(self.count, dim=1)


class NoModulation(nn.Module):
    """Returns the first `count` of shift 0, scale 0 and gate 1, twice over, as numbers; its arguments are unused."""

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, c: Tensor | None, shared: Tensor | None = None) -> tuple[float, ...]:
        """Returns the first `count` of the numbers 0, 0, 1, 0, 0, 1: shifts 0, scales 0 and gates 1. The arguments have
        no effect.
        """
        return (0.0, 0.0, 1.0, 0.0, 0.0, 1.0)[: self.count]


MODULATIONS = {"own": OwnModulation, "shared": SharedModulation, "none": NoModulation}


def modulate(x: Tensor, shift: Tensor | float, scale: Tensor | float) -> Tensor:
    """Returns x * (1 + scale) + shift, as adaLN applies a condition (DiT)."""
    return x * (1 + scale) + shift
