"""Rank, world and the few words that ranks exchange; every function is the identity in one process.

Ranks are started by the `deepspeed` launcher, torchrun, srun, mpirun or plain `python`, see dstrain/ranks/place.py. The
process group itself is started by dstrain/engine/.
"""

import functools
import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dstrain.ranks.place import place

_speech = threading.local()
_CUT = "pair closure"                                        # of gloo, which does not always give its name
# What gloo, NCCL and the store say of a peer that is gone; their other errors are this rank's own.
_SIGNS = ("connection closed", "connection reset", "connection refused", "broken pipe", "timed out", "timeout",
          "remote process exited", "unhandled system error", "failed to recv", "failed to send", "socket closed",
          _CUT)


def started() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if started() else place().rank


def world() -> int:
    return dist.get_world_size() if started() else 1


def device() -> torch.device:
    """The accelerator of this rank, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", place().local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def barrier() -> None:
    """Waits for all ranks, and for nothing on their GPUs."""
    if world() > 1:
        dist.barrier(group=_control())


def leave(seconds: float = 60.0) -> None:
    """The last word of a command: no rank ends its process while another is still exchanging words; then each is alone.

    A barrier is none: who is out of it first and ends closes connections on which another may still read (gloo's issue
    155), and rank 0 takes the store along. So each says in the store that it is out, and rank 0 leaves last. Who dies
    after the barrier is waited for no longer than `seconds`; who has died before it, as in any other exchange, until
    the connection breaks or the process group's own time is over. Its launcher tells of it.
    """
    if world() == 1:
        return
    barrier()
    store, patience = dist.distributed_c10d._get_default_store(), timedelta(seconds=seconds)
    try:
        for word, waits in (("out", True), ("left", rank() == 0)):
            if store.add(f"dstrain/{word}", 1) == world():
                store.set(f"dstrain/all_{word}", "1")
            if waits:
                store.wait([f"dstrain/all_{word}"], patience)
    except dist.DistError:
        pass
    dist.destroy_process_group()                              # and its threads, see quit_among_others
    _usual_control.cache_clear()


def lost(error: BaseException) -> str | None:
    """What a rank says that can no longer speak with the others; None for any other error."""
    text = str(error).lower()
    if not (isinstance(error, dist.DistError) or isinstance(error, RuntimeError) and ("gloo" in text or _CUT in text)):
        return None
    if not any(sign in text for sign in _SIGNS):
        return None
    if not started():
        at = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        happened = (f"has not met the other ranks at {at} within faults.timeout_minutes: that address is not reached, "
                    "or one of them has not come and says why itself")
    elif "timed out" in text or "timeout" in text:
        happened = ("no longer hears from another rank: that rank, its machine or the network between them has failed, "
                    "or it was busy for longer than faults.timeout_minutes")
    else:
        happened = "has lost its connection to another rank, which has ended: what that one says comes first"
    return (f"rank {place().rank} on {socket.gethostname()} {happened}. What was saved is whole; mend the cause, and "
            "the same command goes on")


def fall(error: BaseException, seconds: float = 60.0) -> str:
    """Called by a rank that goes down with an error: one line that says so.

    Where it has lost the others, what it then waits for may never come: a thread that speaks with them, a file system
    beyond the broken link. So it ends after `seconds` at the latest.
    """
    if world() > 1 and lost(error):
        last = threading.Timer(seconds, end, (error,))
        last.daemon = True
        last.start()
    return lost(error) or f"rank {place().rank} ends: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def end(error: BaseException) -> None:
    """Ends this process with an error's traceback and exit code 1, and waits for no thread and no group."""
    try:
        traceback.print_exception(error)
        print(f"error: {lost(error) or error}", file=sys.stderr, flush=True)
    finally:                                                  # who would read it may be gone, too
        os._exit(1)


def quit_among_others(code: int | str | None) -> None:
    """Ends this process with an exit code where a process group is at work; in one process nothing happens.

    A thread of gloo's that gives back a tensor while Python is being taken down takes its lock, which aborts the
    process: its exit code would be the abort's.
    """
    if world() > 1:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def new_group() -> dist.ProcessGroup | None:
    """A group for words on the host: gloo, so that none waits for the GPU's queue. All ranks make it together."""
    return dist.new_group(backend="gloo") if world() > 1 else None


@contextmanager
def speaking_over(group: dist.ProcessGroup | None) -> Iterator[None]:
    """What this thread says to other ranks goes over a group of its own, never between another thread's words."""
    _speech.group = group
    try:
        yield
    finally:
        _speech.group = None


def _control() -> dist.ProcessGroup | None:
    return getattr(_speech, "group", None) or _usual_control()


@functools.cache
def _usual_control() -> dist.ProcessGroup | None:
    return None if dist.get_backend() == "gloo" else new_group()


def agree(flag: bool) -> bool:
    """True on every rank when it is true on any."""
    return agreed_max(int(flag)) > 0


def agreed_max(value: int) -> int:
    """The largest of all ranks' integers."""
    if world() == 1:
        return value
    word = torch.tensor(value, dtype=torch.int64)
    dist.all_reduce(word, op=dist.ReduceOp.MAX, group=_control())
    return int(word.item())


def total(values: Tensor) -> Tensor:
    """Sum of a tensor over ranks; the argument is left as it is."""
    if world() == 1:
        return values
    values = values.clone()
    dist.all_reduce(values)
    return values


def gather(values: Tensor) -> Tensor:
    """Rows of all ranks in rank order: (b, ...) -> (sum of b, ...); ranks may hold different numbers of rows."""
    return values if world() == 1 else _gather(values, _counts(len(values)))


def _counts(mine: int) -> list[int]:
    """Every rank's number of rows, told on the host, so that no GPU is waited for."""
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world())]
    dist.all_gather(counts, torch.tensor([mine]), group=_control())
    return torch.cat(counts).tolist()


def _gather(values: Tensor, counts: list[int]) -> Tensor:
    padded = torch.cat((values, values.new_zeros((max(counts) - len(values), *values.shape[1:]))))
    rows = [torch.empty_like(padded) for _ in range(world())]
    dist.all_gather(rows, padded.contiguous())
    return torch.cat([part[:count] for part, count in zip(rows, counts)])


def in_order(positions: Tensor, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rows of all ranks by name, (b, ...) each, sorted by their positions (b,): (sum of b, ...), equal on all ranks."""
    if world() > 1:
        counts = _counts(len(positions))
        positions, rows = _gather(positions, counts), {name: _gather(values, counts) for name, values in rows.items()}
    order = positions.argsort()
    return {name: values[order] for name, values in rows.items()}


def objects(value: Any) -> list[Any]:
    """Every rank's small Python value, in rank order."""
    if world() == 1:
        return [value]
    values: list[Any] = [None] * world()
    dist.all_gather_object(values, value, group=_control())
    return values


def from_first(value: Any) -> Any:
    """Rank 0's small Python value, on every rank."""
    if world() == 1:
        return value
    word = [value]
    dist.broadcast_object_list(word, src=0, group=_control())
    return word[0]
