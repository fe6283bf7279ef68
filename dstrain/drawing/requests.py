"""What to draw: the recipe's `samples` section, and what whoever asks chooses otherwise."""

from collections.abc import Sequence
from itertools import cycle, islice

import torch
from torch import Tensor

from dstrain.data.built_in import name_of
from dstrain.data.moving import MOVING, captions as built_in_captions
from dstrain.recipe import ConfigError, Data, Samples
from dstrain.systems.base import Request, System


def make_request(samples: Samples, system: System, num: int, seed: int = 0, *, labels: Sequence[int] | None = None,
                 prompts: Sequence[str] | None = None, images: Tensor | None = None, num_steps: int | None = None,
                 sampler: str | None = None, guidance_scale: float | None = None,
                 num_frames: int | None = None) -> tuple[Request, list[str] | None]:
    """A request for `num` samples, sample i a function of seed + i, and the texts that they are of, one a sample.

    labels and prompts are repeated to `num`. images: uint8 (N, C, H, W), or frames (N, K, C, H, W), that samples begin
    from, repeated, too. None takes the choice of the recipe. ConfigError: the system does not take what is chosen.
    """
    if num < 1:
        raise ConfigError(f"{num} samples are asked for: ask for 1 or more")
    if prompts is None and not labels:
        prompts = samples.prompts
    captions = None
    if prompts is not None:
        captions = [*islice(cycle(prompts), num)]
        conditions = system.conditions_from_texts(captions)
    else:
        chosen = samples.labels if labels is None else labels
        conditions = system.conditions(num, None if chosen is None else tuple(chosen))
    if images is not None:
        conditions |= system.conditions_from(images[torch.arange(num) % len(images)])
    return Request(seed + torch.arange(num), conditions, samples.num_steps if num_steps is None else num_steps,
                   system.sampler(samples.sampler if sampler is None else sampler) or None,
                   samples.guidance_scale if guidance_scale is None else guidance_scale,
                   samples.num_frames if num_frames is None else num_frames), captions


def of_all(samples: Samples, data: Data, system: System) -> Samples:
    """The section for a set that metrics compare with the data: every class in turn, whatever labels the grids show,
    and every caption of the built-in clips; of other texts the recipe's prompts.
    """
    prompts = tuple(built_in_captions()) if system.takes_texts and name_of(data) == MOVING else samples.prompts
    return samples.model_copy(update={"labels": None, "prompts": prompts})
