"""When to stop early: SIGTERM, SIGINT, SIGUSR1 or SIGHUP to any rank, a file named `stop`, a launcher that has gone.

A handler only sets a flag. The ranks vote on it with each step's last micro-batch and count the votes after the step
(group.Ballot), so that all save the same step and end together.
DeepSpeed's launcher leaves its ranks running when it is killed. So a rank checks at each step that the launchers which
started it still run, or its ssh session on another machine. A second Ctrl-C ends at once, without saving. Under nohup
SIGHUP, which a closed terminal sends, stays ignored.
"""

import os
import signal
from contextlib import suppress
from pathlib import Path
from types import FrameType

from dstrain.distributed.processes import read_birth, read_command, read_parent

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_LAUNCHERS = ("deepspeed", "torchrun", "torch.distributed")
_REMOTE = "deepspeed.launcher.launch"
_SHELLS = ("sh", "bash", "dash", "zsh")


class Stops:
    """The reasons to stop that this rank has seen; installs its handlers when made, in the main thread."""

    def __init__(self, folder: Path | None, watch_launcher: bool = True):
        self.reason: str | None = None
        self._interrupted = False
        self._file = folder / "stop" if folder else None  # only one rank has to watch it
        self._launchers = _find_launchers() if watch_launcher else []
        self._before = {
            number: signal.signal(number, self._note)
            for number in SIGNALS
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        }

    def requested(self) -> bool:
        """Whether this rank has a reason to stop; cheap enough for every step."""
        if self.reason is None and self._file and self._file.exists():
            self.reason = f"the file {self._file}"
        if self.reason is None and any(read_birth(pid) != born for pid, born in self._launchers):
            self.reason = "the launcher has gone"
        return self.reason is not None

    def settle(self) -> None:
        """Removes the stop file, so that the same command goes on next time."""
        if self._file and self._file.exists():
            with suppress(OSError):  # the run is saved in any case
                self._file.rmdir() if self._file.is_dir() else self._file.unlink()

    def restore(self) -> None:
        """Puts the earlier handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT and self._interrupted:
            raise KeyboardInterrupt
        self._interrupted |= number == signal.SIGINT
        self.reason = self.reason or name


def _find_launchers() -> list[tuple[int, str]]:
    """The launchers among the ancestors of this process, from its parent up, as (pid, start time).

    `deepspeed --hostfile` has sshd start a shell that runs deepspeed.launcher.launch, or becomes it, and sshd's process
    for this session ends with its connection. Where someone has typed `deepspeed` in an ssh session, that session may
    end without ending the run: there another launcher, or the shell of the session, stands between.
    """
    launchers, pid = [], os.getppid()
    while pid > 1 and _is_launcher(pid):
        launchers.append((pid, read_birth(pid)))
        pid = read_parent(pid)
    if launchers and _REMOTE in read_command(launchers[-1][0]):
        if _is_shell(pid) and _REMOTE in read_command(pid):
            pid = read_parent(pid)
        if read_command(pid).startswith("sshd"):
            launchers.append((pid, read_birth(pid)))
    return launchers


def _is_launcher(pid: int) -> bool:
    """Whether a process is a launcher, by the names of its program and script without their folders.

    A shell is none: its script may be called deepspeed.sh, yet it launches no ranks. Nor is dstrain keep, which has
    the launcher's command line behind `--`.
    """
    words = read_command(pid).partition("\0--\0")[0].split("\0")[:4]
    names = [Path(word).name for word in words]  # a folder, too, may be called deepspeed
    return not _is_shell(pid) and any(word in " ".join(names) for word in _LAUNCHERS)


def _is_shell(pid: int) -> bool:
    return Path(read_command(pid).partition("\0")[0]).name.removeprefix("-") in _SHELLS
