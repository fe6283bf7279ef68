"""Finds missing shards of NAME-00000-of-00005.parquet, .arrow or .tar, whose names say how many there should be."""

import os
import re
from collections import defaultdict
from collections.abc import Iterable

from dstrain.data.formats.base import Layout
from dstrain.recipe import ConfigError

_SUFFIXES = (".parquet", ".arrow", ".tar")
_SHARD = re.compile(r"(.*?)(\d+)-of-(\d+)(\D.*)")


def find_incomplete_shard_sets(names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Returns the sets of shards that are incomplete, as {pattern: (shards that are there, shards there should be)},
    such as {"x-*-of-00005.tar": (3, 5)}. Ignores names without -of-.
    """
    numbers: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for match in filter(None, map(_SHARD.fullmatch, names)):
        numbers[match[1], match[3], match[4]].add(int(match[2]))
    gaps = {}
    for (start, total, end), own in numbers.items():
        if len(own) < int(total):
            gaps[f"{start}*-of-{total}{end}"] = len(own), int(total)
    return gaps


def _find_conflicting_shard_sets(names: Iterable[str]) -> tuple[str, str] | None:
    """Returns the patterns of two sets of shards that differ only in their total, such as x-*-of-00005.tar and
    x-*-of-00008.tar: they look like two versions of the same data. Returns None if there are none.
    """
    seen: dict[tuple[str, str], str] = {}
    for match in filter(None, map(_SHARD.fullmatch, names)):
        pattern = f"{match[1]}*-of-{match[3]}{match[4]}"
        if seen.setdefault((match[1], match[4]), pattern) != pattern:
            return seen[match[1], match[4]], pattern
    return None


def refuse_or_record_missing_shards(layout: Layout, names: Iterable[str]) -> None:
    """Raises ConfigError if the data are a folder and shards are missing from it, or if it holds two sets of shards
    whose names differ only in the total, such as x-*-of-00005.tar and x-*-of-00008.tar.

    If the user has named a file or a pattern instead of a folder, only counts missing shards as left out.
    names: the files that are read.
    """
    names = list(names)
    root, gaps = layout.root, find_incomplete_shard_sets(names)
    is_folder = os.path.isdir(root) or (layout.files.far and not root.lower().endswith(_SUFFIXES))
    if is_folder and (two := _find_conflicting_shard_sets(names)):
        raise ConfigError(
            f"{layout.request.key}={root}: {two[0]} and {two[1]} are two sets of shards of one name, and both would be "
            f"read: remove the older one, or write {layout.request.key}='{root.rstrip('/')}/{two[1]}'"
        )
    if gaps and is_folder:
        name, (own, total) = next(iter(gaps.items()))
        raise ConfigError(
            f"{layout.request.key}={root}: of the {total:,} shards {name}, {own:,} are there: fetch the others, or "
            f"write {layout.request.key}='{root.rstrip('/')}/{name}' for these alone"
        )
    for name, (own, total) in gaps.items():
        layout.add_left_out_count(f"shards of {name}", total - own)
