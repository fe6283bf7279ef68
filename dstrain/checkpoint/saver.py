"""Writes checkpoints, while training waits or while it continues, in one thread of every rank.

In the second case training waits only while HostCopies copies the values to the host's memory. The thread writes and
hashes the files, writes the manifest, and communicates over its own process group. Only one save runs at a time: the
next one and the end of the run wait for it. A save that fails is reported, older checkpoints stay whole, and training
continues.
"""

import math
import socket
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dstrain.checkpoint.fragments import Fragment
from dstrain.checkpoint.store import Hashes, Store
from dstrain.distributed import group
from dstrain.recipe import NotSaved

Entry = tuple[str, Fragment, Tensor]  # kind, fragment, its values (numel,) float32: what write_shard takes
_CGROUP = Path("/sys/fs/cgroup")
_SHARE = 0.8  # of the free memory; loaders and the page cache need some, too

Entries = dict[str, list[Entry]]  # by part

_MAX_FAILURES = 3  # failed saves in a row that end the run


@dataclass
class _Pending:
    """A save, until all ranks know whether it has failed."""

    step: int
    score: float | None
    extra: dict[str, Any]  # what else its manifest gets
    began: float
    waited: float = 0.0  # seconds that training stood still for it
    seconds: float = 0.0  # from its beginning to its end
    error: str | None = None
    cause: Exception | None = None  # of an error that the store did not expect
    remark: str = ""  # on a fault that leaves the checkpoint whole
    reported: bool = False
    ended: threading.Event = field(default_factory=threading.Event)


