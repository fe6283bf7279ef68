"""A trained run as a folder of its own, read back and compared with the trained networks.

    diffusers      what diffusers loads: how stands in the system's own folder, systems/SYSTEM/to_diffusers.py; with a
                   model card, README.md
    safetensors    PART.safetensors of every part, which init_from takes, and the run's recipe.yaml: of any system
"""

import importlib
import importlib.util
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from dstrain import recipe, systems
from dstrain.data import order as orders
from dstrain.data.batches import held_out
from dstrain.data.shards import INDEX, read_index, statistics, sums
from dstrain.data.sources import open_sources
from dstrain.encoders.autoencoder import fingerprint
from dstrain.engine.checkpoint import read_weights
from dstrain.ranks import group
from dstrain.recipe import ConfigError, Run
from dstrain.runs import card, trained
from dstrain.runs.weights import read
from dstrain.systems.base import Example, System

_BATCH = 32                   # samples of the data at a time
_PROBE = 4                    # random samples that are compared
_TOLERATED = 1e-5             # relative; the same float32 operations in the same order agree to the bit


@dataclass(frozen=True)
class Order:
    """What to export."""

    run: Path
    out: Path                                  # folder to write
    format: str = "diffusers"                  # or safetensors
    ema: float | None = None                   # decay; None: the run's choice
    raw: bool = False                          # the training weights instead of an average
    step: int | None = None                    # checkpoint; None: the newest whole one
    statistics: Path | None = None             # folder or index of launch/encode.py; None: measured over the run's data
    num: int = 1000                            # samples to measure over


@dataclass(frozen=True)
class Exported:
    """What became of it."""

    name: str                                  # diffusers' class, or safetensors
    errors: dict[str, float]                   # relative, against the trained network
    statistics: dict[str, Any]                 # what was measured or read on the way
    note: str = ""                             # what whoever loads it has to know


def export(order: Order) -> Exported:
    """Writes order.out, whole or not at all. ConfigError: it cannot be expressed, or does not agree."""
    if group.place().world > 1:
        raise ConfigError("an export takes one process: python launch/export.py ...")
    if order.statistics and order.format != "diffusers":
        raise ConfigError("--statistics gives an autoencoder's scaling_factor, which only --format diffusers writes: "
                          "leave it out")
    run = trained.read(order.run)
    writer = _writer(order.run, run) if order.format == "diffusers" else None
    if order.out.exists() and (not order.out.is_dir() or any(order.out.iterdir())):
        raise ConfigError(f"--out {order.out} is there already: name a new folder")
    system = systems.build(run.system, run.model)
    if order.statistics and not system.encodes:
        raise ConfigError(f"--statistics gives an autoencoder's scaling_factor, and {order.run} trains {run.system}: "
                          "leave it out")
    checkpoint = trained.checkpoint(order.run, order.step)
    ema = run.samples.ema if order.ema is None else order.ema
    kinds = trained.kinds(system, checkpoint, ema, order.raw, every=True)
    if writer is not None:                                        # diffusers' classes are of the first part alone
        first = next(iter(system.parts))
        kinds = {first: kinds[first]}
    tmp = order.out.with_name(f"{order.out.name}.tmp{os.getpid()}")
    try:
        tmp.parent.mkdir(parents=True, exist_ok=True)
        if writer is None:
            done = _as_parts(run, checkpoint, kinds, tmp)
        else:
            nets = trained.networks(system, checkpoint, kinds, torch.float32)
            done = _in_diffusers(order, run, system, nets, writer, tmp)
        limits = getattr(writer, "TOLERATED", {})
        wrong = {name: error for name, error in done.errors.items() if not error <= limits.get(name, _TOLERATED)}
        if wrong:
            raise ConfigError(f"{order.run} read back from {done.name} differs from the trained network by "
                              f"{', '.join(f'{error:.1e} ({name})' for name, error in wrong.items())}: nothing is kept")
        if writer is not None:
            card.write(tmp, order.out.name, run, order.run, checkpoint, kinds, done.name, done.note,
                       writer.about(system)[2], done.errors)
        if order.out.is_dir():
            order.out.rmdir()
        os.rename(tmp, order.out)
    except (OSError, SafetensorError) as error:                   # the second of a full disk, too
        raise ConfigError(f"--out {order.out} cannot be written ({getattr(error, 'strerror', None) or error}): name a "
                          "folder that can be written and has room") from None
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    return done


