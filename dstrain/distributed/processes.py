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
    """Returns the time at which a process started, in clock ticks as a string; "" if it has ended or is a zombie. So a
    later process with the same pid can be told apart.
    """
    fields = _read_stat_fields(pid)
    return fields[19] if len(fields) > 19 and fields[0] != "Z" else ""


def is_suspended(pid: int) -> bool:
    """Returns whether a process is suspended, by SIGSTOP or by a debugger. Returns False if it has ended."""
    return _read_stat_fields(pid)[:1] in (["T"], ["t"])


def read_parent_pid(pid: int) -> int:
    """Returns the pid of a process's parent; 0 if the process has ended."""
    fields = _read_stat_fields(pid)
    return int(fields[1]) if len(fields) > 1 else 0


def list_descendant_pids(pid: int) -> list[int]:
    """Returns the pids of a process's children, then of their children, and so on; without zombies. Raises
    FileNotFoundError if there is no /proc.
    """
    parents = {
        int(name): read_parent_pid(int(name))
        for name in os.listdir("/proc")
        if name.isdigit() and read_start_time(int(name))
    }
    line, last = [], [pid]
    while last:
        last = [child for child, above in parents.items() if above in last]
        line += last
    return line


def read_command_line(pid: int) -> str:
    """Returns the command line of a process, with NUL between the words; "" if the process has ended or cannot be
    read.
    """
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _read_stat_fields(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat, from the third one, the state, on; [] if the process has ended. The second
    field, the program's name, may contain blanks and brackets.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def install_stack_dump_handler() -> None:
    """Makes this process print the stacks of all its threads on stderr when it gets SIGUSR2, as by `kill -USR2 PID`."""
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)


def find_current_line_of_thread(thread: int) -> tuple[str, bool]:
    """Returns (place, exchanges) of a thread, given by its ident. `place` is the line of code that it executes now, as
    "FILE:LINE (FUNCTION)": the innermost line in dstrain, group.py left out, else the outermost line. `exchanges` says
    whether the thread exchanges data with other ranks there. Returns ("", False) if there is no such thread.
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
    """Returns whether a thread (by its ident) is inside a Python debugger, such as pdb."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if Path(frame.f_code.co_filename).name in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False
