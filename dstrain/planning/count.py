"""Counts what a run costs on any number of ranks, before it is started, on a machine without a GPU.

    counts.py    what is counted
    rank.py      counts as rank 0, in a process of its own: its process group and its tensors are not real
    step.py      three steps of the training loop under a watch
    watch.py     what is alive when, what goes between ranks, what is computed again

Nothing is computed, so a network of any size is counted whole, in seconds. Blocks are counted as they run eagerly; a
compiled one keeps less. Not counted: what the driver, the libraries and torch's allocator take beside the tensors.
"""

import functools
import gc
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

from dstrain.planning.counts import Counts, Layout
from dstrain.recipe import Run
from dstrain.recipe.trust import list_trusted_packages, trust_system

T = TypeVar("T")


def count_costs(run: Run, settings: dict[str, Any], layout: Layout) -> Counts:
    """Returns what a step of a checked recipe costs, see Counts. The first call takes longer, since it imports torch
    and DeepSpeed.

    settings: DeepSpeed's settings, resolved for layout.world ranks (engine/settings.py)

    Raises ConfigError if the settings ask for ZeRO++'s quantization, which cannot be counted.
    Raises RuntimeError, TypeError or ValueError if the system's code needs the values of tensors, which have none here.
    """
    from dstrain.planning.rank import count_costs_of_rank_0

    return run_in_worker(count_costs_of_rank_0, run, settings, layout)


def run_in_worker(work: Callable[..., T], *arguments: Any) -> T:
    """Calls a function in the worker process that counts costs, and returns its result or raises its exception. Ctrl-C
    also ends the worker; the next call then starts a new one.
    """
    worker = _get_worker()
    try:
        return worker.submit(_call_with_picklable_errors, list_trusted_packages(), work, *arguments).result()
    except KeyboardInterrupt:
        for process in worker._processes.values():  # public as kill_workers() from Python 3.14 on
            process.kill()
        _get_worker.cache_clear()
        raise


def _call_with_picklable_errors(trusted_packages: list[str], work: Callable[..., T], *arguments: Any) -> T:
    """Calls `work` within the worker process, and returns its result. First allows the worker to import
    `trusted_packages` as systems. An exception that cannot be pickled becomes a RuntimeError with the traceback as
    text.
    """
    for name in trusted_packages:
        trust_system(name)
    try:
        return work(*arguments)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            raise RuntimeError("".join(traceback.format_exception(error))) from None
        raise


@functools.cache
def _get_worker() -> ProcessPoolExecutor:
    """Returns the pool of the one worker process that counts costs. The first call makes it."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare_worker)


def _prepare_worker() -> None:
    """Prepares the worker process that counts costs: it uses no GPU, prints nothing, ignores SIGINT, ends with its
    parent, and imports DeepSpeed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal sends it to the parent, too.
    threading.Thread(target=_exit_when_parent_ends, daemon=True).start()
    os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(nowhere, output)
    from dstrain.engine.patches import import_deepspeed

    import_deepspeed()
    gc.freeze()


def _exit_when_parent_ends() -> None:
    """Waits until the parent process has ended, then ends this process with exit code 1."""
    multiprocessing.parent_process().join()
    os._exit(1)
