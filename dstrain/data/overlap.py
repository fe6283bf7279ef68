"""Finds held-out files that are trained on, too: through links, patterns, and folders within folders."""

import itertools
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dstrain.data.files.local import LocalFiles, extract_pattern_folder
from dstrain.data.files.remote import is_remote_address, open_files
from dstrain.data.formats.imagenet import find_split_paths, open_hugging_face_layout
from dstrain.recipe import Cache, Data


def find_overlaps(data: Data) -> list[str]:
    """Returns a message for each of these faults in a data section; [] if there are none:

    a held-out path shares files with a path that is trained on
    a source of a mixture holds out a share of its files, and another source trains on these files
    two sources of a mixture are the same files

    Raises ConfigError if the files of a path cannot be found.
    """
    parts = data.list_sources() or (data,)
    problems = []
    for part, other in itertools.product(parts, parts):
        if other.held_out_path and _is_trained_on(part, other.held_out_path):
            problems.append(
                f"data.held_out_path={other.held_out_path} and data.path={part.path} share files, and "
                "evaluation would see what was trained on: name a folder beside it, or write "
                "data.held_out=0.02"
            )
        elif part is not other and other.held_out and _is_trained_on(part, other.path):
            problems.append(
                f"data.mixture: {part.path} and {other.path} share files, and what one holds out would be "
                "trained on in the other: take folders that lie beside each other, or hold nothing out"
            )
    for part, other in itertools.combinations(parts, 2):
        if not (part.held_out or other.held_out) and _resolve_real_paths(part.path) == _resolve_real_paths(other.path):
            problems.append(f"data.mixture: {part.path} and {other.path} are the same files: name them once")
    return problems


def _is_trained_on(data: Data, path: str) -> bool:
    """Returns whether files at `path` are also in the training split of data.path."""
    if not _have_overlapping_paths(_resolve_real_paths(data.path), _resolve_real_paths(path)):
        return False
    train, _ = find_split_paths(data.path, 1.0, None, cache=data.cache)
    return _have_overlapping_paths(
        _list_real_paths_to_read(str(train), data.cache), _list_real_paths_to_read(path, data.cache)
    )


def _list_real_paths_to_read(path: str, cache: Cache) -> set[str]:
    """Returns the real paths of what is read at `path`. For tables of several splits, these are the tables of the split
    that is read; for other data, what `_resolve_real_paths` returns.
    """
    if not os.path.exists(path) and extract_pattern_folder(path) is None:
        return _resolve_real_paths(path)
    files = open_files(path, cache)
    tables = open_hugging_face_layout(path, files)
    return (
        _resolve_real_paths(path)
        if tables is None
        else {os.path.realpath(files.fetch_local_path(part)) for part in tables.list_partitions()}
    )


def _resolve_real_paths(path: str) -> set[str]:
    """Returns {real path} of a file or folder. For a pattern such as DIR/*.tar, returns the real paths of the files
    that fit it; {real path of the pattern itself} if its folder cannot be listed.
    """
    if is_remote_address(path) or extract_pattern_folder(path) is None or os.path.exists(path):
        return {os.path.realpath(path)}
    files = LocalFiles(path)
    with suppress(OSError):  # A folder that is not there is told when it is listed.
        return {os.path.realpath(files.fetch_local_path(name)) for name in files.listed or dict(files.list_names())}
    return {os.path.realpath(path)}


def _have_overlapping_paths(first: set[str], second: set[str]) -> bool:
    """Returns whether a path of one set equals a path of the other, or lies below or above it."""
    return not (
        first.isdisjoint(_iterate_paths_and_parents(second)) and second.isdisjoint(_iterate_paths_and_parents(first))
    )


def _iterate_paths_and_parents(paths: set[str]) -> Iterator[str]:
    """Yields each path and all folders above it."""
    for path in paths:
        yield path
        yield from map(str, Path(path).parents)
