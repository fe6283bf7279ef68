"""Writes report.html: one file that opens offline, with plotly's curves, pictures as data: URLs, and all texts
escaped.
"""

import json
import math
import os
import re
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dstrain import __version__
from dstrain.disk import atomic
from dstrain.recipe import ConfigError, explain_write_errors, format_value, require_replaceable_file
from dstrain.tracking.figures import format_duration
from dstrain.tracking.report import metrics, pictures
from dstrain.tracking.report.record import Record, read_record

_POINTS = 300_000  # of all curves together: some 5 MB of text
_PER_CURVE = 2000  # two for each pixel of a wide chart
_PICTURE_BYTES = 12 << 20  # of all pictures together, before base64
_GRIDS = 200  # pictures of all kinds and runs together, or a few more
_MOST_MARKS = 200
_SHOWN = 200  # lines of a log, and of bad files
_QUARTER = re.compile(r"(.*)_q([0-3])")
_FIRST = ("loss", "held_out/loss", "lr", "grad_norm", "samples_per_second")  # the order of the charts begins so
_COLORS = ("#1f4e9c", "#c2571a", "#3a7d44", "#7b4aa0", "#b0343c", "#2b8a9e", "#8a6d1f", "#d16ba5", "#5b6470", "#82a01f")


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Writes the report of one run, or of several side by side, to the file `out`, whole or not at all; returns its
    path.

    Raises ConfigError if a folder is not a run's, if plotly is not installed, or if `out` is a folder, cannot be
    written, or is a file that is no report and so may not be replaced.
    """
    _read_plotly_javascript()
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder: name a file in it, for example {out / 'report.html'}")
    require_replaceable_file(out, "--out", _is_report)
    folders = [folder.resolve() for folder in dict.fromkeys(folders)]
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):  # runs of one name are told apart by their folders
        above = Path(os.path.commonpath([folder.parent for folder in folders]))
        names = [str(folder.relative_to(above)) for folder in folders]
    make = out.parent.resolve() not in folders  # a run's folder that is taken away meanwhile stays so
    records = [read_record(folder, None if len(folders) == 1 else name) for folder, name in zip(folders, names)]
    text = render_page(records)
    with explain_write_errors(f"--out {out}", "name a file in a folder that can be written"):
        atomic.write_file(out, text.encode("utf-8", "replace"), make_parent=make)  # a name may be no text
    return out


def _is_report(path: Path) -> bool:
    """Returns whether a file is an HTML page that dstrain has written."""
    with open(path, "rb") as file:
        return b'<meta name="generator" content="dstrain ' in file.read(1000)


def render_page(records: Sequence[Record]) -> str:
    """Returns the text of the HTML page that reports one or several runs."""
    from jinja2 import Environment, PackageLoader, select_autoescape

    environment = Environment(
        loader=PackageLoader("dstrain.tracking.report", "."),
        autoescape=select_autoescape(),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    grids, plots = _collect_grids_and_plots(records)  # before remarks are shown: it may add some
    drawn = {
        "runs": [_describe_run(record, place) for place, record in enumerate(records)],
        "charts": _make_charts(records),
        "dull": [f"{column} ({reason})" for column, reason in _find_uninformative_columns(records).items()],
        "grids": grids,
    }
    return environment.get_template("page.html").render(
        records=records,
        drawn=drawn,
        plots=plots,
        plotly=_read_plotly_javascript(),
        version=__version__,
        duration=format_duration,
        now=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        facts=[_format_run_facts(record) for record in records],
        differences=_list_setting_differences(records),
        show=format_value,
        when=_format_time,
        as_json=partial(json.dumps, indent=2),
        shown=_SHOWN,
        colors=_COLORS,
    )


def _read_plotly_javascript() -> str:
    """Returns plotly's JavaScript. Raises ConfigError if plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError("reports are drawn by plotly, which is not installed: pip install plotly") from None
    return get_plotlyjs()


