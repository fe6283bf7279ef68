"""Writes RUN/report.html while a run trains, by a process of its own with low priority, so that no step waits."""

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from dstrain.distributed.progress import get_phases


class Page:
    """Starts `python -m dstrain.tracking.report FOLDER` every `every` steps; never if `every` is 0. The first error is
    logged in one line, later errors are not; training continues.
    """

    def __init__(self, folder: Path, every: int, done: int, note: Callable[[str], None]) -> None:
        self._folder, self._every, self._note = folder.absolute(), every, note
        self._written = self._ended_at = done  # the steps of the last page, and of the last one that was an end
        self._starter: subprocess.Popen | None = None  # of the writer at work, whose group bears its number
        self._errors: IO[bytes] | None = None
        self._failed = False

    def write_report_if_due(self, done: int) -> None:
        """Starts the process that writes report.html, if `done` has reached a multiple of `every` since the last report
        was started. Does nothing if an earlier such process still runs.
        """
        if self._every and done // self._every > self._written // self._every and self._wait_for_writer():
            self._start_report_writer(done, niceness=19)

    def write_last_report(self, done: int, seconds: float) -> None:
        """Writes report.html after the last step, by a new process, and waits for this process at most `seconds`. After
        that, it continues beside the end of the run, if the machine lets it. Kills an earlier process that still writes
        a report.

        Does nothing if `every` is 0, or if the last report was written for this step already.
        """
        # Slurm ends all processes of a job with its last rank: then the earlier page stays.
        if self._every and done > self._ended_at:
            self._ended_at = done
            get_phases().enter_phase("writing report.html")
            if not self._wait_for_writer():
                os.killpg(self._starter.pid, signal.SIGKILL)
                self._close_writer()
            self._start_report_writer(done, niceness=0)
            if not self._wait_for_writer(seconds):
                self._note(f"report.html is still being written after {seconds:g} s, which goes on beside the end")

    def _start_report_writer(self, done: int, niceness: int) -> None:
        """Starts `python -m dstrain.tracking.report` on the run's folder, with this niceness."""
        self._written = done
        try:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in _close_writer)
            root = str(Path(__file__).resolve().parents[2])  # a script may find dstrain by itself
            path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
            # In a session of its own: Ctrl-C in the terminal is for the training.
            self._starter = subprocess.Popen(
                [sys.executable, "-P", "-m", "dstrain.tracking.report", str(self._folder), str(niceness)],
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
        except OSError as error:
            self._log_first_error(str(error))

    def _wait_for_writer(self, seconds: float = 0.0) -> bool:
        """Waits at most `seconds` for the process that writes report.html. Returns True if none runs any more. Logs the
        error of one that has failed.
        """
        if self._starter is None:
            return True
        poll = select.poll()  # select.select takes no descriptor above 1023, of which a large world has many
        poll.register(self._starter.stdout, select.POLLIN)
        if not poll.poll(1000 * seconds):
            return False
        if self._starter.stdout.read() != b"written":
            self._errors.seek(0)
            lines = self._errors.read().decode("utf-8", "replace").split("\n")
            self._log_first_error(
                next((line.strip() for line in reversed(lines) if line.strip()), "its process was ended")
            )
        self._close_writer()
        return True

    def _close_writer(self) -> None:
        """Closes the pipes of the process that writes report.html, after its end."""
        self._errors.close()
        self._starter.stdout.close()
        self._starter.wait()
        self._starter = None

    def _log_first_error(self, reason: str) -> None:
        """Logs why report.html was not written, the first time only."""
        if not self._failed:
            self._failed = True
            self._note(f"report.html was not written, and training goes on: {reason}")
