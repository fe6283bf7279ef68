"""Finite scalar quantization (FSQ; Mentzer et al. 2023, arXiv:2309.15505): a few numbers, each rounded to few levels.

A vector is projected to d numbers z. Number i is bounded to the range of its L_i levels by a tanh and rounded, and the
gradient passes straight through the rounding. All L_1 * ... * L_d combinations are the codebook. It is not learned, so
there is neither a commitment loss nor an entropy loss. Everything from z on is float32.

The bound is the paper's: for an even number of levels it is shifted by half a level, and z = 0 still falls on a level.
The paper suggests five levels or more for each number: [8, 6, 5] for about 2 ** 8 codes, [8, 5, 5, 5] for 2 ** 10, [7,
5, 5, 5, 5] for 2 ** 12, [8, 8, 8, 6, 5] for 2 ** 14, [8, 8, 8, 5, 5, 5] for 2 ** 16.
"""

import math

import torch
from torch import Tensor, nn

from dstrain.distributed.group import copy_to_device
from dstrain.nn.layers import Linear
from dstrain.nn.lookup_free import Quantized
from dstrain.nn.quantize import upcast_to_float32
from dstrain.recipe import ConfigError

_MARGIN = 1e-3  # share by which the bound exceeds the outermost levels, as published
_MOST = 1000  # levels of a number: then the bound is half a level above the last


class FiniteScalar(nn.Module):
    """Quantizes vectors to d = len(levels) projections, each rounded to one of its levels. The methods forward, encode
    and decode are those of the quantizers in nn/lookup_free.py.
    """

    def __init__(self, dim: int, levels: tuple[int, ...]) -> None:
        super().__init__()
        self.levels = tuple(levels)
        self.project_in, self.project_out = Linear(dim, len(levels)), Linear(len(levels), dim)

    def forward(self, x: Tensor, weight: Tensor) -> Quantized:
        """Returns a Quantized with the quantized vectors (B, ..., dim) and the tokens (B, ...) of vectors x (B, ...,
        dim). Its loss terms are all 0, (B,), since the codebook is fixed. `weight` has no effect.
        """
        z = bound_numbers_to_levels(upcast_to_float32(self.project_in(x)), self.levels)  # (B, ..., d)
        rounded = z + (z.round() - z).detach()
        nothing = z.new_zeros(len(x))
        return Quantized(
            self.project_out(scale_rounded_numbers_to_unit(rounded, self.levels).to(x.dtype)),
            convert_numbers_to_tokens(z, self.levels),
            nothing,
            nothing,
            nothing,
            z.new_zeros(len(x), 0),
        )

    def encode(self, x: Tensor) -> Tensor:
        """Returns the tokens of vectors: (B, ..., dim) -> int64 (B, ...)."""
        return convert_numbers_to_tokens(
            bound_numbers_to_levels(upcast_to_float32(self.project_in(x)), self.levels), self.levels
        )

    def decode(self, tokens: Tensor) -> Tensor:
        """Returns the quantized vectors of tokens: int64 (B, ...) -> (B, ..., dim)."""
        code = scale_rounded_numbers_to_unit(convert_tokens_to_numbers(tokens, self.levels), self.levels)
        return self.project_out(code.to(self.project_out.weight.dtype))


def bound_numbers_to_levels(z: Tensor, levels: tuple[int, ...]) -> Tensor:
    """Bounds d numbers z by tanh: (..., d) -> (..., d). With L = levels[i], number i then rounds to one of the L
    integers -(L // 2) to (L - 1) // 2. The result is not rounded yet. 0 stays 0.
    """
    half = [(size - 1) * (1 + _MARGIN) / 2 for size in levels]
    offset = [0.0 if size % 2 else 0.5 for size in levels]
    shift = [math.atanh(by / most) for by, most in zip(offset, half)]
    half, offset, shift = (
        copy_to_device(torch.tensor(values, dtype=z.dtype), z.device) for values in (half, offset, shift)
    )
    return half * torch.tanh(z + shift) - offset


def convert_numbers_to_tokens(z: Tensor, levels: tuple[int, ...]) -> Tensor:
    """Rounds the numbers z (..., d), which come from `bound_numbers_to_levels`, and returns the token of each
    combination of d numbers, int64 (...). Tokens 0, 1, ... differ in the first number, which changes fastest.

    NaN counts as 0, so that a failed forward pass still gives valid tokens.
    """
    places = z.nan_to_num().round().long() + _compute_level_middles(levels, z.device)
    return (places * _compute_level_strides(levels, z.device)).sum(-1)


def convert_tokens_to_numbers(tokens: Tensor, levels: tuple[int, ...]) -> Tensor:
    """Inverts `convert_numbers_to_tokens`: returns the d rounded numbers of each token, int64 (...) -> float32 (...,
    d).
    """
    sizes = copy_to_device(torch.tensor(levels), tokens.device)
    return ((tokens[..., None] // _compute_level_strides(levels, tokens.device)) % sizes - sizes // 2).float()


def scale_rounded_numbers_to_unit(rounded: Tensor, levels: tuple[int, ...]) -> Tensor:
    """Divides the rounded number i by levels[i] // 2, so that all lie in about [-1, 1]: (..., d) -> (..., d)."""
    return rounded / _compute_level_middles(levels, rounded.device)


def require_valid_levels(levels: tuple[int, ...], codebook_size: int, key: str) -> None:
    """Raises ConfigError if `levels` is empty, if one of them is below 3 or above 1000, or if their product is not
    `codebook_size`. `key` is the recipe's name for `codebook_size`, used in the message.
    """
    if not levels or min(levels) < 3 or max(levels) > _MOST:
        raise ConfigError(f"levels {list(levels)}: give 3 to {_MOST} levels for each number, such as [8, 6, 5]")
    if math.prod(levels) != codebook_size:
        raise ConfigError(
            f"levels {list(levels)} make {math.prod(levels)} tokens and {key} is {codebook_size}: write "
            f"{key}={math.prod(levels)}, or other levels"
        )


def _compute_level_middles(levels: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns levels[i] // 2 for each number i, int64 (d,): the place of the integer 0 among the levels."""
    return copy_to_device(torch.tensor([size // 2 for size in levels]), device)


def _compute_level_strides(levels: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the product of the levels before each number i, int64 (d,): the difference of tokens whose number i
    differs by one level.
    """
    return copy_to_device(torch.tensor([math.prod(levels[:number]) for number in range(len(levels))]), device)
