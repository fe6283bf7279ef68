"""Ranks of one machine know each other's processes, from before they meet: a dead one ends the others.

A launcher ends all ranks when one has died. Ranks that were started by hand, or by srun without --kill-on-bad-exit,
would wait for it until faults.timeout_minutes, where they have not met yet or compute on GPUs. So each rank writes its
pid into a file of the launch, in the folder for temporary files, and looks at those of the others. Ranks of one launch
have one parent, their launcher or the script that started them: two commands on one machine never know each other. A
parent may start the same ranks again: then each finds a file of its own number, and enters the next attempt.

    TMP/dstrain-UID/LAUNCH/ATTEMPT/RANK    pid and start time of the process; or that it has left as it should
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

from dstrain.distributed.launcher import read_place
from dstrain.distributed.processes import read_start_time

Process = tuple[int, str]  # pid and start time

# What a launch shares, too.
_LAUNCH = ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RESTART_COUNT")


class Presence:
    """Knows the other ranks of this launch on this machine.

    patience: seconds that this rank has to end by itself, with a better message, once another has died.
    """

    def __init__(self, patience: float = 20.0):
        self._patience = patience
        self._file: Path | None = None

    def announce_process(self) -> None:
        """Writes the pid of this process and watches the other ranks in a thread; does nothing where no file can be
        made.
        """
        folder = Path(tempfile.gettempdir()) / f"dstrain-{os.getuid()}" / name_launch_folder()
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.parent.lstat().st_uid != os.getuid():  # pids that others wrote would be believed
                return
            self._file = _write_process_file(folder)
        except OSError:
            return
        threading.Thread(target=self._watch_others, name="presence", daemon=True).start()

    def list_other_ranks(self) -> dict[int, Process]:
        """Returns {rank: (pid, start time)} of the other ranks of this launch on this machine that have not ended in
        order, dead ones included.
        """
        mine, found = self._file, {}
        for path in sorted(mine.parent.glob("*")) if mine else ():
            with contextlib.suppress(OSError, ValueError):  # it has left, or is only just written
                pid, born = path.read_text().split()
                if path != mine:
                    found[int(path.name)] = (int(pid), born)
        return found

    def mark_ended(self) -> None:
        """Marks this rank as ended in order, so that the others go on. The last rank removes the files of all."""
        mine, self._file = self._file, None
        if mine:
            with contextlib.suppress(OSError):
                mine.write_text("left")
                if all(path.read_text() == "left" for path in mine.parent.iterdir()):
                    shutil.rmtree(mine.parent)
                    mine.parent.parent.rmdir()  # unless there is another attempt

    def _watch_others(self) -> None:
        since: float | None = None
        while True:
            time.sleep(1)
            dead = sorted(
                (rank, pid) for rank, (pid, born) in self.list_other_ranks().items() if read_start_time(pid) != born
            )
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
def get_presence() -> Presence:
    """Returns the Presence of this process, which the first call makes."""
    return Presence()


def name_launch_folder() -> str:
    """Returns the name of a folder, equal for all ranks of one launch on this machine; each container counts as a
    machine.
    """
    try:
        processes = os.readlink("/proc/self/ns/pid")
    except OSError:
        processes = ""
    parent = os.getppid()
    words = [socket.gethostname(), processes, parent, read_start_time(parent), *map(os.environ.get, _LAUNCH)]
    return hashlib.sha1(repr(words).encode()).hexdigest()[:16]


def _write_process_file(folder: Path) -> Path:
    """Writes this process into a file of its rank, and returns the file: in the folder of the newest attempt, or if
    that has this rank already, of the next one.
    """
    attempt = max((int(path.name) for path in folder.iterdir()), default=0)
    while True:
        mine = folder / str(attempt) / str(read_place().rank)
        mine.parent.mkdir(exist_ok=True, mode=0o700)
        try:
            with open(mine, "x", encoding="ascii") as file:
                file.write(f"{os.getpid()} {read_start_time(os.getpid())}")
            return mine
        except FileExistsError:
            attempt += 1
