"""Folders of files as sources: their names, classes, held-out split and sizes.

A folder has one folder for each class, with files at any depth below, or files only, which is one class, 0.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import numpy as np

from dstrain.data.source import Source
from dstrain.recipe import ConfigError

_ASKED = 10_000                            # files whose sizes are asked for whenever a run starts
_THREADS = 16                              # a network's disk answers slowly
_PENDING = 4096                            # calls that wait for a thread: a million would fill the memory
_T = TypeVar("_T")


class Names:
    """A list of strings as one block of bytes: a million paths are pickled to a worker in milliseconds."""

    def __init__(self, names: list[str]) -> None:
        encoded = [os.fsencode(name) for name in names]
        self.blob = b"".join(encoded)
        self.ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        if index < 0 or index >= len(self):
            raise IndexError(index)
        return os.fsdecode(self.blob[self.ends[index - 1] if index else 0:self.ends[index]])


class Folder(Source):
    """Files of the folder `path` as samples. A subclass sets the attributes, the last two by `_select`.

    split: "train", "held_out" or "all". held_out: fraction that is held out. classes: empty for those of the folder.
    """

    path: Path
    split: str
    held_out: float
    names: Names
    labels: np.ndarray                     # int32 (N,), indices into classes

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return self.names[index]

    def _select(self, names: list[str], labels: np.ndarray, folders: tuple[str, ...], key: str, kind: str) -> None:
        """Takes the samples of the split from what `list_folder` returns; labels then index `classes`.

        A name is held out by its hash, so that adding a file moves no other. ConfigError: unknown class, empty split.
        """
        if self.classes:
            unknown = [name for name in folders if name not in self.classes]
            if unknown:
                raise ConfigError(f"{key}={self.path}: class folders {few(unknown)} are not among the classes of the "
                                  f"training data ({few(self.classes)}): rename or remove them")
            labels = np.array([self.classes.index(name) for name in folders] or [0], np.int32)[labels]
        self.classes = self.classes or folders
        if self.split != "all" and self.held_out:
            unseen = self.split == "held_out"
            members = [index for index, name in enumerate(names) if _is_held_out(name, self.held_out) == unseen]
            if not members:
                raise ConfigError(f"{key}={self.path}: data.held_out={self.held_out} leaves no {kind} of {len(names)} "
                                  f"for the {self.split} split: choose another fraction or give data.held_out_path")
            names, labels = [names[index] for index in members], labels[members]
        self.names, self.labels = Names(names), labels

    def fingerprint(self) -> str:
        names = self.names
        if len(names) > _ASKED:
            names = Names([names[i] for i in np.linspace(0, len(names) - 1, _ASKED).astype(int).tolist()])
        return f"{self._summary()} {self._files(names)}"

    def contents(self) -> str:
        return f"{self._summary()} {self._files(self.names)}"

    def _summary(self) -> str:
        """Kind, split, numbers and names, for the fingerprint."""
        raise NotImplementedError

    def _files(self, names: Names) -> str:
        """Sizes and whatever else stands in the named files, for the fingerprint."""
        return summary_of_sizes(self.path, names)


def list_folder(root: Path, suffixes: tuple[str, ...], key: str = "data.path",
                kind: str = "images") -> tuple[list[str], np.ndarray, tuple[str, ...]]:
    """Relative paths in order, their labels int32 (N,), and the names of the class folders (none for a flat folder).

    suffixes: of the files that count, in lower case. key, kind: what folder and files are called in messages.
    ConfigError: no files, files beside class folders, or class folders without files.
    """
    if not root.is_dir():
        fault = "is not a folder" if root.exists() else "does not exist"
        raise ConfigError(f"{key}={root}: {fault}; give a folder of {kind}, or builtin:fashion")
    classes = class_folders(root)
    flat = sorted(name for name in set(os.listdir(root)).difference(classes)
                  if name.lower().endswith(suffixes) and name[0] != ".")
    members = {name: sorted(_walk(root, name, suffixes, set())) for name in classes}
    full = [name for name in classes if members[name]]
    which = f"files ending in {' '.join(suffixes)} are read, in any case"
    if not flat and not full:
        content = f"no {kind} in it" if any(os.scandir(root)) else "is empty"
        raise ConfigError(f"{key}={root}: {content}; {which}")
    if flat and full:
        raise ConfigError(f"{key}={root}: {kind} ({few(flat)}) beside class folders ({few(full)}): is this one class "
                          f"or several? Move the {kind} into a folder of their class")
    if flat:
        return flat, np.zeros(len(flat), np.int32), ()
    if len(full) < len(classes):
        empty = [name for name in classes if not members[name]]
        raise ConfigError(f"{key}={root}: class folders without {kind}: {few(empty)}; remove or fill them, since they "
                          f"would count as classes; {which}")
    labels = np.repeat(np.arange(len(full), dtype=np.int32), [len(members[name]) for name in full])
    return [name for folder in full for name in members[folder]], labels, tuple(full)


def class_folders(root: Path) -> tuple[str, ...]:
    """The names of the first-level folders, sorted; hidden ones do not count. Empty where `root` is no folder."""
    if not root.is_dir():
        return ()
    with os.scandir(root) as entries:
        return tuple(sorted(entry.name for entry in entries if entry.name[0] != "." and entry.is_dir()))


def _is_held_out(name: str, fraction: float) -> bool:
    digest = blake2b(os.fsencode(name), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0 ** 64


def of_each(ask: Callable[[str], _T], names: Names) -> Iterator[_T]:
    """ask(name) in the order of the names, by several threads."""
    with ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, len(names), _PENDING):
            yield from pool.map(ask, [names[i] for i in range(start, min(start + _PENDING, len(names)))])


def summary_of_sizes(root: Path, names: Names, texts: bytes = b"") -> str:
    """The bytes of all files, and a hash of the size of each (-1 where it is unknown) and of `texts`.

    Times do not count: a folder that was copied is the same data.
    """
    def size(name: str) -> int:
        try:
            return os.stat(root / name).st_size
        except OSError:
            return -1

    sizes = np.fromiter(of_each(size, names), np.int64, len(names))
    return f"bytes={sizes.sum()} contents={blake2b(sizes.tobytes() + texts, digest_size=8).hexdigest()}"


def few(names: list[str] | tuple[str, ...], most: int = 5) -> str:
    """The first names for a message, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _walk(root: Path, folder: str, suffixes: tuple[str, ...], seen: set[str]) -> Iterator[str]:
    """Relative paths of the files at any depth below root/folder; no file is asked for its status, no link met twice.
    """
    with os.scandir(root / folder) as entries:
        for entry in entries:
            if entry.name[0] == ".":                             # .DS_Store, ._photo.jpg
                continue
            if entry.is_dir():
                if entry.is_symlink():
                    target = os.path.realpath(entry.path)
                    if target in seen:
                        continue
                    seen.add(target)
                yield from _walk(root, f"{folder}/{entry.name}", suffixes, seen)
            elif entry.name.lower().endswith(suffixes):
                yield f"{folder}/{entry.name}"
