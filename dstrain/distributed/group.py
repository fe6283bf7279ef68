"""Rank, world size and the exchanges between ranks; in one process every exchange returns its argument.

Ranks are started by the `deepspeed` launcher, torchrun, srun, mpirun or plain `python`, see launcher.py. The
process group itself is started by dstrain/engine/.
"""

import functools
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dstrain.distributed.launcher import read_rank_and_world
from dstrain.distributed.progress import get_phases
from dstrain.distributed.stops import IDLE

_thread = threading.local()  # .group: what this thread's exchanges go over; .calls: of broadcast_from_first
_CUT = "pair closure"  # gloo's message, which does not always name gloo
# Messages of gloo, NCCL and the store about a lost peer. Their other errors are faults of this rank itself.
_SIGNS = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out",
    "timeout",
    "remote process exited",
    "unhandled system error",
    "failed to recv",
    "failed to send",
    "socket closed",
    _CUT,
)


def is_started() -> bool:
    """Returns whether torch's process group is initialized in this process."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Returns the rank of this process; before the process group is started, the one that the launcher has set."""
    return dist.get_rank() if is_started() else read_rank_and_world().rank


def world() -> int:
    """Returns the number of ranks in the process group; 1 before the group is started."""
    return dist.get_world_size() if is_started() else 1


