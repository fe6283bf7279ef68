"""Detects reasons to stop early: SIGTERM, SIGINT, SIGUSR1 or SIGHUP to any rank, a file named `stop`, the end of the
launcher.

    at once       while nothing is unsaved (every verb, and the start of training): Stopped is raised in the main thread
    by a vote     while training: the ranks vote with each step's last micro-batch (group.Ballot) and between the
                  pieces of long work (pieces.py), so that all save the same step and end together

A signal handler only records the reason. A thread checks for the other reasons, tells the other ranks over the store,
and, while nothing is unsaved, ends a process whose main thread does not return from C code, such as an exchange that
waits. DeepSpeed's launcher leaves its ranks running when it is killed, so each rank watches the launchers that started
it, or its ssh session on another machine. A second Ctrl-C ends the process at once, without saving. Under nohup SIGHUP,
which a closed terminal sends, stays ignored.
"""

import functools
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from dstrain.disk.owner import require_claim_not_lost
from dstrain.distributed import exit_codes
from dstrain.distributed.launcher import read_rank_and_world
from dstrain.distributed.processes import read_command_line, read_parent_pid, read_start_time
from dstrain.distributed.progress import get_phases

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_LAUNCHERS = ("deepspeed", "torchrun", "torch.distributed")
_REMOTE = "deepspeed.launcher.launch"
_SHELLS = ("sh", "bash", "dash", "zsh")
_KEY = "dstrain/stop"
IDLE = "dstrain/idle"  # key: the seconds since a piece of rank 0's work has ended
_TICK = 0.5  # seconds between two looks of the thread
_PATIENCE = 8.0  # seconds that the main thread has to leave where nothing is unsaved


class Stopped(SystemExit):
    """Raised to leave work because of a reason to stop. If nobody catches it, the process ends with exit code 75."""

    def __init__(self) -> None:
        super().__init__(exit_codes.STOPPED)


