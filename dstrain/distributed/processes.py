"""Other processes of this machine, as /proc shows them; without /proc there seem to be none."""

import os
from pathlib import Path


def identity(pid: int) -> str:
    """The start time of a process, which tells it from a later one of the same pid; "" when it is gone or a zombie."""
    fields = _stat(pid)
    return fields[19] if len(fields) > 19 and fields[0] != "Z" else ""


def stopped(pid: int) -> bool:
    """Whether a process is suspended, by SIGSTOP or by a debugger."""
    return _stat(pid)[:1] in (["T"], ["t"])


def parent(pid: int) -> int:
    """The pid of a process's parent; 0 when it is gone."""
    fields = _stat(pid)
    return int(fields[1]) if len(fields) > 1 else 0


def descendants(pid: int) -> list[int]:
    """The living children of a process, their children, and so on; zombies are left out."""
    parents = {int(name): parent(int(name)) for name in os.listdir("/proc") if name.isdigit() and identity(int(name))}
    line, last = [], [pid]
    while last:
        last = [child for child, above in parents.items() if above in last]
        line += last
    return line


def command_line(pid: int) -> str:
    """A process's command line, its words separated by NUL; "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third (state) on; the second may hold blanks and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
