"""Converts pixels in [-1, 1], as networks see them, to bytes, and checks the shape of a model's input."""

import torch
from torch import Tensor

from dstrain.recipe import ConfigError


def convert_to_uint8(pixels: Tensor) -> Tensor:
    """Returns pixels of any shape, mapped from [-1, 1] to 0, 1, ..., 255 and rounded; values outside are clamped."""
    return ((pixels + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def require_shape(x: Tensor, shape: tuple[int, int, int], channels: str) -> None:
    """Raises ConfigError if x (..., C, H, W) does not have the `shape` (C, H, W) that the model's fields image_size and
    `channels` give.
    """
    if tuple(x.shape[-3:]) != shape:
        raise ConfigError(
            f"data: the model takes {shape} (channels, height, width) by {channels} and image_size, the "
            f"data give {tuple(x.shape[-3:])}; change the one or the other"
        )