def _as_parts(run: Run, checkpoint: Path, kinds: dict[str, str], out: Path) -> Exported:
    out.mkdir()
    (out / "recipe.yaml").write_text(recipe.dump(run), encoding="utf-8")
    assert recipe.load(out / "recipe.yaml") == run
    errors = {}
    for part, kind in kinds.items():
        path, weights = out / f"{part}.safetensors", read_weights(checkpoint, part, kind)
        save_file(weights, path, metadata={"weights": kind, "checkpoint": checkpoint.name})
        back = read(path)
        same = back.keys() == weights.keys() and all(torch.equal(back[name], weights[name]) for name in weights)
        errors[part] = 0.0 if same else math.inf
    return Exported("safetensors", errors, {})


def _in_diffusers(order: Order, run: Run, system: System, nets: dict[str, nn.Module], writer: ModuleType,
                  out: Path) -> Exported:
    found: dict[str, Any] = {}

    def measured() -> dict[str, Any]:
        found.update(_told(order, system, nets) if order.statistics else _measured(order.num, run, system, nets))
        return found

    writer.save(system, nets, out, measured, lambda: _classes(run))
    synthetic = {name: tensor.to(group.device()) for name, tensor in system.synthetic(_PROBE).items()}
    # Both sides in whole float32: on a GPU convolutions would round to TF32, by algorithms of their own choice.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        errors = writer.errors(system, nets, out, system.encode(synthetic))
    name, note, _ = writer.about(system)
    return Exported(name, errors, found, note)


def _classes(run: Run) -> tuple[str, ...]:
    """Names of the labels, if the run's data are still there and say so."""
    try:
        return tuple(open_sources(run.data)[0].classes)
    except (ValueError, OSError, AttributeError):
        return ()


def _writer(folder: Path, run: Run) -> ModuleType:
    """The module by which the run's system is written for diffusers."""
    name = f"{systems.package(run.system).__name__}.to_diffusers"
    if importlib.util.find_spec(name) is None:
        raise ConfigError(f"{folder} trains {run.system}, which has no form in diffusers here: take --format "
                          "safetensors")
    return importlib.import_module(name)


def _told(order: Order, system: System, nets: dict[str, nn.Module]) -> dict[str, Any]:
    """The statistics of a cache, if it is of these weights."""
    folder = order.statistics.parent if order.statistics.name == INDEX else order.statistics
    index = read_index(folder)
    ours, theirs = fingerprint(*system.identity(nets)), index["encoding"]["first_stage"]
    if ours != theirs:
        raise ConfigError(f"--statistics {order.statistics}: these codes are of the first stage {theirs}, {order.run} "
                          f"exports {ours}; name the cache that was encoded by it (and the same --ema or --raw)")
    return index["statistics"]


@torch.no_grad()
def _measured(num: int, run: Run, system: System, nets: dict[str, nn.Module]) -> dict[str, Any]:
    """Of the posteriors of `num` training samples."""
    shards, count = [], 0
    for example in _examples(num, run, system):
        codes = system.codes(nets, example)
        moments = torch.stack((codes["latent_mean"], codes["latent_std"]), dim=1)[:, None].cpu().numpy()
        shards.append(sums(moments[example["valid"].cpu().numpy()]))
        count += int(example["valid"].sum()) * moments[0, 0, 0, 0].size
    return statistics(shards, count)


def _examples(num: int, run: Run, system: System) -> Iterator[Example]:
    source, _ = open_sources(run.data)
    for batch in held_out(_Shuffled(source, run.seed), min(_BATCH, num), device=group.device(), seed=run.seed,
                          limit=num):
        with torch.no_grad():                  # not around the yield, or it would hold for whoever asks
            example = system.encode(batch)
        yield example


class _Shuffled:
    """A source in the order that training takes: its own may go class by class, and the first ones are one class."""

    def __init__(self, whole: Any, seed: int) -> None:
        self.whole, self.order = whole, orders.Order(len(whole), seed)

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.whole[self.order.index_at(index)]
