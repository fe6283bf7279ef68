"""Lets the ranks of one machine watch each other's processes from their start: a dead rank ends the others.

A launcher ends all ranks when one has died. Ranks that were started by hand, or by srun without --kill-on-bad-exit,
would wait for the dead rank until faults.timeout_minutes, if they are not connected yet or compute on GPUs. So each
rank writes its pid into a file of the launch, in the folder for temporary files, and reads the files of the others.
Ranks of one launch have the same parent process, their launcher or the script that started them, so two commands on one
machine never watch each other. If a parent starts the same ranks again, each rank finds a file of its own number, and
uses the folder of the next attempt.

    TMP/dstrain-UID/LAUNCH/ATTEMPT/RANK    pid and start time of the process, or "left" once it has ended in order
"""

import contextlib
import functools
import hashlib
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

from dstrain.distributed.launcher import read_rank_and_world
from dstrain.distributed.processes import read_start_time

Process = tuple[int, str]  # pid and start time

# What a launch shares, too.
_LAUNCH = ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RESTART_COUNT")


class Presence:
    """Watches the other ranks of this launch on this machine, and ends this process after one of them has died."""

    # Seconds between the death of another rank and the end of this process, which may fail with a better message
    # meanwhile.
    _patience = 20.0

    def __init__(self) -> None:
        self._file: Path | None = None

    def announce_and_watch_ranks(self) -> None:
        """Writes the pid of this process into a file, where the other ranks of this machine find it. Starts a thread
        that ends this process with exit code 1 once another rank of this machine has been dead for 20 seconds.
        Does nothing if the file cannot be made.
        """
        folder = Path(tempfile.gettempdir()) / f"dstrain-{os.getuid()}" / make_launch_folder_name()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.parent.lstat().st_uid != os.getuid():  # pids that others wrote would be believed
                return
            self._file = _write_process_file(folder)
        except OSError:
            return
        threading.Thread(target=self._watch_other_ranks, name="presence", daemon=True).start()

    def find_other_ranks(self) -> dict[int, Process]:
        """Returns {rank: (pid, start time)} of the other ranks of this launch on this machine. Dead ones are among
        them; those that have called `mark_ended_and_clean_up` are not. Returns {} before `announce_and_watch_ranks`.
        """
        mine, found = self._file, {}
        for path in sorted(mine.parent.glob("*")) if mine else ():
            with contextlib.suppress(OSError, ValueError):  # it has left, or is only just written
                pid, born = path.read_text().split()
                if path != mine:
                    found[int(path.name)] = (int(pid), born)
        return found

    def mark_ended_and_clean_up(self) -> None:
        """Writes into this rank's file that it has ended as it should, so that the others do not end because of it. The
        last rank that does so deletes the files of all ranks. Does nothing before `announce_and_watch_ranks`.
        """
        mine, self._file = self._file, None
        if mine:
            with contextlib.suppress(OSError):
                mine.write_text("left")
                if all(path.read_text() == "left" for path in mine.parent.iterdir()):
                    shutil.rmtree(mine.parent)
                    mine.parent.parent.rmdir()  # unless there is another attempt

    def _watch_other_ranks(self) -> None:
        """Looks every second for other ranks of this machine that have died. Once one has been dead for `patience`
        seconds, prints an error and ends this process with exit code 1. Never returns.
        """
        since: float | None = None
        while True:
            time.sleep(1)
            dead = sorted(
                (rank, pid) for rank, (pid, born) in self.find_other_ranks().items() if read_start_time(pid) != born
            )
            since = (since or time.monotonic()) if dead else None
            if since and time.monotonic() - since > self._patience:
                names = ", ".join(f"rank {rank} (process {pid})" for rank, pid in dead)
                print(
                    f"error: {names} on {socket.gethostname()} has ended, and rank {read_rank_and_world().rank} ends, "
                    "too. All saved is whole; the same command goes on",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)


@functools.cache
def get_presence() -> Presence:
    """Returns the single Presence of this process; the first call makes it."""
    return Presence()


def make_launch_folder_name() -> str:
    """Returns a name for a folder that is equal for all ranks of one launch on this machine, and differs between
    launches and between containers.
    """
    try:
        processes = os.readlink("/proc/self/ns/pid")
    except OSError:
        processes = ""
    parent = os.getppid()
    words = [socket.gethostname(), processes, parent, read_start_time(parent), *map(os.environ.get, _LAUNCH)]
    return hashlib.sha1(repr(words).encode()).hexdigest()[:16]


def _write_process_file(folder: Path) -> Path:
    """Writes the pid and start time of this process into a new file FOLDER/ATTEMPT/RANK, and returns its path. ATTEMPT
    is the highest number in `folder`, or the next one if this rank has a file in it already. Raises OSError if the file
    cannot be written.
    """
    attempt = max((int(path.name) for path in folder.iterdir()), default=0)
    while True:
        mine = folder / str(attempt) / str(read_rank_and_world().rank)
        mine.parent.mkdir(exist_ok=True, mode=0o700)
        try:
            with open(mine, "x", encoding="ascii") as file:
                file.write(f"{os.getpid()} {read_start_time(os.getpid())}")
            return mine
        except FileExistsError:
            attempt += 1
