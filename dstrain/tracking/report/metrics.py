"""Reads metrics.jsonl as columns, line by line, since a long run has more lines than memory can hold as
dictionaries.
"""

import itertools
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dstrain.disk import small

_LONGEST = small.MEGABYTE  # bytes of a line
_MOST_NAMES = 500  # columns
_LATEST = 1e11  # seconds since 1970: in the year 5138; a larger time is none
_TAIL = 1 << 18  # bytes at the end, which hold the newest lines


@dataclass
class Metrics:
    """Holds the columns of a metrics.jsonl. A line is a row; a column has no entry for lines without its name."""

    steps: np.ndarray  # int64 (rows,), ascending
    times: np.ndarray  # float64 (rows,): seconds since 1970, NaN where a line has none
    columns: dict[str, tuple[np.ndarray, np.ndarray]]  # by name: rows int64 (n,), values float64 (n,)
    foreign: int = 0  # lines that are half-written, or none of ours
    dropped: set[str] = field(default_factory=set)  # names beyond the most that are kept

    def get_steps_and_values(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the steps, int64 (n,), and the values, float64 (n,), of a column; both are empty if there is no such
        column.
        """
        rows, values = self.columns.get(name, (np.empty(0, np.int64), np.empty(0)))
        return self.steps[rows], values

    def find_last_finite_value(self, name: str) -> float | None:
        """Returns the newest finite value of a column; None if there is none."""
        values = self.get_steps_and_values(name)[1]
        values = values[np.isfinite(values)]
        return float(values[-1]) if len(values) else None


def read_metrics_columns(path: Path) -> Metrics:
    """Reads a metrics.jsonl as columns, ordered by step. If the file is missing, there are no columns. Raises OSError
    if it is not a regular file or not readable.
    """
    steps, times, rows, values = array("q"), array("d"), {}, {}
    foreign, dropped = 0, set()
    for entry in _iterate_entries(path):
        if entry is None:
            foreign += 1
            continue
        row, step = len(steps), entry.pop("step")
        flat = dict(_iterate_numbers(entry))
        steps.append(step)
        times.append(_replace_invalid_time(flat.pop("time", np.nan)))
        for name, value in flat.items():
            if name not in rows:
                if len(rows) == _MOST_NAMES:
                    dropped.add(name)
                    continue
                rows[name], values[name] = array("q"), array("d")
            rows[name].append(row)
            values[name].append(value)
    steps, times = np.array(steps, np.int64), np.array(times)
    order = np.argsort(steps, kind="stable")  # foreign lines may stand anywhere
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    columns = {}
    for name in rows:
        own = place[np.array(rows[name], np.int64)]
        sort = np.argsort(own)
        columns[name] = own[sort], np.array(values[name])[sort]
    return Metrics(steps[order], times[order], columns, foreign, dropped)


def read_newest_values(path: Path) -> tuple[dict[str, float], float | None]:
    """Reads the last 256 KiB of a metrics.jsonl. Returns ({name: its newest value}, time of the newest line that has
    one, in seconds since 1970, or None). Returns ({}, None) if the file is missing. Raises OSError if it is not a
    regular file or not readable.
    """
    latest: dict[str, float] = {}
    for entry in _iterate_entries(path, _TAIL):
        if entry is not None:
            latest |= dict(_iterate_numbers(entry)) | {"step": entry["step"]}
    when = _replace_invalid_time(latest.pop("time", np.nan))
    return latest, when if when == when else None


def is_valid_time(value: Any) -> bool:
    """Returns whether a value is a number of seconds since 1970 that a calendar can show."""
    return type(value) in (int, float) and 0 <= value < _LATEST


def _replace_invalid_time(value: float) -> float:
    """Returns a time in seconds since 1970 as it is, or NaN if it is not valid."""
    return value if is_valid_time(value) else np.nan


def _iterate_entries(path: Path, tail: int | None = None) -> Iterator[dict[str, Any] | None]:
    """Yields the entry of each line of a file of JSON lines, or None for a line that is broken, longer than 1 MB, or
    without a step (an integer from 0). Yields nothing if the file does not exist. Raises OSError if it is not a regular
    file or not readable.

    tail   reads only the last `tail` bytes, without the line that is cut off there; None reads all
    """
    if not path.exists():
        return
    small.require_regular_file(path)
    with open(path, "rb") as file:
        if tail is not None and path.stat().st_size > tail:
            file.seek(-tail, 2)
            file.readline(_LONGEST)
        for line in iter(lambda: file.readline(_LONGEST), b""):
            try:
                entry = json.loads(line)
                whole = type(entry["step"]) is int and 0 <= entry["step"] < 1 << 62
            except (ValueError, KeyError, TypeError, RecursionError):
                whole = False
            yield entry if whole else None


def _iterate_numbers(entry: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields (name, number) for each number in an entry of metrics.jsonl; null becomes NaN. Numbers in inner sections,
    such as timing, keep their own names, without the section's.
    """
    for name, value in entry.items():
        if isinstance(value, dict):
            yield from _iterate_numbers(value)
        elif value is None or type(value) in (int, float):
            try:
                yield name, np.nan if value is None else float(value)
            except OverflowError:  # an integer of hundreds of digits
                yield name, np.nan


def select_curve_indices(values: np.ndarray, max_points: int) -> np.ndarray:
    """Returns the indices of about `max_points` of the values, with which a curve looks as it does with all values: the
    first, the last, and the minimum and maximum of each of many equal intervals.
    """
    count = len(values)
    if count <= max_points:
        return np.arange(count)
    bounds = np.linspace(0, count, max(max_points // 2, 1) + 1).astype(np.int64)
    kept = {0, count - 1}
    for first, end in itertools.pairwise(bounds):
        part = values[first:end]
        if np.isnan(part).all():
            kept.add(int(first))  # a gap stays one
        else:
            kept |= {int(first + np.nanargmin(part)), int(first + np.nanargmax(part))}
    return np.array(sorted(kept))


def compute_training_hours(metrics: Metrics, starts: list[float]) -> np.ndarray | None:
    """Returns the hours of training up to each row of metrics, (rows,), without the pauses between commands. Returns
    None if the hours cannot be computed. starts: the times at which the run's commands began, in seconds since 1970.

    Lines without a time, as earlier versions wrote them, get their hours from samples and samples per second.
    """
    rate, seen = np.full((2, len(metrics.steps)), np.nan)
    for target, name in ((rate, "samples_per_second"), (seen, "images_seen")):
        rows, values = metrics.columns.get(name, ((), ()))
        target[list(rows)] = values
    total, seconds, known, time, samples = 0.0, np.empty(len(rate)), False, min(starts, default=np.nan), 0.0
    ordered = sorted(starts)
    for row, now in enumerate(metrics.times):
        if now == now and time == time:
            since = max((start for start in ordered if time < start <= now), default=time)
            total, known = total + max(now - since, 0.0), True
        elif rate[row] > 0 and seen[row] == seen[row]:
            total, known = total + max(seen[row] - samples, 0.0) / rate[row], True
        time = now if now == now else time
        samples = seen[row] if seen[row] == seen[row] else samples
        seconds[row] = total
    return seconds / 3600 if known else None
