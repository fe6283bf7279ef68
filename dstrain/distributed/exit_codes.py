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


def append_exit_code(code: int) -> None:
    """Appends the exit code of this rank to the file that DSTRAIN_ENDED names; does nothing if the variable is not set
    or the file cannot be written.
    """
    if path := os.environ.get(_VARIABLE):
        with contextlib.suppress(OSError), open(path, "a", encoding="ascii") as file:
            file.write(f"{code}\n")


def make_exit_code_environment(path: str) -> dict[str, str]:
    """Returns a copy of this process's environment that tells ranks to write their exit codes into the file `path`."""
    return {**os.environ, _VARIABLE: path}


def read_exit_codes(path: str) -> list[int]:
    """Returns the exit codes that ranks of this machine have written into a file, in the order in which they ended."""
    with open(path, encoding="ascii") as file:
        return [int(line) for line in file if line.strip().isdigit()]
