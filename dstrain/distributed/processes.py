"""Reads where threads of this process stand, and other processes of this machine from /proc, without torch.

Without /proc there seem to be no other processes.
"""

import faulthandler
import os
import signal
import sys
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_DEBUGGERS = ("pdb.py", "bdb.py", "pydevd.py")


def read_start_time(pid: int) -> str:
    """Returns when a process started, in clock ticks as a string, which tells it from a later process with its pid; ""
    if it has ended, also as a zombie.
    """
    fields = _read_stat(pid)
    return fields[19] if len(fields) > 19 and fields[0] != "Z" else ""


def is_suspended(pid: int) -> bool:
    """Returns whether a process is suspended, by SIGSTOP or by a debugger."""
    return _read_stat(pid)[:1] in (["T"], ["t"])


def read_parent(pid: int) -> int:
    """Returns the pid of a process's parent; 0 if the process has ended."""
    fields = _read_stat(pid)
    return int(fields[1]) if len(fields) > 1 else 0


def list_descendants(pid: int) -> list[int]:
    """Returns the pids of the living children of a process, their children, and so on; zombies are left out."""
    parents = {
        int(name): read_parent(int(name))
        for name in os.listdir("/proc")
        if name.isdigit() and read_start_time(int(name))
    }
    line, last = [], [pid]
    while last:
        last = [child for child, above in parents.items() if above in last]
        line += last
    return line


def read_command(pid: int) -> str:
    """Returns a process's command line, its words separated by NUL; "" if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _read_stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the third on, the state; [] if the process has ended. The second field
    may hold blanks and brackets.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def print_stacks_on_request() -> None:
    """Installs a handler by which `kill -USR2 PID` prints the stacks of all threads of this process on stderr."""
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)


def find_current_line(thread: int) -> tuple[str, bool]:
    """Returns the innermost line of dstrain that a thread is in, as "FILE:LINE (FUNCTION)", and whether the thread
    exchanges data with other ranks there.
    """
    frame, place, exchanges = sys._current_frames().get(thread), "", False
    while frame is not None and not place:
        path = frame.f_code.co_filename
        exchanges |= "torch/distributed/" in path or "deepspeed/comm/" in path
        if (path.startswith(f"{_PACKAGE}/") and not path.endswith("distributed/group.py")) or frame.f_back is None:
            place = f"{Path(path).name}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return place, exchanges


def is_debugged(thread: int) -> bool:
    """Returns whether a thread stands in a debugger of Python."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if Path(frame.f_code.co_filename).name in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False
