"""Draws from a run what is measured: pictures and clips, and stories of several scenes. quality.py measures them."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from dstrain.commands.options.evaluate import EvaluateOptions
from dstrain.data.builtin.moving import MOTIONS, MOVING, map_captions_to_item_and_motion
from dstrain.data.open import find_path_before_encoding
from dstrain.data.source import Source
from dstrain.distributed import group
from dstrain.distributed.progress import Bar, get_phases
from dstrain.metrics.clips import SCENES, choose_story_items_and_motions, sum_scene_measurements
from dstrain.metrics.images import Batch, Images
from dstrain.metrics.in_training import draw_batches
from dstrain.metrics.network import Features
from dstrain.recipe import ConfigError, Run
from dstrain.sampling.draw import set_eval_mode
from dstrain.sampling.requests import adapt_samples_section_for_metrics, make_sampling_request_and_captions
from dstrain.sampling.scenes import assign_frames_to_scenes, choose_clip_length, draw_further_scenes
from dstrain.systems.base import CHOICES, Request, System

SAMPLING = ("num_steps", "guidance_scale", *CHOICES)
_REQUESTED = 1024  # prompts that are encoded, or images that are read, at a time


class Drawn(Images):
    """Draws images by a run whenever they are read, each rank its own share. A super-resolution run enlarges the images
    of `source`, which are made small first.
    """

    def __init__(
        self,
        options: EvaluateOptions,
        run: Run,
        system: System,
        networks: dict[str, nn.Module],
        source: Source | None = None,
    ) -> None:
        self.options, self.run, self.system, self.networks, self.source = options, run, system, networks, source
        self.num = options.num or 50_000 if source is None else len(source)
        self.samples = adapt_samples_section_for_metrics(run.samples, run.data, system)
        self.clips = system.num_frames is not None
        self.captions = self.prompts = options.prompts if options.prompts or options.labels else self.samples.prompts
        if self.prompts and (cut := system.describe_cut([*self.prompts], "prompts")):
            get_phases().print_lines(cut)

    def __len__(self) -> int:
        return self.num

    def iterate_batches(self, size: int) -> Iterator[Batch]:
        """Draws this rank's share of the images, and yields it in batches of at most `size`."""
        options, size = self.options, min(size, self.num)
        # Vectors of texts are large, and so are images: not all samples are asked for at once. The ranks' turns stay.
        turn = size * group.world()
        share = self.num if self.prompts is None and self.source is None else -(-_REQUESTED // turn) * turn
        for begin in range(0, self.num, share):
            count = min(share, self.num - begin)
            prompts = self.prompts and [self.prompts[(begin + i) % len(self.prompts)] for i in range(count)]
            start = (
                {"labels": options.labels}
                if self.source is None
                else self._read_images_to_enlarge(self.source, begin, count)
            )
            request, captions = make_sampling_request_and_captions(
                self.samples,
                self.system,
                count,
                (options.seed or 0) + begin,
                prompts=prompts,
                sampler=options.sampler,
                **start,
                **{name: getattr(options, name) for name in SAMPLING},
            )
            for batch in draw_batches(self.system, self.networks, request, captions, size):
                batch.numbers += begin
                if batch.images.ndim == 5 and batch.images.shape[1] == 1:
                    batch.images = batch.images[:, 0]
                yield batch

    def _read_images_to_enlarge(self, source: Source, first_row: int, count: int) -> dict[str, Any]:
        """Reads `count` samples of a source, from row `first_row` on. Returns {"images": (count, C, H, W), "labels": a
        tuple, or None if the system takes no labels}.
        """
        images, _ = source.read_batch(torch.arange(first_row, first_row + count))
        labels = tuple(images["label"].tolist()) if "label" in self.system.make_conditions(1) else None
        return {"images": images["image"], "labels": labels}


class Stories(Drawn):
    """Draws clips of several scenes by a run, each rank its own share: random stories of builtin:moving. Raises
    ConfigError if the run does not draw such clips from texts.
    """

    def __init__(
        self,
        options: EvaluateOptions,
        run: Run,
        system: System,
        networks: dict[str, nn.Module],
        source: Source | None = None,
    ) -> None:
        super().__init__(options, run, system, networks, source)
        if not (
            system.num_frames
            and system.takes_texts
            and system.takes_pictures
            and find_path_before_encoding(run.data) == MOVING
        ):
            raise ConfigError(
                f"--metrics scenes tells stories of {MOVING}, and {options.folder}, a {run.system} of "
                f"{find_path_before_encoding(run.data)}, does not draw those from texts: choose other metrics"
            )
        self.num, self.prompts = options.num or 250, None
        self.length = choose_clip_length(system, self.samples.num_frames, options.prime_frames, True)
        if self.length.frames < self.length.primed + 2:
            raise ConfigError(
                f"--metrics scenes: of {self.length.frames} frames {self.length.primed} are taken over, "
                "and one new frame shows no motion: lower --prime-frames"
            )

    @torch.no_grad()
    def draw_stories_and_sum_scores(self, network: Features) -> torch.Tensor:
        """Draws all stories, and sums their scores over stories and ranks. Returns float64 (6, scenes): six scores of
        each scene, see metrics/clips.py.
        """
        options, texts, size = self.options, [*map_captions_to_item_and_motion()], min(self.options.batch, self.num)
        request, _ = make_sampling_request_and_captions(
            self.samples,
            self.system,
            len(texts),
            prompts=texts,
            sampler=options.sampler,
            num_frames=self.length.frames,
            **{name: getattr(options, name) for name in SAMPLING},
        )
        ends = [scene.first + scene.frames for scene in assign_frames_to_scenes(("",) * SCENES, self.length)]
        sums = torch.zeros(6, SCENES, dtype=torch.float64, device=group.device())
        with Bar("telling stories", total=self.num, unit="story") as bar:
            for begin in range(0, self.num, size * group.world()):
                numbers = begin + group.rank() * size + torch.arange(size)
                real, seeds = numbers < self.num, (options.seed or 0) + numbers % self.num
                items, motions = choose_story_items_and_motions(seeds)
                clips = self._draw_stories(request, seeds, items[:, None] + motions * (len(texts) // len(MOTIONS)))
                if real.any():
                    sums += sum_scene_measurements(network, clips[real], ends, items[real], motions[real])
                bar.update(min(size * group.world(), self.num - begin))
        return group.sum_over_ranks(sums)

    def _draw_stories(self, request: Request, seeds: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        """Draws n clips on this rank's device, and returns them there, uint8 (n, T, C, H, W). texts: int64 (n, scenes),
        the index of each scene's text among the texts of the request.
        """
        seeds = seeds.to(group.device())
        first, *later = [
            {name: values[numbers].to(seeds.device) for name, values in request.conditions.items()}
            for numbers in texts.T
        ]
        draw = partial(self.system.sample, self.networks)
        with set_eval_mode(self.networks):
            clips = draw(replace(request, seeds=seeds, conditions=first))
            return draw_further_scenes(self.system, clips, seeds, later, self.length.primed, request, draw)
