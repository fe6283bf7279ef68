"""What values each entry of a recipe may hold, and what it means where it is silent."""

import math
import typing
from typing import Any

import annotated_types
import pytest

from dstrain import recipe
from dstrain.recipe import ConfigError, Run
from dstrain.recipe.section import find_section_class, iterate_fields, list_types_of_annotation

# A changed default would change every recipe that leaves the key out, without a word.
DEFAULTS = {
    "name": "dit-small",
    "system": "dit",
    "folder": None,
    "steps": 1000,
    "seed": 0,
    "init_from": None,
    "train_only": None,
    "compile": "auto",
    "channels_last": False,
    "model": {},
    "data.buckets": None,
    "data.max_upscale": None,
    "data.crop": "center",
    "data.crop_scale": None,
    "data.crop_ratio": None,
    "data.size_conditions": False,
    "data.mixture": None,
    "data.mixture_classes": "same",
    "data.path": "builtin:fashion",
    "data.image_size": 32,
    "data.height": None,
    "data.num_frames": None,
    "data.frame_stride": 1,
    "data.captions": None,
    "data.captioned": False,
    "data.labels": "auto",
    "data.class_list": None,
    "data.columns": {},
    "data.images": None,
    "data.image_share": 0.2,
    "data.channels": 3,
    "data.flip": True,
    "data.held_out": 0.0,
    "data.held_out_path": None,
    "data.leave_out": (),
    "data.upright": True,
    "data.draft": False,
    "data.max_bad_fraction": 0.01,
    "data.workers": None,
    "data.index": None,
    "data.splits": (0.75, 0.15, 0.1),
    "data.cache.folder": None,
    "data.cache.gb": 20.0,
    "data.embeddings": None,
    "data.codes": None,
    "batch.global": 64,
    "batch.micro": None,
    "parallel.sequence": 1,
    "optimizer.name": "adamw",
    "optimizer.lr": 1e-4,
    "optimizer.betas": (0.9, 0.999),
    "optimizer.eps": 1e-8,
    "optimizer.momentum": 0.95,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip": 0.0,
    "optimizer.warmup": 0,
    "optimizer.schedule": "constant",
    "optimizer.final_lr": 0.0,
    "optimizer.decay_steps": None,
    "optimizer.rates": {},
    "ema.decays": (0.9999,),
    "ema.warmup": False,
    "ema.profiles": (),
    "ema.snapshots": 0,
    "ema.snapshot_precision": "fp32",
    "every.report": 50,
    "every.sample": 500,
    "every.evaluate": 500,
    "every.evaluate_samples": 0,
    "every.metrics": 0,
    "every.save": 500,
    "every.report_page": 5000,
    "save.format": "fragments",
    "save.keep": 2,
    "save.keep_every": 0,
    "save.best": False,
    "save.asynchronous": True,
    "samples.num": 40,
    "samples.labels": None,
    "samples.prompts": None,
    "samples.num_frames": None,
    "samples.size": None,
    "samples.sampler": None,
    "samples.num_steps": 50,
    "samples.guidance_scale": 1.0,
    "samples.guidance_rescale": 0.0,
    "samples.guidance_interval": None,
    "samples.negative_prompt": None,
    "samples.spacing": None,
    "samples.eta": None,
    "samples.seed": 0,
    "samples.ema": None,
    "samples.metrics": None,
    "samples.features": (),
    "samples.metrics_samples": 500,
    "samples.metrics_split": "train",
    "samples.reference": None,
    "track.wandb": "auto",
    "track.project": "dstrain",
    "track.entity": None,
    "track.tags": (),
    "track.group": None,
    "track.notes": None,
    "track.tensorboard": False,
    "track.artifact": False,
    "faults.max_skipped": 20,
    "faults.spike": None,
    "faults.max_rollbacks": 3,
    "faults.orphan_check": True,
    "faults.timeout_minutes": 30,
    "faults.hang_factor": 20,
    "faults.hang_seconds": 300,
}

