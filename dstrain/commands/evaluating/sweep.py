"""Measures averages of a run by their width: the held-out loss or a metric of each, as JSON and a curve.

The averages are those that `dstrain reconstruct` has written; every rank loads one after another.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from dstrain import systems
from dstrain.checkpoint.layout import RECONSTRUCTED
from dstrain.commands.evaluating.quality import measure_quality, replace_nonfinite_by_none, require_measurable_run
from dstrain.commands.evaluating.results import print_and_write_result
from dstrain.commands.options.evaluate import EvaluateOptions
from dstrain.data.batches import iterate_held_out
from dstrain.data.open import open_sources
from dstrain.data.source import Source
from dstrain.data.views import Spread
from dstrain.distributed import group
from dstrain.metrics.table import HIGHER, LOWER
from dstrain.recipe import ConfigError, Run, reword_errors
from dstrain.runs import trained
from dstrain.sampling.draw import evaluate_held_out_batches
from dstrain.tracking import figures


def require_measurable_averages(folder: Path, options: EvaluateOptions | None) -> None:
    """Raises ConfigError if the averages of a run cannot be measured. Call it before they are made. With
    options.metrics they are measured by that metric, otherwise by the held-out loss, which needs held-out samples.
    """
    if options is None or options.metrics is None:
        _open_held_out_samples(folder, trained.read_recipe(folder))
        return
    if options.metrics[0] not in (*LOWER, *HIGHER):
        raise ConfigError(f"--metric {options.metrics[0]}: name one of {', '.join((*LOWER, *HIGHER))}")
    with reword_errors(options={"--metrics ": "--metric "}):
        require_measurable_run(options)


def _open_held_out_samples(folder: Path, run: Run) -> Source:
    """Opens the run's held-out samples. Raises ConfigError if there are none."""
    source = open_sources(run.data, run=folder)[1]
    if source is None:
        raise ConfigError(f"--sweep: {folder} holds no samples out: train with data.held_out=0.05, or name a --metric")
    return source


def measure_loss_by_ema_width(
    folder: Path, step: int, widths: Sequence[float], num_samples: int | None = None, batch: int = 32
) -> tuple[Path, dict[str, Any]]:
    """Measures the held-out loss of a run's averages at `step`, of each width in `widths`, on all ranks together. Uses
    the same noise at every width. Returns the path of the JSON file, and its content.

    num_samples: the number of held-out samples, evenly spaced; None: all
    batch: the number of samples that a rank takes at a time

    Raises ConfigError if the run has no held-out samples.
    """
    run = trained.read_recipe(folder)
    all_held_out, system = _open_held_out_samples(folder, run), systems.build(run.system, run.model)
    if num_samples is not None and num_samples > len(all_held_out) and group.rank() == 0:
        print(
            f"--num-samples {num_samples}: {len(all_held_out):,} are held out, and all of them are taken",
            file=sys.stderr,
        )
    source = Spread(all_held_out, num_samples)
    scores = []
    for width in widths:
        path = trained.find_checkpoint(folder, step, width)
        networks = trained.load_networks(
            system, path, trained.choose_raw_or_ema_by_part(system, path, width), torch.float32
        )
        batches = iterate_held_out(source, batch, group.rank(), group.world(), group.device(), run.seed)
        scores.append(evaluate_held_out_batches(system, networks, batches))
    facts = {"run": run.name, "step": step, "split": "held_out", "samples": len(source)}
    return _print_and_write_scores(folder, facts, "loss", widths, scores)


def measure_metric_by_ema_width(options: EvaluateOptions, widths: Sequence[float]) -> tuple[Path, dict[str, Any]]:
    """Measures one metric of the pictures that each average draws, with the same noise at every width. Returns the path
    of the JSON file, and its content.

    Raises ConfigError if the metric has several figures, or if something cannot be measured, see `measure_quality`.
    """
    require_measurable_averages(options.run_folder, options)
    (metric,) = options.metrics or ("",)
    results = [measure_quality(replace(options, ema=width))[1] for width in widths]
    facts = {name: results[0][name] for name in ("run", "step", "split", "samples", "reference", "sampling")}
    return _print_and_write_scores(options.run_folder, facts, metric, widths, [result["figures"] for result in results])


def _print_and_write_scores(
    folder: Path,
    facts: dict[str, Any],
    score_name: str,
    widths: Sequence[float],
    scores: Sequence[Mapping[str, float | None]],
) -> tuple[Path, dict[str, Any]]:
    """Prints the scores of all widths, and writes them as a JSON file with a plot into RUN/reconstructed. Chooses the
    best width by the score named `score_name`; it is None if no such score is finite. Returns the path of the JSON
    file, and its content.
    """
    columns = {name: [replace_nonfinite_by_none(one[name]) for one in scores] for name in scores[0]}
    finite = [(value, width) for width, value in zip(widths, columns[score_name]) if value is not None]
    best = (max if score_name in HIGHER else min)(finite, key=itemgetter(0))[1] if finite else None
    result = {**facts, "judge": score_name, "widths": list(widths), "scores": columns, "best": best}
    metric = "" if score_name == "loss" else f"_{score_name}"
    path = folder / RECONSTRUCTED / f"sweep{metric}_step_{facts['step']:08d}.json"
    print_and_write_result(path, result, format_report(result), figures.plot_score_by_ema_width)
    return path, result


def format_report(result: dict[str, Any]) -> str:
    """Returns the scores as a text: a line for each width, then the best width."""
    judge = result["judge"]
    name = "held-out loss" if judge == "loss" else judge
    lines = [f"{name} of {result['samples']} samples at step {result['step']}, by width"]
    for width, value in zip(result["widths"], result["scores"][judge]):
        lines.append(f"  --ema {width:<8}" + ("not finite" if value is None else f"{value:.6g}"))
    return "\n".join([*lines, f"best: --ema {result['best']}"])
