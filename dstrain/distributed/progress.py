"""What a run is at, on rank 0: a line for each phase of its beginning, and a word wherever nothing is heard for long.

    main thread    say("data: ..."): a line at once, which also goes to log.txt once there is one
                   at("listing data/images"), beat(): nothing is printed yet; the watchdog sees that work goes on
    a thread       after 20 s without a line: "still listing data/images, for 20 s, at folder.py:33 (_scan)", and again

It imports no torch, since that alone may take half a minute from a network file system. Words go to stderr, and into no
file.
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
from dstrain.distributed.launcher import read_place
from dstrain.distributed.processes import find_current_line, is_debugged

_TICK = 1.0  # seconds between two looks


class Phases(AbstractContextManager):
    """Within it a thread says what the thread that entered it is at.

    quiet: seconds without a line, after which it does so.
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
        self.note_output()
        self._main = threading.get_ident()
        if read_place().rank == 0:
            threading.Thread(target=self._watch_silence, args=(self._left,), name="phases", daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._left.set()

    def enter_phase(self, phase: str) -> None:
        """Notes that the main thread makes progress, and in which phase it is from now on."""
        self.note_progress()
        if phase != self._phase[0]:
            self._phase = (phase, self.beaten)

    def note_progress(self, ago: float = 0.0) -> None:
        """Notes that a piece of work was done `ago` seconds ago: a time stamp, without lock or exchange."""
        if threading.get_ident() == self._main:
            self.beaten = time.monotonic() - ago
        else:
            self.beaten_beside = time.monotonic() - ago

    @property
    def phase(self) -> str:
        return self._phase[0]

    def print_lines(self, *lines: str) -> None:
        """Prints lines on rank 0, and keeps them for its log."""
        if read_place().rank == 0:
            self._lines += lines
            with suppress(OSError, ValueError):  # a closed pipe or terminal ends no training
                for line in lines:
                    print(line, flush=True)
            self.note_output()

    def take_printed_lines(self) -> list[str]:
        """Returns the lines that were printed since the last call, for the log."""
        lines, self._lines = self._lines, []
        return lines

    def note_output(self) -> None:
        """Notes the time at which a line was printed."""
        self._heard = time.monotonic()

    def begin_steps(self) -> None:
        """Notes that steps are reported from now on: one that takes no longer than `quiet` needs no line of its own."""
        self._settled = True

    def redirect_output(self, write: Callable[[str], None]) -> None:
        """Prints lines about silence by `write` from now on, which keeps a progress bar whole."""
        self._print = write

    def _is_line_due(self, now: float) -> bool:
        """Returns whether no line was printed for so long that one is due."""
        since = max(self._phase[1], self._heard) if self._settled else self._heard
        return now - since >= self._quiet

    def _watch_silence(self, left: threading.Event) -> None:
        while not left.wait(_TICK):
            now = time.monotonic()
            if not self._is_line_due(now) or is_debugged(self._main):
                continue
            phase, since = self._phase
            lasts = now - since
            begins = f"still {phase}, for {lasts:.0f} s" if lasts >= self._quiet else f"now {phase}"
            where, exchanges = find_current_line(self._main)
            waits = ", waiting for other ranks" if exchanges and read_place().world > 1 else ""
            self.note_output()
            if not left.is_set():
                self._print(f"{begins}{waits}, at {where}")


def make_greeting() -> str:
    """Returns the first line that a command prints: which rank of which launch has begun, and where."""
    own = read_place()
    return (
        f"dstrain {__version__}: rank {own.rank} of {own.world}, process {os.getpid()} on {socket.gethostname()}, "
        f"Python {platform.python_version()}"
    )


def _write_to_stderr(text: str) -> None:
    """Writes a line to stderr without the lock of sys.stderr, which a process that is forked at this moment would
    inherit.
    """
    with suppress(OSError):
        os.write(2, f"{text}\n".encode("ascii", "backslashreplace"))


@functools.cache
def get_phases() -> Phases:
    """Returns the Phases of this process, which the first call makes."""
    return Phases()


class Bar(tqdm):
    """As tqdm. phase: what is done, such as "drawing"; show: whether there may be a bar, which rank 0 alone draws."""

    def __init__(self, phase: str, *, show: bool = True, **options: Any) -> None:
        self._phase = phase
        super().__init__(disable=None if show and read_place().rank == 0 else True, **options)
        self._enter_phase()

    def update(self, n: float | None = 1) -> bool | None:
        if self.disable:
            self.n += n  # tqdm leaves a hidden bar where it began
        else:
            get_phases().note_output()
        drawn = super().update(n)
        self._enter_phase()
        return drawn

    def _enter_phase(self) -> None:
        get_phases().enter_phase(f"{self._phase}: {self.n:,} of {self.total:,}")
