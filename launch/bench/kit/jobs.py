"""The recipes of the kit: every system at a size that any machine trains, and published ones without their data.

Samples are synthetic, so no data set and no trained first stage is needed.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dstrain.commands.job import load_and_check_recipe
from dstrain.distributed import group
from dstrain.engine.settings import resolve_deepspeed_settings
from dstrain.recipe import Run

# With an adversary, these keep what rounding changes small; the recipes' own rates let it grow to a share of the loss.
_CALM = ["optimizer.lr=3e-5", "optimizer.final_lr=0", "optimizer.eps=1e-5"]

# Small recipes, with what lets the whole of a system learn within some steps: no warm-up, an adversary from the start,
# and with the optimizer of the loops that they are compared with.
SYSTEMS = {
    # A chain: torch compiles the quantiles of a flow's times for the GPU at hand, which tests/gpu cannot stand in for.
    "dit": (
        "dit-small",
        ["optimizer.name=adamw", "optimizer.lr=1.5e-3", "model.objective=diffusion", "samples.sampler=ddim"],
    ),
    "iddpm": (
        "iddpm-small",
        [
            "optimizer.name=adamw",
            "optimizer.lr=1e-3",
            "model.history_per_term=1",
            "model.diffusion_steps=4",
            "samples.num_steps=4",
        ],
    ),
    "dvae": (
        "dvae-small",
        ["model.discrete.quantizer=gumbel", "model.discrete.levels=null", "model.discrete.discriminator=null"],
    ),
    "vae": ("vae-small", [*_CALM, "model.kl.discriminator={start: 2, weight: 0.1, n_layers: 1, base_channels: 16}"]),
    "tokenizer": (
        "phenaki-tokenizer-small",
        [
            *_CALM,
            "optimizer.name=adamw",
            "model.perceptual=null",
            "data.image_size=24",
            "model.dim=64",
            "model.dim_head=16",
            "model.codebook_size=1024",
            "model.discriminator={start: 2, n_layers: 1, base_channels: 8, penalty: {every: 2}}",
        ],
    ),
    "phenaki": (
        "phenaki-small",
        [
            "optimizer.name=adamw",
            "model.tokenizer=null",
            "model.token_shape=[5,6,6]",
            "data.image_size=24",
            "model.codebook_size=1024",
            "model.temporal_patch_size=2",
            "model.beginnings=[]",
            "samples.sampler=null",
        ],
    ),
    "prior": ("prior-small", ["optimizer.name=adamw", "optimizer.lr=1e-3", "model.dropout=0"]),
}
# A quantizer that rounds is followed in no other precision; its steps must not wait either.
STEPPED = SYSTEMS | {"dvae fsq": ("dvae-small", ["optimizer.name=adamw"])}
_SMALL = ["batch.global=8", "optimizer.warmup=0", "every.sample=0", "every.evaluate=0"]

# Published recipes: how they are freed of their data, and how small a dry run makes them.
_LATENTS = ["model.first_stage=null", "model.image_size=32", "data.image_size=32", "data.channels=4"]
_TINY_DIT = ["model.size=null", "model.patch_size=2", "model.hidden_size=32", "model.depth=2", "model.num_heads=2"]
PUBLISHED = {
    "DiT-XL/2": ("dit-xl2-imagenet256", _LATENTS, [*_TINY_DIT, "model.image_size=8", "data.image_size=8"]),
    "DiT-XL/2 of images": (
        "dit-xl2-imagenet256",
        [],  # model.first_stage.path is still the hub's
        [*_TINY_DIT, "model.image_size=32", "data.image_size=32"],
    ),
    "IDDPM-64": ("iddpm-imagenet64-hybrid", [], ["model.num_channels=32", "model.num_res_blocks=1"]),
    "VAE f8": (
        "vae-kl-f8",
        ["model.kl.perceptual=null", "model.kl.discriminator.start=0"],
        ["model.kl.block_out_channels=[32,32]", "data.image_size=32"],
    ),
    "C-ViViT": (
        "phenaki-tokenizer",
        ["model.perceptual=null", "model.discriminator.start=0"],
        [
            "model.dim=32",
            "model.heads=2",
            "model.dim_head=16",
            "model.spatial_depth=1",
            "model.temporal_depth=1",
            "data.image_size=32",
            "data.num_frames=3",
        ],
    ),
    "MaskGit": (
        "phenaki-readme",
        ["model.tokenizer=null", "samples.sampler=null", "samples.prompts=null"],
        [
            "model.dim=32",
            "model.depth=1",
            "model.heads=2",
            "model.dim_head=16",
            "model.codebook_size=64",
            "model.token_shape=[3,4,4]",
            "data.num_frames=5",
        ],
    ),
    "prior": ("prior-laion", [], ["model.depth=1", "model.heads=2", "model.dim_head=16"]),
}


def root() -> Path:
    """The repository: recipes and DeepSpeed JSONs are no part of the package."""
    return Path(__file__).resolve().parents[3]


def small(system: str, overrides: Sequence[str] = ()) -> Run:
    recipe, own = STEPPED[system]
    return load_and_check_recipe(Path(recipe), [*own, *_SMALL, *overrides])


def published(name: str, dry: bool, overrides: Sequence[str] = ()) -> Run:
    recipe, own, scaled_down = PUBLISHED[name]
    nowhere = "data.path=no/data"  # else data that are there, such as cached latents, would change the recipe
    return load_and_check_recipe(Path(recipe), [nowhere, *own, *(scaled_down if dry else ()), *overrides])


def settings(run: Run, stage: int, precision: str, **zero: Any) -> dict[str, Any]:
    """The shipped JSON of that stage in that precision, with other entries of zero_optimization."""
    content = json.loads((root() / "ds_configs" / f"zero{max(stage, 1)}.json").read_text(encoding="ascii"))
    del content["bf16"]
    content["zero_optimization"] |= {"stage": stage, **zero}
    if precision == "fp16":  # from a scale that none of these losses overflows: no step is skipped
        content["fp16"] = {"enabled": True, "initial_scale_power": 8}
    elif precision == "bf16":
        content["bf16"] = {"enabled": True}
    return resolve_deepspeed_settings(
        content, 1, group.device().type, batch=run.batch, optimizer=run.optimizer, faults=run.faults
    )
