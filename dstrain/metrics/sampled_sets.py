"""What a run draws to be measured: pictures and clips, and stories of several scenes. quality.py measures them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dstrain.data.builtin.moving import MOTIONS, MOVING, captions
from dstrain.data.open import find_origin
from dstrain.data.source import Source
from dstrain.distributed import group
from dstrain.distributed.progress import Bar, phases
from dstrain.encoders.precision import Precision
from dstrain.metrics.clips import SCENES, make_stories, sum_scenes
from dstrain.metrics.images import Batch, Images
from dstrain.metrics.network import Features
from dstrain.metrics.statistics import KEPT
from dstrain.recipe import ConfigError, Run
from dstrain.runs.trained import Guide
from dstrain.sampling.draw import draw_own, set_eval_mode
from dstrain.sampling.requests import make_request, request_all_classes
from dstrain.sampling.scenes import choose_length, draw_scenes, frames_of_scenes
from dstrain.systems.base import CHOICES, Request, System

SAMPLING = ("num_steps", "guidance_scale", *CHOICES)
_REQUESTED = 1024  # prompts that are encoded, or images that are read, at a time


@dataclass(frozen=True)
class QualityOptions:
    """What to measure; None takes the run's own choice."""

    metrics: tuple[str, ...]  # names of metrics/table.py; or scenes, alone
    features: tuple[str, ...] = ()  # networks, KIND:PATH
    folder: Path | None = None  # of the run
    images: Path | None = None  # measured instead of what a run draws
    reference: Path | None = None  # statistics or images; None: the run's own data
    write_reference: Path | None = None  # statistics of `images`, or of the run's data, go here
    split: str | None = None  # of the run's data: train (None), held_out or test
    num: int | None = None  # images to draw, or evenly spaced ones of the data
    kept: int = KEPT  # features that kid, pr and dc compare
    labels: tuple[int, ...] | None = None  # as in generate.py, like all that follow
    prompts: tuple[str, ...] | None = None
    num_steps: int | None = None
    sampler: str | None = None
    guidance_scale: float | None = None
    guidance_rescale: float | None = None
    guidance_interval: tuple[float, float] | None = None
    spacing: str | None = None
    eta: float | None = None
    prime_frames: int | None = None  # that a scene takes over from the one before
    guide: Guide | None = None
    seed: int = 0
    ema: float | None = None
    raw: bool = False
    step: int | None = None
    batch: int = 32  # images of one rank at a time
    precision: Precision = "fp32"  # of the drawing networks; features are always fp32
    out: Path | None = None  # None: FOLDER/evaluation


