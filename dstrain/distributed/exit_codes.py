"""Exit codes of a command, and how its ranks tell them to dstrain keep whatever their launcher makes of them.

torchrun ends with 1 where a rank ends with any code but 0, so ranks also write theirs, a line each, into the file that
the environment variable DSTRAIN_ENDED names.
"""

import contextlib
import os

DONE = 0
BUG = 1  # or a lost rank
WRONG_INPUT = 2
DIVERGED = 3
HUNG = 4
STOPPED = 75  # EX_TEMPFAIL: stopped early and saved, the same command goes on
DELIBERATE = (WRONG_INPUT, DIVERGED, STOPPED)  # the same command would end so again, or was asked to

_VARIABLE = "DSTRAIN_ENDED"


def note_code(code: int) -> None:
    """Writes how this rank ends, where a supervisor asks for it."""
    if path := os.environ.get(_VARIABLE):
        with contextlib.suppress(OSError), open(path, "a", encoding="ascii") as file:
            file.write(f"{code}\n")


def ask_codes(path: str) -> dict[str, str]:
    """Returns this process's environment, in which ranks write how they end into a file."""
    return {**os.environ, _VARIABLE: path}


def read_codes(path: str) -> list[int]:
    """Reads what ranks of this machine have written, in the order of their ends."""
    with open(path, encoding="ascii") as file:
        return [int(line) for line in file if line.strip().isdigit()]