def _describe_run(record: Record, run_number: int) -> dict[str, Any]:
    """Returns what the page's script needs to draw a run, for JSON: its label and colour, the hours that had
    passed at some steps, the samples in a step, and marks at resumes and rollbacks. `run_number` is the number of the
    run on the page, from 0.
    """
    clock = None
    if record.hours is not None:
        rows = pictures.select_evenly_spaced_steps(range(len(record.hours)), _PER_CURVE)
        clock = {"steps": record.metrics.steps[rows].tolist(), "hours": [round(record.hours[row], 5) for row in rows]}
    marks = [("resume", start["step"]) for start in record.starts if start["step"] > 0]
    marks += [("rollback", event["step"]) for event in record.rollbacks]
    if len(marks) > _MOST_MARKS:
        record.remarks.append(f"of {len(marks)} resumes and rollbacks the last {_MOST_MARKS} are marked on the curves")
    return {
        "label": record.label,
        "color": _COLORS[run_number % len(_COLORS)],
        "clock": clock,
        "batch": record.run.batch.global_ if record.run else None,
        "marks": [{"kind": kind, "step": step} for kind, step in marks[-_MOST_MARKS:]],
    }


def _make_charts(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Returns the charts in the order of the page, each {"title", "traces"}. The quarters of the timesteps share a
    chart, and so do EMA and raw weights on held-out data.
    """
    charts: dict[str, list[tuple[int, str, str]]] = {}  # title: run, column, name within the chart
    dull = _find_uninformative_columns(records)
    for place, record in enumerate(records):
        for column in record.metrics.columns:
            if column == "images_seen" or column in dull:  # the former is an axis
                continue
            title, name = column, ""
            if match := _QUARTER.fullmatch(column):
                title, name = f"{match[1]} by quarter of the timesteps", f"quarter {int(match[2]) + 1}"
            if title.startswith("held_out/"):
                raw = title.startswith("held_out/raw/")
                title, name = title.replace("/raw/", "/", 1), ", ".join(filter(None, (name, "raw" if raw else "EMA")))
            charts.setdefault(title, []).append((place, column, name))
    most = max(50, min(_PER_CURVE, _POINTS // max(1, sum(map(len, charts.values())))))

    def make_title_sort_key(title: str) -> tuple[int, int]:
        """Returns the key by which charts are sorted: first the titles in _FIRST, then the others as they came."""
        known = [place for place, first in enumerate(_FIRST) if title == first or title.startswith(f"{first} by ")]
        return known[0] if known else len(_FIRST), list(charts).index(title)

    return [
        {
            "title": title,
            "traces": [
                _make_chart_curve(records[place], place, column, name, most) for place, column, name in charts[title]
            ],
        }
        for title in sorted(charts, key=make_title_sort_key)
    ]


def _find_uninformative_columns(records: Sequence[Record]) -> dict[str, str]:
    """Returns {column: reason} of the columns that the page leaves out. Such a column is 0 throughout, or equal to an
    earlier column, in every run that has it.
    """
    reasons: dict[str, list[str]] = {}
    for record in records:
        known: dict[tuple[bytes, bytes], str] = {}
        for column in record.metrics.columns:
            steps, values = record.metrics.get_steps_and_values(column)
            first = known.setdefault((steps.tobytes(), values.tobytes()), column)
            reason = "" if first == column or len(values) < 2 else f"as {first}"
            reasons.setdefault(column, []).append(reason if values.any() else "0 throughout")
    return {column: found[0] for column, found in reasons.items() if found[0] and len({*found}) == 1}


def _make_chart_curve(record: Record, run_number: int, column: str, name: str, max_points: int) -> dict[str, Any]:
    """Returns a curve of a chart: one column of one run, thinned to about `max_points` points."""
    steps, values = record.metrics.get_steps_and_values(column)
    kept = metrics.select_curve_indices(values, max_points)
    numbers = [float(f"{value:.6g}") if np.isfinite(value) else None for value in values[kept]]
    return {"run": run_number, "name": name, "steps": steps[kept].tolist(), "values": numbers}


def _collect_grids_and_plots(records: Sequence[Record]) -> tuple[list[dict[str, Any]], dict[Path, str]]:
    """Returns (grids, plots). Adds a remark to a run's record if some of its pictures are left out or cannot be read.

    grids   the sample grids, one entry for each kind: {"title", "runs"}, with the steps and pictures of each run
    plots   the plots of evaluations, {path: data: URL with the picture, or None if it cannot be read}
    """
    most = max(4, _GRIDS // max(1, sum(len(record.pictures) for record in records)))
    chosen = [
        (kind, place, pictures.select_evenly_spaced_steps(list(steps), most))
        for place, record in enumerate(records)
        for kind, steps in record.pictures.items()
    ]
    plots = [(record, plot) for record in records for *_, plot in record.evaluations if plot.is_file()]
    share = _PICTURE_BYTES // max(1, len(plots) + sum(len(steps) for *_, steps in chosen))

    def embed_file(record: Record, path: Path) -> str | None:
        """Returns a picture as a data: URL. If it cannot be read, adds a remark to the record and returns None."""
        try:
            return pictures.make_picture_data_url(path, share)
        except (OSError, ValueError) as error:
            record.remarks.append(f"{path.relative_to(record.folder)} is no picture that can be read: {error}")
            return None

    grids: dict[str, list[dict[str, Any]]] = {}
    for kind, place, steps in chosen:
        record = records[place]
        if len(steps) < len(record.pictures[kind]):
            record.remarks.append(f"of {len(record.pictures[kind])} pictures ({kind}) {len(steps)} are shown")
        images = [(step, embed_file(record, record.pictures[kind][step])) for step in steps]
        images = [(step, image) for step, image in images if image]
        if images:
            grids.setdefault(kind, []).append(
                {"run": place, "steps": [step for step, _ in images], "images": [image for _, image in images]}
            )
    embedded = {plot: embed_file(record, plot) for record, plot in plots}
    return [{"title": kind, "runs": runs} for kind, runs in grids.items()], embedded


def _format_run_facts(record: Record) -> dict[str, str]:
    """Returns {name: text} for the table at the top of a run's page, such as its state, step, loss and device."""
    state, columns = record.state, record.metrics
    step = "none" if state.step is None else f"{state.step:,}" + (f" of {state.steps:,}" if state.steps else "")
    facts = {"state": state.state, "step": step}

    def add_fact(name: str, column: str, text: str = "{:.4g}") -> None:
        """Adds the newest value of a column to the facts, if there is one, formatted by `text`."""
        if (value := columns.find_last_finite_value(column)) is not None:
            facts[name] = text.format(value)

    add_fact("samples seen", "images_seen", "{:,.0f}")
    add_fact("loss", "loss")
    if state.loss is not None and not math.isfinite(state.loss):  # the column's last value is an older one
        facts["loss"] = str(state.loss)
    add_fact("held-out loss", "held_out/loss")
    add_fact("samples/s", "samples_per_second")
    add_fact("MFU", "mfu", "{:.1%}")
    add_fact("peak memory, GB", "peak_memory_gb", "{:.3g}")
    if record.hours is not None and len(record.hours):
        facts["running time"] = format_duration(3600 * record.hours[-1])
    add_fact("skipped steps", "skipped", "{:,.0f}")
    add_fact("rollbacks", "rollbacks", "{:,.0f}")
    facts["starts"] = f"{len(record.starts):,}" if record.starts else "unknown"
    facts["unreadable files"] = f"{len(record.bad_files):,}"
    facts["newest checkpoint"] = "none" if state.checkpoint is None else f"step {state.checkpoint:,}"
    if record.starts:
        last = record.starts[-1]
        facts |= {name: str(last[name]) for name in ("device", "world", "host") if name in last}
        if "commit" in last:
            facts["code"] = str(last["commit"])[:12] + (", changed since" if last.get("dirty") else "")
        if isinstance(system := last.get("system"), dict) and "commit" in system:
            facts["system's code"] = str(system["commit"])[:12] + (", changed since" if system.get("dirty") else "")
        if isinstance(weights := last.get("weights"), dict):
            facts["weights"] = ", ".join(f"{part} {count:,}" for part, count in weights.items() if type(count) is int)
    return facts


def _list_setting_differences(records: Sequence[Record]) -> list[tuple[str, list[Any]]]:
    """Returns (key, [value of each run]) for the entries of recipe and DeepSpeed settings in which runs differ. Entries
    that a run lacks, such as those of another system's model, stand last, with "absent" as the value.
    """
    tables = [record.flatten_settings() for record in records]
    keys = dict.fromkeys(key for table in tables for key in table if key not in ("name", "folder"))
    rows = [(key, [table.get(key, "absent") for table in tables]) for key in keys]
    differing = [(key, values) for key, values in rows if any(value != values[0] for value in values)]
    return sorted(differing, key=lambda row: "absent" in row[1])


def _format_time(seconds: float) -> str:
    """Formats seconds since 1970 as local date and time."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
