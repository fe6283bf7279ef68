"""Folders of files as sources: their names, classes, held-out split and sizes.

A folder has one folder for each class, with files at any depth below, or files only, which have no classes and the
label 0, or a dataset.json that says the labels (labels.py).
"""

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import numpy as np

from dstrain.data.labels import LABELS, labels_of_names, refuse_splits
from dstrain.data.source import Source
from dstrain.recipe import ConfigError

_ASKED = 10_000                            # files whose sizes are asked for whenever a run starts
_THREADS = 16                              # a network's disk answers slowly
_PENDING = 4096                            # calls that wait for a thread: a million would fill the memory
SAMPLES = "samples"                        # of launch/generate.py: the folder of single samples
_T, _A = TypeVar("_T"), TypeVar("_A")


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


class Folder(Source, ABC):
    """Files of the folder `path` as samples. A subclass sets the attributes, the last two by `_select`.

    split: "train", "held_out" or "all". held_out: fraction that is held out. classes: names that the folder's must be
    among, empty for those of the folder; afterwards empty where the folder has none.
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
        if self.classes and folders:
            unknown = [name for name in folders if name not in self.classes]
            if unknown:
                raise ConfigError(f"{key}={self.path}: class folders {few(unknown)} are not among the classes of the "
                                  f"training data ({few(self.classes)}): rename or remove them")
            places = {name: place for place, name in enumerate(self.classes)}
            labels = np.array([places[name] for name in folders], np.int32)[labels]
        self.classes = folders and (self.classes or folders)
        if self.split != "all" and self.held_out:
            unseen = self.split == "held_out"
            members = [index for index, name in enumerate(names) if _is_held_out(name, self.held_out) == unseen]
            if not members:
                raise ConfigError(f"{key}={self.path}: data.held_out={self.held_out} leaves no {kind} of {len(names)} "
                                  f"for the {self.split} split: choose another fraction or give data.held_out_path")
            names, labels = [names[index] for index in members], labels[members]
        self.names, self.labels = Names(names), labels

    def class_counts(self) -> np.ndarray | None:
        return np.bincount(self.labels, minlength=len(self.classes)) if self.classes else None

    def fingerprint(self) -> str:
        names = self.names
        if len(names) > _ASKED:
            names = Names([names[i] for i in np.linspace(0, len(names) - 1, _ASKED).astype(int).tolist()])
        return f"{self._summary()} {self._files(names)}"

    def contents(self) -> str:
        return f"{self._summary()} {self._files(self.names)}"

    @abstractmethod
    def _summary(self) -> str:
        """Kind, split, numbers and names, for the fingerprint."""

    def _files(self, names: Names) -> str:
        """Sizes and whatever else stands in the named files, for the fingerprint."""
        return summary_of_sizes(self.path, names)


def list_folder(root: Path, suffixes: tuple[str, ...], key: str = "data.path",
                kind: str = "images") -> tuple[list[str], np.ndarray, tuple[str, ...]]:
    """Relative paths in order, their labels int32 (N,), and the names of the classes (none for a flat folder).

    suffixes: of the files that count, in lower case. key, kind: what folder and files are called in messages.
    ConfigError: no files, files beside class folders, class folders without files or named as splits, a folder that
    cannot be listed.
    """
    if not root.is_dir():
        fault = "is not a folder" if root.exists() else "does not exist"
        raise ConfigError(f"{key}={root}: {fault}; give a folder of {kind}, or builtin:fashion")
    with listing(root, key):
        by_name = labels_of_names(root, key)
        if by_name is not None:
            return _by_names(root, suffixes, key, kind, by_name)
        return _by_folders(root, suffixes, key, kind)


@contextmanager
def listing(root: str | Path, key: str = "data.path") -> Iterator[None]:
    """Turns an OSError raised inside into a ConfigError: a folder in `root` cannot be listed."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{key}={root}: {error.filename or 'a folder in it'} cannot be listed ({error.strerror}): "
                          "repair it, or take it away") from None