class Stops:
    """Collects reasons to stop: signals, a file, the end of the launcher, other ranks' reasons. Create it in the main
    thread, since it installs signal handlers.

    folder           the folder in which a file named `stop` is a reason; None: no such file
    watch_launcher   whether the end of the launcher is a reason
    at_once          whether a reason raises Stopped in the main thread; else the main thread must call `is_requested`
    """

    def __init__(self, folder: Path | None = None, watch_launcher: bool = True, at_once: bool = False):
        self.reason: str | None = None
        self.at_once, self.patience = at_once, _PATIENCE if at_once else None
        self._interrupted = self._left = False
        self._launchers = _find_launchers()
        self.watch_stop_file_and_launchers(folder, watch_launcher)
        self._store: Any = None
        self._before: dict[int, Any] = {}
        self.install_signal_handlers(*(number for number in SIGNALS if number != signal.SIGINT or not at_once))
        self._closed, self._main = threading.Event(), threading.get_ident()
        self._numbers, numbers = os.pipe()
        os.set_blocking(numbers, False)
        self._wakeup_before = signal.set_wakeup_fd(numbers, warn_on_full_buffer=False)
        threading.Thread(target=self._watch_for_stop_reasons, args=(numbers,), name="stops", daemon=True).start()

    def install_signal_handlers(self, *numbers: int) -> None:
        """Installs handlers for the signals with these numbers, which make each such signal a reason to stop. Does not
        handle SIGHUP if it is ignored so far, as under nohup.
        """
        for number in numbers:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before.setdefault(number, signal.signal(number, self._handle_signal))

    def watch_stop_file_and_launchers(self, folder: Path | None, launcher: bool = True) -> None:
        """From now on, a file named `stop` in `folder` is a reason to stop; with None, no file is. If `launcher` is
        False, the end of the launcher is no longer a reason; a later call does not change this.
        """
        self._file = folder / "stop" if folder else None
        self._launchers = self._launchers if launcher else []

    def set_store(self, store: Any) -> None:
        """Sets the store over which the ranks tell each other that they have a reason to stop."""
        self._store = store

    def defer_stops_to_main_thread(self, patience: float | None) -> None:
        """From now on, a reason to stop no longer raises Stopped: the main thread must call `is_requested`. Raises
        Stopped if a reason has raised it before, since other code may have caught it.

        patience   ends the process this many seconds after a reason, whatever the main thread does; None: never
        """
        self.at_once, self.patience = False, patience
        if self._left:  # its exception was raised where nobody let it through
            raise Stopped

    def is_requested(self) -> bool:
        """Returns whether this rank has a reason to stop. Each call looks for the file `stop` and whether the launchers
        have ended; this is cheap enough for every step. Sets `reason` to the first reason found.
        """
        if self.reason is None and self._file and _is_stop_file(self._file):
            self.reason = f"the file {self._file}"
        if self.reason is None and any(read_start_time(pid) != born for pid, born in self._launchers):
            self.reason = "the launcher has gone"
        return self.reason is not None

    def remove_stop_file(self) -> None:
        """Removes the file `stop`, so that the same command can resume. Leaves it if another run owns the folder now.
        Ignores errors of the disk.
        """
        if self._file and _is_stop_file(self._file):
            with suppress(OSError):  # the run is saved in any case; another run's file stays
                require_claim_not_lost(self._file)
                self._file.unlink()

    def announce_end_and_remove_stop_file(self) -> None:
        """Prints why the process ends, and that nothing was unsaved. Removes the file `stop`. If there is a store,
        first tells the other ranks over it that this rank stops, and gives them 2 seconds to read it.
        """
        if self._store is not None:
            self._exchange_stop_reasons_once()
            time.sleep(4 * _TICK)
        self.remove_stop_file()
        print(
            f"{Path(sys.argv[0]).name}: stopped ({self.reason}) while {get_phases().phase}: nothing was unsaved; "
            "the same command goes on",
            file=sys.stderr,
            flush=True,
        )

    def restore_handlers_and_end_thread(self) -> None:
        """Restores the signal handlers that there were before, and ends this object's thread. The next `get_stops`
        makes a new Stops.
        """
        if not self._closed.is_set():
            signal.set_wakeup_fd(self._wakeup_before)
            self._closed.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        get_stops.cache_clear()

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Records a signal as the reason to stop. Raises Stopped at the first signal, unless
        `defer_stops_to_main_thread` was called. Raises KeyboardInterrupt at the second SIGINT.
        """
        if number == signal.SIGINT and self._interrupted:
            raise KeyboardInterrupt
        self._interrupted |= number == signal.SIGINT
        self.reason = self.reason or signal.Signals(number).name
        if self.at_once and not self._left:
            self._left = True
            raise Stopped

    def _watch_for_stop_reasons(self, pipe_end: int) -> None:
        """Looks for reasons to stop until `restore_handlers_and_end_thread` is called. Ends the process if the main
        thread has not ended it within `patience` seconds after a reason. pipe_end: the pipe's end into which Python
        writes the numbers of signals.
        """
        heard: float | None = None
        while not self._closed.is_set():
            if woken := bool(select.select([self._numbers], [], [], _TICK)[0]):
                # The main thread may be in C for long, and run no handler.
                for number in os.read(self._numbers, 64):
                    if number in self._before:
                        self.reason = self.reason or signal.Signals(number).name
            self._exchange_stop_reasons_once()
            if not self.is_requested() or self._closed.is_set():
                continue
            heard = heard or time.monotonic()
            if self.at_once and not self._left and not woken:  # this signal, too, wakes the thread: one each _TICK
                signal.pthread_kill(self._main, signal.SIGTERM)
            if self.patience is not None and time.monotonic() - heard > self.patience:
                self.announce_end_and_remove_stop_file()
                exit_codes.append_exit_code_to_file(exit_codes.STOPPED)
                os._exit(exit_codes.STOPPED)
        os.close(self._numbers)
        os.close(pipe_end)

    def _exchange_stop_reasons_once(self) -> None:
        """Exchanges reasons to stop over the store, if there is one: tells the other ranks if this rank has a reason,
        else takes over that another rank has one. Rank 0 also writes how long ago it last made progress.
        """
        try:
            if self._store is not None and read_rank_and_world().rank == 0:  # for those that wait for it, see group.py
                last = max(get_phases().beaten, get_phases().beaten_beside)
                self._store.set(IDLE, f"{time.monotonic() - last:.1f}")
            if self._store is not None and self.is_requested():
                self._store.set(_KEY, "")
            elif self._store is not None and self._store.check([_KEY]):
                self.reason = self.reason or "another rank was stopped"
        except RuntimeError:  # the store has ended, and with it the run
            self._store = None


@functools.cache
def get_stops() -> Stops:
    """Returns the single Stops of this process; the first call makes it. A reason to stop raises Stopped in the main
    thread until the main thread calls `defer_stops_to_main_thread`.
    """
    return Stops(at_once=True)


def _is_stop_file(path: Path) -> bool:
    """Returns whether something exists at a path that can be removed as a file: anything but a folder."""
    return path.exists() and not path.is_dir()


def _find_launchers() -> list[tuple[int, str]]:
    """Returns the launchers that have started this process, as (pid, start time), from its parent up. The list may be
    empty. With `deepspeed --hostfile`, it ends with the sshd process through which the launcher was started on this
    host.
    """
    # sshd starts a shell that runs deepspeed.launcher.launch, or becomes it. sshd ends with the connection. If someone
    # has typed `deepspeed` in an ssh session, the session may end without ending the run; its sshd is not included,
    # since another launcher, or the session's shell, is between.
    launchers, pid = [], os.getppid()
    while pid > 1 and _is_launcher(pid):
        launchers.append((pid, read_start_time(pid)))
        pid = read_parent_pid(pid)
    if launchers and _REMOTE in read_command_line(launchers[-1][0]):
        if _is_shell(pid) and _REMOTE in read_command_line(pid):
            pid = read_parent_pid(pid)
        if read_command_line(pid).startswith("sshd"):
            launchers.append((pid, read_start_time(pid)))
    return launchers


def _is_launcher(pid: int) -> bool:
    """Returns whether a process is a launcher of ranks, such as torchrun, by the names of its program and script.
    Shells and `dstrain keep` are no launchers.
    """
    # A shell's script may be called deepspeed.sh, yet it launches no ranks. `dstrain keep` has the launcher's command
    # line after `--`.
    words = read_command_line(pid).partition("\0--\0")[0].split("\0")[:4]
    names = [Path(word).name for word in words]  # a folder, too, may be called deepspeed
    return not _is_shell(pid) and any(word in " ".join(names) for word in _LAUNCHERS)


def _is_shell(pid: int) -> bool:
    """Returns whether a process runs a shell, such as bash, by the name of its program."""
    return Path(read_command_line(pid).partition("\0")[0]).name.removeprefix("-") in _SHELLS
