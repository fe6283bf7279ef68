"""Processes that read samples: how they start, which signals they hear, and when they die.

They come from a fork server, a clean process that imports torch once and is forked for each worker.
Until 4 workers delivered on two cores: 1.8 s the first time and 0.3 s again; spawn 11 s and 8 s;
fork 0.6 s and 0.3 s (launch/bench_data.py --start). Yet a fork would copy a process that runs the
threads of gloo, NCCL, pinning and wandb, with whatever locks they hold, and registered memory of
the network card; spawn imports torch again in each worker, at every start.
"""

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import multiprocessing.synchronize
import multiprocessing.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import torch

# they ask the rank to save and stop, not its workers
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1
_GRACE = 1.0                                                   # seconds


def context() -> multiprocessing.context.BaseContext:
    """The start method of the workers: a fork server where the system has one."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    chosen = multiprocessing.get_context("forkserver")
    chosen.set_forkserver_preload(["torch", "torch.utils.data", "dstrain.data.batches"])
    return chosen


@contextlib.contextmanager
def starting() -> Iterator[list[Callable[[], None]]]:
    """Around the start of workers; gives a list that holds, afterwards, what `unlink` wants.

    Signals wait meanwhile: server and workers inherit the mask and so never hear those that a
    launcher sends to every process it finds, not even before `prepare` runs; ours are delivered at
    the end. The main module is hidden, since a worker needs nothing of it and would import the
    launch script again, and all of deepspeed with it.
    """
    multiprocessing.resource_tracker.ensure_running()      # its start would lift the mask again
    main = sys.modules["__main__"]
    names = [name for name in ("__file__", "__spec__") if name in main.__dict__]
    hidden = {name: main.__dict__.pop(name) for name in names}
    main.__spec__ = None
    made: list[Callable[[], None]] = []
    earlier = set(multiprocessing.util._finalizer_registry)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield made
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        main.__dict__.update(hidden)
        made += [finalizer for key, finalizer in multiprocessing.util._finalizer_registry.items()
                 if key not in earlier
                 and finalizer._callback is multiprocessing.synchronize.SemLock._cleanup]


def unlink(made: list[Callable[[], None]]) -> None:
    """Takes the workers' semaphores out of /dev/shm, once every worker has opened them.

    multiprocessing does so at exit, or its tracker process does; but who kills a rank often kills
    all of its processes at once, and then nobody is left to do it.
    """
    while made:
        made.pop()()


def prepare(_worker_id: int) -> None:
    """In a fresh worker: deaf to signals, one thread, and dead as soon as its rank is."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    if sys.platform == "linux":  # the parent is the fork server, or with spawn the rank itself
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    rank = multiprocessing.parent_process()
    # a pipe that closes with the rank, however that ends: nobody need be polled
    if rank is not None:
        threading.Thread(target=_die_with, args=(rank.sentinel,), daemon=True).start()


def end(reader: object) -> None:
    """Ends the workers of a DataLoader's iterator: politely for a second, then by force.

    torch alone would wait five seconds for each worker that is busy with a slow file, and then send
    a signal that none of ours hears.
    """
    processes = list(getattr(reader, "_workers", ()))
    if not processes or reader._shutdown:
        return
    try:                                  # in the order in which _shutdown_workers goes about it
        if hasattr(reader, "_pin_memory_thread"):
            reader._pin_memory_thread_done_event.set()     # else it complains about lost workers
        reader._workers_done_event.set()
        for queue in reader._index_queues:
            queue.put(None)
        until = time.monotonic() + _GRACE
        while left := [process.sentinel for process in processes if process.is_alive()]:
            if not multiprocessing.connection.wait(left, max(0.0, until - time.monotonic())):
                break
    finally:                              # else exit would wait for them without end
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    reader._shutdown_workers()


def _die_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
