"""Makes requests for samples from the recipe's `samples` section and from choices that replace its fields."""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from dstrain.data.builtin.fashion import FASHION_PATH, map_captions_to_item_and_shade
from dstrain.data.builtin.moving import MOVING, map_captions_to_item_and_motion
from dstrain.data.open import find_path_before_encoding
from dstrain.recipe import ConfigError, Data, Samples
from dstrain.systems.base import CHOICES, Request, System

# Of commands, for the keys that messages name.
OPTIONS = {"num_steps: ": "--steps: ", "labels: ": "--labels: ", "guidance_scale: ": "--guidance-scale: "}


def make_sampling_request_and_captions(
    samples: Samples,
    system: System,
    num: int,
    seed: int = 0,
    *,
    labels: Sequence[int] | None = None,
    prompts: Sequence[str] | None = None,
    images: Tensor | None = None,
    **choices: Any,
) -> tuple[Request, list[str] | None]:
    """Returns a request for `num` samples, sample i with the seed `seed` + i, and the samples' texts, None without
    texts.

    labels   repeated to `num`; None: those of `samples`.
    prompts  texts, repeated to `num`; None: those of `samples`, but no texts if labels are given.
    images   uint8 (N, C, H, W), or frames (N, K, C, H, W), from which samples begin, repeated to `num`; None: none.
    choices  values that replace fields of `samples`, such as sampler and num_steps; None replaces nothing.

    Raises ConfigError if the system cannot draw what is asked for, or choices contradict each other.
    """
    choices = {name: value for name, value in choices.items() if value is not None}
    samples = samples.model_copy(update=choices)
    guiding = {"guidance_interval", "guidance_rescale", "negative_prompt"}
    if samples.guidance_scale == 1 and (idle := guiding & choices.keys()):
        raise ConfigError(
            f"--{min(idle).replace('_', '-')} changes nothing at --guidance-scale 1, which turns "
            "guidance off: give another scale, or leave it out"
        )
    if num < 1:
        raise ConfigError(f"{num} samples are asked for: ask for 1 or more")
    if prompts is None and not labels:
        prompts = samples.prompts
    if samples.negative_prompt is not None and prompts is None:
        raise ConfigError(
            "samples.negative_prompt, or --negative-prompt: it goes with prompts, and none are given: give some, or "
            "leave it out"
        )
    captions = None
    if prompts is not None and labels:
        raise ConfigError("--labels: the texts of --prompts say what is drawn; leave one of the two out")
    if prompts is not None:
        captions = [*islice(cycle(prompts), num)]
        conditions = system.conditions_from_texts(captions)
        if samples.negative_prompt is not None and samples.guidance_scale != 1:
            conditions |= system.make_negative_prompt_conditions(samples.negative_prompt, num)
    else:
        chosen = samples.labels if labels is None else labels
        conditions = make_valid_conditions(system, num, None if chosen is None else tuple(chosen))
    if images is not None:
        conditions |= system.conditions_from(images[torch.arange(num) % len(images)])
    require_condition_per_sample(system, conditions, num)
    system.check_sampling(samples)
    return Request(
        seed + torch.arange(num),
        conditions,
        samples.num_steps,
        system.choose_sampler(samples.sampler) or None,
        samples.guidance_scale,
        num_frames=samples.num_frames,
        size=samples.size,
        **{name: getattr(samples, name) for name in CHOICES},
    ), captions


def make_valid_conditions(system: System, num: int, labels: tuple[int, ...] | None) -> dict[str, Tensor]:
    """Returns the system's conditions for `num` samples, {name: tensor (num, ...)}. If `labels` is None, the system
    chooses labels. Raises ConfigError if the system does not know a label, or returns conditions for another number of
    samples.
    """
    if labels and system.num_labels is not None:  # A system that says no number may still know its labels.
        system.require_labels(labels)
    conditions = system.make_conditions(num, labels)
    require_condition_per_sample(system, conditions, num)
    return conditions


def require_condition_per_sample(system: System, conditions: dict[str, Tensor], num: int) -> None:
    """Raises ConfigError unless all values of `conditions`, which the system has returned, are tensors (num, ...)."""
    for name, values in conditions.items():
        if not torch.is_tensor(values) or values.shape[:1] != (num,):
            found = tuple(values.shape) if torch.is_tensor(values) else type(values).__name__
            raise ConfigError(
                f"system: conditions of a {type(system).__name__} for {num} samples have {name} of {found}: return "
                f"a tensor ({num}, ...) for each"
            )


def list_built_in_captions(data: Data, system: System) -> tuple[str, ...]:
    """Returns all captions that occur in `data`, if it is one of the package's built-in data sets. Returns () for other
    data, for data without captions, and for a system that reads no texts.
    """
    name = find_path_before_encoding(data)
    if system.takes_texts and name == MOVING:
        return tuple(map_captions_to_item_and_motion())
    if system.takes_texts and name == FASHION_PATH and (data.captioned or data.codes is not None):
        return tuple(map_captions_to_item_and_shade())
    return ()


def adapt_samples_section_for_metrics(samples: Samples, data: Data, system: System) -> Samples:
    """Returns a copy of the `samples` section for samples that metrics compare with the data. These fields are changed:

    labels   None: all classes in turn.
    size     None: the size of the data.
    prompts  all captions of the built-in data; for other data unchanged.
    """
    prompts = list_built_in_captions(data, system) or samples.prompts
    return samples.model_copy(update={"labels": None, "prompts": prompts, "size": None})
