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
    """Returns fixed 2-D positions, computed in float64: float32 (height * width, dim), row-major.

    The first half of a vector encodes the column, the second the row; each half is sines, then cosines (Vaswani et al.
    2017, per axis as in He et al. 2021, MAE). By numpy, since zero.Init rounds tensors that torch creates to bfloat16.

    base    both axes run from 0 to below base, however many patches they have, so that a network meets the positions of
            its square grid of base x base patches at other sizes, too (PixArt-alpha, Chen et al. 2023); None: 0, 1, ...
    within  the positions are those in the middle of a larger grid, with `within` patches a side (Stable Diffusion 3);
            None: they begin at 0.

    Raises ConfigError if dim is no multiple of 4.
    """
    if dim % 4:
        raise ConfigError(f"hidden_size: {dim} is not a multiple of 4, which two axes of sines and cosines need")
    column, row = (_spread_positions(count, base, within) for count in (width, height))
    column, row = np.tile(column, height), np.repeat(row, width)
    frequencies = PERIOD ** (-np.arange(dim // 4) / (dim // 4))
    halves = []
    for position in (column, row):
        angles = position[:, None] * frequencies[None]  # (N, dim / 4)
        halves += [np.sin(angles), np.cos(angles)]
    return torch.from_numpy(np.concatenate(halves, axis=1).astype(np.float32))


def make_sincos_times(dim: int, count: int) -> Tensor:
    """Returns fixed positions of `count` frames in a row, float32 (count, dim): sines, then cosines minus 1, with the
    frequencies of `make_sincos_positions`.

    The positions of the first frame are 0, so that weights of a network of images compute the same for it.
    """
    angles = np.arange(count)[:, None] * PERIOD ** (-np.arange(dim // 2) / (dim // 2))
    return torch.from_numpy(np.concatenate((np.sin(angles), np.cos(angles) - 1), axis=1).astype(np.float32))


def make_rotations(
    sides: Sequence[int], head_dim: int, bases: Sequence[float | None] = (), before: int = 0, after: int = 0
) -> Tensor:
    """Returns the cosines and sines of the angles by which the queries and keys of a grid of N tokens are rotated:
    float32 (1, 2, before + N + after, head_dim).

    RoPE (Su et al. 2021) over 1 to 3 axes: each rotates a share of a head's values, neighbours in pairs. All axes but
    the first take equal even shares, and the first takes the rest (so do EVA-02's two axes and Wan's three). `before`
    and `after` are numbers of tokens around the grid, which are not rotated. bases: by axis, `base` of
    `make_sincos_positions`.
    """
    share = 2 * (head_dim // (2 * len(sides)))
    widths = (head_dim - share * (len(sides) - 1), *(share,) * (len(sides) - 1))
    parts = []
    for axis, (count, width) in enumerate(zip(sides, widths, strict=True)):
        frequencies = PERIOD ** (-np.arange(0, width, 2) / width)
        angles = np.repeat(_spread_positions(count, bases[axis] if bases else None)[:, None] * frequencies, 2, axis=1)
        shape = [width if at == len(sides) else count if at == axis else 1 for at in range(len(sides) + 1)]
        parts.append(np.broadcast_to(angles.reshape(shape), (*sides, width)))
    angles = np.concatenate(parts, axis=-1).reshape(-1, head_dim)
    angles = np.pad(angles, ((before, after), (0, 0)))
    return torch.from_numpy(np.stack((np.cos(angles), np.sin(angles)))[None].astype(np.float32))


def rotate_values(x: Tensor, rotation: Tensor) -> Tensor:
    """Returns x (B, heads, N, d), in which each pair of neighbouring values is rotated by its angle in `rotation`, (1
    or B, 2, N, d).
    """
    cosines, sines = rotation[:, :1], rotation[:, 1:]
    # The signs go to the small table of sines, and the values change places by roll: slices of x would be scattered one
    # by one in the backward pass.
    sines = torch.stack((-sines[..., ::2], sines[..., 1::2]), dim=-1).flatten(-2)
    swapped = x.unflatten(-1, (-1, 2)).roll(1, -1).flatten(-2)
    return (x * cosines + swapped * sines).to(x.dtype)


def _spread_positions(count: int, base: float | None, within: int | None = None) -> np.ndarray:
    whole = within or count
    return ((whole - count) // 2 + np.arange(count)) * ((base or whole) / whole)
