"""Samples that cannot be read: what replaces them, where they are listed, and how many are too
many.

A sample that cannot be read is replaced by the next index, cyclically, that can: a function of the
data set and the index alone, so the same on any rank, in any worker, at any world size.
"""

import os
import warnings
from pathlib import Path

from dstrain.recipe import ConfigError

_MOST = 1000          # substitutes in a row; a data set with a longer stretch is broken as a whole


class BadSample(Exception):
    """A sample that cannot be read: `path` (relative to the data set) and `reason`, one line
    each.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason


def read_items(source, indices: list[int],
               chances: list[float] | None = None) -> tuple[list[dict], list[tuple[str, str]]]:
    """The items at `indices`, the unreadable ones replaced, and (name, reason) of each that was
    met. `chances`: a number in [0, 1) for each, which a source with `drawn` reads it by.
    """
    items, bad = [], []
    for place, index in enumerate(indices):
        most = min(len(source), _MOST)
        for candidate in range(index, index + most):
            candidate %= len(source)
            try:
                items.append(source[candidate] if chances is None else source.read(candidate, chances[place]))
                break
            except BadSample as error:
                bad.append((error.path, error.reason))
        else:
            raise ConfigError(f"{most} samples in a row cannot be read; the last is {bad[-1][0]}: "
                              f"{bad[-1][1]}. Is data.path the right folder?")
    return items, bad


class BadFiles:
    """Files that could not be read, each listed once in folder/bad_files.txt as path<TAB>reason.

    All ranks append to one list and count what is in it, so that on a shared file system the limit
    holds for all of them together.
    """

    def __init__(self, folder: str | Path | None, size: int, max_fraction: float) -> None:
        if not 0 <= max_fraction <= 1:
            raise ConfigError(f"data.max_bad_fraction is a fraction in [0, 1], not {max_fraction}")
        self.path = None if folder is None else Path(folder) / "bad_files.txt"
        self.limit = max(1, int(max_fraction * size + 1e-9)) if max_fraction > 0 else 0
        self.size, self.max_fraction = size, max_fraction
        self.names: set[str] = set()

    def add(self, found: list[tuple[str, str]]) -> None:
        """Lists what is new. Raises ConfigError once there are more than the limit."""
        found = [(_line(name), _line(reason)) for name, reason in found]
        found = [(name, reason) for name, reason in found if name not in self.names]
        if not found:
            return
        self.names |= self._listed()
        for name, reason in found:
            if name not in self.names:
                self.names.add(name)
                self._append(f"{name}\t{reason}\n")
        if len(self.names) > self.limit:
            raise ConfigError(
                 f"{len(self.names)} of {self.size} samples cannot be read (the last: "
                 f"{found[-1][0]}: {found[-1][1]}), more than the {self.limit} that "
                 f"data.max_bad_fraction={self.max_fraction} tolerates; see "
                 f"{self.path or 'no list, since no folder was given'}. Repair or remove them and "
                 "delete the list, or raise data.max_bad_fraction")

    def _listed(self) -> set[str]:
        if self.path is None or not self.path.exists():
            return set()
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        return {line.split("\t")[0] for line in lines}

    def _append(self, line: str) -> None:
        if self.path is None:
            warnings.warn(f"cannot be read, replaced: {line.strip()}", stacklevel=2)
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line.encode())          # one write: lines of two ranks never mix
        finally:
            os.close(file)


def _line(text: str) -> str:
    """A file's name or an error as part of one line: no tab, no line break, no undecodable byte."""
    return "".join(c if c.isprintable() else "?" for c in text)
