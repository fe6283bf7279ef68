"""Latents that are normalized by channel: what is measured, what is learned from, and what is refused."""

from pathlib import Path

import pytest
import torch

from dstrain import recipe, rng, systems
from dstrain.commands.encode import EncodeOptions, encode_data
from dstrain.data.batches import Batches
from dstrain.data.cached.shards import read_index
from dstrain.data.open import fill_in_codes_entry, open_sources
from dstrain.recipe import ConfigError
from tests.support import first_stage

CHANNELS = {"latents": {"normalize": "channels"}}
MODEL = {"patch_size": 1, "hidden_size": 8, "depth": 1, "num_heads": 2, "num_classes": 10}


@pytest.fixture(scope="module")
def stage(tmp_path_factory) -> Path:
    """A random autoencoder of three channels, whose latents have a quarter of the side."""
    return first_stage.save(tmp_path_factory.mktemp("stage") / "vae", channels=1)


@pytest.fixture(scope="module")
def cache(stage) -> Path:
    """Latents of the built-in pictures."""
    out = stage.parent / "latents"
    encode_data(EncodeOptions(first_stage=str(stage), out=out, data="builtin:fashion", image_size=16))
    return out


def build(path: Path | str, model: dict, **data: object):
    """Returns the section's data and the system, as a command does."""
    run = recipe.Run(
        name="x",
        system="dit",
        steps=1,
        model=MODEL | model,
        data={"path": str(path), "image_size": 16, "channels": 1, "workers": 0, "flip": False} | data,
        batch={"global": 8},
    )
    run = run.model_copy(update={"data": fill_in_codes_entry(run.data)})
    run = recipe.complete_model_section(run, systems.find_config_class("dit"))
    return run, systems.build("dit", run.model)


@pytest.mark.parametrize("decodes", [False, True])
def test_channels_have_unit_variance(cache, stage, decodes):
    """Oracle: the mean and deviation of what is learned from, over all samples and pixels of each channel, by torch:
    0 and 1; as far as 512 draws of 2,000 show them.
    """
    more = {"first_stage": {"path": str(stage)}} if decodes else {}
    run, system = build(cache, CHANNELS | more)
    with Batches(open_sources(run.data)[0], global_batch=512, micro_batch=512, seed=0, flip=False) as batches:
        x = system.encode(next(batches.read_step(0)))["x_start"]
    assert x.shape == (512, 3, 4, 4)
    assert x.mean((0, 2, 3)).abs().max() < 0.1 and (x.std((0, 2, 3)) - 1).abs().max() < 0.1
    _, plain = build(cache, more)
    raw = read_index(cache)["statistics"]
    with Batches(open_sources(run.data)[0], global_batch=512, micro_batch=512, seed=0, flip=False) as batches:
        of_scale = plain.encode(next(batches.read_step(0)))["x_start"]
    mean, std = (torch.tensor(raw[name]).view(-1, 1, 1) for name in ("channel_mean", "channel_std"))
    scale = 0.5 if decodes else raw["scaling_factor"]  # that of the autoencoder's config, or of the cache
    torch.testing.assert_close(x, (of_scale / scale - mean) / std)


def test_decoding_is_the_inverse(cache, stage):
    """Oracle: the autoencoder itself, given the latents as it made them."""
    _, system = build(cache, CHANNELS | {"first_stage": {"path": str(stage)}})
    latents = rng.normal(rng.keys_of_seeds(torch.arange(2)), "x", (3, 4, 4))
    mean, std = (
        torch.tensor(values).view(-1, 1, 1) for values in (system.config.latents.mean, system.config.latents.std)
    )
    with torch.no_grad():
        expected = system.first_stage.vae.decode(latents).sample
    torch.testing.assert_close(system.first_stage.decode((latents - mean) / std), expected)


def test_an_autoencoder_that_says_them(stage, tmp_path):
    """Oracle: latents_mean and latents_std of its config, as VA-VAE and others keep them, without any cache."""
    said = {"latents_mean": [1.0, 2.0, 3.0], "latents_std": [0.5, 1.0, 2.0]}
    path = first_stage.save(tmp_path / "vae", channels=1, **said)
    run, system = build(
        "builtin:fashion", CHANNELS | {"first_stage": {"path": str(path), "factor": 4}, "in_channels": 3}
    )
    assert run.model["latents"]["mean"] == [1.0, 2.0, 3.0] and system.config.latents.std == (0.5, 1.0, 2.0)
    assert system.config.get_latent_scale_and_shift() == ([2.0, 1.0, 0.5], (1.0, 2.0, 3.0))


@pytest.mark.parametrize(
    "latents, words",
    [
        ({"normalize": "channels"}, "latents.normalize: channels needs the mean and deviation .* `dstrain encode`"),
        ({"normalize": "channels", "mean": [0.0] * 3}, "latents.normalize: channels needs"),
        ({"normalize": "channels", "mean": [0.0] * 3, "std": [1.0] * 2}, "latents.std: it has 2 values"),
        ({"normalize": "channels", "mean": [0.0] * 3, "std": [1.0, 1.0, 0.0]}, "latents.std"),
        ({"mean": [0.0] * 3, "std": [1.0] * 3}, "read by latents.normalize=channels alone"),
    ],
)
def test_refusals(stage, latents, words):
    """Oracle: the field and the remedy, before anything is loaded: pixels' autoencoder says no moments."""
    with pytest.raises(ConfigError, match=words):
        build(
            "builtin:fashion", {"latents": latents, "first_stage": {"path": str(stage), "factor": 4}, "in_channels": 3}
        )
