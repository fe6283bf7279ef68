"""Memory for weights that were constructed on the meta device, so that no rank ever holds a second copy of them.

    stages 0 to 2    The weights of a parameter group lie one after another in one tensor of the compute dtype. Stages 1
                     and 2 want them so, and DeepSpeed would copy all of them for it: twice 2 bytes a weight in bf16,
                     beside 16 / N for masters, moments and average. `flattened_in_place` lets it keep ours.
    stage 3          A weight gets its memory when zero.Init asks for it, which keeps this rank's share and frees the
                     rest before it asks for the next one.

What is allocated is not set: values are drawn, or read from files, once the masters exist.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dstrain.distributed import group
from dstrain.engine.settings import read_precision, read_stage

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PADDING = 2  # elements for each rank: DeepSpeed pads a group to a multiple of it
Weights = Sequence[nn.Parameter]


def allocate_weights(network: nn.Module, groups: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    """Replaces weights on the meta device, in a network and in the "params" of its optimizer's groups.

    Others stay as they are. Buffers go to the rank's device. Call on all ranks, before the optimizer is made.
    """
    options = {"dtype": _DTYPES[read_precision(settings)], "device": group.device()}
    for buffer in network.buffers():
        buffer.data = buffer.data.to(group.device())
    on_meta = [weight for weight in network.parameters() if weight.is_meta]
    if read_stage(settings) == 3 and on_meta:
        import deepspeed

        pieces = _OneByOne(on_meta, options)
        deepspeed.zero.Init(module=pieces, config_dict_or_path=settings)
        fresh = pieces.made
    else:
        in_groups = [[weight for weight in members["params"] if weight.is_meta] for members in groups]
        on_meta = [weight for weights in in_groups for weight in weights]
        fresh = [weight for weights in in_groups for weight in _pack_weights(weights, options)]
    new = dict(zip(map(id, on_meta), fresh, strict=True))
    for module in network.modules():
        for name, weight in list(module._parameters.items()):
            if id(weight) in new:
                setattr(module, name, new[id(weight)])
    for members in groups:
        members["params"] = [new.get(id(weight), weight) for weight in members["params"]]


class _OneByOne(nn.Module):
    """As many parameters as `weights`, without memory before they are asked for; then they are in `made`."""

    def __init__(self, weights: Weights, options: dict[str, Any]) -> None:
        super().__init__()
        self.made: list[nn.Parameter] = []
        self._weights, self._options = weights, options

    def parameters(self, *_: Any, **__: Any) -> Iterator[nn.Parameter]:
        for weight in self._weights:
            self.made.append(_replace_weight(weight, torch.empty(weight.shape, **self._options)))
            yield self.made[-1]


def _pack_weights(weights: Weights, options: dict[str, Any]) -> Iterator[nn.Parameter]:
    """The weights, one after another in one tensor that has room for DeepSpeed's padding."""
    counts = [weight.numel() for weight in weights]
    flat = torch.empty(sum(counts) + _PADDING * group.world(), **options)
    for weight, values in zip(weights, flat[: sum(counts)].split(counts)):
        fresh = _replace_weight(weight, values.view(weight.shape))
        fresh.lies_in_one = True
        yield fresh


def _replace_weight(weight: nn.Parameter, values: Tensor) -> nn.Parameter:
    fresh = nn.Parameter(values, requires_grad=weight.requires_grad)
    vars(fresh).update(vars(weight))
    return fresh


@contextmanager
def flatten_in_place() -> Iterator[None]:
    """Inside, DeepSpeed's stages 1 and 2 take the weights of a group that lie in one tensor as they lie."""
    from deepspeed.runtime.zero import stage_1_and_2

    copying, inside = stage_1_and_2._flatten_dense_tensors, True

    def flatten(tensors: Sequence[Tensor]) -> Tensor:
        flat = _find_flat(tensors) if inside else None  # the optimizer keeps this function for gradients
        return copying(tensors) if flat is None else flat

    stage_1_and_2._flatten_dense_tensors = flatten
    try:
        yield
    finally:
        stage_1_and_2._flatten_dense_tensors, inside = copying, False


@torch.no_grad()
def _find_flat(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensor that weights of `_in_one` fill from its beginning, and padding behind them; None: they do not."""
    weights = [tensor for tensor in tensors if getattr(tensor, "lies_in_one", False)]
    padding = sum(tensor.numel() for tensor in tensors[len(weights) :])
    first, end = tensors[0], 0
    for tensor, weight in zip(tensors, weights):
        if tensor is not weight or tensor.storage_offset() != end or not tensor.is_contiguous():
            return None
        end += tensor.numel()
    if not weights or (end + padding) * first.element_size() > first.untyped_storage().nbytes():
        return None
    flat = first.detach().as_strided((end + padding,), (1,), 0)
    for tensor in tensors[len(weights) :]:
        flat[end : end + tensor.numel()] = tensor
        end += tensor.numel()
    return flat


def release_memory() -> None:
    """Gives back to the system what this process has freed, where the C library is glibc, which would keep it: as much
    as a rank of 8 needs at stage 3, where each weight was made whole.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
