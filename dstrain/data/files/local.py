"""Files below a root, by relative names with slashes: on a disk here, or behind an address in remote.py."""

import errno
import fnmatch
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from dstrain.data.files.storage import refuse_special_file, retry
from dstrain.recipe import ConfigError

_T = TypeVar("_T")
_LOOKED = 1000  # files of a pattern that are looked for at each start, and the last one
_MOST_NAMES = 1_000_000  # names that a pattern stands for


class Stat(NamedTuple):
    size: int  # bytes; of a folder 0
    version: str  # changes when the file does: its time of change, or a store's tag


class Files(ABC):
    """Access to the files below `root`; it can be pickled. Its methods raise OSError if a file or folder cannot be
    read.
    """

    root: str
    far = False  # True if the files are at an address, so that prefetching pays
    pattern: str | None = None  # the names in the root that count, such as train-*.tar; None: all

    @abstractmethod
    def list_names(self, folder: str = "") -> list[tuple[str, bool]]:
        """Returns what a folder holds, as a sorted list of (name, whether it is a folder), without hidden names."""

    @abstractmethod
    def read_stat(self, name: str) -> Stat:
        """Returns the size in bytes and the version of a file or folder; the version changes when the content does."""

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """Opens a regular file for reading bytes, from any position."""

    @abstractmethod
    def read_span(self, name: str, offset: int, size: int) -> bytes:
        """Returns the `size` bytes of a file that begin at byte `offset`. Raises ConfigError if the file ends
        earlier.
        """

    @abstractmethod
    def fetch_local_path(self, name: str) -> Path:
        """Returns the path of a file on this machine, for libraries that open files themselves. If the file is at an
        address, fetches it first, and returns the path of the copy.
        """

    def prefetch(self, read: Callable[[_T], Any], places: Iterable[_T]) -> None:
        """Starts to call `read(place)` in other threads for each of the `places`, which are needed soon, and does not
        wait.

        This method of the base class does nothing, since files on a disk of this machine need no prefetching.
        """


def is_hidden(name: str) -> bool:
    """Returns whether a file or folder is ignored because of its name: one that begins with a dot (.DS_Store,
    ._photo.jpg), __MACOSX of zip files, or @eaDir of Synology.
    """
    return name[0] == "." or name in ("__MACOSX", "@eaDir")


def is_hidden_path(path: str) -> bool:
    """Returns whether a relative path is ignored because any part of it is hidden (see `is_hidden`):
    __MACOSX/a/0.png.
    """
    return any(is_hidden(part) for part in path.split("/") if part not in ("", ".", ".."))


