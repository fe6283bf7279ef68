"""Finds the code line that a thread of this process executes, and reads other processes of this machine from /proc,
without torch.

On a system without /proc, every other process seems to have ended.
"""

import faulthandler
import os
import signal
import sys
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_DEBUGGERS = ("pdb.py", "bdb.py", "pydevd.py")


def read_start_time(pid: int) -> str:
    """Returns when a process started, in clock ticks as a string, or "" if it has ended or is a zombie. A later process
    with the same pid has another start time.
    """
    fields = _read_stat(pid)
    return fields[19] if len(fields) > 19 and fields[0] != "Z" else ""


def is_suspended(pid: int) -> bool:
    """Returns whether a process is suspended by SIGSTOP or by a debugger; False if it has ended."""
    return _read_stat(pid)[:1] in (["T"], ["t"])


def read_parent(pid: int) -> int:
    """Returns the pid of a process's parent; 0 if the process has ended."""
    fields = _read_stat(pid)
    return int(fields[1]) if len(fields) > 1 else 0


def list_descendants(pid: int) -> list[int]:
    """Returns the pids of the living children of a process, then of their children, and so on. Leaves out zombies.
    Raises FileNotFoundError if there is no /proc.
    """
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
    """Returns a process's command line, its words separated by NUL; "" if the process has ended or cannot be read."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _read_stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the third one (the state) on; [] if the process has ended. The second
    field, the program's name, may hold blanks and brackets.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def install_stack_dump_handler() -> None:
    """Installs a handler for SIGUSR2: after `kill -USR2 PID`, this process prints the stacks of all its threads on
    stderr.
    """
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)


def find_current_line(thread: int) -> tuple[str, bool]:
    """Returns the innermost line of dstrain, outside distributed/group.py, that a thread executes, as "FILE:LINE
    (FUNCTION)", and whether the thread exchanges data with other ranks there. Without such a line, returns the thread's
    outermost line; "" and False if there is no such thread.
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
    """Returns whether a thread is inside a Python debugger, such as pdb."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if Path(frame.f_code.co_filename).name in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False
