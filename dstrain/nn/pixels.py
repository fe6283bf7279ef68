"""Converts pixels in [-1, 1], as networks see them, to bytes, and checks the shape of a model's input."""

import torch
from torch import Tensor

from dstrain.recipe import ConfigError


def convert_to_uint8(pixels: Tensor) -> Tensor:
    """Returns pixels of any shape as uint8: [-1, 1] is mapped to 0 to 255 and rounded. Values outside are clamped."""
    return ((pixels + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def require_model_input_shape(x: Tensor, shape: tuple[int, int, int], channels: str) -> None:
    """Raises ConfigError unless the last three axes of x are `shape` (C, H, W), the model's input. `channels` is the
    name of the recipe's field that gives C, for the message.
    """
    if tuple(x.shape[-3:]) != shape:
        raise ConfigError(
            f"data: the model takes {shape} (channels, height, width) by {channels} and image_size, the "
            f"data give {tuple(x.shape[-3:])}; change the one or the other"
        )
