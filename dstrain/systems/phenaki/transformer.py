"""The transformer that Phenaki's tokenizer and its token models share (Villegas et al. 2022, arXiv:2210.02399).

Notation: B samples; a clip's tokens lie in the grid (t, h, w) of latent frames, rows and columns, N of them attend to
each other; M tokens are attended to; E is the width of a context. Between layers tokens keep the layout
(B, t, h, w, dim), so that the position encoder sees true neighbours whatever the attention runs over. Ranks that share
samples (nn/sequence.py) each have a part of the rows: (B, t, h / N, w, dim); masks and biases are whole.

Queries and keys have unit length and learned scales (Henry et al. 2020, "Query-key normalization"), so that scores
cannot outgrow bfloat16. Each layer normalizes its input itself; the block adds its output to that input.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dstrain.nn.attention import attend
from dstrain.nn.layers import Linear, make_dropout
from dstrain.nn.quantize import upcast_to_float32
from dstrain.nn.sequence import gather_axis_and_split_channels, gather_channels_and_split_axis, take_rank_slice
from dstrain.recipe import ConfigError

_HIDDEN = -10000.0  # added to scores of hidden tokens: its exp is 0, float16 can hold it
_SCALE = 8.0  # of the scores, which are products of unit vectors at first
OVER = ("all", "space", "time")
ROWS = 2  # the axis that ranks share


class Transformer(nn.Module):
    """`depth` blocks and a LayerNorm: (B, t, h, w, dim) -> (B, t, h, w, dim).

    over          which tokens attend to each other: all; space, those of one latent frame; time, those at one place.
    causal        no output depends on later latent frames: attention over time and position encoders only look back.
    context_dim   E, the width of the context of cross-attention; None: there is no cross-attention.
    peg           whether each block begins with a position encoder.
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        heads: int = 8,
        dim_head: int = 64,
        context_dim: int | None = None,
        causal: bool = False,
        peg: bool = True,
        dropout: float = 0.0,
        *,
        over: str = "all",
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            TransformerBlock(dim, heads, dim_head, context_dim, causal, peg, dropout, over) for _ in range(depth)
        )
        self.norm_out = nn.LayerNorm(dim)

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Returns the output of all blocks and the last norm: (B, t, h, w, dim) -> (B, t, h, w, dim). `bias` (heads, N,
        N) is added to the scores of self-attention; all other arguments are those of TransformerBlock.forward.
        """
        bias = None if bias is None else bias[None]
        for layer in self.layers:
            x = layer(x, bias, mask, context, context_mask)
        return self.norm_out(x)


class TransformerBlock(nn.Module):
    """A position encoder, self-attention, cross-attention if there is a context, and a feed-forward; each is added to
    its input.
    """

    def __init__(
        self,
        dim: int,
        heads: int = 8,
        dim_head: int = 64,
        context_dim: int | None = None,
        causal: bool = False,
        peg: bool = True,
        dropout: float = 0.0,
        over: str = "all",
    ) -> None:
        super().__init__()
        if over not in OVER:
            raise ConfigError(f"over: {over!r} is unknown; one of {', '.join(OVER)}")
        assert not (causal and over == "all"), "attention over all tokens at once sees later frames"
        self.over, self.causal = over, causal and over == "time"
        self.peg = PositionEncoder3d(dim, causal) if peg else None
        self.attention = Attention(dim, heads, dim_head, dropout=dropout)
        self.cross = Attention(dim, heads, dim_head, context_dim, dropout) if context_dim else None
        self.feed_forward = FeedForward(dim, dropout=dropout)

    def forward(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Returns the block's output: (B, t, h, w, dim) -> (B, t, h, w, dim).

        bias          (1, heads, N, N), added to the scores of self-attention; N is how many tokens attend to each
                      other. None: none.
        mask          bool (B, t, h, w), False for tokens that no token may read; None: all may be read.
        context       (B, M, E), which cross-attention reads.
        context_mask  bool (B, M), False for entries of the context that may not be read; None: all may be.
        """
        own_mask = None if mask is None else take_rank_slice(mask, ROWS)
        if self.peg is not None:  # hidden tokens become 0, as the padding around the clip is
            x = x + self.peg(x if own_mask is None else x.masked_fill(~own_mask[..., None], 0.0))
        shape, flat = x.shape, self._reshape_to_sequences(x)
        if self.over == "time":  # each rank has all frames of its own rows, so that nothing is exchanged
            mask, runs = own_mask, 0
        else:
            runs = shape[1] if self.over == "all" else 1  # a sequence is a frame, whose rows ranks share
        seen = None if mask is None else self._reshape_to_sequences(mask)
        x = self._reshape_to_grid(flat + self.attention(flat, None, seen, bias, self.causal, runs), shape)
        if self.cross is not None:
            tokens = x.flatten(1, 3)  # (B, t h w, dim)
            x = x + self.cross(tokens, context, context_mask).view(shape)
        return x + self.feed_forward(x)

    def _reshape_to_sequences(self, x: Tensor) -> Tensor:
        """Reshapes a grid (B, t, h, w, ...) to (sequences, N, ...), where each sequence holds N tokens that attend to
        each other.
        """
        if self.over == "all":
            return x.flatten(1, 3)
        if self.over == "space":
            return x.flatten(2, 3).flatten(0, 1)  # (B t, h w, ...)
        return x.movedim(1, 3).flatten(0, 2)  # (B h w, t, ...)

    def _reshape_to_grid(self, flat: Tensor, shape: torch.Size) -> Tensor:
        """Inverts `_reshape_to_sequences`: (sequences, N, dim) -> `shape`, which is (B, t, h, w, dim)."""
        if self.over != "time":
            return flat.view(shape)
        batch, t, h, w, dim = shape
        return flat.view(batch, h, w, t, dim).movedim(3, 1)


