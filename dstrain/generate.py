"""What a trained run draws: PNGs, a grid and the .npz that ADM's evaluation reads; or embeddings as one .npy.

Runs can be chained: the pictures of the first are what the next one begins from, as in super-resolution.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from dstrain import draws, ranks, runs, systems
from dstrain.config import ConfigError, Run
from dstrain.data.pixels import read_pictures
from dstrain.sampling import class_columns, draw, draw_all
from dstrain.systems.base import Request, System
from dstrain.track.pictures import Album, grid, save_png


@dataclass(frozen=True)
class Order:
    """What to generate; None takes the run's own choice (its `samples` section, its newest checkpoint)."""

    folder: Path                               # of the run
    num: int = 16
    labels: tuple[int, ...] | None = None      # repeated to num; None: every class in turn
    prompts: tuple[str, ...] | None = None     # texts, repeated to num, for a system that takes them
    text_encoder: str | None = None            # what encodes them, a folder or hub name; None: the recipe's
    num_steps: int | None = None               # network evaluations for each picture
    sampler: str | None = None
    guidance_scale: float | None = None
    seed: int = 0                              # picture i is a function of seed + i alone
    ema: float | None = None                   # decay; None: the run's choice
    raw: bool = False                          # the training weights instead of an average
    step: int | None = None                    # checkpoint; None: the newest whole one
    then: tuple[Path, ...] = ()                # runs that go on from the pictures, each by its own choices
    low_res: Path | None = None                # pictures that the first run begins from: a folder, or an .npz
    batch: int = 16                            # pictures of one rank at a time
    out: Path | None = None                    # None: FOLDER/generated, of the last run
    pngs: bool = True                          # one file for each picture, beside the grid and the .npz


Opened = tuple[Path, Run, System]


@dataclass(frozen=True)
class Stage:
    """A run that is ready to draw."""

    folder: Path
    run: Run
    system: System
    networks: dict[str, nn.Module]


def generate(order: Order) -> Path:
    """Draws and writes what is ordered, on all ranks together; the folder it wrote. ConfigError: what cannot be."""
    first, *then = (_systems(order.folder, order), *map(_systems, order.then))
    given = _begin(order, first, then)
    stages = [_stage(*first, order.step, order.ema, order.raw), *(_stage(*later) for later in then)]
    request = _request(order, stages[0].run, stages[0].system, given)
    out = ranks.from_first(_out(order) if ranks.rank() == 0 else None)
    with tqdm(total=order.num, unit="sample", disable=ranks.rank() != 0) as bar:
        rounds = _drawn(stages, order, request)
        numbers, samples = next(rounds)                                   # an order that cannot be leaves no folder
        out.mkdir(parents=True, exist_ok=True)
        ranks.barrier()
        keep = _Pictures(out, order, request) if samples.dtype == torch.uint8 else _Embeddings(out, order)
        while numbers is not None:
            keep.add(numbers, samples)
            bar.update(len(numbers))
            numbers, samples = next(rounds, (None, None))
    keep.close()
    ranks.barrier()
    return out


# ----------------------------------------------------------------------------------------------------------- the runs


def _systems(folder: Path, order: Order | None = None) -> Opened:
    run = runs.read(folder)
    if order and order.text_encoder is not None:
        if "text_encoder" not in run.model:
            raise ConfigError(f"--text-encoder: {folder} trains {run.system}, which takes no texts; leave it out")
        run = run.model_copy(update={"model": run.model | {"text_encoder": order.text_encoder}})
    if order and order.prompts and run.model.get("text_encoder", "") is None:
        raise ConfigError(f"--prompts: {folder} was trained on cached embeddings and names no text encoder; give the "
                          "one that made them, --text-encoder FOLDER or NAME")
    system = systems.build(run.system, run.model)
    if type(system).sample is System.sample:
        raise ConfigError(f"{folder} trains {run.system}, which draws nothing: what it shows is in {folder}/samples")
    return folder, run, system


def _stage(folder: Path, run: Run, system: System, step: int | None = None, ema: float | None = None,
           raw: bool = False) -> Stage:
    checkpoint = runs.checkpoint(folder, step)
    kinds = runs.kinds(system, checkpoint, run.samples.ema if ema is None else ema, raw)
    dtype = torch.bfloat16 if ranks.device().type == "cuda" else torch.float32
    return Stage(folder, run, system, runs.networks(system, checkpoint, kinds, dtype))


def _begin(order: Order, first: Opened, then: list[Opened]) -> Tensor | None:
    """The pictures that the first run begins from, where it does: uint8 (N, C, h, w). ConfigError: broken chains."""
    folder, run, system = first
    if system.starts_from_data and order.low_res is None:
        raise ConfigError(f"{folder} draws from smaller pictures: give them as --low-res FILE.npz or FOLDER, or draw "
                          f"them from another run, launch/generate.py RUN --then {folder}")
    if order.low_res is not None and not system.starts_from_data:
        raise ConfigError(f"--low-res {order.low_res}: {folder} begins from noise and takes no pictures; leave it out")
    size = run.data.image_size
    for folder, later, system in then:
        if not system.starts_from_data:
            raise ConfigError(f"--then {folder}: this run begins from noise, not from the pictures of another")
        if size >= later.data.image_size:
            raise ConfigError(f"--then {folder} draws pictures of {later.data.image_size} pixels, and is given some of "
                              f"{size}: name a run that enlarges them")
        try:
            system.conditions_from(torch.zeros(1, run.data.channels, size, size, dtype=torch.uint8))
        except ValueError as error:
            raise ConfigError(f"--then {folder}: {error}") from None
        size = later.data.image_size
    return None if order.low_res is None else read_pictures(order.low_res, run.data.channels)


