"""A Tracker and a Throughput of a whole recipe, for tests: they pass on the sections that each is made of."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dstrain.recipe import Run, dump_run
from dstrain.tracking.throughput import Throughput
from dstrain.tracking.tracker import Tracker


def track_run(run: Run, folder: Path, parts: tuple[str, ...] = ("denoiser",), **more: Any) -> Tracker:
    """Returns what reports the progress of a recipe into a folder."""
    return Tracker(
        folder,
        run.track,
        name=run.name,
        steps=run.steps,
        parts=parts,
        config=run.model_dump(mode="json", by_alias=True),
        recipe=dump_run(run),
        report_page=run.every.report_page,
        patience=15 * run.faults.timeout_minutes,
        **more,
    )


def time_run(run: Run, first: int, waited: Callable[[], float] = lambda: 0.0, **more: Any) -> Throughput:
    """Returns what measures the speed of a recipe's steps after step `first`."""
    batch, folder = run.batch.global_, run.directory
    return Throughput(folder, first, waited, batch=batch, steps=run.steps, optimizer=run.optimizer, **more)
