"""Serves all commands that write shards: claims a folder for one command, completes shards, limits unreadable files."""

import fcntl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from dstrain.distributed import group
from dstrain.recipe import ConfigError, explain_write_errors
from dstrain.runs import folders

_SHARDS = ".shards"  # its bytes are locked, one for each shard, and never written
_PATIENCE = 60.0  # seconds, for ranks of an earlier command that still write
Record = dict[str, Any]  # what is known of a shard that is whole
SAME_COMMAND = "what is there is whole: give the same command again once it can"


@contextmanager
def lock_and_prepare_folder(
    out: Path, verb: str, prepare: Callable[[], str | None], shard_numbers: range | None = None, shared: bool = False
) -> Iterator[None]:
    """Keeps other commands from writing into the folder `out` within the block. Then waits for all ranks. Call it on
    all ranks.

    `shard_numbers` are the shards that this command writes. If `shared`, other commands may write other shards at the
    same time: then only these shards stay locked once `prepare` has run. `verb` says in messages what the other process
    does, such as "encodes".

    `prepare` returns None, or a message that says why the command cannot go on. Raises ConfigError with that message,
    if the folder cannot be written, or if another process writes there.
    """
    first, problem = group.rank() == 0, None
    busy = f"--out {out}: another process {verb} into it; wait for its end"
    with ExitStack() as locks:
        if first:
            with explain_write_errors(f"--out {out}", "name a folder that can be written"):
                doing = verb.removesuffix("s")
                whole = locks.enter_context(folders.lock_folder(out, busy_message=busy, verb=doing))
        try:
            if first:
                problem = prepare()
            if (
                first
                and problem is None
                and shard_numbers
                and not _lock_shards(locks.enter_context(open(out / _SHARDS, "a")), shard_numbers)
            ):
                problem = busy
            if first and shared:
                whole.close()
        except OSError as error:
            path = error.filename or out
            problem = f"--out {path} cannot be read or written ({error.strerror}): name another folder"
        if problem := group.broadcast_from_first(problem):
            raise ConfigError(problem)
        yield
    group.barrier()


def _lock_shards(file: IO[str], shard_numbers: range) -> bool:
    """Locks one byte of the file for each of the numbers, until the file is closed. Waits up to a minute for other
    processes. Returns False if another process still holds one of the locks. Returns True if all are locked, or if the
    file system has no locks.
    """
    end = time.monotonic() + _PATIENCE
    while True:
        try:  # not flock, which locks no parts of a file
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, len(shard_numbers), shard_numbers.start)
            return True
        except (BlockingIOError, PermissionError):
            if time.monotonic() > end:
                return False
            time.sleep(0.5)
        except OSError:  # a file system without locks
            return True


def make_missing_shards(
    shard_numbers: range, read_if_whole: Callable[[int], Record | None], make: Callable[[list[int]], dict[int, Record]]
) -> dict[int, Record]:
    """Makes those of the shards `shard_numbers` that are not whole yet. Returns {number: record} of all of them, on
    every rank.

    read_if_whole: returns the record of a shard if it is whole, else None
    make: takes the numbers of all missing shards, makes this rank's share of them, and returns {number: record} of
        these
    """
    records = {}
    for number in shard_numbers[group.rank() :: group.world()]:
        record = read_if_whole(number)
        if record is not None:
            records[number] = record
    whole = {number for rank in group.gather_objects(list(records)) for number in rank}
    records |= make([number for number in shard_numbers if number not in whole])
    return {number: record for rank in group.gather_objects(records) for number, record in rank.items()}


def count_samples(shard_numbers: Iterable[int], shard_size: int, total_samples: int) -> int:
    """Returns how many samples the shards `shard_numbers` hold. `total_samples` samples lie in shards of `shard_size`;
    the last shard may hold fewer.
    """
    return sum(min(shard_size, total_samples - number * shard_size) for number in shard_numbers)


def describe_changes(earlier: dict[str, Any], now: dict[str, Any], keys: Iterable[str]) -> str:
    """Describes the `keys` whose values in `earlier` and `now` differ, each as "KEY OLD there, NEW here". Returns "" if
    none differ.
    """
    changes = [
        f"{key} {earlier.get(key)} there, {now.get(key)} here" for key in keys if earlier.get(key) != now.get(key)
    ]
    return "; ".join(changes)


def require_few_unreadable_samples(unreadable: Mapping[str, str], total: int, max_fraction: float, unit: str) -> None:
    """Raises ConfigError if more than `max_fraction` of `total` samples are unreadable. Accepts a single one always,
    unless `max_fraction` is 0. `unreadable` is {name of an unreadable sample: reason}; `unit` is the word for samples
    in the message, such as "files".
    """
    if len(unreadable) > max(max_fraction * total, 1 if max_fraction else 0):
        name, reason = next(iter(unreadable.items()))
        raise ConfigError(
            f"{len(unreadable)} of {total} {unit} cannot be read, more than --max-bad-fraction {max_fraction} "
            f"tolerates, such as {name}: {reason}. Repair or remove them, or raise it"
        )
