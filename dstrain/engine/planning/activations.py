"""Counts the bytes that a forward pass keeps for the backward pass, and the operations of both, without computing
values.
"""

import gc
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


def count_activation_bytes(compute_loss: Callable[[], Tensor], existing_tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of memory that the forward pass `compute_loss` keeps for its backward pass. The storages of the
    tensors `existing_tensors`, such as weights and inputs, are not counted.

    Tensors may be on the meta device. Attention runs by fused kernels, as on a GPU in 16 bits.
    """
    before = {tensor.untyped_storage()._cdata for tensor in existing_tensors}
    with _Storages() as storages, Fused():
        value = compute_loss()  # holds the graph
    gc.collect()
    live = sum(size for key, (storage, size) in storages.made.items() if key not in before and not storage.expired())
    del value
    return live


def count_flops(compute_loss: Callable[[], Tensor]) -> int:
    """Returns the number of floating-point operations of the forward pass `compute_loss` and of its backward pass, by
    torch's counter. Attention is counted as its two matrix products.
    """
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        compute_loss().backward()
    return counter.get_total_flops()


class _Storages(TorchDispatchMode):
    """Records the sizes of all storages that operations make inside the block; it keeps none of them alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out


class Fused:
    """Inside the block, attention runs by the fused kernels that torch uses on a GPU, also on the meta device, where
    torch would use plain products.

    Torch's function is replaced, since a TorchFunctionMode has no effect within Tensor.backward, where blocks are
    computed again.
    """

    def __enter__(self) -> None:
        self._own, F.scaled_dot_product_attention = F.scaled_dot_product_attention, _run_fused_attention

    def __exit__(self, *_: Any) -> None:
        F.scaled_dot_product_attention = self._own


def _run_fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[
            0
        ]
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -math.inf)
    added = attn_mask.expand(*query.shape[:3], key.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, added, True, dropout_p, is_causal, scale=scale
    )[0]
