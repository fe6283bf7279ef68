"""The exit codes of commands, and the file in which ranks report them to `dstrain keep`.

torchrun exits with 1 if a rank exits with any code but 0. So each rank also appends its code, in a line, to the file
that the environment variable DSTRAIN_ENDED names.
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


def append_exit_code_to_file(code: int) -> None:
    """Appends the exit code of this rank, as a line, to the file that the environment variable DSTRAIN_ENDED names.
    Does nothing if the variable is not set or the file cannot be written.
    """
    if path := os.environ.get(_VARIABLE):
        with contextlib.suppress(OSError), open(path, "a", encoding="ascii") as file:
            file.write(f"{code}\n")


def make_exit_code_environment(path: str) -> dict[str, str]:
    """Returns a copy of this process's environment in which DSTRAIN_ENDED is `path`, the file in which ranks report
    their exit codes.
    """
    return {**os.environ, _VARIABLE: path}


def read_exit_codes(path: str) -> list[int]:
    """Returns the exit codes in a file that ranks have written by `append_exit_code_to_file`, in the order of its
    lines. Skips lines that are no number. Raises OSError if the file cannot be read.
    """
    with open(path, encoding="ascii") as file:
        return [int(line) for line in file if line.strip().isdigit()]
