"""Files below a root, by relative names with slashes: on a disk here, or behind an address in remote.py."""

import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from dstrain.data.storage import require_regular, with_retries
from dstrain.recipe import ConfigError


_T = TypeVar("_T")
_MOST_NAMES = 1_000_000                    # that a pattern stands for


class Stat(NamedTuple):
    size: int                              # bytes; of a folder 0
    version: str                           # changes when the file does: its time of change, or a store's tag


class Files(ABC):
    """Access to the files below `root`. OSError: they cannot be read. Pickled to the workers."""

    root: str
    far = False                            # at an address: what is needed soon is worth reading ahead

    @abstractmethod
    def names(self, folder: str = "") -> list[tuple[str, bool]]:
        """(name, whether it is a folder) of what a folder holds, sorted by name; hidden ones left out."""

    @abstractmethod
    def stat(self, name: str) -> Stat:
        """Size and version of a file or folder."""

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """A regular file, open for reading, that can be searched."""

    @abstractmethod
    def span(self, name: str, offset: int, size: int) -> bytes:
        """`size` bytes of a file. ConfigError: it ends before."""

    @abstractmethod
    def local(self, name: str) -> Path:
        """The file as one on this machine, for libraries that open files themselves."""

    def ahead(self, read: Callable[[_T], Any], places: Iterable[_T]) -> None:
        """Calls `read` of places that are needed soon, and does not wait; in vain for files on a disk here."""


class LocalFiles(Files):
    """A folder, or a single file, on this machine; of a file, its own name is the only one below the root."""

    def __init__(self, root: str | Path) -> None:
        path = Path(root if os.path.exists(root) else base_of(str(root)))
        self.single = path.name if path.is_file() else None
        self.root = str(path.parent if self.single else path)

    def names(self, folder: str = "") -> list[tuple[str, bool]]:
        if self.single is not None:
            return [(self.single, False)]
        with os.scandir(os.path.join(self.root, folder)) as entries:
            return sorted((entry.name, entry.is_dir()) for entry in entries if entry.name[0] != ".")

    def stat(self, name: str) -> Stat:
        status = os.stat(os.path.join(self.root, name))
        return Stat(0 if stat.S_ISDIR(status.st_mode) else status.st_size, str(status.st_mtime_ns))

    def open(self, name: str) -> BinaryIO:
        require_regular(self.local(name))
        return open(self.local(name), "rb")

    def span(self, name: str, offset: int, size: int) -> bytes:
        def read() -> bytes:
            with self.open(name) as file:
                file.seek(offset)
                return file.read(size)

        content = with_retries(read)
        if len(content) < size:
            raise ConfigError(f"{name} ends after {offset + len(content)} bytes, before a sample does")
        return content

    def local(self, name: str) -> Path:
        return Path(self.root, name)


def base_of(root: str) -> str:
    """The folder below which all names of a pattern stand, shards/{00..99}.tar or data/train-*.parquet; any other root
    as it is.
    """
    pattern = re.search(r"[{*]", root)
    return (root[:pattern.start()].rpartition("/")[0] or ".") if pattern else root


def expanded(pattern: str) -> list[str]:
    """The names that a pattern stands for, relative to `base_of`: {000..127} and {a,b}, as a shell has them.

    ConfigError: a brace without its other one, or more than a million names.
    """
    start = pattern[:pattern.index("{")].rpartition("/")[0] if "{" in pattern else ""
    names = [pattern[len(start) + 1:] if start else pattern]
    while brace := re.search(r"\{([^{}]*)\}", names[0]):
        first, last = brace[1].split("..") if re.fullmatch(r"\d{1,9}\.\.\d{1,9}", brace[1]) else ("", "")
        padded = any(end[:1] == "0" and len(end) > 1 for end in (first, last))
        width = max(len(first), len(last)) if padded else 1
        choices = range(int(first), int(last) + 1) if first else brace[1].split(",")
        if len(choices) * len(names) > _MOST_NAMES:
            raise ConfigError(f"{pattern}: stands for more than {_MOST_NAMES:,} names")
        words = [f"{choice:0{width}}" for choice in choices] if first else list(choices)
        names = [name.replace(brace[0], word, 1) for name in names for word in words]
        if not names:
            break
    if not names or "{" in names[0] or "}" in names[0]:
        raise ConfigError(f"{pattern}: stands for no names: write a range as {{00000..00099}}, the smaller first, or a "
                          "list as {a,b}")
    return names
