"""Watches a step: which tensors are alive when most bytes are, what goes between ranks, what is computed again.

It sees every operation, and so every storage from the operation that makes it to its end, on real devices as with
tensors that hold no values.
"""

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dstrain.planning.counts import Collective
from dstrain.tracking.flops import count_operation_flops

ON_HOST = "offloaded"  # the kind of what model.recompute=offload keeps in the host's memory
_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall_base": "all_to_all",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all",
    "all_gather_into_tensor": "all_gather",
}


class Done(NamedTuple):
    """What was done from the beginning of a step to some moment in it."""

    collectives: tuple[Collective, ...]
    recomputed: float  # operations
    moved: int  # bytes that went to the host


def _is_recomputing() -> bool:
    """Returns whether the current operation repeats one of the forward pass, because of model.recompute. Call it only
    during a backward pass.
    """
    return torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


class Watch(TorchDispatchMode):
    """Records, within the block, the size and kind of each storage that an operation makes. The kind is the value of
    `kind` at that moment; `set_storage_kind` can change it. Storages of the kind ON_HOST are not in the GPU's memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.kinds = "other", {}  # now; of every storage, by number
        self.recomputed = 0.0
        self.moved = 0  # bytes of kind ON_HOST that were made
        self._numbers: dict[int, int] = {}  # of living storages, by address
        self._references: dict[int, Any] = {}
        self._events: list[tuple[int, int]] = []  # number of a storage, bytes that it adds or frees
        self._calls: Counter[tuple[str, int]] = Counter()
        self._bytes: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].device  # This is asked more often than any operation is done.
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._record_collective(func.name().partition(".")[0].removeprefix("c10d::").strip("_"), args)
        elif func.namespace == "_c10d_functional":
            self._record_token_exchange(func.name().rpartition("::")[2], args, out)
        elif self.kind == "working" and _is_recomputing():
            self.recomputed += count_operation_flops(func, args, kwargs or {}, out)
        for tensor in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if (
                isinstance(tensor, Tensor) and tensor.device.type != "meta"
            ):  # Asking for is_meta would be an operation, too.
                self.record_storage(tensor)
        return out

    def record_storage(self, tensor: Tensor) -> int:
        """Records the storage of a tensor, unless that is recorded already, and returns the storage's number."""
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if address not in self._numbers:
            number = self._numbers[address] = len(self.kinds)
            self.kinds[number] = self.kind
            self._references[address] = weakref.ref(storage, lambda _: self._record_freed_storage(address, size))
            self._events.append((number, size))
            if self.kind == ON_HOST:
                self.moved += size
        return self._numbers[address]

    def _record_freed_storage(self, address: int, size: int) -> None:
        """Records that a storage of `size` bytes has been freed."""
        del self._references[address]
        self._events.append((self._numbers.pop(address), -size))

    def set_storage_kind(self, tensors: Iterable[Tensor], kind: str, instead_of: tuple[str, ...] = ()) -> None:
        """Sets the kind of the tensors' storages to `kind`. With `instead_of` changes only storages whose kind is one
        of these.
        """
        for number in set(map(self.record_storage, tensors)):
            if not instead_of or self.kinds[number] in instead_of:
                self.kinds[number] = kind

    @contextmanager
    def set_kind_of_new_storages(self, kind: str) -> Iterator[None]:
        """Gives the kind `kind` to all storages that are made within the block."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def sum_living_bytes_by_kind(self, until: int | None = None) -> Counter[str]:
        """Returns {kind: bytes} of the storages that exist now, or that existed after the first `until` events."""
        totals: Counter[str] = Counter()
        for number, size in self._events[:until]:
            totals[self.kinds[number]] += size
        return +totals

    @property
    def num_events(self) -> int:
        """Returns the number of events so far. An event is that a storage is made or freed."""
        return len(self._events)

    def find_peak_bytes_by_kind(self, spans: Iterable[tuple[int, int]]) -> Counter[str]:
        """Returns {kind: bytes} of the storages in the GPU's memory at the moment when they take most bytes in all.
        Looks only at the events within `spans`, pairs (number of the first event, number of the last event).
        """
        sizes = (0 if self.kinds[number] == ON_HOST else size for number, size in self._events)
        totals = list(accumulate(sizes, initial=0))
        moments = (range(begin, end + 1) for begin, end in spans)
        found = self.sum_living_bytes_by_kind(max(chain.from_iterable(moments), key=totals.__getitem__))
        found.pop(ON_HOST, None)
        return found

    def find_peak_bytes_on_host(self) -> int:
        """Returns the most bytes that storages of the kind "offloaded" took at one time. Each storage counts as the
        next power of two, the size that torch pins.
        """
        changes = [size for number, size in self._events if self.kinds[number] == ON_HOST and size]
        pinned = (int(math.copysign(2 ** (abs(size) - 1).bit_length(), size)) for size in changes)
        return max(accumulate(pinned, initial=0))

    def replace_storage_kinds(self, kind: str, instead_of: tuple[str, ...]) -> None:
        """Sets to `kind` the kind of all existing storages whose kind is one of `instead_of`."""
        for number in self._numbers.values():
            if self.kinds[number] in instead_of:
                self.kinds[number] = kind

    def _record_collective(self, name: str, args: tuple) -> None:
        """Counts one collective operation of torch.distributed, by operation and number of ranks. Its tensors of the
        kind "working" get the kind "buckets".
        """
        groups = [arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())]
        ranks = dist.ProcessGroup.unbox(groups[0]).size() if groups else dist.get_world_size()
        for tensor in tree_leaves(args[:2]):
            if isinstance(tensor, Tensor):
                self.set_storage_kind([tensor], "buckets", ("working",))
        sides = [sum(leaf.nbytes for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)) for arg in args[:2]]
        operation = _NAMES.get(name, name)
        self._calls[operation, ranks] += 1
        self._bytes[operation, ranks] += max(sides)

    def _record_token_exchange(self, name: str, args: tuple, out: Tensor) -> None:
        """Counts one exchange of tokens between the ranks that share samples. The last of `args` is the name of the
        group of these ranks.
        """
        if name != "wait_tensor":
            key = _NAMES.get(name, name), dist.distributed_c10d._resolve_process_group(args[-1]).size()
            self._calls[key] += 1
            self._bytes[key] += max(args[0].nbytes, out.nbytes)

    def pop_collectives(self) -> tuple[Collective, ...]:
        """Returns the collectives that were counted since the last call, and resets their counts."""
        found = self._list_collectives()
        self._calls.clear()
        self._bytes.clear()
        return found

    def get_counts_since_reset(self) -> Done:
        """Returns what was counted since the last reset: collectives, recomputed operations and bytes moved to the
        host. Does not reset these counts.
        """
        return Done(self._list_collectives(), self.recomputed, self.moved)

    def _list_collectives(self) -> tuple[Collective, ...]:
        """Returns the counted collectives among more than one rank, sorted."""
        return tuple(
            Collective(operation, calls, self._bytes[operation, ranks], ranks)
            for (operation, ranks), calls in sorted(self._calls.items())
            if ranks > 1 and calls
        )
