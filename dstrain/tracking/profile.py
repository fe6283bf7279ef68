"""Records, for `dstrain train --profile A:B[:N]`, where the time and the memory of some steps go.

    profile/steps_A-B_rank_R.json.gz       torch's profiler, for chrome://tracing and ui.perfetto.dev
    profile/memory_A-B_rank_R.pickle       every allocation on the GPU with its stack, for pytorch.org/memory_viz

These are the B - A steps after step A, of rank 0 and of every N-th one after it (N: 1).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dstrain.distributed import group

_ALLOCATIONS = 200_000  # that a snapshot of memory goes back


class Profile:
    """Records the steps of `window` by torch's profiler, if `start_or_stop_recording` is called after each step.
    Records nothing if the run begins within or after the window.

    window: A, B and N; None records nothing. done: steps done so far. note: writes a line into the log, on rank 0
    alone.
    """

    def __init__(
        self, folder: Path, window: tuple[int, int, int] | None, done: int, note: Callable[[str], None]
    ) -> None:
        self._folder, self._note = folder / "profile", note
        self._first, self._last, ranks = window or (0, 0, 1)
        self._waits = group.rank() % ranks == 0 and done <= self._first
        self._profiler: Any = None
        if window and done > self._first:  # the same command again, as a queue types it
            note(
                f"--profile: steps {self._first + 1} to {self._last} are not recorded: the run goes on from step {done}"
            )
        self.start_or_stop_recording(done)

    def start_or_stop_recording(self, done: int) -> None:
        """Starts recording if the step after `done` steps is the first one that --profile asks for. Stops and writes
        the files if the last one is done. Does nothing at other steps. Call it after each step.
        """
        if self._waits and self._first <= done < self._last:
            self._start_recording()
        elif self._profiler is not None and done >= self._last:
            self.stop_recording()

    def _start_recording(self) -> None:
        """Starts torch's profiler and, on a GPU, the record of memory allocations."""
        self._waits = False
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.synchronize()  # else the trace begins with kernels of the step before
            torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS)
        self._profiler = torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True)
        self._profiler.start()

    def stop_recording(self) -> None:
        """Stops recording and writes the files, also if the run ends before the last step that was to be recorded. Logs
        the folder or, if the files cannot be written, why; raises no error then. Does nothing if nothing is being
        recorded.
        """
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        profiler.stop()
        name = f"{self._first}-{self._last}_rank_{group.rank()}"
        try:
            self._folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(self._folder / f"steps_{name}.json.gz"))
            if torch.cuda.is_available():
                torch.cuda.memory._dump_snapshot(str(self._folder / f"memory_{name}.pickle"))
        except (OSError, RuntimeError) as error:
            self._note(f"--profile: {self._folder} cannot be written: {error}; training goes on")
        else:
            self._note(f"--profile: steps {self._first + 1} to {self._last} are in {self._folder}")
        finally:
            if torch.cuda.is_available():
                torch.cuda.memory._record_memory_history(enabled=None)
