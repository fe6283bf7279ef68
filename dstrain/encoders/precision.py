"""Precisions in which networks draw, measure or encode: --precision, and `precision` of a first stage.

fp32   float32 throughout, as the originals; also in convolutions, which torch gives to TF32 by itself
tf32   float32, whose products and convolutions round their factors to 10 bits (NVIDIA GPUs since Ampere)
bf16   weights and activations in bfloat16
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn

from dstrain.recipe import ConfigError

Precision = Literal["fp32", "tf32", "bf16"]


def choose_dtype(precision: Precision) -> torch.dtype:
    """Returns the dtype of weights for a precision."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def choose_precision() -> Precision:
    """Returns tf32 if there is a GPU that has it, else fp32."""
    return "tf32" if torch.cuda.is_available() and torch.cuda.is_tf32_supported() else "fp32"


def find_precision_problem(precision: Precision | None, key: str) -> str | None:
    """Returns a message, which names `key`, if this machine cannot compute in the precision; None if it can. Callers do
    not use another precision instead, since reported values and caches name theirs.
    """
    if precision != "tf32" or choose_precision() == "tf32":
        return None
    return (
        f"{key}: tf32 needs a GPU that has it, such as NVIDIA's since Ampere, and this machine has none; take "
        "fp32, which is more exact, or bf16"
    )


def require_precision(precision: Precision) -> None:
    """Raises ConfigError if this machine cannot compute in the precision that --precision names."""
    if text := find_precision_problem(precision, "--precision tf32"):
        raise ConfigError(text)


@contextmanager
def use_precision(precision: Precision) -> Iterator[None]:
    """Inside the block, lets products and convolutions in float32 use TF32 if `precision` is tf32, and full precision
    otherwise. Afterwards restores the settings of before.
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def cast_weights(network: nn.Module, precision: Precision) -> None:
    """Casts a network's parameters to the dtype of a precision in place; buffers keep theirs. Compute a fingerprint of
    the network before.
    """
    for weight in network.parameters():
        weight.data = weight.data.to(choose_dtype(precision))
