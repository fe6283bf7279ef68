"""Latents that other trainers have cached, as a plan of launch/encode.py: they are written as shards of ours.

Their samples of a posterior are kept without a deviation. What has been multiplied is divided again, since a run scales
latents by the factor of its first stage.
"""

import math
from dataclasses import fields
from typing import Any

from dstrain.commands.encoding.options import EncodeOptions, Plan
from dstrain.data.cached.foreign import Foreign, open_foreign
from dstrain.data.cached.latents import is_encoded
from dstrain.distributed import group
from dstrain.encoders import autoencoder
from dstrain.recipe import ConfigError, reworded
from dstrain.runs.first_stage import FirstStage

_NAMED = "name:"
_OF_THESE = {
    "out",
    "from_latents",
    "first_stage",
    "latent_scale",
    "normalize",
    "image_size",
    "batch",
    "shard_size",
    "dtype",
    "flip",
    "part",
    "max_bad_fraction",
}


def taken_over(options: EncodeOptions) -> Plan:
    """The same on all ranks. ConfigError: what is asked for cannot be."""
    for option in fields(options):
        if option.name not in _OF_THESE and getattr(options, option.name) != option.default:
            raise ConfigError(
                f"--{option.name.replace('_', '-')} is for encoding, and --from-latents takes codes as "
                "they are: leave it out"
            )
    if options.first_stage is None:
        raise ConfigError(
            f"--from-latents {options.from_latents}: name what encoded them: --first-stage PATH, or "
            f"--first-stage {_NAMED}NAME for an encoder that is not at hand"
        )
    if is_encoded(options.from_latents):
        raise ConfigError(f"--from-latents {options.from_latents} holds our own codes: give it as data.path")
    if options.latent_scale is not None and not 0 < options.latent_scale < math.inf:
        raise ConfigError(f"--latent-scale {options.latent_scale}: latents have been multiplied by a number above 0")
    source = open_foreign(options.from_latents)
    if not options.flip:
        source.without_flips()
    if options.latent_scale is not None:
        source.scale = options.latent_scale
    if options.normalize:
        source.normalize()
    stage, image_size = _stage(options, source)
    encoding: dict[str, Any] = {
        "kind": "latents",
        "shape": source.shape,
        "dtype": options.dtype,
        "number": len(source),
        "flips": source.flips,
        "image_size": image_size,
        "channels": stage.channels,
        "shard_size": options.shard_size,
        "batch": options.batch,
        "first_stage": stage.fingerprint,
        "moments": source.moments,
        "latent_scale": source.scale,
        "data": group.from_first(source.contents() if group.rank() == 0 else None),
    }
    return Plan(stage, None, source, encoding)


def _stage(options: EncodeOptions, source: Foreign) -> tuple[FirstStage, int]:
    """What encoded the latents, which it must fit, and the side of its images in pixels."""
    channels, side, _ = source.shape
    name, image_size = options.first_stage, options.image_size
    if name.startswith(_NAMED):
        if image_size is None:
            raise ConfigError(f"--first-stage {name}: give --image-size, too, the pixels that {side} latents stand for")
        stage = FirstStage(name, name.removeprefix(_NAMED), 3, None)
    else:
        with reworded(options={"first_stage.path:": f"--first-stage {name}:"}):
            vae = autoencoder.Autoencoder(name)
        if vae.channels != channels:
            raise ConfigError(
                f"--first-stage {name} makes latents of {vae.channels} channels, those in "
                f"{options.from_latents} have {channels}: name the one that encoded them"
            )
        if image_size not in (None, side * vae.factor):
            raise ConfigError(
                f"--image-size {image_size}: {side} latents of {name} stand for {side * vae.factor} "
                "pixels: leave it out"
            )
        image_size = side * vae.factor
        stage = FirstStage(name, vae.fingerprint(), vae.image_channels, None)
    if source.stats is not None:
        # The first stage cannot decode what is normalized by channel, so that runs refuse it by this fingerprint.
        stage = FirstStage(stage.name, f"{stage.fingerprint}, normalized by {source.digest()}", stage.channels, None)
    return stage, image_size