def _request(order: Order, run: Run, system: System, given: Tensor | None) -> Request:
    wanted = run.samples

    def choice(asked: Any, own: Any) -> Any:
        return own if asked is None else asked

    if order.prompts is not None:
        if type(system).conditions_from_texts is System.conditions_from_texts:
            raise ConfigError(f"--prompts: {order.folder} trains {run.system}, which takes no texts; leave it out")
        conditions = system.conditions_from_texts([*islice(cycle(order.prompts), order.num)])
    else:
        conditions = system.conditions(order.num, choice(order.labels, wanted.labels))
    if given is not None:
        conditions |= system.conditions_from(given[torch.arange(order.num) % len(given)])
    return Request(order.seed + torch.arange(order.num), conditions, choice(order.num_steps, wanted.num_steps),
                   choice(order.sampler, wanted.sampler), choice(order.guidance_scale, wanted.guidance_scale))


def _drawn(stages: list[Stage], order: Order, request: Request) -> Iterator[tuple[Tensor, Tensor]]:
    """(numbers, samples) of each round, carried through all stages."""
    chunk = min(order.batch, order.num)
    first, *then = stages
    told = [_passed_on(request, stage, order) for stage in then]
    for numbers, samples in draw(first.system, first.networks, request, chunk):
        seeds = request.seeds[numbers]
        for stage, all_conditions in zip(then, told):
            wanted = stage.run.samples
            # Other seeds than the first run's: its noise is what the pictures were made of.
            seeds = draws.keys_of_seeds(seeds)
            conditions = {name: values[numbers] for name, values in all_conditions.items()}
            conditions |= stage.system.conditions_from(samples)
            samples = draw_all(stage.system, stage.networks, Request(
                seeds, conditions, wanted.num_steps, wanted.sampler, wanted.guidance_scale), chunk)
        yield numbers, samples


def _passed_on(request: Request, stage: Stage, order: Order) -> dict[str, Tensor]:
    """What a later stage is told: the labels that the first one drew, where it takes labels."""
    if "label" not in stage.system.conditions(1):
        return {}
    labels = request.conditions.get("label")
    given = order.labels or stage.run.samples.labels if labels is None else tuple(labels.tolist())
    try:
        return stage.system.conditions(order.num, given)
    except ValueError as error:
        raise ConfigError(f"--then {stage.folder}: {error}") from None


# ------------------------------------------------------------------------------------------------------ what is written


class _Pictures:
    """PNGs, a grid of the first 256, and the .npz, written as they come."""

    def __init__(self, out: Path, order: Order, request: Request) -> None:
        self.out, self.order, self.columns = out, order, class_columns(request)
        self.first: list[Tensor] = []
        self.album: Album | None = None

    def add(self, numbers: Tensor, images: Tensor) -> None:
        for number, image in zip(numbers.tolist(), images) if self.order.pngs else ():
            if number % ranks.world() == ranks.rank():
                save_png(self.out / f"{self.order.seed + number:06d}.png", image.permute(1, 2, 0).numpy())
        if ranks.rank() == 0:
            if sum(map(len, self.first)) < 256:
                self.first.append(images)
            # The layout of ADM's evaluator: uint8 (N, H, W, 3), grey repeated.
            array = images.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().numpy()
            self.album = self.album or Album(self.out, (self.order.num, *array.shape[1:]))
            self.album.add(array)

    def close(self) -> None:
        if ranks.rank() == 0:
            save_png(self.out / "grid.png", grid(torch.cat(self.first)[:256], self.columns))
            self.album.close()


class _Embeddings:
    """embeddings.npy float32 (N, D), and the texts that they were drawn for."""

    def __init__(self, out: Path, order: Order) -> None:
        self.out, self.order, self.rows = out, order, []

    def add(self, numbers: Tensor, embeddings: Tensor) -> None:
        self.rows.append(embeddings)

    def close(self) -> None:
        if ranks.rank() == 0:
            np.save(self.out / "embeddings.npy", torch.cat(self.rows).float().numpy())
            if self.order.prompts:
                texts = islice(cycle(self.order.prompts), self.order.num)
                (self.out / "prompts.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")


def _out(order: Order) -> Path:
    """The folder to write into: the one asked for, or the first of generated, generated_2, ... that is unused."""
    def used(path: Path) -> bool:
        return path.is_dir() and any((*path.glob("samples_*.npz"), *path.glob("embeddings.npy")))

    if order.out is not None:
        there = next(path for path in (order.out.absolute(), *order.out.absolute().parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(f"--out {order.out} cannot be made below {there}: name a folder that can be written")
        if used(order.out):
            raise ConfigError(f"--out {order.out} holds pictures of another order: name another folder, or empty it")
        return order.out
    parent = (order.folder, *order.then)[-1]
    number, path = 1, parent / "generated"
    while used(path):
        number += 1
        path = parent / f"generated_{number}"
    return path
