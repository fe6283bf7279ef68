"""How good each length of a run's averages is: the held-out loss by width, as JSON and a curve.

The averages are those that launch/reconstruct.py has written; every rank loads one after another.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dstrain import systems
from dstrain.data.batches import held_out
from dstrain.data.sources import open_sources
from dstrain.data.spread import Spread
from dstrain.disk import atomic
from dstrain.drawing.sampling import score
from dstrain.engine.fragment_files import RECONSTRUCTED
from dstrain.ranks import group
from dstrain.recipe import ConfigError
from dstrain.runs import trained
from dstrain.track import figures


def sweep(folder: Path, step: int, widths: Sequence[float], num: int | None = None,
          batch: int = 32) -> tuple[Path, dict[str, Any]]:
    """Scores the averages of these widths at `step`, on all ranks together: the JSON file written, and what it holds.

    num: held-out samples, evenly spaced; None: all. batch: samples of one rank at a time. Samples meet the same noise
    at every width. ConfigError: the run holds no samples out.
    """
    run = trained.read(folder)
    source = open_sources(run.data, run=folder)[1]
    if source is None:
        raise ConfigError(f"--sweep: {folder} holds no samples out: train with data.held_out=0.05")
    source, system = Spread(source, num), systems.build(run.system, run.model)
    scores: dict[str, list[float]] = {}
    for width in widths:
        path = trained.checkpoint(folder, step, width)
        networks = trained.networks(system, path, trained.kinds(system, path, width), torch.float32)
        batches = held_out(source, batch, group.rank(), group.world(), group.device(), run.seed)
        for name, value in score(system, networks, batches).items():
            scores.setdefault(name, []).append(value)
    finite = [(loss, width) for width, loss in zip(widths, scores["loss"]) if math.isfinite(loss)]
    result = {"run": run.name, "step": step, "split": "held_out", "samples": len(source), "widths": list(widths),
              "scores": {name: [value if math.isfinite(value) else None for value in values]
                         for name, values in scores.items()}, "best": min(finite)[1] if finite else None}
    path = folder / RECONSTRUCTED / f"sweep_step_{step:08d}.json"
    if group.rank() == 0:
        atomic.write(path, json.dumps(result, indent=1, allow_nan=False) + "\n")
        figures.sweep(path.with_suffix(".png"), result)
    group.barrier()
    return path, result


def report(path: Path, result: dict[str, Any]) -> str:
    """The lines that are printed in the end."""
    rows = [f"  --ema {width:<8}" + ("not finite" if loss is None else f"{loss:.6g}")
            for width, loss in zip(result["widths"], result["scores"]["loss"])]
    return "\n".join([f"held-out loss of {result['samples']} samples at step {result['step']}, by width", *rows,
                      f"best: --ema {result['best']}", f"{path} and {path.with_suffix('.png').name}"])