def _by_folders(root: Path, suffixes: tuple[str, ...], key: str,
                kind: str) -> tuple[list[str], np.ndarray, tuple[str, ...]]:
    classes = class_folders(root)
    refuse_splits(root, classes, key)
    flat = sorted(name for name in set(os.listdir(root)).difference(classes)
                  if name.lower().endswith(suffixes) and name[0] != ".")
    members = {name: sorted(walk(root, name, suffixes)) for name in classes}
    full = [name for name in classes if members[name]]
    if not flat and not full:
        raise _without_files(root, suffixes, key, kind)
    if full == [SAMPLES] and all(Path(name).stem == "grid" for name in flat):
        raise ConfigError(f"{key}={root}: launch/generate.py wrote this folder, and its samples are in {SAMPLES}: "
                          f"write {key}={root / SAMPLES}")
    if flat and full:
        raise ConfigError(f"{key}={root}: {kind} ({few(flat)}) beside class folders ({few(full)}): is this one class "
                          f"or several? Move the {kind} into a folder of their class")
    if flat:
        return flat, np.zeros(len(flat), np.int32), ()
    if len(full) < len(classes):
        empty = [name for name in classes if not members[name]]
        raise ConfigError(f"{key}={root}: class folders without {kind}: {few(empty)}; remove or fill them, since they "
                          f"would count as classes; files ending in {' '.join(suffixes)} are read, in any case")
    labels = np.repeat(np.arange(len(full), dtype=np.int32), [len(members[name]) for name in full])
    return [name for folder in full for name in members[folder]], labels, tuple(full)


def _by_names(root: Path, suffixes: tuple[str, ...], key: str, kind: str,
              by_name: dict[str, int]) -> tuple[list[str], np.ndarray, tuple[str, ...]]:
    """As `list_folder`, of files at any depth, whose labels stand in a dataset.json."""
    names = sorted(walk(root, "", suffixes))
    if not names:
        raise _without_files(root, suffixes, key, kind)
    if not by_name:
        return names, np.zeros(len(names), np.int32), ()
    missing = [name for name in names if name not in by_name]
    if missing:
        raise ConfigError(f"{key}={root}: {LABELS} has no label of {few(missing, 1)}, of {len(names)} {kind}: make it "
                          "anew, or take it away, and folders are the classes")
    return names, np.array([by_name[name] for name in names], np.int32), _numbered(by_name)


def _numbered(by_name: dict[str, int]) -> tuple[str, ...]:
    return tuple(map(str, range(max(by_name.values()) + 1)))


def _without_files(root: Path, suffixes: tuple[str, ...], key: str, kind: str) -> ConfigError:
    content = f"no {kind} in it" if any(os.scandir(root)) else "is empty"
    return ConfigError(f"{key}={root}: {content}; files ending in {' '.join(suffixes)} are read, in any case")


def class_names(root: Path) -> tuple[str, ...]:
    """The names of a folder's classes, without looking at its files."""
    by_name = labels_of_names(root, "data.path")
    if by_name is None:
        with listing(root):
            return class_folders(root)
    return _numbered(by_name) if by_name else ()


def class_folders(root: Path) -> tuple[str, ...]:
    """The names of the first-level folders, sorted; hidden ones and links back do not count. Empty where `root` is no
    folder.
    """
    if not root.is_dir():
        return ()
    with os.scandir(root) as entries:
        return tuple(sorted(entry.name for entry in entries if entry.name[0] != "." and _is_folder(entry)
                            and not (entry.is_symlink() and os.path.realpath(entry.path) == os.path.realpath(root))))


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:            # a link to itself leads nowhere, as a dangling one
            raise
        return False


def _is_held_out(name: str, fraction: float) -> bool:
    digest = blake2b(os.fsencode(name), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0 ** 64


def of_each(ask: Callable[[_A], _T], names: Sequence[_A]) -> Iterator[_T]:
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


def walk(root: Path, folder: str, suffixes: tuple[str, ...], visited: list[str] | None = None,
         above: tuple[str, ...] = (), seen: set[str] | None = None) -> Iterator[str]:
    """Relative paths of the files at any depth below root/folder; no file is asked for its status.

    visited: gets the relative paths of the folders below. above: the real paths of `root` and of all folders down to
    this one, whose links back are passed over; seen: targets of the links to folders that were followed, once each.
    """
    above = above or (os.path.realpath(root), os.path.realpath(root / folder))
    seen = set() if seen is None else seen
    with os.scandir(root / folder) as entries:
        for entry in entries:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.name[0] == ".":                             # .DS_Store, ._photo.jpg
                continue
            if _is_folder(entry):
                target = f"{above[-1]}/{entry.name}"
                if entry.is_symlink():
                    target = os.path.realpath(entry.path)
                    if target in seen or target in above:
                        continue
                    seen.add(target)
                if visited is not None:
                    visited.append(name)
                yield from walk(root, name, suffixes, visited, (*above, target), seen)
            elif entry.name.lower().endswith(suffixes):
                yield name
