"""Starts and ends the worker processes that read samples, and sets which signals they ignore.

They come from a fork server, a clean process that imports torch once and is forked for each worker. Until 4 workers
delivered on two cores, it took 1.8 s the first time and 0.3 s again; spawn took 11 s and 8 s, fork 0.6 s and 0.3 s
(the benchmark data.py --start). Yet fork would copy a process that runs the threads of gloo, NCCL, pinning and wandb,
with whatever locks they hold, and registered memory of the network card; spawn imports torch in each worker.
"""

import contextlib
import ctypes
import errno
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

from dstrain.recipe import ConfigError, NotRead

# They ask the rank to save and stop, not its workers.
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_GRACE = 1.0  # seconds


def make_worker_context() -> multiprocessing.context.BaseContext:
    """Returns the multiprocessing context in which workers start: a fork server that has imported torch."""
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(["torch", "torch.utils.data", "dstrain.data.batches"])
    return forkserver


@contextlib.contextmanager
def guard_worker_start() -> Iterator[list[Callable[[], None]]]:
    """A context manager for a block that starts workers. Yields a list. After the block, the list holds functions that
    remove the workers' semaphores; give it to `unlink_semaphores`. If the block raises, kills the workers that it has
    started.

    Within the block, the signals SIGTERM, SIGINT, SIGUSR1 and SIGHUP are blocked. The workers inherit this, so that
    they ignore a signal that a launcher sends to all processes. The main module is hidden, so that workers do not
    import it again.
    """
    multiprocessing.resource_tracker.ensure_running()  # its start would lift the mask again
    main = sys.modules["__main__"]
    names = [name for name in ("__file__", "__spec__") if name in main.__dict__]
    hidden = {name: main.__dict__.pop(name) for name in names}
    main.__spec__ = None
    unlinkers: list[Callable[[], None]] = []
    earlier, processes = set(multiprocessing.util._finalizer_registry), set(multiprocessing.active_children())
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield unlinkers
    except BaseException:
        for worker in set(multiprocessing.active_children()) - processes:  # multiprocessing would wait for them at exit
            worker.kill()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        main.__dict__.update(hidden)
        unlinkers += [
            finalizer
            for key, finalizer in multiprocessing.util._finalizer_registry.items()
            if key not in earlier and finalizer._callback is multiprocessing.synchronize.SemLock._cleanup
        ]


def unlink_semaphores(unlinkers: list[Callable[[], None]]) -> None:
    """Removes the workers' semaphores from /dev/shm, and empties the list from `guard_worker_start`. Call it only when
    every worker has opened them.

    multiprocessing would remove them only at exit, and never if all processes of a rank are killed.
    """
    while unlinkers:
        unlinkers.pop()()


def translate_worker_error(error: OSError | RuntimeError, num_workers: int) -> ConfigError | NotRead:
    """Returns the exception to raise in place of `error`, which the workers have caused: ConfigError if /dev/shm is
    full, NotRead if a worker was killed. Raises `error` again if it has another cause.
    """
    text = str(error)
    if "shared memory" in text or getattr(error, "errno", None) == errno.ENOSPC:  # 64 MB in a container of docker
        room = os.statvfs("/dev/shm")
        free, size = (room.f_frsize * blocks / 1e6 for blocks in (room.f_bavail, room.f_blocks))
        return ConfigError(
            f"data.workers={num_workers}: workers hand samples over in /dev/shm, and {free:.3g} of its {size:.3g} MB "
            "are free: enlarge it (docker run --shm-size=8g), or write data.workers=0"
        )
    if "exited unexpectedly" in text:
        return NotRead(
            "a process that reads the data was ended: by the system where memory is short, or since a file of the "
            "index or of the data was cut off meanwhile. Look at the memory and the disk, then give the same command "
            "again"
        )
    raise error


def prepare_worker(_worker_id: int) -> None:
    """Prepares the worker process in which it is called: ignores SIGTERM, SIGINT, SIGUSR1 and SIGHUP, sets torch to one
    thread, and makes the process end when its rank ends.
    """
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    if sys.platform == "linux":  # the parent is the fork server
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    rank = multiprocessing.parent_process()
    if rank is not None:  # its sentinel is a pipe that closes with the rank
        threading.Thread(target=_kill_self_when_parent_ends, args=(rank.sentinel,), daemon=True).start()


def end_loader_workers(loader_iterator: object) -> None:
    """Ends the workers of `loader_iterator`, the iterator of a DataLoader: asks them to stop, and kills those that
    still run after 1 s. Does nothing if there are no workers, or if they have ended.
    """
    # torch itself would wait five seconds for a worker that reads a slow file, and then send a signal that it ignores.
    processes = list(getattr(loader_iterator, "_workers", ()))
    if not processes or loader_iterator._shutdown:
        return
    try:  # in the order of DataLoader's own _shutdown_workers
        if hasattr(loader_iterator, "_pin_memory_thread"):
            loader_iterator._pin_memory_thread_done_event.set()  # else it complains about lost workers
        loader_iterator._workers_done_event.set()
        for queue in loader_iterator._index_queues:
            queue.put(None)
        deadline = time.monotonic() + _GRACE
        while alive := [process.sentinel for process in processes if process.is_alive()]:
            if not multiprocessing.connection.wait(alive, max(0.0, deadline - time.monotonic())):
                break
    finally:  # else exit would wait for them without end
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    loader_iterator._shutdown_workers()


def _kill_self_when_parent_ends(sentinel: int) -> None:
    """Waits until the parent process has ended, which closes the file descriptor `sentinel`, then kills this
    process.
    """
    multiprocessing.connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
