"""What a trained run draws: pictures or videos, a grid and the .npz that ADM's evaluation reads; or embeddings.

Runs can be chained: the pictures of the first are what the next one begins from, as in super-resolution. Videos go on
from given frames, and scene after scene, see scenes.py. What is written stands in written.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from dstrain import rng, systems
from dstrain.data.pixels import read_pictures
from dstrain.drawing.files import About, Embeddings, FORMATS, FPS, Pictures, folder_for
from dstrain.drawing.requests import make_request
from dstrain.drawing.sampling import class_columns, draw, draw_all
from dstrain.drawing.scenes import Length, frames_of_scenes, go_on, length, read_prime
from dstrain.ranks import group
from dstrain.recipe import ConfigError, Run
from dstrain.runs import trained
from dstrain.systems.base import Request, System


@dataclass(frozen=True)
class Order:
    """What to generate; None takes the run's own choice (its `samples` section, its newest checkpoint)."""

    folder: Path                               # of the run
    num: int = 16
    labels: tuple[int, ...] | None = None      # repeated to num; None: every class in turn
    prompts: tuple[str, ...] | None = None     # texts, repeated to num, for a system that takes them
    text_encoder: str | None = None            # what encodes them, a folder or hub name; None: the recipe's
    tokenizer: str | None = None               # what decodes drawn tokens, a folder; None: the recipe's
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
    pngs: bool = True                          # one file for each picture or clip, beside the grid and the .npz
    # of systems that draw videos
    num_frames: int | None = None              # of a clip or a scene, those included that are given
    scenes: tuple[str, ...] | None = None      # texts of one long clip for each seed, instead of prompts
    prime: Path | None = None                  # clips or pictures to go on from, repeated to num
    prime_frames: int | None = None            # that are given, or go over from scene to scene
    formats: tuple[str, ...] | None = None     # of files; None: all
    fps: int = FPS


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
    _, run, system = first
    sampler = system.sampler(*((run.samples.sampler,) if order.sampler is None else (order.sampler, "--sampler")))
    clip = _length(order, *first[1:])
    given = _begin(order, first, then, clip)
    stages = [_stage(*first, order.step, order.ema, order.raw), *(_stage(*later) for later in then)]
    further = _further(order, stages[0].run, stages[0].system)
    request, captions = _request(order, stages[0].run, stages[0].system, given, clip, sampler)
    out = group.from_first(folder_for(order.out, stages[-1].folder) if group.rank() == 0 else None)
    try:
        _write(order, out, stages, request, captions, further, clip)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written ({error.strerror or error}): make room, or name a folder "
                          "elsewhere") from None
    group.barrier()
    return out


def _write(order: Order, out: Path, stages: list[Stage], request: Request, captions: list[str] | None,
           further: list[dict[str, Tensor]], clip: Length | None) -> None:
    with tqdm(total=order.num, unit="sample", disable=None if group.rank() == 0 else True) as bar:
        rounds = _drawn(stages, order, request, further, clip)
        numbers, samples = next(rounds)                                   # an order that cannot be leaves no folder
        out.mkdir(parents=True, exist_ok=True)
        group.barrier()
        about = About(order.num, order.seed, class_columns(request), request.conditions.get("label"), captions,
                      frames_of_scenes(order.scenes, clip) if order.scenes else None, order.pngs,
                      order.formats or FORMATS, order.fps)
        keep = (Pictures if samples.dtype == torch.uint8 else Embeddings)(out, about)
        while numbers is not None:
            keep.add(numbers, samples)
            bar.update(len(numbers))
            numbers, samples = next(rounds, (None, None))
    keep.close()


# ----------------------------------------------------------------------------------------------------------- the runs


def _systems(folder: Path, order: Order | None = None) -> Opened:
    run = trained.read(folder)
    try:
        if order is not None:
            model = systems.config_class(run.system).with_encoders(run.model, order.text_encoder, order.tokenizer)
            run = run.model_copy(update={"model": model})
        system = systems.build(run.system, run.model)
    except ConfigError as error:
        raise ConfigError(*(f"{folder}: {line}" for line in error.problems)) from None
    if problem := system.cannot_draw():
        raise ConfigError(f"{folder} trains {run.system}, which cannot draw: {problem}")
    return folder, run, system


def _stage(folder: Path, run: Run, system: System, step: int | None = None, ema: float | None = None,
           raw: bool = False) -> Stage:
    checkpoint = trained.checkpoint(folder, step)
    kinds = trained.kinds(system, checkpoint, run.samples.ema if ema is None else ema, raw)
    dtype = torch.bfloat16 if group.device().type == "cuda" else torch.float32
    return Stage(folder, run, system, trained.networks(system, checkpoint, kinds, dtype))