class Drawn(Images):
    """What a run draws, each rank its own share; super-resolution from the images of `source`, made small."""

    def __init__(
        self,
        options: QualityOptions,
        run: Run,
        system: System,
        networks: dict[str, nn.Module],
        source: Source | None = None,
    ) -> None:
        self.options, self.run, self.system, self.networks, self.source = options, run, system, networks, source
        self.num = options.num or 50_000 if source is None else len(source)
        self.samples = request_all_classes(run.samples, run.data, system)
        self.clips = system.num_frames is not None
        self.captions = self.prompts = options.prompts if options.prompts or options.labels else self.samples.prompts
        if self.prompts and (cut := system.describe_cut([*self.prompts], "prompts")):
            phases().say(cut)

    def __len__(self) -> int:
        return self.num

    def batches(self, size: int) -> Iterator[Batch]:
        options, size = self.options, min(size, self.num)
        # Vectors of texts are large, and so are images: not all samples are asked for at once. The ranks' turns stay.
        turn = size * group.world()
        share = self.num if self.prompts is None and self.source is None else -(-_REQUESTED // turn) * turn
        for begin in range(0, self.num, share):
            count = min(share, self.num - begin)
            prompts = self.prompts and [self.prompts[(begin + i) % len(self.prompts)] for i in range(count)]
            start = {"labels": options.labels} if self.source is None else self._low_res(begin, count)
            request, captions = make_request(
                self.samples,
                self.system,
                count,
                options.seed + begin,
                prompts=prompts,
                sampler=options.sampler,
                **start,
                **{name: getattr(options, name) for name in SAMPLING},
            )
            labels = request.conditions.get("label")
            for numbers, images in draw_own(self.system, self.networks, request, size):
                numbers = numbers[numbers < count]
                images = images[: len(numbers)]
                if len(numbers):
                    yield Batch(
                        begin + numbers,
                        images[:, 0] if images.shape[1:2] == (1,) and images.ndim == 5 else images,
                        None if labels is None else labels[numbers],
                        None if captions is None else [captions[number] for number in numbers.tolist()],
                    )

    def _low_res(self, begin: int, count: int) -> dict[str, Any]:
        images, _ = self.source.read_batch(torch.arange(begin, begin + count))
        labels = tuple(images["label"].tolist()) if "label" in self.system.conditions(1) else None
        return {"images": images["image"], "labels": labels}


class Stories(Drawn):
    """Clips of several scenes that a run draws, each rank its own share: random stories of the built-in clips."""

    def __init__(
        self,
        options: QualityOptions,
        run: Run,
        system: System,
        networks: dict[str, nn.Module],
        source: Source | None = None,
    ) -> None:
        super().__init__(options, run, system, networks, source)
        if not (system.num_frames and system.takes_texts and system.takes_pictures and find_origin(run.data) == MOVING):
            raise ConfigError(
                f"--metrics scenes tells stories of {MOVING}, and {options.folder}, a {run.system} of "
                f"{find_origin(run.data)}, does not draw those from texts: choose other metrics"
            )
        self.num, self.prompts = options.num or 250, None
        self.length = choose_length(system, self.samples.num_frames, options.prime_frames, True)
        if self.length.frames < self.length.primed + 2:
            raise ConfigError(
                f"--metrics scenes: of {self.length.frames} frames {self.length.primed} are taken over, "
                "and one new frame shows no motion: lower --prime-frames"
            )

    @torch.no_grad()
    def sums(self, network: Features) -> torch.Tensor:
        """Sums over the stories of all ranks, see metrics/clips.py."""
        options, texts, size = self.options, [*captions()], min(self.options.batch, self.num)
        request, _ = make_request(
            self.samples,
            self.system,
            len(texts),
            prompts=texts,
            sampler=options.sampler,
            num_frames=self.length.frames,
            **{name: getattr(options, name) for name in SAMPLING},
        )
        ends = [scene.first + scene.frames for scene in frames_of_scenes(("",) * SCENES, self.length)]
        sums = torch.zeros(6, SCENES, dtype=torch.float64, device=group.device())
        with Bar("telling stories", total=self.num, unit="story") as bar:
            for begin in range(0, self.num, size * group.world()):
                numbers = begin + group.rank() * size + torch.arange(size)
                real, seeds = numbers < self.num, options.seed + numbers % self.num
                items, motions = make_stories(seeds)
                clips = self._told(request, seeds, items[:, None] + motions * (len(texts) // len(MOTIONS)))
                if real.any():
                    sums += sum_scenes(network, clips[real], ends, items[real], motions[real])
                bar.update(min(size * group.world(), self.num - begin))
        return group.sum_ranks(sums)

    def _told(self, request: Request, seeds: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        """Clips uint8 (n, T, C, H, W) of the texts by number, int64 (n, scenes), on this rank's device."""
        seeds = seeds.to(group.device())
        first, *later = [
            {name: values[numbers].to(seeds.device) for name, values in request.conditions.items()}
            for numbers in texts.T
        ]
        draw = partial(self.system.sample, self.networks)
        with set_eval_mode(self.networks):
            clips = draw(replace(request, seeds=seeds, conditions=first))
            return draw_scenes(self.system, clips, seeds, later, self.length.primed, request, draw)