def is_folder(entry: os.DirEntry) -> bool:
    """Returns whether an entry is a folder or a link to one; False for a link that leads nowhere or to itself."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False


def list_children(paths: Iterable[str], folder: str) -> list[tuple[str, bool]]:
    """Returns what a folder holds directly, as a sorted list of (name, whether it is a folder). paths: the relative
    paths of all files.
    """
    start = len(folder) + 1 if folder else 0
    below = [name[start:] for name in paths if not folder or name.startswith(f"{folder}/")]
    return sorted({(name.split("/")[0], "/" in name) for name in below})


class LocalFiles(Files):
    """A folder, a single file, or the files of a pattern such as shards/{00..99}.tar or x/*.tar, on this machine.

    single: the name of a single file, which is the only one below the root. Of a pattern, names are relative to the
    last folder before its first brace or star; whether files of braces are there shows when they are read.
    """

    def __init__(self, root: str | Path) -> None:
        path = str(root)
        self.single = os.path.basename(path) if os.path.isfile(path) else None
        self.listed: list[str] = [self.single] if self.single else []
        self.root = os.path.dirname(path) if self.single else path
        base = extract_pattern_folder(path)
        if base is not None and not os.path.exists(path):
            self.root, self.pattern = base, extract_star_pattern(path)
            self.listed = [name[len(base) :].lstrip("/") for name in expand_braces(path)] if "{" in path else []
        self.root = str(Path(self.root))

    def list_names(self, folder: str = "") -> list[tuple[str, bool]]:
        if self.listed:
            return list_children(self.listed, folder)
        with os.scandir(os.path.join(self.root, folder)) as entries:
            names = sorted((entry.name, is_folder(entry)) for entry in entries if not is_hidden(entry.name))
        return names if self.pattern is None else select_matching_files(names, self.pattern)

    def read_stat(self, name: str) -> Stat:
        status = os.stat(os.path.join(self.root, name))
        return Stat(0 if stat.S_ISDIR(status.st_mode) else status.st_size, str(status.st_mtime_ns))

    def open(self, name: str) -> BinaryIO:
        refuse_special_file(self.fetch_local_path(name))
        return open(self.fetch_local_path(name), "rb")

    def read_span(self, name: str, offset: int, size: int) -> bytes:
        def read_once() -> bytes:
            with self.open(name) as file:
                file.seek(offset)
                return file.read(size)

        content = retry(read_once)
        if len(content) < size:
            raise ConfigError(f"{name} ends after {offset + len(content)} bytes, before a sample does")
        return content

    def fetch_local_path(self, name: str) -> Path:
        return Path(self.root, name)


def select_matching_files(entries: list[tuple[str, bool]], pattern: str) -> list[tuple[str, bool]]:
    """Returns those of `entries` that are files and fit a pattern such as train-*.tar.

    entries: a list of (name, whether it is a folder), as the result is.
    """
    return [(name, is_folder) for name, is_folder in entries if not is_folder and fnmatch.fnmatchcase(name, pattern)]


def require_files_of_pattern_exist(display_name: str, files: Files) -> None:
    """Raises ConfigError if data.path is a pattern with a star that fits no file, or one with braces that lists a file
    that is missing. Of a long list, looks for only some 1000 files. Does nothing without a pattern.

    display_name: what messages call the pattern, such as data.path=x/*.tar.
    """
    if files.pattern is not None and not files.list_names():
        raise ConfigError(f"{display_name} fits no file: correct the pattern")
    listed = files.listed if isinstance(files, LocalFiles) else []
    looked = [*listed[:: max(1, len(listed) // _LOOKED)], *listed[-1:]]
    absent = next((name for name in looked if not os.path.exists(files.fetch_local_path(name))), None)
    if absent is not None:
        raise ConfigError(
            f"{display_name} names {len(listed):,} files, and {absent} is not there: shorten the pattern, or "
            "fetch what is missing"
        )


def extract_pattern_folder(path: str) -> str | None:
    """Returns the folder in which a pattern looks for files: the path up to the last slash before the first brace or
    star, such as x for x/{00..99}.tar. Returns None for a path without braces and stars.
    """
    place = re.search(r"[{*]", path)
    return path[: place.start()].rpartition("/")[0] if place else None


def extract_star_pattern(path: str) -> str | None:
    """Returns the pattern of file names at the end of a path with a star: train-*.tar for x/train-*.tar. Returns None
    for a path without a star.

    Raises ConfigError if a star stands in the name of a folder, or beside braces.
    """
    if "*" not in path:
        return None
    folder, _, name = path.rpartition("/")
    if "*" in folder or "{" in path:
        raise ConfigError(f"{path}: a star stands for names of files in one folder, without braces: write FOLDER/*.tar")
    return name


def expand_braces(pattern: str) -> list[str]:
    """Returns the paths that a shell makes of a pattern with braces: x000.tar to x127.tar for x{000..127}.tar. Several
    braces give all combinations.

    Raises ConfigError if a brace has no counterpart, or if there are no paths, or more than a million.
    """
    names = [pattern]
    while brace := re.search(r"\{([^{}]*)\}", names[0]):
        words: list[str] | range = brace[1].split(",")
        width = 0  # digits of a number at least
        if ends := re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", brace[1]):
            words = range(int(ends[1]), int(ends[2]) + 1)
            if any(end[0] == "0" and len(end) > 1 for end in ends.groups()):
                width = max(map(len, ends.groups()))
        if not 0 < len(words) * len(names) <= _MOST_NAMES:
            raise ConfigError(
                f"{pattern}: {brace[0]} stands for none or for more than {_MOST_NAMES:,} names: write a "
                "range as {00000..00099}, the smaller number first, or a list as {a,b}"
            )
        words = [str(word).zfill(width) for word in words]
        names = [name.replace(brace[0], word, 1) for name in names for word in words]
    if "{" in names[0] or "}" in names[0]:
        raise ConfigError(f"{pattern}: a brace stands alone: write a range as {{00000..00099}}, or a list as {{a,b}}")
    return names
