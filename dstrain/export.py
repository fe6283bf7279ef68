"""A trained run as a folder that diffusers loads, read back and compared with the trained network.

How each system is expressed stands in its own folder, systems/SYSTEM/to_diffusers.py; systems without one are refused.
"""

import importlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from dstrain import ranks, runs, systems
from dstrain.config import ConfigError, Run
from dstrain.data.batches import held_out
from dstrain.data.shards import INDEX, read_index, statistics, sums
from dstrain.data.sources import open_sources
from dstrain.encoders.autoencoder import fingerprint
from dstrain.systems.base import Example, System

_BATCH = 32
_TOLERATED = 1e-5             # relative; the same float32 operations in the same order agree to the bit


@dataclass(frozen=True)
class Order:
    """What to export."""

    run: Path
    out: Path                                  # folder to write
    format: str = "diffusers"
    ema: float | None = None                   # decay; None: the run's choice
    raw: bool = False                          # the training weights instead of an average
    step: int | None = None                    # checkpoint; None: the newest whole one
    statistics: Path | None = None             # folder or index of launch/encode.py; None: measured over the run's data
    num: int = 1000                            # samples to measure over


@dataclass(frozen=True)
class Exported:
    """What became of it."""

    name: str                                  # diffusers' class
    errors: dict[str, float]                   # relative, against the trained network
    statistics: dict[str, Any]                 # what was measured or read on the way


def export(order: Order) -> Exported:
    """Writes order.out, whole or not at all. ConfigError, ValueError: it cannot be expressed, or does not agree."""
    if ranks.place().world > 1:
        raise ConfigError("an export takes one process: python launch/export.py ...")
    run = runs.read(order.run)
    writer = _writer(order.run, run)
    if order.out.exists() and (not order.out.is_dir() or any(order.out.iterdir())):
        raise ConfigError(f"--out {order.out} is there already: name a new folder")
    system = systems.build(run.system, run.model)
    checkpoint = runs.checkpoint(order.run, order.step)
    kinds = runs.kinds(system, checkpoint, run.samples.ema if order.ema is None else order.ema, order.raw)
    nets = runs.networks(system, checkpoint, kinds, torch.float32)
    found: dict[str, Any] = {}

    def measured() -> dict[str, Any]:
        found.update(_told(order, system, nets) if order.statistics else _measured(order.num, run, system, nets))
        return found

    tmp = order.out.with_name(f"{order.out.name}.tmp{os.getpid()}")
    try:
        tmp.parent.mkdir(parents=True, exist_ok=True)
        writer.save(system, nets, tmp, measured)
        errors = writer.errors(system, nets, tmp, next(_examples(_BATCH, run, system)))
        wrong = {name: error for name, error in errors.items() if not error <= _TOLERATED}
        if wrong:
            raise ValueError(f"{order.run} read back from diffusers differs from the trained network by "
                             f"{', '.join(f'{error:.1e} ({name})' for name, error in wrong.items())}: nothing is kept")
        if order.out.is_dir():
            order.out.rmdir()
        os.rename(tmp, order.out)
    except OSError as error:
        raise ConfigError(f"--out {order.out} cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    return Exported(writer.NAME, errors, found)


def _writer(folder: Path, run: Run) -> ModuleType:
    able = [name for name, module in systems.NAMES.items() if importlib.util.find_spec(f"{module}.to_diffusers")]
    if run.system not in able:
        raise ConfigError(f"{folder} trains {run.system}, which has no form in diffusers here; these have: "
                          f"{', '.join(able)}")
    return importlib.import_module(f"{systems.NAMES[run.system]}.to_diffusers")


def _told(order: Order, system: System, nets: dict[str, nn.Module]) -> dict[str, Any]:
    """The statistics of a cache, if it is of these weights."""
    folder = order.statistics.parent if order.statistics.name == INDEX else order.statistics
    index = read_index(folder)
    ours, theirs = fingerprint(*system.identity(nets)), index["encoding"]["first_stage"]
    if ours != theirs:
        raise ConfigError(f"--statistics {order.statistics}: these codes are of the first stage {theirs}, {order.run} "
                          f"exports {ours}; name the cache that was encoded by it (and the same --ema or --raw)")
    return index["statistics"]


def _measured(num: int, run: Run, system: System, nets: dict[str, nn.Module]) -> dict[str, Any]:
    """Of the posteriors of the first `num` training samples."""
    shards, count = [], 0
    for example in _examples(num, run, system):
        codes = system.codes(nets, example)
        moments = torch.stack((codes["latent_mean"], codes["latent_std"]), dim=1)[:, None].cpu().numpy()
        shards.append(sums(moments[example["valid"].cpu().numpy()]))
        count += int(example["valid"].sum()) * moments[0, 0, 0, 0].size
    return statistics(shards, count)


def _examples(num: int, run: Run, system: System) -> Iterator[Example]:
    source, _ = open_sources(run.data)
    with torch.no_grad():
        for batch in held_out(source, min(_BATCH, num), device=ranks.device(), seed=run.seed, limit=num):
            yield system.encode(batch)
