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


def choose_weight_dtype(precision: Precision) -> torch.dtype:
    """Returns the dtype of weights for a precision: bfloat16 for bf16, float32 for fp32 and tf32."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def choose_default_precision() -> Precision:
    """Returns the default precision on this machine: tf32 if it has a GPU that supports it, else fp32."""
    return "tf32" if torch.cuda.is_available() and torch.cuda.is_tf32_supported() else "fp32"


def find_precision_problem(precision: Precision | None, key: str) -> str | None:
    """Returns an error message if this machine cannot compute in `precision`. Returns None if it can, or if `precision`
    is None (the machine's default). key: the option or key with which the message begins.
    """
    if precision != "tf32" or choose_default_precision() == "tf32":
        return None
    return (
        f"{key}: tf32 needs a GPU that has it, such as NVIDIA's since Ampere, and this machine has none; take "
        "fp32, which is more exact, or bf16"
    )


def require_supported_precision(precision: Precision) -> None:
    """Raises ConfigError if this machine cannot compute in `precision`, the value of the option --precision."""
    if text := find_precision_problem(precision, "--precision tf32"):
        raise ConfigError(text)


@contextmanager
def use_precision(precision: Precision) -> Iterator[None]:
    """Within its `with` block, lets float32 matrix products and convolutions use TF32 if `precision` is tf32, and makes
    them exact float32 otherwise. Restores the previous settings afterwards.
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
    """Casts a network's parameters, in place, to the dtype of `precision`; buffers keep their dtype. Hash the network
    before this call, since its weights change.
    """
    for weight in network.parameters():
        weight.data = weight.data.to(choose_weight_dtype(precision))
