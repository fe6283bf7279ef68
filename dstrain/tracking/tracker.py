"""Writes what a run reports while it trains, on rank 0, into the run's folder.

metrics.jsonl      one JSON object a report: step, means, figures; figures that depend on the machine stand below
                   "timing", so that all others are equal bit for bit in a resumed and an uninterrupted run whose
                   saves fall on reports
events.jsonl       a line for each start, with the machine, and each rollback
log.txt            the lines that were printed
report.html        all of this for a person, see page.py and report/
samples/           step_00000500.png, grids; of videos step_00000500.gif, and frames side by side as .png
wandb/             see wandb_sink.py
tensorboard/       where run.track.tensorboard asks for it
"""

import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from dstrain.disk import atomic, lines
from dstrain.distributed import group
from dstrain.distributed.progress import get_phases
from dstrain.recipe import ConfigError, Track, explain_write_errors
from dstrain.tracking.figures import format_duration, plot_curves_of_sorted_values
from dstrain.tracking.machine import describe_machine, describe_memory_use
from dstrain.tracking.meter import Meter
from dstrain.tracking.page import Page
from dstrain.tracking.pictures import make_grid, save_png
from dstrain.tracking.videos import make_film_grid, save_gif, tile_clip_frames
from dstrain.tracking.wandb_sink import WandbSink

_PATIENCE = 5.0  # seconds that a run which was stopped early waits for its report.html
# Figures that depend on the machine: two runs of the same steps differ in them.
TIMING = ("samples_per_second", "step_seconds", "data_wait", "peak_memory", "seconds", "mfu", "tflops")


