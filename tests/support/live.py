"""Counts the bytes of tensors in the host's memory by watching every operation."""

import time
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """`now`: bytes of the storages that operations have made inside and that still live; `peak`: the most so far, a
    moment after each rise, since a thread of gloo may hold the tensor of an exchange a little longer than its rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self._storages: dict[int, Any] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address not in self._storages:
            self._storages[address] = weakref.ref(storage, lambda _: self._gone(address, size))
            self.now += size
            if self.now > self.peak:
                time.sleep(0.003)
                self.peak = max(self.peak, self.now)

    def _gone(self, address: int, size: int) -> None:
        del self._storages[address]
        self.now -= size
