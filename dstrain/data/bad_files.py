"""The list of the files that could not be read, and how many of them a run tolerates."""

import io
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import numpy as np

from dstrain.data.source import Bad
from dstrain.disk.lines import append_lines, make_printable
from dstrain.recipe import ConfigError

_BLOCK = 1 << 20  # bytes of the list that are read at a time
_RECENT = 1024  # names that are kept apart from the sorted ones


class Names:
    """A set of names in little memory: it keeps a hash of 8 bytes of each."""

    def __init__(self) -> None:
        self._sorted = np.empty(0, np.uint64)
        self._recent: set[int] = set()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._recent)

    def __contains__(self, name: str) -> bool:
        return self._contains_hash(_hash_name(name))

    def add_name_if_new(self, name: str) -> bool:
        """Adds a name. Returns True if it is new, False if it was in the set."""
        value = _hash_name(name)
        if self._contains_hash(value):
            return False
        self._recent.add(value)
        if len(self._recent) > _RECENT + len(self._sorted) // 8:  # so each name is sorted a few times at most
            recent = np.fromiter(self._recent, np.uint64, len(self._recent))
            self._sorted, self._recent = np.sort(np.concatenate((self._sorted, recent))), set()
        return True

    def _contains_hash(self, name_hash: int) -> bool:
        """Returns whether the hash of a name is in the set."""
        place = int(np.searchsorted(self._sorted, np.uint64(name_hash)))
        return name_hash in self._recent or (place < len(self._sorted) and int(self._sorted[place]) == name_hash)


class BadFiles:
    """Counts and lists the files that could not be read. folder/bad_files.txt has each once, as path<TAB>reason.

    All ranks append to one list and count its lines, so that on a shared file system the limit holds for all of them
    together. folder None: each process counts its own, and warns of each. max_bad_fraction: fraction of `size` samples
    that may be unreadable; above 0 it allows at least one. Raises ConfigError if max_bad_fraction is not in [0, 1], or
    if bad_files.txt exists and is no regular file.
    """

    def __init__(self, folder: str | Path | None, size: int, max_fraction: float) -> None:
        if not 0 <= max_fraction <= 1:
            raise ConfigError(f"data.max_bad_fraction is a fraction in [0, 1], not {max_fraction}")
        self.path = None if folder is None else Path(folder) / "bad_files.txt"
        self.limit = max(1, int(max_fraction * size + 1e-9)) if max_fraction > 0 else 0
        self.size, self.max_fraction = size, max_fraction
        self.names = Names()
        if self.path is not None and self.path.exists() and not self.path.is_file():
            raise ConfigError(f"{self.path} is no regular file: remove it")
        self._read = 0  # bytes of the list that this process knows

    def add_unreadable_samples(self, samples: Bad) -> None:
        """Adds each (name, reason) whose name is not in the list yet, also to bad_files.txt. If there is no folder, or
        if the file cannot be written, warns instead of writing.

        Raises ConfigError if a name is new to this process and the list now has more than `limit` names.
        """
        lines = [(make_printable(name), make_printable(reason)) for name, reason in samples]
        lines = [(name, reason) for name, reason in lines if name not in self.names]
        if not lines:
            return
        self._add_newly_listed_names()
        for name, reason in lines:
            if self.names.add_name_if_new(name):
                self._append_line_or_warn(f"{name}\t{reason}\n")
        if len(self.names) > self.limit:
            raise ConfigError(
                f"{len(self.names)} of {self.size} samples cannot be read (the last: {lines[-1][0]}: {lines[-1][1]}), "
                f"more than the {self.limit} that data.max_bad_fraction={self.max_fraction} tolerates; see "
                f"{self.path or 'no list, since no folder was given'}. Repair or remove them and delete the list, or "
                "raise data.max_bad_fraction"
            )

    def _add_newly_listed_names(self) -> None:
        """Adds to `names` what any rank has appended to bad_files.txt since the last call. Reads from the start if the
        file has become shorter. Leaves an unfinished last line for the next call.
        """
        if self.path is None or not self.path.exists():
            return
        with open(self.path, "rb") as file:
            if file.seek(0, 2) < self._read:  # it was deleted meanwhile, and begun anew
                self._read = 0
            file.seek(self._read)
            for whole in _iterate_blocks_of_lines(file):
                self._read += len(whole)
                for name in _parse_listed_names(whole):
                    self.names.add_name_if_new(name)

    def _append_line_or_warn(self, line: str) -> None:
        """Appends a line to bad_files.txt. Shows it as a warning instead if there is no folder, or if the file cannot
        be written.
        """
        if self.path is None:
            warnings.warn(f"cannot be read, replaced: {line.strip()}", stacklevel=2)
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_lines(self.path, line)  # one write: lines of two ranks never mix
        except OSError as error:  # a full disk: the limit still holds for what this process has met
            warnings.warn(f"{self.path} cannot be written ({error.strerror}); unreadable: {line.strip()}", stacklevel=2)


def count_listed_bad_files(folder: Path) -> int:
    """Returns how many different files are listed in bad_files.txt in the folder of a run; 0 if that file is missing or
    cannot be read.
    """
    path, names = folder / "bad_files.txt", Names()
    try:
        with open(path, "rb") if path.is_file() else nullcontext(io.BytesIO()) as file:
            for whole in _iterate_blocks_of_lines(file):
                for name in _parse_listed_names(whole):
                    names.add_name_if_new(name)
    except OSError:
        return 0
    return len(names)


def _iterate_blocks_of_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yields a file's bytes from its present position on, in blocks that end with a line break. Leaves out an
    unfinished last line.
    """
    rest = b""
    while new := file.read(_BLOCK):
        whole, line_break, rest = (rest + new).rpartition(b"\n")
        if line_break:
            yield whole + line_break


def _parse_listed_names(lines: bytes) -> list[str]:
    """Returns the name in each line "NAME<TAB>REASON" of bad_files.txt."""
    return [line.split(b"\t")[0].decode(errors="replace") for line in lines.splitlines()]


def _hash_name(name: str) -> int:
    return int.from_bytes(blake2b(name.encode("utf-8", "replace"), digest_size=8).digest(), "little")
