"""Shards that are not there: of NAME-00000-of-00005.parquet, .arrow or .tar, whose names say how many there are."""

import os
import re
from collections import defaultdict
from collections.abc import Iterable

from dstrain.data.formats.base import Layout
from dstrain.recipe import ConfigError

_SUFFIXES = (".parquet", ".arrow", ".tar")
_SHARD = re.compile(r"(.*?)(\d+)-of-(\d+)(\D.*)")


def find_gaps(names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Returns how many shards are there and should be, by NAME-*-of-00005.parquet, where some are missing."""
    numbers: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for match in filter(None, map(_SHARD.fullmatch, names)):
        numbers[match[1], match[3], match[4]].add(int(match[2]))
    gaps = {}
    for (start, total, end), own in numbers.items():
        if len(own) < int(total):
            gaps[f"{start}*-of-{total}{end}"] = len(own), int(total)
    return gaps


def _find_two_sets(names: Iterable[str]) -> tuple[str, str] | None:
    """Returns two patterns of shards that differ only in how many there are: two versions of the same data."""
    seen: dict[tuple[str, str], str] = {}
    for match in filter(None, map(_SHARD.fullmatch, names)):
        pattern = f"{match[1]}*-of-{match[3]}{match[4]}"
        if seen.setdefault((match[1], match[4]), pattern) != pattern:
            return seen[match[1], match[4]], pattern
    return None


def note_missing_shards(layout: Layout, names: Iterable[str]) -> None:
    """Notes shards that are missing among those that a user has named one by one, as left out. Raises ConfigError if a
    folder lacks some, or holds two sets of the same name.
    """
    names = list(names)
    root, gaps = layout.root, find_gaps(names)
    is_folder = os.path.isdir(root) or (layout.files.far and not root.lower().endswith(_SUFFIXES))
    if is_folder and (two := _find_two_sets(names)):
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
        layout.note_left_out(f"shards of {name}", total - own)
