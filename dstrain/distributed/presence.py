"""Ranks of one machine know each other's processes, from before they meet: a dead one ends the others.

A launcher ends all ranks when one has died. Ranks that were started by hand, or by srun without --kill-on-bad-exit,
would wait for it until faults.timeout_minutes, where they have not met yet or compute on GPUs. So each rank writes its
pid into a file of the launch, in the folder for temporary files, and looks at those of the others. Ranks of one launch
have one parent, their launcher or the script that started them: two commands on one machine never know each other.

    TMP/dstrain-UID/LAUNCH/RANK-PID    start time of the process; removed by a rank that ends as it should
"""

import contextlib
import functools
import hashlib
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

from dstrain.distributed.launcher import read_place
from dstrain.distributed.processes import read_birth

Process = tuple[int, str]  # pid and start time

_LAUNCH = ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")  # what a launch shares, too


class Presence:
    """The other ranks of this launch on this machine.

    patience: seconds that this rank has to end by itself, with a better message, once another has died.
    """

    def __init__(self, patience: float = 20.0):
        self._patience = patience
        self._file: Path | None = None
        self._began = _read_start()
        self._alive: dict[int, Process] = {}  # those that have been seen alive

    def announce(self) -> None:
        """Writes down this process and watches the others in a thread of its own; nothing where no file can be made."""
        folder = Path(tempfile.gettempdir()) / f"dstrain-{os.getuid()}" / _name_launch()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.parent.stat().st_uid != os.getuid():  # pids that others wrote would be believed
                return
            temporary = folder / f".{os.getpid()}"
            temporary.write_text(read_birth(os.getpid()))
            temporary.rename(folder / f"{read_place().rank}-{os.getpid()}")
        except OSError:
            return
        self._file = folder / f"{read_place().rank}-{os.getpid()}"
        threading.Thread(target=self._watch, name="presence", daemon=True).start()

    def others(self) -> dict[int, Process]:
        """The other ranks of this launch here that have not left, dead ones included.

        The first process of a rank that was seen alive stays the one that counts, whatever is started beside it. A file
        that an earlier launch has left is known by its age.
        """
        dead, present, mine = {}, set(), self._file
        for path in sorted(mine.parent.glob("[0-9]*-*")) if mine else ():
            try:
                rank, pid = map(int, path.name.split("-"))
                process, written = (pid, path.read_text()), path.stat().st_mtime
            except (OSError, ValueError):  # it has just left
                continue
            if rank == read_place().rank:
                continue
            present.add((rank, process))
            if read_birth(pid) == process[1]:
                self._alive.setdefault(rank, process)
            elif written >= self._began:
                dead[rank] = process
        return {rank: process for rank, process in (dead | self._alive).items() if (rank, process) in present}

    def leave(self) -> None:
        """This rank ends as it should: the others go on."""
        mine, self._file = self._file, None
        if mine:
            with contextlib.suppress(OSError):
                mine.unlink()
                mine.parent.rmdir()  # by the last rank

    def _watch(self) -> None:
        since: float | None = None
        while True:
            time.sleep(1)
            dead = sorted((rank, pid) for rank, (pid, born) in self.others().items() if read_birth(pid) != born)
            since = (since or time.monotonic()) if dead else None
            if since and time.monotonic() - since > self._patience:
                names = ", ".join(f"rank {rank} (process {pid})" for rank, pid in dead)
                print(
                    f"error: {names} on {socket.gethostname()} has ended, and rank {read_place().rank} ends, too. All "
                    "saved is whole; the same command goes on",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)


@functools.cache
def presence() -> Presence:
    """This process's own."""
    return Presence()


def _name_launch() -> str:
    """A name that the ranks of one launch on this machine share; containers are machines, too."""
    try:
        processes = os.readlink("/proc/self/ns/pid")
    except OSError:
        processes = ""
    parent = os.getppid()
    words = [socket.gethostname(), processes, parent, read_birth(parent), *map(os.environ.get, _LAUNCH)]
    return hashlib.sha1(repr(words).encode()).hexdigest()[:16]


def _read_start() -> float:
    """When this process began, in seconds of time.time()."""
    ticks = int(read_birth(os.getpid()) or 0)
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
