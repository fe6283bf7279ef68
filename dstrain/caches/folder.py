"""What the makers of all caches share: a folder that one command at a time writes, and a limit of unreadable files."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from dstrain.ranks import group
from dstrain.recipe import ConfigError, write_errors
from dstrain.runs import folders

SAME_COMMAND = "what is there is whole: give the same command again once it can"


@contextmanager
def claimed(out: Path, verb: str, prepare: Callable[[], str | None]) -> Iterator[None]:
    """Inside, `out` is locked against other commands, and `prepare` has run on rank 0; on all ranks together.

    ConfigError: the folder cannot be written, another process `verb` into it, or `prepare` has returned a problem.
    """
    first, problem, lock = group.rank() == 0, None, nullcontext()
    if first:
        with write_errors(f"--out {out}", "name a folder that can be written"):
            lock = folders.claim(out, busy=f"--out {out}: another process {verb} into it; wait for its end")
    with lock:
        try:
            problem = prepare() if first else None
        except OSError as error:
            path = error.filename or out
            problem = f"--out {path} cannot be read or written ({error.strerror}): name another folder"
        if problem := group.from_first(problem):
            raise ConfigError(problem)
        yield
    group.barrier()


def of_all_ranks(entries: Iterable[Any]) -> list[Any]:
    """The entries of every rank, on every rank."""
    return [entry for rank in group.objects(list(entries)) for entry in rank]


def require_readable(bad: int, total: int, max_fraction: float, unit: str) -> None:
    """ConfigError: more than a fraction of the files are unreadable. One always may be, unless the fraction is 0."""
    if bad > max(max_fraction * total, 1 if max_fraction else 0):
        raise ConfigError(f"{bad} of {total} {unit} cannot be read, more than --max-bad-fraction {max_fraction} "
                          "tolerates: repair or remove them, or raise it")
