"""Weights that stay in the files of a checkpoint until somebody needs their values, and then are read by slices."""

from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dstrain.checkpoint.fragments import IndexedShards, Shards


class StoredWeight(torch.Tensor):
    """A float32 tensor in the shards of a checkpoint: its shape is known, and every operation reads its values anew.

    So a network may be fitted to a file of any size, and `elements` gives each rank what it owns. It cannot be written.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, shards: Shards | IndexedShards, kind: str, name: str) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, shards.shape(name), dtype=torch.float32)

    def __init__(self, shards: Shards | IndexedShards, kind: str, name: str) -> None:
        self._shards, self._place = shards, (kind, name)

    def __repr__(self) -> str:
        return f"StoredWeight({'/'.join(self._place)}, {tuple(self.shape)})"

    def elements(self, start: int = 0, numel: int | None = None) -> Tensor:
        """Elements start .. start + numel of the flattened tensor: (numel,)."""
        with self._shards:
            return self._shards.read(*self._place, start, numel)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if op._schema.is_mutable and isinstance(args[0], cls):
            raise TypeError(f"{op} writes into a weight of a checkpoint: write into a clone of it")
        args, kwargs = tree_map(
            lambda value: value.elements().view(value.shape) if isinstance(value, cls) else value, (args, kwargs or {})
        )
        return op(*args, **kwargs)


def read_elements(value: Tensor, start: int, numel: int) -> Tensor:
    """Elements start .. start + numel of a flattened tensor; of one in a checkpoint no others are read."""
    return value.elements(start, numel) if isinstance(value, StoredWeight) else value.reshape(-1)[start : start + numel]


def list_stored_weights(shards: Shards | IndexedShards, kind: str) -> dict[str, Tensor]:
    """All tensors of a kind by state-dict name."""
    return {name: StoredWeight(shards, kind, name) for name in shards.names(kind)}
