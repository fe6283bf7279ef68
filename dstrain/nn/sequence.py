"""Sharing of a sample's tokens by neighbouring ranks (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509).

    x = take_rank_slice(x, 1)            # before the blocks: of N ranks each keeps an N-th of the tokens
    x = attend(..., shared_stretches=1)  # within: all tokens of an N-th of the heads, by an exchange before and after
    x = gather_rank_slices(x, 1)         # behind the last block: all tokens on every rank, which all compute the loss

ZeRO's mean of gradients over all ranks is then right, if the backward pass of `gather_rank_slices` sends nothing and
multiplies the gradient of a rank's own tokens by N. For every weight between `take_rank_slice` and `gather_rank_slices`
a rank computes N times the part of its tokens, and the mean over N ranks is the sum. The same holds for weights before
`take_rank_slice`, though the gradients of the tokens there differ between the ranks. So what `gather_rank_slices` has
gathered must not be cut by `take_rank_slice` once more: `take_rank_slice_after_gathering` gathers the gradients, too.

Outside of `share_tokens_among_ranks` all functions return their argument. Notation: N ranks, H heads, n own tokens, d
values of a head.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed import ProcessGroup


class Team(NamedTuple):
    """Describes the ranks that share the tokens of a sample, by values that a compiled block can hold."""

    name: str  # of their process group
    size: int
    rank: int  # this one's, among them


_team: Team | None = None  # for all threads: on a GPU, one of autograd's computes blocks again


@contextmanager
def share_tokens_among_ranks(group: ProcessGroup | None) -> Iterator[None]:
    """Inside the block, the ranks of `group` share the tokens of a sample: the functions of this module split and
    gather them in forward and backward passes. If `group` is None, this rank has all tokens. Afterwards the earlier
    setting is restored.
    """
    global _team
    before, _team = _team, None if group is None else Team(group.group_name, group.size(), group.rank())
    try:
        yield
    finally:
        _team = before


def are_tokens_shared_among_ranks() -> bool:
    """Returns whether this runs inside a `share_tokens_among_ranks` block with a group, so that ranks share the tokens
    of a sample.
    """
    return _team is not None


def take_rank_slice(x: Tensor, axis: int) -> Tensor:
    """Returns a copy of this rank's part of an axis of x. x must be equal on all ranks that share tokens, and the
    number of these ranks must divide the axis. If no tokens are shared, returns x itself.
    """
    if _team is None:
        return x
    length = x.shape[axis] // _team.size
    assert length * _team.size == x.shape[axis], f"{_team.size} ranks cannot share {x.shape[axis]}"
    return x.narrow(axis, _team.rank * length, length).clone()


def take_rank_slice_of_both_parts(x: Tensor, split_at: int, axis: int) -> Tensor:
    """Splits an axis into its first `split_at` entries and the rest, and returns this rank's part of both,
    concatenated. If no tokens are shared, returns x itself.
    """
    if _team is None:
        return x
    return torch.cat(
        [take_rank_slice(part, axis) for part in x.split((split_at, x.shape[axis] - split_at), axis)], axis
    )


def reorder_like_gathered_slices(x: Tensor, split_at: int, axis: int) -> Tensor:
    """Reorders a whole axis of x as `attend` sees tokens that ranks took by `take_rank_slice_of_both_parts` with the
    same `split_at`: for each rank in turn its part of the first `split_at` entries, then its part of the rest.
    If no tokens are shared, returns x itself.
    """
    if _team is None:
        return x
    parts = [part.tensor_split(_team.size, axis) for part in x.split((split_at, x.shape[axis] - split_at), axis)]
    return torch.cat([piece for pieces in zip(*parts, strict=True) for piece in pieces], axis)


def gather_rank_slices(x: Tensor, axis: int) -> Tensor:
    """Returns x with the whole axis, gathered from the parts of all ranks that share tokens. These ranks call this
    together, and must compute the same from the result. If no tokens are shared, returns x itself.
    """
    return x if _team is None else _GatherSlices.apply(x, axis)


def take_rank_slice_after_gathering(x: Tensor, axis: int) -> Tensor:
    """Returns this rank's part of an axis that `gather_rank_slices` has made whole before. The backward pass gathers
    the gradients of all parts, so all ranks that share tokens must run it. If no tokens are shared, returns x itself.
    """
    return x if _team is None else _TakeSlice.apply(x, axis)


def gather_tokens_and_split_heads(x: Tensor, num_stretches: int) -> Tensor:
    """Exchanges tokens for heads among the N ranks that share tokens: (B, H, n, d) -> (B, H / N, N n, d). Before, a
    rank has its own n tokens with all H heads; afterwards all N n tokens with its own H / N heads.

    num_stretches  how many stretches of equal length the tokens form, such as frames; a rank holds its part of each.
    """
    return _exchange_axes_among_ranks(x.unflatten(2, (num_stretches, -1)), gather_axis=3, split_axis=1).flatten(2, 3)


def gather_heads_and_split_tokens(x: Tensor, num_stretches: int) -> Tensor:
    """Inverts `gather_tokens_and_split_heads`: (B, H / N, N n, d) -> (B, H, n, d). `num_stretches` must be the same."""
    return _exchange_axes_among_ranks(x.unflatten(2, (num_stretches, -1)), gather_axis=1, split_axis=3).flatten(2, 3)


def gather_axis_and_split_channels(x: Tensor, axis: int) -> Tensor:
    """Exchanges channels for parts of an axis among the N ranks that share tokens: (..., n, ..., D) -> (..., N n, ...,
    D / N). Before, a rank has its own n entries of `axis` with all D channels (the last axis); afterwards all N n
    entries with its own D / N channels. If no tokens are shared, returns x itself.
    """
    return x if _team is None else _exchange_axes_among_ranks(x, gather_axis=axis, split_axis=x.ndim - 1)


def gather_channels_and_split_axis(x: Tensor, axis: int) -> Tensor:
    """Inverts `gather_axis_and_split_channels`: (..., N n, ..., D / N) -> (..., n, ..., D)."""
    return x if _team is None else _exchange_axes_among_ranks(x, gather_axis=x.ndim - 1, split_axis=axis)


def _exchange_axes_among_ranks(x: Tensor, gather_axis: int, split_axis: int) -> Tensor:
    """Returns x with the axis `gather_axis` N times as long and the axis `split_axis` N times shorter, by an all-to-all
    among the N ranks that share tokens. The backward pass exchanges the gradients back.
    """
    parts = torch.stack(x.chunk(_team.size, split_axis))  # (N, ...), one for each rank
    # A function of torch, for torch.compile: it may lose the gradient of an autograd.Function with collectives.
    return torch.cat(collectives.all_to_all_single_autograd(parts, None, None, _team.name).unbind(0), gather_axis)


def _gather_axis_from_ranks(x: Tensor, axis: int) -> Tensor:
    """Returns the parts of all ranks that share tokens, concatenated along an axis in the order of the ranks."""
    operations = torch.ops._c10d_functional
    parts = operations.all_gather_into_tensor(x.contiguous(), _team.size, _team.name)
    return torch.cat(operations.wait_tensor(parts).chunk(_team.size), axis)


class _GatherSlices(torch.autograd.Function):
    """Gathers the parts of all ranks. Its backward pass returns N times the gradient of the own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int) -> Tensor:
        """Returns the whole axis, gathered from the parts of all ranks."""
        ctx.axis = axis
        return _gather_axis_from_ranks(x, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Returns this rank's part of the gradient, times the number of ranks that share tokens."""
        return take_rank_slice(gradient, ctx.axis) * _team.size, None


class _TakeSlice(torch.autograd.Function):
    """Takes the own part. Its backward pass gathers the gradients of all parts and divides them by N, the factor by
    which `_GatherSlices` will multiply them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int) -> Tensor:
        """Returns this rank's part of an axis."""
        ctx.axis = axis
        return take_rank_slice(x, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Returns the gradient of the whole axis, gathered from all ranks and divided by their number."""
        return _gather_axis_from_ranks(gradient, ctx.axis) / _team.size, None