class Attention(nn.Module):
    """Multi-head attention of normalized tokens to each other, or to a context of width context_dim."""

    def __init__(
        self, dim: int, heads: int = 8, dim_head: int = 64, context_dim: int | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.heads, self.dropout, width = heads, dropout, heads * dim_head
        self.norm = nn.LayerNorm(dim)
        self.context_norm = nn.LayerNorm(context_dim) if context_dim else None
        self.to_q = Linear(dim, width, bias=False)
        self.to_kv = Linear(context_dim or dim, 2 * width, bias=False)
        self.q_norm, self.k_norm = UnitNorm(dim_head), UnitNorm(dim_head)
        self.to_out = Linear(width, dim, bias=False)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        causal: bool = False,
        shared: int = 0,
    ) -> Tensor:
        """Returns the output of attention for tokens x: (B, N, dim) -> (B, N, dim).

        context  (B, M, E), what is read; None: x itself.
        mask     bool (B, M), True for what may be read; None: all. The output is 0 for a sample that may read nothing.
        bias     (1, heads, N, M), added to the scores; None: none.
        causal   whether a token reads only itself and those before it (N = M).
        shared   how ranks share the tokens, see nn.attention.attend; mask and bias cover all tokens in any case.
        """
        x = self.norm(x)
        source = x if self.context_norm is None else self.context_norm(context.to(x.dtype))

        def split_heads(y):
            """Splits the last axis into heads: (B, N, heads d) -> (B, heads, N, d)."""
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, heads, N, d)

        key, value = self.to_kv(source).chunk(2, dim=-1)
        query, key, value = self.q_norm(split_heads(self.to_q(x))), self.k_norm(split_heads(key)), split_heads(value)
        added = _combine_bias_and_mask(bias, mask, causal, query, key.shape[2])
        dropout = (
            self.dropout if self.dropout and self.training else 0.0
        )  # so a graph with dropout 0 does not depend on the mode
        out = attend(query, key, value, added, dropout, causal and added is None, _SCALE, shared)
        if mask is not None:
            out = out.masked_fill(~mask.any(1)[:, None, None, None], 0.0)
        return self.to_out(out.transpose(1, 2).flatten(2))


def _combine_bias_and_mask(
    bias: Tensor | None, mask: Tensor | None, causal: bool, query: Tensor, num_keys: int
) -> Tensor | None:
    """Returns the sum of all that is added to the scores of attention, (B or 1, heads or 1, N or 1, M): `bias`, and
    large negative numbers where `mask` or `causal` hides a token. Returns None if both bias and mask are None; the
    caller must then apply `causal` itself.
    """
    if bias is None and mask is None:
        return None
    terms = []  # it begins without zeros: inductor cannot partition a recomputed block with such a sum
    if mask is not None:
        terms.append((~mask)[:, None, None] * query.new_full((), _HIDDEN))
    if causal:
        terms.append(query.new_full((query.shape[2], num_keys), _HIDDEN).triu(1))
    if bias is not None:
        terms.append(bias.to(query.dtype))
    return sum(terms[1:], terms[0])


class UnitNorm(nn.Module):
    """Scales vectors to unit length, and then each entry by a learned gain: (..., dim) -> (..., dim)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the gains to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Returns x scaled to length 1 over its last axis, times the gains: (..., dim) -> (..., dim)."""
        return F.normalize(upcast_to_float32(x), dim=-1, eps=1e-6).to(x.dtype) * self.weight


