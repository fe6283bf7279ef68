"""Time of a run: rates for a report."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from dstrain.recipe import Run
from dstrain.systems.base import System
from dstrain.track.flops import Utilization
from dstrain.track.profile import Profile


class Throughput:
    """What happened since the last report. `waited` tells the seconds spent waiting for data so far.

    system, precision: what learns and in what it computes, fp32, bf16 or fp16; with both mfu is reported, see flops.py.
    window, note: the steps to record, and what writes a line into the log about them, see profile.py.
    """

    def __init__(self, run: Run, first: int, waited: Callable[[], float], system: System | None = None,
                 precision: str = "fp32", window: tuple[int, int, int] | None = None,
                 note: Callable[[str], None] = print) -> None:
        self._run = run
        self._waited = waited
        self._profile = Profile(run.directory, window, first, note)
        self._utilization = None if system is None else Utilization(run, system, precision)
        self.begin(first)

    def begin(self, done: int) -> None:
        """Begins an interval after `done` steps."""
        self._done, self._begun, self._paused, self._waited_before = done, time.perf_counter(), 0.0, self._waited()

    def at(self, done: int) -> None:
        """Call after each step."""
        self._profile.at(done)

    def close(self) -> None:
        """Writes what was recorded of a run that ended meanwhile."""
        self._profile.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside is not training time."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        entered = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - entered

    def figures(self, done: int) -> dict[str, float]:
        """Figures of the interval that ends with `done` steps; then begins the next one."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = max(time.perf_counter() - self._begun - self._paused, 1e-9)
        batch, steps = self._run.batch.global_, done - self._done
        figures = {"lr": self._run.optimizer.lr_at(done - 1, self._run.steps), "images_seen": done * batch,
                   "samples_per_second": steps * batch / seconds, "step_seconds": seconds / max(steps, 1),
                   "data_wait": (self._waited() - self._waited_before) / seconds, "peak_memory_gb": _peak_memory()}
        if self._utilization is not None:
            figures |= self._utilization.figures(self._done, done, seconds)
        self.begin(done)
        return figures


def _peak_memory() -> float:
    """Peak memory of this rank in GB: allocated on the GPU, or resident on the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
