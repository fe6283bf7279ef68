"""Reads what a run's folder tells of it besides its curves: recipe, DeepSpeed settings, starts, evaluations, faults.

Files may be absent, half-written or somebody else's. What cannot be read becomes a remark, and the rest is shown.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dstrain.disk import small
from dstrain.recipe import ConfigError, Run, dump_run, load_recipe
from dstrain.recipe.files import convert_to_plain_values
from dstrain.tracking.figures import format_evaluation_table
from dstrain.tracking.report import metrics, pictures
from dstrain.tracking.report.state import State, read_run_state

_MOST = 100  # evaluations that are shown
_Read = TypeVar("_Read")


@dataclass
class Record:
    """Holds one run as its report shows it."""

    folder: Path
    label: str
    state: State
    metrics: metrics.Metrics
    run: Run | None
    differing: list[tuple[str, Any, Any]] = field(default_factory=list)  # key, value, default
    settings: dict[str, Any] = field(default_factory=dict)  # DeepSpeed's
    starts: list[dict[str, Any]] = field(default_factory=list)  # of events.jsonl: one of each command
    rollbacks: list[dict[str, Any]] = field(default_factory=list)
    hours: np.ndarray | None = None  # after each row of metrics
    pictures: dict[str, dict[int, Path]] = field(default_factory=dict)  # by kind and step
    evaluations: list[tuple[str, str, Path]] = field(default_factory=list)  # name, table as text, plot
    bad_files: list[str] = field(default_factory=list)  # name and reason
    log: list[str] = field(default_factory=list)  # without its lines of metrics
    recipe: str = ""  # YAML, whole
    data: str = ""  # fingerprint
    remarks: list[str] = field(default_factory=list)

    def flatten_settings(self) -> dict[str, Any]:
        """Returns {dotted key: value} of all entries of the recipe, and of the DeepSpeed settings with "deepspeed."
        before their keys.
        """
        return dict(flatten_entries(convert_to_plain_values(self.run) if self.run else {})) | dict(
            flatten_entries({"deepspeed": self.settings})
        )


def read_record(folder: Path, label: str | None = None) -> Record:
    """Reads all that a report shows of a run from its folder. If a file cannot be read, the record gets a remark
    instead. label: the name to show for the run; None takes the recipe's. Raises ConfigError if the folder has no
    run.yaml.
    """
    if not (folder / "run.yaml").exists():
        if read_run_state(folder).state == "beginning":
            raise ConfigError(f"{folder}: the training that holds it has not begun yet: wait for its first report")
        raise ConfigError(
            f"{folder} is not a run's folder: it holds no run.yaml; name one that training has made, for "
            "example runs/dit-small"
        )
    remarks: list[str] = []

    def read_file_or_add_remark(name: str, reader: Callable[[Path], _Read], default: _Read) -> _Read:
        """Returns `reader(path)` for the run's file `name`. If the file is missing, returns `default`. If it cannot
        be read, returns `default`, too, and adds a remark.
        """
        try:
            return reader(folder / name)
        except FileNotFoundError:
            return default
        except (OSError, ValueError) as error:  # ConfigError is a ValueError
            remarks.append(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}")
            return default

    run = read_file_or_add_remark("run.yaml", load_recipe, None)
    columns = read_file_or_add_remark(
        "metrics.jsonl", metrics.read_metrics_columns, metrics.Metrics(np.empty(0, np.int64), np.empty(0), {})
    )
    record = Record(
        folder, label or (run.name if run else folder.name), read_run_state(folder), columns, run, remarks=remarks
    )
    if run is not None:
        record.differing, record.recipe = _list_nondefault_entries(run, remarks), dump_run(run)
    settings = read_file_or_add_remark("ds_config.json", small.read_json, {})
    record.settings = settings if isinstance(settings, dict) else {}
    events = read_file_or_add_remark("events.jsonl", _read_events, [])
    record.starts = [event for event in events if event["event"] == "start"]
    record.rollbacks = [event for event in events if event["event"] == "rollback"]
    record.hours = metrics.compute_training_hours(columns, [event["time"] for event in record.starts])
    record.pictures = pictures.find_pictures_by_kind_and_step(folder / "samples")
    record.evaluations = _read_evaluations(folder / "evaluation", remarks)
    record.bad_files = read_file_or_add_remark("bad_files.txt", _read_last_lines, [])
    record.log = [
        line for line in read_file_or_add_remark("log.txt", _read_last_lines, []) if not _is_metrics_line(line)
    ]
    record.data = "\n".join(read_file_or_add_remark("data.txt", _read_last_lines, []))
    if columns.foreign:
        remarks.append(f"half-written or foreign lines of metrics.jsonl, which are left out: {columns.foreign:,}")
    if columns.dropped:
        remarks.append(f"{len(columns.dropped):,} names of metrics.jsonl are left out: there are too many")
    if not len(columns.steps):
        remarks.append("metrics.jsonl holds no report yet: there are no curves")
    if not record.pictures:
        remarks.append("samples/ holds no picture")
    if not record.starts and record.state.state != "beginning":
        remarks.append(
            "events.jsonl tells no start (earlier versions wrote none): hardware, versions and resumes are unknown"
        )
    return record


def flatten_entries(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of all entries of nested sections. An empty section is yielded as a value."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from flatten_entries(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _list_nondefault_entries(run: Run, remarks: list[str]) -> list[tuple[str, Any, Any]]:
    """Returns (key, value, default) of each entry of a recipe that differs from its default. Leaves out name and
    folder. If the model's defaults are unknown, adds a remark, and these defaults are None.
    """
    from dstrain import systems  # loads torch, which nothing else here needs

    model = {}
    try:
        fields = systems.find_config_class(run.system).model_fields.items()
        model = {
            field.alias or name: field.get_default(call_default_factory=True)
            for name, field in fields
            if not field.is_required()
        }
    except Exception as error:  # a system from outside may raise anything
        remarks.append(f"the system {run.system} is not here, so that the defaults of its model are unknown: {error}")
    values = dict(flatten_entries(convert_to_plain_values(run)))
    defaults = dict(
        flatten_entries(convert_to_plain_values(Run()) | {"system": None, "model": convert_to_plain_values(model)})
    )
    return [
        (key, value, defaults.get(key))
        for key, value in values.items()
        if key not in ("name", "folder") and value != defaults.get(key)
    ]


def _read_events(path: Path) -> list[dict[str, Any]]:
    """Returns the events in an events.jsonl, starts and rollbacks; skips all other lines."""
    events = []
    for line in _read_last_lines(path):
        try:
            event = small.parse_json(line)
            known = event["event"] in ("start", "rollback") and type(event["step"]) is int
            if known and metrics.is_valid_time(event["time"]):
                events.append(event)
        except (ValueError, KeyError, TypeError):
            continue
    return events


def _read_evaluations(folder: Path, remarks: list[str]) -> list[tuple[str, str, Path]]:
    """Returns (name, table as text, path of the plot) for each result that `dstrain evaluate` has written into
    `folder`, at most 100, in descending order of name. Adds a remark if some are left out, and one for each that cannot
    be read.
    """
    files = sorted(folder.glob("*.json"), key=lambda path: path.name, reverse=True)
    if len(files) > _MOST:
        remarks.append(f"evaluation/ holds {len(files)} files: the newest {_MOST} are shown")
    found = []
    for path in files[:_MOST]:
        try:
            found.append((path.stem, format_evaluation_table(small.read_json(path)), path.with_suffix(".png")))
        except Exception as error:  # a file of others may be anything
            remarks.append(f"evaluation/{path.name} is no evaluation that can be read: {error}")
    return found


def _read_last_lines(path: Path) -> list[str]:
    """Returns the lines of a text file; of a larger one, those of its last 16 MB. Raises OSError if it is not a regular
    file or not readable.
    """
    small.require_regular_file(path)
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 16 * small.MEGABYTE))
        return file.read(16 * small.MEGABYTE).decode("utf-8", "replace").splitlines()


def _is_metrics_line(line: str) -> bool:
    """Returns whether a line of log.txt only repeats a report of metrics.jsonl, as "step 25/1200 loss ..." does."""
    words = line.split(maxsplit=2)
    return len(words) > 1 and words[0] == "step" and words[1].replace("/", "").isdigit() and "/" in words[1]
