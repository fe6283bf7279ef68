"""Time of a run: rates for a report."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from dstrain.recipe import Optimizer
from dstrain.systems.base import System
from dstrain.tracking.flops import Utilization
from dstrain.tracking.profile import Profile

_REPORTS = 20  # that tell how long the rest takes


class Throughput:
    """Measures what happened since the last report. `waited` tells the seconds spent waiting for data so far.

    folder              of the run
    batch, steps        samples of a step, and steps of the whole run
    system, precision   with both mfu is reported, see flops.py; fp32, bf16 or fp16
    train_only          of the recipe
    window, note        the steps to record, and what writes a line into the log about them, see profile.py
    """

    def __init__(
        self,
        folder: Path,
        first: int,
        waited: Callable[[], float],
        *,
        batch: int,
        steps: int,
        optimizer: Optimizer,
        system: System | None = None,
        precision: str = "fp32",
        train_only: Sequence[str] | None = None,
        window: tuple[int, int, int] | None = None,
        note: Callable[[str], None] = print,
    ) -> None:
        self._batch, self._steps, self._optimizer = batch, steps, optimizer
        self._waited, self._note, self._first = waited, note, first
        self._profile = Profile(folder, window, first, note)
        self._reports: deque[tuple[int, float]] = deque(maxlen=_REPORTS)  # steps done, and when
        self._utilization = None if system is None else Utilization(system, batch, precision, train_only)
        self.begin(first)

    def begin(self, done: int) -> None:
        """Begins an interval after `done` steps, where none of this command came before or the run has gone back."""
        self._reports.clear()
        self._start(done)

    def _start(self, done: int) -> None:
        self._done, self._begun, self._paused, self._waited_before = done, time.perf_counter(), 0.0, self._waited()
        self._compiled = _read_compile_seconds()

    def at(self, done: int, losses: dict[str, list[Tensor]] | None = None) -> None:
        """Counts a step, with the losses of its micro-batches by network: the first ones become a line."""
        self._profile.at(done)
        if losses and done == self._first + 1:
            means = (f"{part} {torch.stack(of_part).mean().item():.4g}" for part, of_part in losses.items())
            compiled = _read_compile_seconds() - self._compiled
            blocks = f", blocks compiled in {compiled:.1f} s of it" if compiled else ""
            self._note(f"first step: {time.perf_counter() - self._begun:.1f} s{blocks}, loss of {', '.join(means)}")

    def close(self) -> None:
        """Writes what was recorded of a run that ended meanwhile."""
        self._profile.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the time inside out of the training time."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        entered = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - entered

    def figures(self, done: int) -> dict[str, float]:
        """Returns figures of the interval that ends with `done` steps; then begins the next one."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = max(time.perf_counter() - self._begun - self._paused, 1e-9)
        steps = done - self._done
        figures = {
            "lr": self._optimizer.lr_at(done - 1, self._steps),
            "images_seen": done * self._batch,
            "samples_per_second": steps * self._batch / seconds,
            "step_seconds": seconds / max(steps, 1),
            "data_wait": (self._waited() - self._waited_before) / seconds,
            "peak_memory_gb": _read_peak_memory(),
        }
        if self._utilization is not None:
            figures |= self._utilization.figures(self._done, done, seconds)
        self._start(done)
        return figures | {"seconds_left": self._left(done, figures["step_seconds"])}

    def _left(self, done: int, step_seconds: float) -> float:
        """Returns seconds to the run's end: as the last reports went, with their saves, pictures and evaluations."""
        self._reports.append((done, time.perf_counter()))
        (first, then), (_, now) = self._reports[0], self._reports[-1]
        pace = (now - then) / (done - first) if done > first else step_seconds
        return pace * (self._steps - done)


def _read_peak_memory() -> float:
    """Returns peak memory of this rank in GB: allocated on the GPU, or resident on the CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def _read_compile_seconds() -> float:
    """Returns seconds that torch.compile has taken so far in this process; asked for without its import, which takes
    long.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.calculate_time_spent()["total_wall_time"] if dynamo else 0.0
