"""What the makers of all caches share: a folder that one command at a time writes, and a limit of unreadable files."""

import fcntl
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from dstrain.distributed import group
from dstrain.recipe import ConfigError, explain_write_errors
from dstrain.runs import folders

_SHARDS = ".shards"  # its bytes are locked, one for each shard, and never written
_PATIENCE = 60.0  # seconds, for ranks of an earlier command that still write
SAME_COMMAND = "what is there is whole: give the same command again once it can"


@contextmanager
def claimed(
    out: Path, verb: str, prepare: Callable[[], str | None], numbers: range | None = None, shared: bool = False
) -> Iterator[None]:
    """Inside, `out` is locked against other commands, and `prepare` has run on rank 0; on all ranks together.

    numbers: of the shards that this command writes. shared: other commands may write other shards meanwhile; then
    the whole folder is locked while `prepare` runs, and only these shards afterwards.
    ConfigError: the folder cannot be written, another process `verb` into it, or `prepare` has returned a problem.
    """
    first, problem = group.rank() == 0, None
    busy = f"--out {out}: another process {verb} into it; wait for its end"
    with ExitStack() as locks:
        if first:
            with explain_write_errors(f"--out {out}", "name a folder that can be written"):
                whole = locks.enter_context(folders.lock_folder(out, busy=busy))
        try:
            if first:
                problem = prepare()
            if (
                first
                and problem is None
                and numbers
                and not _locked(locks.enter_context(open(out / _SHARDS, "a")), numbers)
            ):
                problem = busy
            if first and shared:
                whole.close()
        except OSError as error:
            path = error.filename or out
            problem = f"--out {path} cannot be read or written ({error.strerror}): name another folder"
        if problem := group.from_first(problem):
            raise ConfigError(problem)
        yield
    group.barrier()


def _locked(file: IO[str], numbers: range) -> bool:
    """Locks a byte of the file for each of the numbers, until it is closed; False: another process holds some."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:  # not flock, which locks no parts of a file
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, len(numbers), numbers.start)
            return True
        except (BlockingIOError, PermissionError):
            if time.monotonic() > end:
                return False
            time.sleep(0.5)
        except OSError:  # a file system without locks
            return True


def of_all_ranks(entries: Iterable[Any]) -> list[Any]:
    """The entries of every rank, on every rank."""
    return [entry for rank in group.gather_objects(list(entries)) for entry in rank]


def require_readable(bad: int, total: int, max_fraction: float, unit: str) -> None:
    """ConfigError: more than a fraction of the files are unreadable. One always may be, unless the fraction is 0."""
    if bad > max(max_fraction * total, 1 if max_fraction else 0):
        raise ConfigError(
            f"{bad} of {total} {unit} cannot be read, more than --max-bad-fraction {max_fraction} "
            "tolerates: repair or remove them, or raise it"
        )