def _length(order: Order, run: Run, system: System) -> Length | None:
    """How long clips are, None of pictures. ConfigError: words for videos where there are none, or that do not fit."""
    said = {"--num-frames": order.num_frames, "--scenes": order.scenes, "--prime": order.prime,
            "--prime-frames": order.prime_frames, "--format": order.formats}
    said = [word for word, value in said.items() if value is not None]
    if system.num_frames is None:
        if said:
            raise ConfigError(f"{said[0]}: {order.folder} trains {run.system}, which draws no videos; leave it out")
        return None
    for word in {"--scenes", "--prime"}.intersection(said):
        if not system.takes_pictures:
            raise ConfigError(f"{word}: {order.folder} trains {run.system}, which cannot go on from given frames; "
                              "leave it out")
    if "--prime-frames" in said and not {"--scenes", "--prime"}.intersection(said):
        raise ConfigError("--prime-frames says what --scenes and --prime go on from: give one of them, or leave it out")
    if order.scenes is not None and (order.prompts or order.labels):
        raise ConfigError("--scenes gives the texts itself: leave out --prompts and --labels")
    clip = length(system, order.num_frames or run.samples.num_frames, order.prime_frames)
    if {"--scenes", "--prime"}.intersection(said) and clip.given >= clip.frames:
        raise ConfigError(f"{said[0]}: clips of {clip.frames} frames have no room for more; raise --num-frames")
    return clip


def _begin(order: Order, first: Opened, then: list[Opened], clip: Length | None) -> Tensor | None:
    """What the first run begins from, where it does: pictures uint8 (N, C, h, w), or frames (N, K, C, H, W).

    ConfigError: broken chains.
    """
    folder, run, system = first
    if system.starts_from_data and order.low_res is None:
        raise ConfigError(f"{folder} draws from smaller pictures: give them as --low-res FILE.npz or FOLDER, or draw "
                          f"them from another run, launch/generate.py RUN --then {folder}")
    if order.low_res is not None and not system.starts_from_data:
        raise ConfigError(f"--low-res {order.low_res}: {folder} begins from noise and takes no pictures; leave it out")
    if order.prime is not None:
        return read_prime(order.prime, run.data, system.temporal_patch_size, clip.given, order.prime_frames is not None)
    size = run.data.image_size
    for folder, later, system in then:
        if not system.starts_from_data:
            raise ConfigError(f"--then {folder}: this run begins from noise, not from the pictures of another")
        if clip is not None:
            raise ConfigError(f"--then {folder}: this run goes on from pictures, and {order.folder} draws videos")
        if size >= later.data.image_size:
            raise ConfigError(f"--then {folder} draws pictures of {later.data.image_size} pixels, and is given some of "
                              f"{size}: name a run that enlarges them")
        try:
            system.conditions_from(torch.zeros(1, run.data.channels, size, size, dtype=torch.uint8))
        except ConfigError as error:
            raise ConfigError(f"--then {folder}: {error}") from None
        size = later.data.image_size
    return None if order.low_res is None else read_pictures(order.low_res, run.data.channels)


def _request(order: Order, run: Run, system: System, given: Tensor | None, clip: Length | None,
             sampler: str) -> tuple[Request, list[str] | None]:
    """What the first run is to draw, and the texts that stand for it, one a sample."""
    prompts = order.scenes[:1] if order.scenes is not None else order.prompts
    if prompts is not None:
        _require_texts(order, run, system)
    try:
        request, captions = make_request(
            run.samples, system, order.num, order.seed, labels=order.labels, prompts=prompts, images=given,
            num_steps=order.num_steps, sampler=sampler or None, guidance_scale=order.guidance_scale,
            num_frames=clip and clip.frames)
    except ConfigError as error:
        option = "" if prompts is None else "--prompts: " if order.scenes is None else "--scenes: "
        raise ConfigError(f"{option}{order.folder}: {error}") from None
    return request, captions if order.scenes is None else ["; ".join(order.scenes)] * order.num


def _require_texts(order: Order, run: Run, system: System) -> None:
    """ConfigError: the system takes no texts."""
    if not system.takes_texts:
        option = "--scenes" if order.scenes is not None else "--prompts"
        raise ConfigError(f"{option}: {order.folder} trains {run.system}, which takes no texts; leave it out")


def _further(order: Order, run: Run, system: System) -> list[dict[str, Tensor]]:
    """Conditions of the scenes behind the first, (1, ...) each. All scenes are asked for at once, so that an encoder is
    loaded once.
    """
    if order.scenes is None:
        return []
    _require_texts(order, run, system)
    try:
        conditions = system.conditions_from_texts([*order.scenes])
    except ConfigError as error:
        raise ConfigError(f"--scenes: {order.folder}: {error}") from None
    return [{name: values[i:i + 1] for name, values in conditions.items()} for i in range(1, len(order.scenes))]


def _drawn(stages: list[Stage], order: Order, request: Request, further: list[dict[str, Tensor]],
           clip: Length | None) -> Iterator[tuple[Tensor, Tensor]]:
    """(numbers, samples) of each round, carried through all scenes or stages."""
    chunk = min(order.batch, order.num)
    first, *then = stages
    told = [_passed_on(request, stage, order) for stage in then]
    for numbers, samples in draw(first.system, first.networks, request, chunk):
        seeds = request.seeds[numbers]
        if further:
            samples = go_on(first.system, first.networks, samples, seeds, further, clip.given, request, chunk)
        for stage, all_conditions in zip(then, told):
            wanted = stage.run.samples
            # Other seeds than the first run's: its noise is what the pictures were made of.
            seeds = rng.keys_of_seeds(seeds)
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
    except ConfigError as error:
        raise ConfigError(f"--then {stage.folder}: {error}") from None
