"""Reads the progress of a run from its folder, without disturbing it, and makes a table of all runs in a folder."""

import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dstrain.disk import lines, small
from dstrain.recipe import ConfigError, load_recipe
from dstrain.tracking.figures import format_duration
from dstrain.tracking.report import metrics

_BESIDE = ("wandb: ", "report.html ")  # lines that may follow the one of a run's end
_DEPTH = 4  # levels of folders in which runs are looked for


@dataclass(frozen=True)
class State:
    """Holds the progress of a run as read from its folder; an entry is None if it is unknown."""

    run: str
    state: str  # beginning (no report yet), running, complete, stopped, dead, imported, or
    # unknown: no locks there
    step: int | None
    steps: int | None
    loss: float | None
    samples_per_second: float | None
    seconds_left: float | None
    checkpoint: int | None  # step of the newest one
    seconds_since: float | None  # the last line of metrics.jsonl
    picture: str | None  # path of the newest one
    note: str | None  # the last line of log.txt


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """Returns the folders of runs among `folders` and up to four levels below them. Does not look for runs inside a
    run. Raises ConfigError if one of `folders` does not exist.
    """
    found: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder: name a run, or a folder of runs, for example runs")
        found += _find_runs_within(folder, _DEPTH)
    return list(dict.fromkeys(found))


def _find_runs_within(folder: Path, depth: int) -> Iterator[Path]:
    """Yields the folders of runs that are `folder` or lie at most `depth` levels below it, but not inside a run."""
    if (folder / "run.yaml").is_file() or _is_locked(folder / ".lock"):  # a start writes run.yaml after its checks
        yield folder
    elif depth:
        try:
            inner = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        except OSError:
            return
        for path in inner:
            yield from _find_runs_within(path, depth - 1)


def read_run_state(folder: Path) -> State:
    """Reads the progress of the run in a folder. Entries for which a file is missing or unreadable are None."""
    try:
        run = load_recipe(folder / "run.yaml")
    except ConfigError:
        run = None
    try:
        latest, when = metrics.read_newest_values(folder / "metrics.jsonl")
    except OSError:
        latest, when = {}, None
    step, note = latest.get("step"), read_last_line_of_run(folder / "log.txt")
    steps, rate, saved = run.steps if run else None, latest.get("samples_per_second"), list_checkpoint_steps(folder)
    left = None
    if run and step is not None and rate and rate > 0 and step < steps:  # 0 seconds: the run was to end there
        left = latest.get("seconds_left") or (steps - step) * run.batch.global_ / rate
    if steps is not None and step is not None and step >= steps:
        word = "complete"  # though it may be held until the last files are written
    elif (held := _is_locked(folder / ".lock")) is not False and not _has_logged_a_stop(folder, note):
        word = "beginning" if step is None else "running"
        if not held:
            word = "unknown"
    else:
        word = _parse_run_ending(note) or ("imported" if saved == [0] and step is None else "dead")
    return State(
        folder.name or str(folder),
        word,
        None if step is None else int(step),
        steps,
        latest.get("loss"),
        rate,
        left,
        max(saved, default=None),
        None if when is None else time.time() - when,
        _find_newest_picture(folder / "samples"),
        note,
    )


def format_states(states: list[State]) -> str:
    """Formats the states of runs as a table, a line for each run. Below the table stand the last log line of each dead
    run, and a line for each run whose recipe is missing or damaged.
    """
    rows = [("run", "state", "step", "loss", "samples/s", "left", "checkpoint", "last line", "last picture")]
    for one in states:
        step = "-" if one.step is None else f"{one.step:,} of {one.steps:,}" if one.steps else f"{one.step:,}"
        running = one.state in ("running", "unknown")
        rows.append(
            (
                one.run,
                one.state,
                step,
                *("-" if value is None else f"{value:.4g}" for value in (one.loss, one.samples_per_second)),
                format_duration(one.seconds_left if running else None),
                "-" if one.checkpoint is None else f"{one.checkpoint:,}",
                "-" if one.seconds_since is None else f"{format_duration(one.seconds_since)} ago",
                one.picture or "-",
            )
        )
    shown = [[lines.make_printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in shown]
    for one in states:
        if one.state == "dead" and one.note:
            table.append(lines.make_printable(f"{one.run}: {one.note}"))
    for one in states:
        if one.steps is None and one.state != "beginning":
            table.append(lines.make_printable(f"{one.run}: its run.yaml is missing or damaged"))
    return "\n".join(table)


def convert_state_to_json_object(state: State) -> dict[str, Any]:
    """Converts the state of a run to {name: value} for JSON. Numbers that are not finite become null."""
    return {
        name: None if isinstance(value, float) and not abs(value) < float("inf") else value
        for name, value in asdict(state).items()
    }


def read_last_line_of_run(path: Path, tail: int = 1 << 14) -> str | None:
    """Returns the last line of a log, among its last `tail` bytes, that is about the run itself: not one of wandb or
    report.html. Returns None if there is none, or if the log cannot be read.
    """
    try:
        small.require_regular_file(path)
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - tail))
            last = file.read(tail).decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    return next((line.strip() for line in reversed(last) if line.strip() and not line.startswith(_BESIDE)), None)


def list_checkpoint_steps(folder: Path) -> list[int]:
    """Returns the steps of the checkpoints in a run's folder, ascending. Does not check that they are complete."""
    names = [path.name[5:] for path in (folder / "checkpoints").glob("step_*")]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def _parse_run_ending(last_line: str | None) -> str | None:
    """Returns "complete" or "stopped" if `last_line`, the last line of a run's log, says that the run has ended so;
    else None.
    """
    words = {"complete:": "complete", "stopped at step": "stopped"}
    return next((word for begins, word in words.items() if (last_line or "").startswith(begins)), None)


def _has_logged_a_stop(folder: Path, last_line: str | None) -> bool:
    """Returns whether `last_line`, the last line of a run's log, says that the run was stopped, and no command has
    claimed its folder since.
    """
    try:
        written, taken = ((folder / name).stat().st_mtime_ns for name in ("log.txt", ".lock"))
        return _parse_run_ending(last_line) == "stopped" and written > taken
    except OSError:
        return False


def _is_locked(lock_file: Path) -> bool | None:
    """Returns whether a command that trains holds the lock file of its run's folder. Returns None if that cannot be
    queried here.
    """
    try:
        descriptor = os.open(lock_file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back at once: a start waits for it
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _find_newest_picture(samples: Path) -> str | None:
    """Returns the path of the last picture by name in samples/, which is of the newest step; None if there is none."""
    names = (path for path in samples.glob("step_*") if path.suffix in (".png", ".gif"))
    return max(map(str, names), default=None)
