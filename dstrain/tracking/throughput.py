"""Measures how fast a run trains, for its reports."""

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
    """Measures the time, rates and memory of training since the last report.

    first, waited       the step that the run begins with; what returns the seconds of waiting for data so far
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
        self.start_interval(first)

    def start_interval(self, done: int) -> None:
        """Discards all measurements and starts a new interval after `done` steps. Call it when training starts or goes
        back to an earlier step.
        """
        self._reports.clear()
        self._reset_interval(done)

    def _reset_interval(self, done: int) -> None:
        """Starts a new interval after `done` steps. The times of the interval are counted from 0."""
        self._done, self._begun, self._paused, self._waited_before = done, time.perf_counter(), 0.0, self._waited()
        self._compiled = _read_compile_seconds()

    def record_step_end(self, done: int, losses: dict[str, list[Tensor]] | None = None) -> None:
        """Tells the profiler that step `done` has ended. After the command's first step, logs how long this step took,
        and its mean losses. losses: {part: losses of this rank's micro-batches}.
        """
        self._profile.start_or_stop_recording(done)
        if losses and done == self._first + 1:
            means = (f"{part} {torch.stack(of_part).mean().item():.4g}" for part, of_part in losses.items())
            compiled = _read_compile_seconds() - self._compiled
            blocks = f", blocks compiled in {compiled:.1f} s of it" if compiled else ""
            self._note(f"first step: {time.perf_counter() - self._begun:.1f} s{blocks}, loss of {', '.join(means)}")

    def close(self) -> None:
        """Stops the profiler if it is recording, and writes its files."""
        self._profile.stop_recording()

    @contextmanager
    def exclude_time_of_block(self) -> Iterator[None]:
        """Excludes the time spent in the block from the interval's training time. Waits for the GPU before the
        block.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        entered = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - entered

    def compute_interval_figures(self, done: int) -> dict[str, float]:
        """Returns {name: value} of the interval that ends after `done` steps, such as lr, samples_per_second, data_wait
        (a share), peak_memory_gb, mfu and seconds_left. Starts the next interval. Waits for the GPU.
        """
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = max(time.perf_counter() - self._begun - self._paused, 1e-9)
        steps = done - self._done
        figures = {
            "lr": self._optimizer.compute_lr(done - 1, self._steps),
            "images_seen": done * self._batch,
            "samples_per_second": steps * self._batch / seconds,
            "step_seconds": seconds / max(steps, 1),
            "data_wait": (self._waited() - self._waited_before) / seconds,
            "peak_memory_gb": _read_peak_memory_gb(),
        }
        if self._utilization is not None:
            figures |= self._utilization.compute_tflops_and_mfu(self._done, done, seconds)
        self._reset_interval(done)
        return figures | {"seconds_left": self._estimate_seconds_left(done, figures["step_seconds"])}

    def _estimate_seconds_left(self, done: int, step_seconds: float) -> float:
        """Returns an estimate of the seconds to the run's end, from the mean time of a step over the last 20 reports.
        This includes checkpoints, pictures and evaluations. After the first report alone, takes `step_seconds` for each
        step.
        """
        self._reports.append((done, time.perf_counter()))
        (first, then), (_, now) = self._reports[0], self._reports[-1]
        pace = (now - then) / (done - first) if done > first else step_seconds
        return pace * (self._steps - done)


def _read_peak_memory_gb() -> float:
    """Returns the largest memory that this rank has used so far, in GB: allocated on the GPU, or without one resident
    on the host.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def _read_compile_seconds() -> float:
    """Returns the seconds that torch.compile has taken in this process so far, 0 if it was never used. Does not import
    the compiler, since that takes long.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.calculate_time_spent()["total_wall_time"] if dynamo else 0.0
