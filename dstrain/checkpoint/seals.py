"""Size and hash of every file of a checkpoint that all ranks have written, brought together on rank 0.

A rank looks at its own files alone and sends one list: a folder holds files of every rank, and a listing with sizes on
each of a thousand ranks is a million requests to a file system.
"""

import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dstrain.checkpoint.manifest import hash_files
from dstrain.distributed import group

Hashes = dict[str, dict[str, Any]]  # size and hash of files by name
_WRITTEN_BY = re.compile(r".*-(\d{5,})-of-\d{5,}\.\w+")


def hash_all(folder: Path, hashed: Hashes, finish: Callable[[Path], Hashes]) -> tuple[Hashes, str | None]:
    """The hashes of all files on rank 0, {} on the others; and why that failed, None for success, on all.

    `hashed` are the files that this rank has hashed while it wrote them, and `finish(folder)`, called on all ranks,
    adds others. They are not read again: each has as many bytes, or the save fails. What is sealed is then what was to
    be written, and bytes that storage has altered since show when the step is verified. Each other file is hashed, and
    forced to the disk, by one rank.
    """
    names, fault = list(hashed), None
    try:
        hashed = hashed | finish(folder)
        names = names or _list_files(folder)
        if short := [name for name in hashed if (folder / name).stat().st_size != hashed[name]["size"]]:
            raise OSError(f"{short[0]} has another size than was written")
    except Exception as error:
        fault = describe_error(error)
    merged, rest, failed = _merge_hashes(folder, group.to_first((hashed, names, fault)))
    if failed is not None:
        return {}, failed
    more = {}
    try:
        own = [name for name in rest if _choose_rank(name) == group.rank() % group.world()]
        more = hash_files(folder, [name for name in own if (folder / name).is_file()], sync=True)
    except Exception as error:
        fault = describe_error(error)
    merged_more, _, failed = _merge_hashes(folder, group.to_first((more, [], fault)), rest)
    return merged | merged_more, failed


def _merge_hashes(
    folder: Path, gathered: list[tuple[Hashes, list[str], str | None]] | None, expected: list[str] | None = None
) -> tuple[Hashes, list[str], str | None]:
    """What the ranks have hashed, on rank 0; on all ranks the files that none has, and what is wrong.

    All of the `expected` ones must be hashed; None: those in the folder, by one rank or later.
    """
    hashed: Hashes = {}
    rest, failed = [], None
    if gathered is not None:
        hashed = {name: entry for hashes, _, _ in gathered for name, entry in hashes.items()}
        failed = first_failure([fault for _, _, fault in gathered])
        try:
            present = set(_list_files(folder)) if expected is None else set(hashed)
            seen = {name for _, names, _ in gathered for name in names} | set(hashed) | set(expected or ())
            if failed is None and (unseen := sorted(seen - present)):
                failed = f"{unseen[0]} is not seen by all ranks: is {folder.parent} shared?"
            rest = sorted(present - set(hashed))
        except OSError as error:
            failed = failed or describe_error(error)
    return hashed, *group.from_first((rest, failed))


def first_failure(reasons: list[str | None]) -> str | None:
    """The failure of the lowest rank that failed, with its number if there are several ranks."""
    for rank, failure in enumerate(reasons):
        if failure is not None:
            return failure if len(reasons) == 1 else f"rank {rank}: {failure}"
    return None


def describe_error(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def _list_files(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _choose_rank(name: str) -> int:
    """The rank that hashes a file: the writer in its name, else any, the same on all ranks."""
    writer = _WRITTEN_BY.fullmatch(name)
    return (int(writer[1]) if writer else zlib.crc32(name.encode())) % group.world()
