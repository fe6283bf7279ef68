"""Positions of tokens: sines that are added to tokens, and rotations of their queries and keys."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dstrain.recipe import ConfigError

PERIOD = 10000.0  # the longest, of sines and of rotations


def make_sincos_positions(
    dim: int, height: int, width: int, base: float | None = None, within: int | None = None
) -> Tensor:
    """Returns fixed 2-D sine-cosine positions of a grid of patches, row by row: float32 (height * width, dim). The
    first half of a vector encodes the column, the second half the row; each half is sines, then cosines.

    base    None: patches are numbered 0, 1, ... along an axis. Otherwise both axes run from 0 to below `base`, whatever
            the number of patches (PixArt-alpha).
    within  None: the grid is the whole. Otherwise it lies in the middle of a larger grid of `within` patches along each
            axis, and has the numbers from there (Stable Diffusion 3).

    Raises ConfigError if dim is not a multiple of 4.
    """
    if dim % 4:
        raise ConfigError(f"hidden_size: {dim} is not a multiple of 4, which two axes of sines and cosines need")
    column, row = (_compute_axis_positions(count, base, within) for count in (width, height))
    column, row = np.tile(column, height), np.repeat(row, width)
    frequencies = PERIOD ** (-np.arange(dim // 4) / (dim // 4))
    halves = []
    for position in (column, row):
        angles = position[:, None] * frequencies[None]  # (N, dim / 4)
        halves += [np.sin(angles), np.cos(angles)]
    return torch.from_numpy(np.concatenate(halves, axis=1).astype(np.float32))


def make_sincos_frame_positions(dim: int, num_frames: int) -> Tensor:
    """Returns fixed positions of frames 0 to num_frames - 1, float32 (num_frames, dim): dim // 2 sines, then as
    many cosines minus 1. The first frame's position is all zeros, so that it leaves a network for images unchanged.
    """
    angles = np.arange(num_frames)[:, None] * PERIOD ** (-np.arange(dim // 2) / (dim // 2))
    return torch.from_numpy(np.concatenate((np.sin(angles), np.cos(angles) - 1), axis=1).astype(np.float32))


def make_rotary_embedding(
    sides: Sequence[int], head_dim: int, bases: Sequence[float | None] = (), after: int = 0
) -> Tensor:
    """Returns rotary positions (RoPE, Su et al. 2021) of a grid of N tokens: float32 (1, 2, N + after, head_dim),
    the cosines and the sines of the angles by which `apply_rotary_embedding` turns queries and keys.

    sides          tokens along each of 1 to 3 axes. Each axis rotates a share of a head's values, in pairs of
                   neighbours.
    bases          one value for each axis: None for positions 0, 1, ..., or a number below which all positions lie, see
                   `base` of `make_sincos_positions`. (): None for all axes.
    after          how many tokens follow the grid; these are not rotated.
    """
    share = 2 * (head_dim // (2 * len(sides)))
    widths = (head_dim - share * (len(sides) - 1), *(share,) * (len(sides) - 1))
    parts = []
    for axis, (count, width) in enumerate(zip(sides, widths, strict=True)):
        frequencies = PERIOD ** (-np.arange(0, width, 2) / width)
        angles = np.repeat(
            _compute_axis_positions(count, bases[axis] if bases else None)[:, None] * frequencies, 2, axis=1
        )
        shape = [width if at == len(sides) else count if at == axis else 1 for at in range(len(sides) + 1)]
        parts.append(np.broadcast_to(angles.reshape(shape), (*sides, width)))
    angles = np.concatenate(parts, axis=-1).reshape(-1, head_dim)
    angles = np.pad(angles, ((0, after), (0, 0)))
    return torch.from_numpy(np.stack((np.cos(angles), np.sin(angles)))[None].astype(np.float32))


def apply_rotary_embedding(x: Tensor, rotation: Tensor) -> Tensor:
    """Returns x (B, heads, N, d) with each pair of neighbouring values rotated by its angle. `rotation`, (1 or B, 2, N,
    d), holds the angles' cosines and sines, as `make_rotary_embedding` returns them.
    """
    cosines, sines = rotation[:, :1], rotation[:, 1:]
    # The signs go to the small table of sines, and the values change places by roll: slices of x would be scattered one
    # by one in the backward pass.
    sines = torch.stack((-sines[..., ::2], sines[..., 1::2]), dim=-1).flatten(-2)
    swapped = x.unflatten(-1, (-1, 2)).roll(1, -1).flatten(-2)
    return (x * cosines + swapped * sines).to(x.dtype)


def _compute_axis_positions(count: int, base: float | None, within: int | None = None) -> np.ndarray:
    """Returns the positions of `count` patches along an axis, (count,). `base` and `within` are those of
    `make_sincos_positions`.
    """
    whole = within or count
    return ((whole - count) // 2 + np.arange(count)) * ((base or whole) / whole)
