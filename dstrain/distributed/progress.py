"""Prints on rank 0 what a run is doing: a line for each phase of its start, and one whenever nothing was printed for
long.

    main thread    print_lines("data: ..."): prints a line at once, which also goes to log.txt later
                   enter_phase("listing data/images"), record_progress(): print nothing, but tell the watchdog
    a thread       after 20 s without a line: "still listing data/images, for 20 s, at folder.py:33 (_scan)", and again

It imports no torch, since that alone may take half a minute from a network file system. The thread's lines go to
stderr, and into no file.
"""

import functools
import os
import platform
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

from tqdm import tqdm

from dstrain import __version__
from dstrain.distributed.launcher import read_rank_and_world
from dstrain.distributed.processes import find_current_line_of_thread, is_debugged

_TICK = 1.0  # seconds between two looks


class Phases(AbstractContextManager):
    """Within its block, a thread of rank 0 prints what the main thread is doing, whenever nothing was printed for
    `quiet` seconds.
    """

    def __init__(self, quiet: float = 20.0) -> None:
        self._quiet = quiet
        self._main = threading.get_ident()
        # When the main thread, and any other, last made progress: the watchdog's clock.
        self.beaten = self.beaten_beside = time.monotonic()
        self._phase = ("beginning", self.beaten)
        self._heard = self.beaten  # when the last line was printed
        self._settled = False
        self._lines: list[str] = []  # said, and not in log.txt yet
        self._left = threading.Event()
        self._print: Callable[[str], None] = _write_to_stderr

    def __enter__(self) -> "Phases":
        self._left, self._settled = threading.Event(), False
        self.enter_phase("beginning")
        self.postpone_next_heartbeat_line()
        self._main = threading.get_ident()
        if read_rank_and_world().rank == 0:
            threading.Thread(target=self._print_heartbeat_lines, args=(self._left,), name="phases", daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._left.set()

    def enter_phase(self, phase: str) -> None:
        """Records that the main thread enters a phase of its work, such as "building networks", and so makes
        progress.
        """
        self.record_progress()
        if phase != self._phase[0]:
            self._phase = (phase, self.beaten)

    def record_progress(self, ago: float = 0.0) -> None:
        """Records that this thread ended a piece of work `ago` seconds ago. (The watchdog asks for it; the main thread
        is recorded apart from all others.) Takes no lock and exchanges nothing between ranks.
        """
        if threading.get_ident() == self._main:
            self.beaten = time.monotonic() - ago
        else:
            self.beaten_beside = time.monotonic() - ago

    @property
    def phase(self) -> str:
        return self._phase[0]

    def print_lines(self, *lines: str) -> None:
        """On rank 0, prints lines on stdout, and keeps them for `take_printed_lines`. Ignores that stdout is closed."""
        if read_rank_and_world().rank == 0:
            self._lines += lines
            with suppress(OSError, ValueError):  # a closed pipe or terminal ends no training
                for line in lines:
                    print(line, flush=True)
            self.postpone_next_heartbeat_line()

    def take_printed_lines(self) -> list[str]:
        """Returns the lines that `print_lines` has printed since the last call of this method."""
        lines, self._lines = self._lines, []
        return lines

    def postpone_next_heartbeat_line(self) -> None:
        """Records that something was printed just now. This delays the next "still ..." line, which says what the main
        thread is doing, for `quiet` seconds.
        """
        self._heard = time.monotonic()

    def print_fewer_heartbeat_lines(self) -> None:
        """Makes the "still ..." lines, which say what the main thread is doing, rarer. From now on only a phase that
        lasts longer than `quiet` seconds gets one. Training calls this, since it reports its steps itself.
        """
        self._settled = True

    def redirect_heartbeat_lines(self, write: Callable[[str], None]) -> None:
        """From now on, calls `write` with each "still ..." line, which says what the main thread is doing, instead of
        writing the line to stderr. So it can be printed above a progress bar.
        """
        self._print = write

    def _is_heartbeat_due(self, now: float) -> bool:
        """Returns whether to print a "still ..." line now: if nothing was printed for `quiet` seconds. After
        `print_fewer_heartbeat_lines`, the phase must also have lasted that long.
        """
        since = max(self._phase[1], self._heard) if self._settled else self._heard
        return now - since >= self._quiet

    def _print_heartbeat_lines(self, ended: threading.Event) -> None:
        """Prints a "still ..." line, which says what the main thread is doing, whenever nothing was printed for long.
        Ends when `ended` is set.
        """
        while not ended.wait(_TICK):
            now = time.monotonic()
            if not self._is_heartbeat_due(now) or is_debugged(self._main):
                continue
            phase, since = self._phase
            lasts = now - since
            begins = f"still {phase}, for {lasts:.0f} s" if lasts >= self._quiet else f"now {phase}"
            where, exchanges = find_current_line_of_thread(self._main)
            waits = ", waiting for other ranks" if exchanges and read_rank_and_world().world > 1 else ""
            self.postpone_next_heartbeat_line()
            if not ended.is_set():
                self._print(f"{begins}{waits}, at {where}")


def make_greeting_line() -> str:
    """Returns the line that a command prints first: version, rank, world size, process id, host and Python."""
    own = read_rank_and_world()
    return (
        f"dstrain {__version__}: rank {own.rank} of {own.world}, process {os.getpid()} on {socket.gethostname()}, "
        f"Python {platform.python_version()}"
    )


def _write_to_stderr(text: str) -> None:
    """Writes a line to file descriptor 2, without sys.stderr and its lock: a process that is forked at this moment
    would inherit the lock locked.
    """
    with suppress(OSError):
        os.write(2, f"{text}\n".encode("ascii", "backslashreplace"))


@functools.cache
def get_phases() -> Phases:
    """Returns the single Phases of this process; the first call makes it."""
    return Phases()


class Bar(tqdm):
    """A progress bar of tqdm on rank 0; hidden on other ranks, or if `show` is False. Each update also enters the phase
    "PHASE: COUNT of TOTAL" of this process, on all ranks.
    """

    def __init__(self, phase: str, *, show: bool = True, **options: Any) -> None:
        self._phase = phase
        super().__init__(disable=None if show and read_rank_and_world().rank == 0 else True, **options)
        self._enter_phase()

    def update(self, n: float | None = 1) -> bool | None:
        if self.disable:
            self.n += n  # tqdm leaves a hidden bar where it began
        else:
            get_phases().postpone_next_heartbeat_line()
        drawn = super().update(n)
        self._enter_phase()
        return drawn

    def _enter_phase(self) -> None:
        get_phases().enter_phase(f"{self._phase}: {self.n:,} of {self.total:,}")