class Saver:
    """Saves steps into a store, one after another. All ranks must call each method together, except
    `report_finished_save`.

    report   is called with each line for the user, in the main thread of rank 0
    saved    is called with each step whose checkpoint is whole, on rank 0, in any thread
    """

    def __init__(self, store: Store, asynchronous: bool, report: Callable[[str], None], saved: Callable[[int], None]):
        self.store = store
        self.report = report
        self.newest = 0  # the newest step known to be whole
        self._saved = saved
        self._asynchronous = asynchronous
        self._snapshot = HostCopies()
        self._group: ProcessGroup | None = None  # made with the first thread
        self._pending: _Pending | None = None
        self._failed: _Pending | None = None  # the latest that failed
        self._failures = 0  # in a row

    def save(
        self,
        step: int,
        entries: Entries,
        write: Callable[[Path, Entries], Hashes | None],
        *,
        need_bytes: int,
        score: float | None,
        last: bool,
        extra: dict[str, Any] | None = None,
    ) -> None:
        """Saves `step`: every rank calls `write(folder, entries)` to write its files, then rank 0 writes the manifest
        with `extra` (see Store.commit_save). First waits for the save before this one.

        A thread writes a copy of the values, and this method returns meanwhile. It returns only when all is written if
        saves are synchronous, if this is the `last` save, or if the two saves before this one have failed.

        entries: the values to save, by part, as they are now
        need_bytes: the most bytes that this rank will write
        score: goes into the manifest, by which the best checkpoint is chosen; None: not measured

        Raises NotSaved if the `last` save fails, or the third in a row.
        """
        began = time.perf_counter()
        self.wait_for_save()
        pending = _Pending(step, score, extra or {}, began)
        at_once = last or self._failures == _MAX_FAILURES - 1
        copies = None if at_once else self._copy_entries_to_host(entries)
        if copies is None:
            self._pending = pending
            self._run_save(pending, lambda folder: write(folder, entries), need_bytes)
            pending.waited = pending.seconds
            self.wait_for_save()
            if self._failures >= _MAX_FAILURES or (last and self._failures):
                failed = self._failed
                assert failed is not None
                raise NotSaved(
                    f"step {failed.step} could not be saved: {failed.error or 'see the other ranks'}. Older "
                    f"checkpoints in {self.store.folder} are whole: mend that, and give the same command "
                    "again"
                ) from failed.cause
            return
        if self._group is None:
            self._group = group.make_gloo_group()

        def run_in_thread() -> None:
            with group.use_group_in_thread(self._group):
                self._run_save(pending, lambda folder: write(folder, copies), need_bytes)

        # A daemon thread, so that a process whose peers are lost can end.
        thread = threading.Thread(target=run_in_thread, name=f"save-{step}", daemon=True)
        self._pending, pending.waited = pending, time.perf_counter() - began
        try:
            thread.start()
        except RuntimeError:  # no more threads here, while those of other ranks are at work
            run_in_thread()
            pending.waited = pending.seconds

    def wait_for_save(self) -> None:
        """Waits until the running save has ended on all ranks, reports whether it succeeded, and counts failures in a
        row. Does nothing if no save is running. Call it on all ranks.
        """
        pending = self._pending
        if pending is None:
            return
        pending.ended.wait()
        self.report_finished_save()
        self._pending = None
        if group.is_true_on_any_rank(pending.error is not None):
            self._failures, self._failed = self._failures + 1, pending
        else:
            self.newest, self._failures = pending.step, 0

    def add_score(self, step: int, score: float) -> None:
        """Waits for the running save, then writes a score into the manifest of a saved step. Writes nothing if the step
        has no checkpoint. Call it on all ranks.
        """
        self.wait_for_save()
        self.store.add_score(step, score)

    @property
    def is_writing(self) -> bool:
        """Returns whether this rank is still writing a checkpoint."""
        return self._pending is not None and not self._pending.ended.is_set()

    def report_finished_save(self) -> None:
        """Reports on rank 0 whether the latest save succeeded. Does nothing if the save is still running, or was
        reported before. Never waits, so that it can be called at each step.
        """
        pending = self._pending
        if pending is None or pending.reported or self.is_writing or group.rank() != 0:
            return
        pending.reported = True
        if pending.error is None:
            self.report(
                f"saved step {pending.step} in {pending.seconds:.1f} s; training waited {pending.waited:.2f} s"
                f"{pending.remark}"
            )
        else:
            self.report(f"saving step {pending.step} failed: {pending.error}; older checkpoints are whole")

    def is_improvement(self, score: float) -> bool:
        """Returns whether a score is finite and lower than the scores of all checkpoints, including one that is being
        written. If no checkpoint has a score, any finite one is. Call it on all ranks; all get the same result.
        """
        best, pending = self.store.find_best_checkpoint() if group.rank() == 0 else None, self._pending
        scores = [best[1]] if best else []
        if pending is not None and _is_finite(pending.score) and not (pending.ended.is_set() and pending.error):
            scores.append(pending.score)
        return group.broadcast_from_first(_is_finite(score) and all(score < earlier for earlier in scores))

    def close(self) -> None:
        """Waits for the running save and reports it, also after an error. Does nothing during a KeyboardInterrupt, by
        which the user asks to end at once.
        """
        if self._pending is not None and not isinstance(sys.exc_info()[1], KeyboardInterrupt):
            self._pending.ended.wait()
            self.report_finished_save()

    def _copy_entries_to_host(self, entries: Entries) -> Entries | None:
        """Returns copies of the entries in the host's memory, from which a thread can write. Returns None on all ranks
        if saves are synchronous, or if some host lacks the memory for copies. In that case rank 0 reports it, and all
        later saves are synchronous. Call it on all ranks.
        """
        if not self._asynchronous:
            return None
        shortage, copies = self._snapshot.find_memory_shortage(entries), None
        if shortage is None:
            try:
                copies = self._snapshot.copy_entries_to_host(entries)
            except (RuntimeError, MemoryError) as error:
                shortage = f"rank {group.rank()} has no memory for a copy: {_get_first_line(error)}"
        shortages = [reason for reason in group.gather_objects(shortage) if reason is not None]
        if not shortages:
            return copies
        self._asynchronous, self._snapshot = False, HostCopies()
        if group.rank() == 0:
            self.report(f"training waits for each save (save.asynchronous): {shortages[0]}")
        return None

    def _run_save(self, pending: _Pending, write: Callable[[Path], Hashes | None], need_bytes: int) -> None:
        """Writes the checkpoint through the store. Notes in `pending` whether it succeeded, and the error if not.
        Raises nothing, since it may run in a thread.
        """
        try:
            self.store.save(pending.step, write, extra={**pending.extra, "score": pending.score}, need_bytes=need_bytes)
            pending.error = self.store.error
            if pending.error is None and group.rank() == 0:
                try:
                    self._saved(pending.step)
                except OSError as error:  # the checkpoint is whole all the same
                    pending.remark = f"; but that was not written down: {error}"
        except Exception as error:  # such as a lost peer: raised where the save is awaited
            pending.error, pending.cause = (
                group.explain_lost_ranks(error) or f"{type(error).__name__}: {_get_first_line(error)}",
                error,
            )
        finally:
            pending.seconds = time.perf_counter() - pending.began
            pending.ended.set()