class FeedForward(nn.Module):
    """A gated feed-forward (GEGLU, Shazeer 2020) after a LayerNorm: (..., dim) -> (..., dim).

    Its hidden width is 2/3 mult * dim, rounded up to a multiple of 8 for the tensor cores. So it has about as many
    weights as a feed-forward of width mult * dim without a gate.
    """

    def __init__(self, dim: int, mult: float = 4, dropout: float = 0.0) -> None:
        super().__init__()
        hidden = 8 * math.ceil(2 / 3 * mult * dim / 8)
        self.norm = nn.LayerNorm(dim)
        self.widen = Linear(dim, 2 * hidden, bias=False)
        self.dropout = make_dropout(dropout)
        self.narrow = Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns narrow(value * gelu(gate)), where widen(norm(x)) gives value and gate: (..., dim) -> (..., dim)."""
        value, gate = self.widen(self.norm(x)).chunk(2, dim=-1)
        return self.narrow(self.dropout(value * F.gelu(gate)))


class PositionEncoder3d(nn.Conv3d):
    """A position encoder (PEG, Chu et al. 2021): a depthwise convolution of 3 x 3 x 3 over (B, t, h, w, dim).

    The zeros around the clip tell tokens where they are. With `causal` all padding in time lies before the first frame:
    an output depends on its own latent frame and the two before it.
    """

    def __init__(self, dim: int, causal: bool) -> None:
        super().__init__(dim, dim, kernel_size=3, groups=dim)
        self.before = 2 if causal else 1

    def forward(self, x: Tensor) -> Tensor:
        """Returns the depthwise convolution of tokens over time, height and width: (B, t, h, w, dim) -> (B, t, h, w,
        dim).
        """
        x = gather_axis_and_split_channels(
            x, ROWS
        )  # a rank that shares rows encodes all of them, of a part of the channels
        x = F.pad(x.movedim(-1, 1), (1, 1, 1, 1, self.before, 2 - self.before))  # (B, dim, t, h, w)
        x = F.conv3d(x, take_rank_slice(self.weight, 0), take_rank_slice(self.bias, 0), groups=x.shape[1])
        return gather_channels_and_split_axis(x.movedim(1, -1), ROWS)


class PositionBias(nn.Module):
    """Computes a learned bias for each head and pair of tokens in a grid, (heads, N, N), by an MLP from their distance
    along each axis.

    Distances are signed and logarithmic, sign(d) log(1 + |d|), as in Swin v2 (Liu et al. 2021). `axes` is the number of
    axes of the grid. The MLP runs once for each distance that occurs, not for each pair of tokens.
    """

    def __init__(self, heads: int, dim: int, axes: int = 2) -> None:
        super().__init__()
        self.net = nn.Sequential(
            Linear(axes, dim), nn.LeakyReLU(0.1), Linear(dim, dim), nn.LeakyReLU(0.1), Linear(dim, heads)
        )

    def forward(self, *sides: int) -> Tensor:
        """Returns the bias of each head for each pair of tokens, (heads, N, N), in a grid with these `sides`, whose
        product is N. Tokens are numbered row by row.
        """
        like = self.net[0].weight
        distances = [torch.arange(1 - side, side, device=like.device) for side in sides]
        grid = torch.stack(torch.meshgrid(*distances, indexing="ij"), dim=-1).flatten(0, -2)  # (differences, axes)
        table = self.net((grid.sign() * grid.abs().float().log1p()).to(like.dtype))  # (differences, heads)
        return F.embedding(_index_token_distances(sides, like.device), table).permute(2, 0, 1)


def _index_token_distances(sides: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns for each pair of tokens in a grid with these `sides` the row of PositionBias's table that belongs to
    their distance: int64 (N, N). The table has one row for each distance that occurs.
    """
    row = torch.zeros((), dtype=torch.int64, device=device)
    places = torch.meshgrid(*(torch.arange(side, device=device) for side in sides), indexing="ij")
    for side, place in zip(sides, places):
        distance = place.flatten()[:, None] - place.flatten()[None]  # (N, N)
        row = row * (2 * side - 1) + distance + side - 1
    return row


def build_alibi_bias(heads: int, count: int, like: Tensor) -> Tensor:
    """Returns ALiBi's bias for `count` tokens in a row, (heads, count, count), with the dtype and device of `like`. The
    bias falls linearly with the distance of two tokens, at a different rate for each head (Press et al. 2021).
    """
    slopes = 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, device=like.device))
    place = torch.arange(count, device=like.device)
    return (-slopes[:, None, None] * (place[:, None] - place[None]).abs()).to(like.dtype)