TINY, BELOW_1, ABOVE_1 = math.ulp(0.0), math.nextafter(1, 0), math.nextafter(1, 2)
INT, FLOAT = 2**63 - 1, math.nextafter(2**63, 0)
CODES = "data.codes={{kind: tokens, flips: 1, scaling_factor: null, first_stage: a, "
# An entry, with what it needs beside it, and the least and the greatest number that it takes.
BOUNDS: list[tuple[str, float, float]] = [
    ("steps={}", 1, INT),
    ("seed={}", 0, INT),
    ("data.buckets=[[{}, 16]]", 1, 65536),
    ("data.buckets=[[16, {}]]", 1, 65536),
    ("data.buckets=[[8, 8]]%data.max_upscale={}", 1.0, FLOAT),
    ("data.crop=random%data.crop_scale=[{}, 1]", TINY, 1.0),
    ("data.crop=random%data.crop_scale=[0.5, {}]", 0.5, 1.0),
    ("data.crop=random_resized%data.crop_ratio=[{}, 1000]", TINY, 1000.0),
    ("data.crop=random_resized%data.crop_ratio=[0.1, {}]", 0.1, 1000.0),
    ("data.mixture=[{{path: a, weight: {}}}]", TINY, 1e9),
    ("data.mixture=[{{path: a, held_out: {}}}]", 0.0, 1.0),
    ("data.image_size={}", 1, 65536),
    ("data.num_frames=2%data.height={}", 1, INT),
    ("data.num_frames={}", 1, INT),
    ("data.num_frames=2%data.frame_stride={}", 1, INT),
    ("data.image_share={}", 0.0, 1.0),
    ("data.num_frames=2%data.images=x%data.image_share={}", TINY, BELOW_1),
    ("data.held_out={}", 0.0, BELOW_1),
    ("data.max_bad_fraction={}", 0.0, 1.0),
    ("data.workers={}", 0, 1024),
    ("data.splits=[{}, 0, 0]", 0.0, 1.0),
    ("data.splits=[0, {}, 0]", 0.0, 1.0),
    ("data.splits=[0, 0, {}]", 0.0, 1.0),
    ("data.cache.gb={}", 0.01, 1e9),
    (CODES + "shape: [{}]}}", 1, INT),
    (CODES + "shape: [4], text: [{}, 1]}}", 1, INT),
    (CODES + "shape: [4], text: [1, {}]}}", 1, INT),
    ("batch.global={}", 1, 2**24),
    ("batch.global=1%batch.micro={}", 1, 1),
    ("parallel.sequence={}", 1, INT),
    ("optimizer.lr={}", 0.0, 1e9),
    ("optimizer.betas=[{}, 0]", 0.0, BELOW_1),
    ("optimizer.betas=[0, {}]", 0.0, BELOW_1),
    ("optimizer.momentum={}", 0.0, BELOW_1),
    ("optimizer.eps={}", 0.0, 1e9),
    ("optimizer.weight_decay={}", 0.0, 1e9),
    ("optimizer.clip={}", 0.0, 1e9),
    ("optimizer.warmup={}", 0, INT),
    ("optimizer.decay_steps={}", 1, INT),
    ("optimizer.rates={{'*': {}}}", TINY, 1000.0),
    ("optimizer.lr=1e9%optimizer.final_lr={}", 0.0, 1e9),
    ("optimizer.lr=0.5%optimizer.final_lr={}", 0.0, 0.5),
    ("optimizer.decay_steps=9%optimizer.warmup={}", 0, 8),
    ("ema.decays=[{}]", 0.0, BELOW_1),
    ("ema.decays=[]%ema.profiles=[{}]", 0.001, 0.288),
    ("ema.profiles=[0.1]%ema.decays=[{}]", math.nextafter(0.288, 1), BELOW_1),
    ("ema.profiles=[0.1]%ema.snapshots={}", 0, INT),
    ("every.report={}", 0, INT),
    ("every.sample={}", 0, INT),
    ("every.evaluate={}", 0, INT),
    ("every.evaluate_samples={}", 0, INT),
    ("every.metrics={}", 0, INT),
    ("every.save={}", 0, INT),
    ("every.report_page={}", 0, INT),
    ("save.keep={}", 2, INT),
    ("save.keep_every={}", 0, INT),
    ("samples.num={}", 1, 100_000),
    ("samples.labels=[{}]", 0, INT),
    ("samples.num_frames={}", 1, INT),
    ("samples.size=[{}, 8]", 1, 65536),
    ("samples.size=[8, {}]", 1, 65536),
    ("samples.num_steps={}", 1, INT),
    ("samples.guidance_scale={}", 0.0, 1e9),
    ("samples.guidance_rescale={}", 0.0, 1.0),
    ("samples.guidance_interval=[{}, 1e9]", 0.0, 1e9),
    ("samples.guidance_interval=[0.5, {}]", 0.5, 1e9),
    ("samples.eta={}", 0.0, 1e9),
    ("samples.seed={}", 0, INT),
    ("samples.metrics_samples={}", 2, INT),
    ("faults.max_skipped={}", 1, INT),
    ("faults.spike={}", ABOVE_1, FLOAT),
    ("faults.max_rollbacks={}", 0, INT),
    ("faults.timeout_minutes={}", TINY, 10080.0),
    ("faults.hang_factor={}", 1.0, 1e9),
    ("faults.hang_seconds={}", 0.0, 1e9),
]


