"""A copy of a checkpoint's values in the host's memory, so that training may go on while they are written."""

import socket
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dstrain.checkpoint.fragments import Fragment
from dstrain.distributed import group

Entry = tuple[str, Fragment, Tensor]  # kind, fragment, its values (numel,) float32: what write_shard takes

_CGROUP = Path("/sys/fs/cgroup")
_SHARE = 0.8  # of the free memory; loaders and the page cache need some, too


class HostCopies:
    """Copies of a checkpoint's values, in buffers that the next one uses again."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def shortage(self, entries: dict[str, list[Entry]]) -> str | None:
        """Why a copy does not fit into the memory of some host, None if it fits everywhere; on all ranks together."""
        if self._buffers:
            return None
        nbytes = 4 * sum(len(values) for own in entries.values() for _, _, values in own)
        ranks = group.objects((socket.gethostname(), nbytes, measure_free_memory()))
        for host in dict.fromkeys(name for name, _, _ in ranks):
            needed = sum(count for name, count, _ in ranks if name == host)
            free = min(left for name, _, left in ranks if name == host)
            if needed > _SHARE * free:
                return f"a copy of {needed / 1e6:.0f} MB has no room in the {free / 1e6:.0f} MB that {host} has left"
        return None

    def take(self, entries: dict[str, list[Entry]]) -> dict[str, list[Entry]]:
        """The same entries by part with copies of their values; the copies of an earlier call are overwritten."""
        copies: dict[str, list[Entry]] = {}
        for part, live in entries.items():
            counts = [len(values) for _, _, values in live]
            if part not in self._buffers:
                self._buffers[part] = self._host_buffer(sum(counts))
            copies[part] = [
                (kind, fragment, target.copy_(values, non_blocking=True))
                for (kind, fragment, values), target in zip(live, self._buffers[part].split(counts))
            ]
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return copies

    def _host_buffer(self, numel: int) -> Tensor:
        """(numel,) float32 on the host, page-locked if this process has a GPU, which then copies at the bus's full
        rate. torch's own pinned allocator would round the size up to a power of two.
        """
        buffer = torch.empty(numel, dtype=torch.float32)
        if torch.cuda.is_available() and numel:
            runtime, begin = torch.cuda.cudart(), buffer.data_ptr()
            if _call_cuda(runtime.cudaHostRegister, begin, 4 * numel, 0):
                # Before the memory is given back, which another copy may then be given.
                weakref.finalize(self, _call_cuda, runtime.cudaHostUnregister, begin).atexit = False
        return buffer


def _call_cuda(call: Callable[..., Any], *arguments: int) -> bool:
    """Whether CUDA has done what it was asked for. Its error is cleared, else the next kernel would raise it."""
    failed = int(call(*arguments))
    if failed:
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
    return not failed


def measure_free_memory() -> int:
    """Bytes that this host, or this process's container, can still give; sys.maxsize if the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, ValueError, KeyError):  # no Linux
        return sys.maxsize
    try:
        limit, used = ((_CGROUP / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        kinds = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        if limit != "max":
            free = min(free, int(limit) - int(used) + int(kinds["inactive_file"]))
    except (OSError, ValueError, KeyError):  # no container, or one of cgroups version 1
        pass
    return free
