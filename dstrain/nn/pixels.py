"""Pixels as networks see them, in [-1, 1], and as pictures hold them, in bytes; the shape that a model takes."""

import torch
from torch import Tensor

from dstrain.recipe import ConfigError


def convert_to_uint8(pixels: Tensor) -> Tensor:
    """Maps [-1, 1] to 0, 1, ..., 255, of any shape; values beyond are clamped."""
    return ((pixels + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def require_shape(x: Tensor, shape: tuple[int, int, int], channels: str) -> None:
    """Raises ConfigError if x (..., C, H, W) is not of the `shape` (C, H, W) by the model's fields image_size and
    `channels`.
    """
    if tuple(x.shape[-3:]) != shape:
        raise ConfigError(
            f"data: the model takes {shape} (channels, height, width) by {channels} and image_size, the "
            f"data give {tuple(x.shape[-3:])}; change the one or the other"
        )