def test_defaults():
    """Oracle: the values written down above, of every entry of the schema, which the recipes of users count on."""
    run = Run().model_dump(by_alias=True)
    given: dict[str, Any] = {}
    for key, field in iterate_fields(Run):
        value: Any = run
        for part in key.split("."):
            value = None if value is None else value[part]
        inner = find_section_class(field)
        if (inner is None and not key.startswith(("data.mixture.", "data.codes."))) or (value is None and inner):
            given[key] = value
    assert given == DEFAULTS and all(type(value) is type(DEFAULTS[key]) for key, value in given.items())


def beyond(number: float, up: bool) -> float:
    """The next number, of the same type."""
    return number + (1 if up else -1) if isinstance(number, int) else math.nextafter(number, math.inf if up else -1)


@pytest.mark.parametrize("template, least, greatest", BOUNDS, ids=[template for template, _, _ in BOUNDS])
def test_bounds(template, least, greatest):
    """Oracle: by hand: the least and the greatest number pass, and the next ones beyond are
    refused by the entry's name.
    """

    def load(number: float) -> Run:
        return recipe.load_recipe(None, template.format(repr(number)).split("%"))

    load(least), load(greatest)
    key = template.split("%")[-1].partition("=")[0]
    for number in (beyond(least, False), beyond(greatest, True)):
        with pytest.raises(ConfigError) as caught:
            load(number)
        assert len(caught.value.problems) == 1 and key in str(caught.value), number


def bounded(annotation: Any, metadata: Any = ()) -> bool:
    """Whether a number within an annotation has a bound."""
    kinds = (annotated_types.Ge, annotated_types.Gt, annotated_types.Le, annotated_types.Lt)
    if any(
        isinstance(mark, kinds) or any(isinstance(own, kinds) for own in getattr(mark, "metadata", ()))
        for mark in metadata
    ):
        return True
    if typing.get_origin(annotation) is typing.Annotated:
        return bounded(typing.get_args(annotation)[0], annotation.__metadata__)
    return any(bounded(part) for part in typing.get_args(annotation))


def test_every_bound_is_tried():
    """Oracle: the schema: each number that has a bound stands in the table above."""
    tried = {entry.partition("=")[0] for template, _, _ in BOUNDS for entry in template.split("%")}
    missing = {key for key, field in iterate_fields(Run) if bounded(field.annotation, field.metadata)} - tried
    assert missing == {"data.mixture.weight", "data.mixture.held_out", "data.codes.shape", "data.codes.text"}  # within


@pytest.mark.parametrize(
    "key",
    [
        key
        for key, field in iterate_fields(Run)
        if int in list_types_of_annotation(field.annotation) and bool not in list_types_of_annotation(field.annotation)
    ],
)
def test_true_is_no_number(key):
    """Oracle: every key that takes a whole number, from the schema: `true` is refused, never taken for 1."""
    with pytest.raises(ConfigError, match=rf"(?m)^{key} is true, which has no meaning here"):
        recipe.load_recipe(None, [f"{key}=true"])
