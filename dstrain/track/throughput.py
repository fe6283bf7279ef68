"""Time and steps of a run: rates for a report, and a limit to steps that change nothing."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from dstrain.recipe import Run


class Clock:
    """What happened since the last report.

    `waited` tells the seconds spent waiting for data so far; `skipped` is the number of steps skipped before `first`.
    """

    def __init__(self, run: Run, first: int, waited: Callable[[], float], skipped: int = 0):
        self._run = run
        self._waited = waited
        self._skipped, self._in_a_row = skipped, 0
        self._mark(first)

    def _mark(self, done: int) -> None:
        self._done, self._begun, self._paused, self._waited_before = done, time.perf_counter(), 0.0, self._waited()

    def step(self, applied: bool) -> None:
        """Counts a step that was not applied. FloatingPointError after faults.max_skipped in a row."""
        if applied:
            self._in_a_row = 0
            return
        self._skipped += 1
        self._in_a_row += 1
        if self._in_a_row > self._run.faults.max_skipped:
            raise FloatingPointError(
                f"{self._in_a_row} steps in a row had gradients that are not finite, and were skipped; the checkpoints "
                f"in {self._run.directory} are finite. Lower optimizer.lr, set optimizer.clip, or use bf16 in place of "
                "fp16, and give the same command with --allow-change")

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
        batch = self._run.batch.global_
        figures = {"lr": self._run.optimizer.lr_at(done - 1, self._run.steps), "images_seen": done * batch,
                   "skipped": self._skipped, "samples_per_second": (done - self._done) * batch / seconds,
                   "data_wait": (self._waited() - self._waited_before) / seconds, "peak_memory_gb": _peak_memory()}
        self._mark(done)
        return figures


def _peak_memory() -> float:
    """Peak memory of this rank in GB: allocated on the GPU, or resident on the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