class Tracker:
    """Reports progress, metrics and pictures. Make it and call it on all ranks; only rank 0 writes.

    Lines of metrics.jsonl after `resumed_step` are dropped: those steps are trained anew. If a file cannot be written
    later, that is reported once, and training goes on. Raises ConfigError if tensorboard is asked for and not
    installed, or if the folder cannot be written.

    name, steps     of the run
    parts           names of the networks that learn
    config, recipe  the whole recipe for wandb, and as text for TensorBoard
    report_page     steps between two pages report.html; 0 writes none
    patience        seconds that the end may wait for the last page at most
    settings        DeepSpeed's, resolved
    weights         numbers of weights by part
    system          the file of a system from outside dstrain
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        track: Track,
        *,
        name: str,
        steps: int,
        parts: Sequence[str],
        config: dict[str, Any],
        recipe: str,
        report_page: int,
        patience: float,
        resumed_step: int = 0,
        settings: dict[str, Any] | None = None,
        weights: dict[str, int] | None = None,
        system: Path | None = None,
    ) -> None:
        if track.tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise ConfigError("track.tensorboard=true needs a package: `pip install tensorboard`, or write false")
        self.folder, self._name, self._steps, self._patience = Path(folder), name, steps, patience
        self._artifact = track.artifact
        self._meter = Meter(parts)
        self._first = group.rank() % group.world() == 0
        self._done = resumed_step
        self._faults: set[str] = set()
        self._bar = self._wandb = self._board = None
        if not self._first:
            return
        with explain_write_errors(self.folder / "metrics.jsonl", "make room there, or name another folder="):
            self.folder.mkdir(parents=True, exist_ok=True)
            damaged = _remove_lines_after_step(self.folder / "metrics.jsonl", resumed_step)
            torn = lines.remove_partial_last_line(self.folder / "log.txt")
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=steps, initial=resumed_step, unit="step", dynamic_ncols=True)
            get_phases().redirect_heartbeat_lines(self._print_line)
        for line in get_phases().take_printed_lines():
            self._append_to_file("log.txt", line + "\n")
        facts = describe_machine(system) | ({"weights": weights} if weights else {})
        sharding = {"deepspeed": settings or {}}
        if track.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(self.folder / "tensorboard", purge_step=resumed_step + 1)
            for name, text in (("recipe", recipe), ("machine", json.dumps(facts | sharding, indent=2))):
                self._board.add_text(name, f"```\n{text}\n```", resumed_step)
        self._wandb = WandbSink(
            self.folder, track, name=name, config=config | sharding | {"machine": facts}, note=self.log
        )
        if weights:
            self.log(describe_memory_use())
        if damaged or torn:
            self.log(f"half-written lines were dropped: {damaged} of metrics.jsonl, {int(torn > 0)} of log.txt")
        self._page = Page(self.folder, report_page, resumed_step, self.log)
        self._write_event("start", resumed_step, facts)

    def add_terms(self, part: str, terms: dict[str, Tensor]) -> None:
        """Adds the terms of one micro-batch of `part`, {name: scalar or (B,)}, to the means of the next report. Never
        waits for the device.
        """
        self._meter.add_terms(part, terms)

    def move_progress_bar(self, done: int) -> None:
        """Records that `done` steps are complete, and moves the progress bar there, if one is shown."""
        self._done = done
        if self._bar is not None:
            self._bar.update(done - self._bar.n)

    def report_means(self, done: int, figures: dict[str, float]) -> None:
        """Computes the means of the terms since the last report. Writes them, together with `figures`, to
        metrics.jsonl, the log, wandb and TensorBoard, as the values after `done` steps. Starts writing report.html if
        it is due. Call it on all ranks.
        """
        values = self._meter.compute_means() | figures
        if not self._first:
            return
        timing = {name: value for name, value in values.items() if name.rpartition("/")[2].startswith(TIMING)}
        steady = {name: value for name, value in values.items() if name not in timing}
        self._append_to_file(
            "metrics.jsonl", _format_as_json_line({"step": done, **steady, "timing": timing | {"time": time.time()}})
        )
        self.log(self._format_log_line(done, values))
        get_phases().print_fewer_heartbeat_lines()
        self._send_values(
            {f"train/{name}": value for name, value in steady.items()}
            | {f"timing/{name}": value for name, value in timing.items()},
            done,
        )
        self._page.write_report_if_due(done)

    def report_scores(
        self, done: int, scores: dict[str, float], curves: dict[str, list[float]] | None = None, kind: str = "held_out"
    ) -> None:
        """Writes scores after `done` steps to metrics.jsonl, the log, wandb and TensorBoard, under names KIND/NAME.
        Plots each curve as samples/step_N_NAME.png.

        scores   {NAME: value}
        curves   {NAME: values}
        kind     held_out or metrics
        """
        if not self._first:
            return
        named = {f"{kind}/{name}": value for name, value in scores.items()}
        self._append_to_file("metrics.jsonl", _format_as_json_line({"step": done, **named}))
        self.log(self._format_log_line(done, named))
        self._send_values(named, done)
        for name, values in (curves or {}).items():
            path = self.folder / "samples" / f"step_{done:08d}_{name}.png"
            try:
                path.parent.mkdir(exist_ok=True)  # and never the run's folder, which may be taken away
                plot_curves_of_sorted_values(path, f"{self._name} at step {done}, held out", {name: values})
            except OSError as error:
                self._print_first_write_error(path.parent.name, error)
                return
            self._wandb.log_media(f"held_out/{name}", path, done)
            if self._board is not None:
                with Image.open(path) as plot:
                    self._board.add_image(f"held_out/{name}", np.asarray(plot.convert("RGB")), done, dataformats="HWC")

    def save_samples(
        self,
        done: int,
        images: Tensor | None,
        name: str = "samples",
        columns: int | None = None,
        captions: Sequence[str] | None = None,
    ) -> None:
        """Writes images uint8 (N, C, H, W) as one grid: samples/step_N.png or, if `name` is not "samples",
        step_N_NAME.png. Videos uint8 (N, T, C, H, W) become a GIF of that name, and a PNG with frames side by side.
        `images` may be None on ranks other than 0, which write nothing.
        """
        if not self._first or images is None:
            return
        if images.ndim == 5 and images.shape[1] == 1:
            images = images[:, 0]
        videos = images.ndim == 5
        pixels = tile_clip_frames(images, captions) if videos else make_grid(images, columns, captions)
        suffix = "" if name == "samples" else f"_{name}"
        path = self.folder / "samples" / f"step_{done:08d}{suffix}.png"
        try:
            path.parent.mkdir(exist_ok=True)
            save_png(path, pixels)
            if videos:
                save_gif(path.with_suffix(".gif"), make_film_grid(images, columns, captions))
        except OSError as error:
            self._print_first_write_error(path.parent.name, error)
            return
        self._wandb.log_media(name, path.with_suffix(".gif") if videos else path, done)
        if self._board is not None:
            self._board.add_image(name, pixels, done, dataformats="HWC")

    def report_rollback(self, step: int, done: int, trouble: str) -> None:
        """Records in events.jsonl that training goes back from step `done` to `step`; `trouble` says why. Removes the
        reports of all steps after `step`, which are taken again.
        """
        self._meter.clear_terms()
        if not self._first:
            return
        self._write_event("rollback", step, {"done": done, "trouble": trouble})
        try:
            _remove_lines_after_step(self.folder / "metrics.jsonl", step)
        except OSError as error:
            self._print_first_write_error("metrics.jsonl", error)
        self.move_progress_bar(step)

    def find_which_results_are_written(self, done: int) -> tuple[bool, bool, bool]:
        """Returns which results of step `done` are in the run's folder already: (pictures, held-out figures, metrics),
        the same on all ranks. Call it on all ranks.
        """
        drawn = evaluated = measured = False
        if self._first and done:
            drawn = any((self.folder / "samples").glob(f"step_{done:08d}*"))
            path = self.folder / "metrics.jsonl"
            names = [
                name
                for entry in (read_metrics(path) if path.is_file() else ())
                if entry["step"] == done
                for name in entry
            ]
            evaluated, measured = (
                any(name.startswith(f"{kind}/") for name in names) for kind in ("held_out", "metrics")
            )
        return group.broadcast_from_first((drawn, evaluated, measured))

    def log_model_to_wandb(self, done: int, write_weights: Callable[[Path], None]) -> None:
        """Logs the weights to wandb as an artifact. For this, calls `write_weights`, which must fill the folder
        RUN/model. Does nothing unless track.artifact is set and wandb is on. If writing fails, logs why.
        """
        if not (self._first and self._artifact and self._wandb.is_on):
            return
        folder = self.folder / "model"
        try:
            write_weights(folder)
        except (OSError, ValueError) as error:
            self.log(f"track.artifact: the model was not logged: {error}")
        else:
            self._wandb.log_artifact(self._name, folder, done)

    def write_last_report(self, done: int) -> None:
        """Writes report.html when a run ends, after `done` steps, and waits for it: at most 60 s after the run's last
        step, 5 s if the run was stopped early.
        """
        if self._first:
            self._page.write_last_report(done, min(60.0 if done == self._steps else _PATIENCE, self._patience))

    def log_failure(self, text: str, write_page: bool) -> None:
        """Logs `text`, the error that ends the run. If `write_page` is True, also writes report.html, so that the
        report shows the error.
        """
        self._faults.add("log.txt")  # it would be no news now that training goes on without it
        self.log(text)
        if self._first and write_page:
            self._page.write_last_report(self._done, _PATIENCE)

    def log(self, text: str) -> None:
        """On rank 0, prints a line of text and appends it to log.txt. Control characters, which a terminal would obey,
        become "?".
        """
        if self._first:
            text = lines.make_printable(text, keep="\n\t")
            self._print_line(text)
            self._append_to_file("log.txt", text + "\n")

    def close(self) -> None:
        """Closes all outputs; waits at most 15 s until wandb has sent what is left. May be called more than once."""
        for sink in (self._wandb, self._board, self._bar):
            if sink is not None:
                sink.close()
        self._bar = self._board = None

    def _format_log_line(self, done: int, values: dict[str, float]) -> str:
        """Returns the line of log.txt that reports `values` after `done` steps. Leaves out the means by quarter of the
        timesteps.
        """
        shown = [
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in values.items()
            if name[-3:-1] != "_q" and name != "seconds_left"
        ]
        left = [f"left {format_duration(values['seconds_left'])}"] if "seconds_left" in values else []
        return f"step {done}/{self._steps}  " + "  ".join(shown + left)

    def _send_values(self, values: dict[str, float], done: int) -> None:
        """Sends {name: number} of step `done` to wandb and TensorBoard."""
        self._wandb.log_values(values, done)
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, done)

    def _print_line(self, text: str) -> None:
        """Prints a line above the progress bar, or without one on stdout."""
        get_phases().postpone_next_heartbeat_line()
        bar = self._bar  # which the main thread may close meanwhile
        with suppress(OSError, ValueError):  # a closed pipe or terminal ends no training
            if bar is not None:
                bar.write(text, file=sys.stderr)
            else:
                print(text, flush=True)

    def _write_event(self, kind: str, step: int, facts: dict[str, Any]) -> None:
        """Appends an event to events.jsonl. kind: start or rollback."""
        self._append_to_file(
            "events.jsonl", _format_as_json_line({"event": kind, "time": time.time(), "step": step, **facts})
        )

    def _append_to_file(self, name: str, text: str) -> None:
        """Appends text to a file in the run's folder. If that fails, raises no error, and prints why the first time."""
        try:
            lines.append_lines(self.folder / name, text)
        except OSError as error:
            self._print_first_write_error(name, error)

    def _print_first_write_error(self, name: str, error: OSError) -> None:
        """Prints that a file of the run cannot be written, once for each file."""
        if name not in self._faults:
            self._faults.add(name)
            self._print_line(f"{self.folder / name} can not be written: {error}; training goes on")


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Returns the entries of a metrics.jsonl, one dictionary a line. Skips half-written lines, which kill -9 may
    leave.
    """
    return _read_entries_and_count_broken(path)[0]


def _read_entries_and_count_broken(path: str | os.PathLike) -> tuple[list[dict[str, Any]], int]:
    """Returns the entries of a metrics.jsonl, and how many lines are half-written. If half a line is followed by a
    whole entry without a line break, this entry is returned, too.
    """
    entries, damaged = [], 0
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = _parse_entry(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            damaged += 1
            with suppress(ValueError, KeyError, TypeError, RecursionError):  # a whole one glued to half of one
                entries.append(_parse_entry(line[line.rindex('{"step"') :]))
        else:
            entries.append(entry)
    return entries, damaged


def _parse_entry(line: str) -> dict[str, Any]:
    """Returns a line of metrics.jsonl as a dictionary. Raises ValueError, KeyError or TypeError if the line is no JSON
    object with an integer "step".
    """
    if type((entry := json.loads(line))["step"]) is not int:
        raise TypeError("no number of steps")
    return entry


def _remove_lines_after_step(path: Path, step: int) -> int:
    """Removes lines from a metrics.jsonl: those of steps after `step`, and half-written ones. The file is replaced as a
    whole. Returns how many lines were half-written. Returns 0 if there is no file.
    """
    if not path.is_file():
        return 0
    entries, damaged = _read_entries_and_count_broken(path)
    atomic.write_file(path, "".join(_format_as_json_line(entry) for entry in entries if entry["step"] <= step))
    return damaged


def _format_as_json_line(entry: dict[str, Any]) -> str:
    """Returns an entry as one line of strict JSON. Numbers that are not finite become null."""

    def replace_nonfinite(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: replace_nonfinite(inner) for name, inner in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(replace_nonfinite(entry), allow_nan=False) + "\n"