def device() -> torch.device:
    """Returns the device of this rank: a GPU, chosen by the rank's number on this machine, or the CPU if there is no
    GPU.
    """
    if torch.cuda.is_available():
        return torch.device("cuda", read_rank_and_world().local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Returns a copy of a tensor on `device`, or the tensor itself if it is there already. The host does not wait for a
    copy to a GPU.
    """
    if values.device.type == "cpu" and device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=device.type == "cuda")


def barrier() -> None:
    """Waits until all ranks have called this function. Does not wait for the work of their GPUs."""
    if world() > 1:
        dist.barrier(group=_get_host_group())


def leave_process_group() -> None:
    """Destroys the process group at the end of a command, once no rank needs the connections any more. Call it on all
    ranks. Does nothing for one rank.

    First waits until all ranks have called it. If a rank dies after that, the others wait at most 60 seconds for it.
    """
    # A barrier alone is not enough: the first rank that leaves it and ends closes connections that another rank may
    # still read from (gloo's issue 155), and when rank 0 ends, the store ends, too. So each rank writes into the store
    # that it has left the barrier, and rank 0 leaves last. If a rank has died before the barrier, the others wait until
    # the connection breaks or the process group times out.
    if world() == 1:
        return
    barrier()
    store, patience = dist.distributed_c10d._get_default_store(), timedelta(seconds=60)
    try:
        for event, waits in (("out", True), ("left", rank() == 0)):
            if store.add(f"dstrain/{event}", 1) == world():
                store.set(f"dstrain/all_{event}", "1")
            if waits:
                store.wait([f"dstrain/all_{event}"], patience)
    except dist.DistError:
        pass
    dist.destroy_process_group()
    clear_group_caches()


def clear_group_caches() -> None:
    """Forgets the groups that were made from the present process group, so that another process group can be started
    later.
    """
    _make_gloo_group_unless_default.cache_clear()
    get_neighbour_group.cache_clear()


def explain_lost_ranks(error: BaseException) -> str | None:
    """Returns a message for the user if `error` means that the connection to another rank is lost; None if it means
    anything else.
    """
    text = str(error).lower()
    remote = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and ("gloo" in text or _CUT in text))
    if not remote or not any(sign in text for sign in _SIGNS):
        return None
    if not is_started():
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        happened = (
            f"has not met the other ranks at {address} within faults.timeout_minutes: that address is not "
            "reached, or one of them has not come and says why itself"
        )
    elif "timed out" in text or "timeout" in text:
        happened = (
            "no longer hears from another rank: that rank, its machine or the network between them has failed, "
            "or it was busy for longer than faults.timeout_minutes"
        )
    else:
        happened = "has lost its connection to another rank, which has ended: what that one says comes first"
    return (
        f"rank {read_rank_and_world().rank} on {socket.gethostname()} {happened}. All saved is whole; the same command "
        "goes on"
    )


def explain_error_and_schedule_end(error: BaseException, seconds: float = 60.0) -> str:
    """Returns a message for the log on the error that ends this rank. If the error means that other ranks are lost,
    also starts a timer: it ends this process with exit code 1 after `seconds`, in case the process waits for the lost
    ranks.
    """
    if world() > 1 and explain_lost_ranks(error):
        timer = threading.Timer(seconds, end_process, (error,))
        timer.daemon = True
        timer.start()
    return (
        explain_lost_ranks(error)
        or f"rank {read_rank_and_world().rank} ends: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    )


def end_process(error: BaseException) -> None:
    """Prints the traceback and the message of an error, and ends this process at once with exit code 1. Waits neither
    for threads nor for other ranks.
    """
    try:
        traceback.print_exception(error)
        print(f"error: {explain_lost_ranks(error) or error}", file=sys.stderr, flush=True)
    finally:  # printing fails where the reader of stderr has gone
        os._exit(1)


def open_group_store() -> dist.Store | None:
    """Returns a new connection to the process group's store, by which ranks exchange small values; None if there is
    only one rank.
    """
    return dist.distributed_c10d._get_default_store().clone() if world() > 1 else None


def make_gloo_group() -> dist.ProcessGroup | None:
    """Makes a new gloo group of all ranks and returns it; None if there is only one rank. It exchanges data through the
    host's memory, and so does not wait for the GPU's queue. Call it on all ranks.
    """
    made = dist.new_group(backend="gloo") if world() > 1 else None
    return made if isinstance(made, dist.ProcessGroup) else None


@functools.cache
def get_neighbour_group(size: int) -> dist.ProcessGroup | None:
    """Returns the process group of those `size` consecutive ranks that contain this rank: ranks 0 to size - 1, or the
    next `size`, and so on. These ranks work on the same samples. Returns None if `size` is 1. The first call makes the
    group, and waits for the other ranks in it.
    """
    if size == 1:
        return None
    first = rank() // size * size
    made = dist.new_group(list(range(first, first + size)), use_local_synchronization=True)
    return made if isinstance(made, dist.ProcessGroup) else None


@contextmanager
def use_group_in_thread(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Within the block, this thread exchanges data through the host's memory over `group`, so that its exchanges never
    mix with those of another thread. None stands for the gloo group of all ranks, which is also used after the block.
    Blocks must not be nested.
    """
    _thread.group = group
    try:
        yield
    finally:
        _thread.group = None


def _get_host_group() -> dist.ProcessGroup | None:
    """Returns the group over which this thread exchanges data through the host's memory: the one that
    `use_group_in_thread` has set, else a gloo group of all ranks. The first call makes this gloo group, on all ranks
    together. If torch's default group is gloo itself, returns None, which stands for it.
    """
    return getattr(_thread, "group", None) or _make_gloo_group_unless_default()


@functools.cache
def _make_gloo_group_unless_default() -> dist.ProcessGroup | None:
    return None if dist.get_backend() == "gloo" else make_gloo_group()


def is_true_on_any_rank(flag: bool) -> bool:
    """Returns, on every rank, whether `flag` is True on any rank. Call it on all ranks."""
    return compute_max_over_ranks(int(flag)) > 0


class Ballot:
    """A vote whose exchange runs in the background: each rank casts its vote, computes, and waits for the outcome
    later.

    wish   returns whether this rank votes yes
    """

    def __init__(self, wish: Callable[[], bool]) -> None:
        self._wish = wish
        self._count: dist.Work | None = None

    def cast_vote(self) -> None:
        """Calls `wish` for this rank's vote, and starts to exchange the votes of all ranks without waiting for them.
        Call it on all ranks. With one rank does nothing.
        """
        if world() > 1:
            self._largest = torch.tensor(int(self._wish()))
            self._count = dist.all_reduce(self._largest, op=dist.ReduceOp.MAX, group=_get_host_group(), async_op=True)

    def await_outcome(self) -> bool:
        """Waits for the votes of all ranks. Returns, on every rank, True if any rank has voted yes. With one rank, or
        if `cast_vote` was not called, calls `wish` now and returns its result.
        """
        if self._count is None:
            return self._wish()
        self._count.wait()
        return bool(self._largest.numpy())


def compute_max_over_ranks(value: int) -> int:
    """Returns, on every rank, the largest `value` of all ranks. Call it on all ranks."""
    if world() == 1:
        return value
    largest = torch.tensor(value, dtype=torch.int64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=_get_host_group())
    return int(largest.item())


def sum_over_ranks(values: Tensor) -> Tensor:
    """Returns, on every rank, the sum over all ranks of their tensors `values`, which are not changed. With one rank,
    returns `values` itself. Call it on all ranks.
    """
    if world() == 1:
        return values
    values = values.clone()
    dist.all_reduce(values)
    return values


def gather_rows(values: Tensor) -> Tensor:
    """Returns, on every rank, the rows of all ranks in rank order: (b, ...) on each rank -> (sum of all b, ...). b may
    differ between ranks. Call it on all ranks.
    """
    return values if world() == 1 else _gather_padded(values, gather_objects(len(values)))


def _gather_padded(values: Tensor, counts: list[int]) -> Tensor:
    """Returns, on every rank, the rows of all ranks in rank order. counts: the number of rows of each rank. For the
    exchange, shorter tensors are padded.
    """
    padded = torch.cat((values, values.new_zeros((max(counts) - len(values), *values.shape[1:]))))
    rows = [torch.empty_like(padded) for _ in range(world())]
    dist.all_gather(rows, padded.contiguous())
    return torch.cat([part[:count] for part, count in zip(rows, counts)])


def gather_rows_by_position(positions: Tensor, rows: dict[str, Tensor], copies: int = 1) -> dict[str, Tensor]:
    """Returns, on every rank, the rows of all ranks, sorted by position: {name: (world * b / copies, ...)}. Call it on
    all ranks, with the same b.

    positions   (b,), the position of each row
    rows        {name: (b, ...)}
    copies      on how many ranks each position occurs; one row of each is kept
    """
    if world() > 1:
        counts = [len(positions)] * world()
        positions, rows = (
            _gather_padded(positions, counts),
            {name: _gather_padded(values, counts) for name, values in rows.items()},
        )
    order = positions.argsort(stable=True)[::copies]
    return {name: values[order] for name, values in rows.items()}


def gather_objects(value: Any) -> list[Any]:
    """Returns, on every rank, the Python values of all ranks in rank order. They should be small. Call it on all
    ranks.
    """
    if world() == 1:
        return [value]
    values: list[Any] = [None] * world()
    dist.all_gather_object(values, value, group=_get_host_group())
    return values


def gather_on_first_rank(value: Any) -> list[Any] | None:
    """Returns, on rank 0, the Python values of all ranks in rank order; on other ranks None. Call it on all ranks."""
    if world() == 1:
        return [value]
    values: list[Any] | None = [None] * world() if rank() == 0 else None
    dist.gather_object(value, values, dst=0, group=_get_host_group())
    return values


def gather_rows_on_first_rank(rows: Tensor, counts: list[int]) -> Tensor | None:
    """Returns, on rank 0, the first counts[r] rows of each rank r, in rank order, as one tensor on the CPU; on other
    ranks None. Call it on all ranks.

    `counts` must be the same on all ranks, and so must the shape and dtype of a row. No GPU holds rows of other ranks.
    """
    rows = rows.detach().cpu()
    if world() == 1:
        return rows[: counts[0]]
    own = rows[: counts[rank()]].contiguous()
    if rank() != 0:
        if len(own):
            dist.send(own, dst=0, group=_get_host_group())
        return None
    parts = [own]
    for other, count in enumerate(counts[1:], 1):
        if count:
            parts.append(rows.new_empty((count, *rows.shape[1:])))
            dist.recv(parts[-1], src=other, group=_get_host_group())
    return torch.cat(parts)


def wait_for_first_rank(store: dist.Store, key: str, seconds: float) -> bool:
    """Waits until rank 0 sets `key` in the store. Returns True when it has.

    Returns False if rank 0 has made no progress for more than `seconds`, as it reports in the store, if it reports
    nothing at all (after a wait of 5 s, or `seconds` if that is less), or if the store has ended.
    """
    idle = 0.0
    while idle <= seconds:
        get_phases().record_progress(idle)
        try:
            store.wait([key], timedelta(seconds=min(5.0, seconds)))
            return True
        except dist.DistNetworkError:
            time.sleep(6)  # rank 0 has ended and says why itself; the launcher ends this rank meanwhile
            return False
        except dist.DistStoreError:
            idle = float(store.get(IDLE)) if store.check([IDLE]) else seconds + 1
    return False


def broadcast_from_first(value: Any) -> Any:
    """Returns, on every rank, the `value` of rank 0, a small Python value. The other ranks wait as long as rank 0 makes
    progress, even longer than the timeout of the process group. Call it on all ranks.
    """
    if world() == 1:
        return value
    if not getattr(_thread, "group", None):  # the main thread
        store, number = dist.distributed_c10d._get_default_store(), getattr(_thread, "calls", 0)
        _thread.calls = number + 1
        if rank() == 0:
            store.set(f"dstrain/first/{number}", "")
        else:
            timeout = dist.distributed_c10d.default_pg_timeout
            wait_for_first_rank(
                store, f"dstrain/first/{number}", timeout.total_seconds()
            )  # else the exchange times out
    values = [value]
    dist.broadcast_object_list(values, src=0, group=_get_host_group())
    return values[0]
