"""Lists class folders, and files at any depth; calls a function for many files in several threads."""

import os
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from dstrain.data.files.local import is_folder, is_hidden
from dstrain.recipe import ConfigError

_THREADS = 16  # a network's disk answers slowly
_PENDING = 4096  # calls that wait for a thread: a million would fill the memory
METADATA = ("metadata.csv", "metadata.tsv", "metadata.jsonl", "metadata.parquet")  # tables with labels or captions
LABELS = "dataset.json"  # labels as JSON
BEHIND = "files whose names go on behind a suffix, as x.jpg.1 or x.jpg?w=640,"  # a reason to leave them out
_WRITTEN_ON = re.compile(r"[^a-z0-9.]|\.[0-9]+$")  # begins what a browser, wget or an editor writes behind a suffix
SAMPLES = "samples"  # the folder of single samples that `dstrain generate` writes
_T, _A = TypeVar("_T"), TypeVar("_A")


@contextmanager
def convert_oserror_to_config_error(root: str | Path, recipe_key: str = "data.path") -> Iterator[None]:
    """Turns any OSError within the block into ConfigError, which says that a folder in `root` cannot be listed.

    recipe_key: the key that names `root`, for the message.
    """
    try:
        yield
    except ConfigError:  # The error of a store is an OSError, too.
        raise
    except OSError as error:
        raise ConfigError(
            f"{recipe_key}={root}: {error.filename or 'a folder in it'} cannot be listed ({error.strerror}): "
            "repair it, or take it away"
        ) from None


def list_class_folders(root: Path) -> tuple[str, ...]:
    """Returns the sorted names of the folders directly in `root`, without hidden ones and links to `root` itself; () if
    `root` is no folder.
    """
    if not root.is_dir():
        return ()
    names = []
    with os.scandir(root) as entries:
        for entry in entries:
            leads_back = entry.is_symlink() and os.path.realpath(entry.path) == os.path.realpath(root)
            if not is_hidden(entry.name) and not leads_back and is_folder(entry):
                names.append(entry.name)
    return tuple(sorted(names))


def map_in_threads(
    function: Callable[[_A], _T], items: Iterable[_A], threads: int = _THREADS, max_pending: int = _PENDING
) -> Iterator[_T]:
    """Calls `function` for each item in several threads, and yields the results in the order of the items.

    max_pending: how many further calls may already be made, or wait for a thread, while the next result is awaited.
    """
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[_T]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > max_pending:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def join_first(names: list[str] | tuple[str, ...], max_names: int = 5) -> str:
    """Returns the first `max_names` names, joined by commas, and the number of the others, for a message: "a, b and 3
    more".
    """
    text = ", ".join(names[:max_names])
    return f"{text} and {len(names) - max_names} more" if len(names) > max_names else text


def walk_files(
    root: Path,
    folder: str,
    suffixes: tuple[str, ...],
    visited_folders: list[str] | None = None,
    other_suffix_counts: Counter | None = None,
    ancestors: tuple[str, ...] = (),
    seen_link_targets: set[str] | None = None,
    metadata_files: list[str] | None = None,
) -> Iterator[str]:
    """Yields the paths, relative to `root`, of the files with one of these suffixes, at any depth below root/folder.
    Follows no link back to a folder above, and none twice. Never asks for a file's status, which would be slow.

    visited_folders      a list to which the relative paths of all subfolders are added.
    other_suffix_counts  counts the files with other suffixes, by suffix.
    metadata_files       a list to which files with a name in METADATA, and dataset.json files, are added.
    ancestors, seen_link_targets  of the recursion alone: the real paths of the folders above, and the targets of links
                         to folders.
    """
    ancestors = ancestors or (os.path.realpath(root), os.path.realpath(root / folder))
    seen_link_targets = set() if seen_link_targets is None else seen_link_targets
    with os.scandir(root / folder) as entries:
        for entry in entries:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if is_hidden(entry.name):
                continue
            if is_folder(entry):
                target = f"{ancestors[-1]}/{entry.name}"
                if entry.is_symlink():
                    target = os.path.realpath(entry.path)
                    if target in seen_link_targets or target in ancestors:
                        continue
                    seen_link_targets.add(target)
                if visited_folders is not None:
                    visited_folders.append(name)
                yield from walk_files(
                    root,
                    name,
                    suffixes,
                    visited_folders,
                    other_suffix_counts,
                    (*ancestors, target),
                    seen_link_targets,
                    metadata_files,
                )
                continue
            if metadata_files is not None and (entry.name in METADATA or entry.name == LABELS):
                metadata_files.append(name)
            if entry.name.lower().endswith(suffixes):
                yield name
            elif other_suffix_counts is not None and entry.name not in METADATA:  # these are looked into
                own = entry.name.lower()
                ends = [own.find(suffix) + len(suffix) for suffix in suffixes if suffix in own]
                goes_on = any(_WRITTEN_ON.match(own, end) for end in ends)
                other_suffix_counts[BEHIND if goes_on else os.path.splitext(own)[1]] += 1