def _is_finite(score: float | None) -> TypeGuard[float]:
    return score is not None and math.isfinite(score)


def _get_first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


class HostCopies:
    """Copies the values of a checkpoint into the host's memory, into the same buffers at each call."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def find_memory_shortage(self, entries: dict[str, list[Entry]]) -> str | None:
        """Returns a message if some host has no free memory for copies of its ranks' entries; None if all hosts have,
        or if the buffers exist already. Call it on all ranks; all get the same result.
        """
        if self._buffers:
            return None
        nbytes = 4 * sum(len(values) for own in entries.values() for _, _, values in own)
        ranks = group.gather_objects((socket.gethostname(), nbytes, measure_free_host_memory()))
        needed: Counter[str] = Counter()
        free: dict[str, int] = {}
        for host, count, left in ranks:
            needed[host] += count
            free[host] = min(left, free.get(host, left))
        for host, count in needed.items():
            if count > _SHARE * free[host]:
                return (
                    f"a copy of {count / 1e6:.0f} MB has no room in the {free[host] / 1e6:.0f} MB that {host} has left"
                )
        return None

    def copy_entries_to_host(self, entries: dict[str, list[Entry]]) -> dict[str, list[Entry]]:
        """Returns the entries, by part, with copies of their values in the host's memory. Waits until all is copied.
        The next call overwrites these copies.
        """
        copies: dict[str, list[Entry]] = {}
        for part, live in entries.items():
            counts = [len(values) for _, _, values in live]
            if part not in self._buffers:
                self._buffers[part] = self._allocate_host_buffer(sum(counts))
            copies[part] = [
                (kind, fragment, target.copy_(values, non_blocking=True))
                for (kind, fragment, values), target in zip(live, self._buffers[part].split(counts))
            ]
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return copies

    def _allocate_host_buffer(self, numel: int) -> Tensor:
        """Returns an uninitialized float32 tensor (numel,) in the host's memory. With a GPU it is page-locked if
        possible, so that the GPU copies into it at full rate.

        Does not use torch's own pinned memory, whose sizes are rounded up to a power of two.
        """
        buffer = torch.empty(numel, dtype=torch.float32)
        if torch.cuda.is_available() and numel:
            runtime, begin = torch.cuda.cudart(), buffer.data_ptr()
            if _call_cuda_runtime(runtime.cudaHostRegister, begin, 4 * numel, 0):
                # Before the memory is given back, which another copy may then be given.
                weakref.finalize(self, _call_cuda_runtime, runtime.cudaHostUnregister, begin).atexit = False
        return buffer


def _call_cuda_runtime(call: Callable[..., Any], *arguments: int) -> bool:
    """Calls a function of the CUDA runtime and returns whether it succeeded. After a failure clears CUDA's error state:
    otherwise the next kernel would raise that error.
    """
    failed = int(call(*arguments))
    if failed:
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
    return not failed


def measure_free_host_memory() -> int:
    """Returns the bytes of memory that this process can still take: the free memory of the host, or of its container if
    that has less. Returns sys.maxsize if there is no /proc/meminfo.
    """
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
