"""What listing folders needs: class folders, files at any depth, and questions to many files by several threads."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from dstrain.data.files.local import is_folder, is_hidden
from dstrain.recipe import ConfigError

_THREADS = 16  # a network's disk answers slowly
_PENDING = 4096  # calls that wait for a thread: a million would fill the memory
SAMPLES = "samples"  # of launch/generate.py: the folder of single samples
_T, _A = TypeVar("_T"), TypeVar("_A")


@contextmanager
def listing_errors(root: str | Path, key: str = "data.path") -> Iterator[None]:
    """Turns an OSError raised inside into a ConfigError: a folder in `root` cannot be listed."""
    try:
        yield
    except ConfigError:  # of a store, which is an OSError, too
        raise
    except OSError as error:
        raise ConfigError(
            f"{key}={root}: {error.filename or 'a folder in it'} cannot be listed ({error.strerror}): "
            "repair it, or take it away"
        ) from None


def list_class_folders(root: Path) -> tuple[str, ...]:
    """The names of the first-level folders, sorted; hidden ones and links back do not count. Empty where `root` is no
    folder.
    """
    if not root.is_dir():
        return ()
    with os.scandir(root) as entries:
        return tuple(
            sorted(
                entry.name
                for entry in entries
                if not is_hidden(entry.name)
                and is_folder(entry)
                and not (entry.is_symlink() and os.path.realpath(entry.path) == os.path.realpath(root))
            )
        )


def ask_each(ask: Callable[[_A], _T], names: Sequence[_A]) -> Iterator[_T]:
    """ask(name) in the order of the names, by several threads."""
    with ThreadPoolExecutor(_THREADS) as pool:
        for start in range(0, len(names), _PENDING):
            yield from pool.map(ask, [names[i] for i in range(start, min(start + _PENDING, len(names)))])


def join_few(names: list[str] | tuple[str, ...], most: int = 5) -> str:
    """The first names for a message, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def walk_files(
    root: Path,
    folder: str,
    suffixes: tuple[str, ...],
    visited: list[str] | None = None,
    others: Counter | None = None,
    above: tuple[str, ...] = (),
    seen: set[str] | None = None,
) -> Iterator[str]:
    """Relative paths of the files at any depth below root/folder; no file is asked for its status.

    visited: gets the relative paths of the folders below. others: counts files of other suffixes, by suffix.
    above: the real paths of `root` and of all folders down to this one, whose links back are passed over; seen: targets
    of the links to folders that were followed, once each.
    """
    above = above or (os.path.realpath(root), os.path.realpath(root / folder))
    seen = set() if seen is None else seen
    with os.scandir(root / folder) as entries:
        for entry in entries:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if is_hidden(entry.name):
                continue
            if is_folder(entry):
                target = f"{above[-1]}/{entry.name}"
                if entry.is_symlink():
                    target = os.path.realpath(entry.path)
                    if target in seen or target in above:
                        continue
                    seen.add(target)
                if visited is not None:
                    visited.append(name)
                yield from walk_files(root, name, suffixes, visited, others, (*above, target), seen)
            elif entry.name.lower().endswith(suffixes):
                yield name
            elif others is not None:
                others[os.path.splitext(name)[1].lower()] += 1
