"""Pixels as networks see them, in [-1, 1], and as pictures hold them, in bytes."""

import torch
from torch import Tensor


def to_uint8(pixels: Tensor) -> Tensor:
    """[-1, 1] to 0, 1, ..., 255, of any shape; values beyond are clamped."""
    return ((pixels + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
