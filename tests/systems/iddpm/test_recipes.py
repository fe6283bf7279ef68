"""The published recipes against the original's flags and state dicts."""

import json

import pytest
import torch

from dstrain import recipe, systems
from tests.support import golden
from tests.support.launch import ROOT

KEYS = json.loads((golden.FOLDER / "iddpm_keys.json").read_text())


def load(name):
    run = recipe.complete_model_section(
        recipe.load_recipe(ROOT / "launch" / "recipes" / f"{name}.yaml"), systems.find_config_class("iddpm")
    )
    return run, systems.build("iddpm", run.model)


@pytest.mark.parametrize(
    "name, official, batch, lr, steps",
    [
        ("iddpm-imagenet64-hybrid", "imagenet64_uncond_hybrid", 128, 1e-4, 1_500_000),
        ("iddpm-imagenet64-vlb", "imagenet64_uncond_hybrid", 128, 1e-4, 1_500_000),
        ("iddpm-cifar10-hybrid", "cifar10_uncond_hybrid", 128, 1e-4, 500_000),
        ("iddpm-cifar10-vlb", "cifar10_uncond_hybrid", 128, 1e-4, 500_000),
        ("iddpm-imagenet64-cond", "imagenet64_cond_270M", 2048, 3e-4, 250_000),
        ("iddpm-lsun256", "lsun_bedroom", 128, 1e-4, 1_200_000),
        ("iddpm-upsampler-64-256", "upsampler_64_256", 256, 3e-4, 500_000),
    ],
)
def test_published_recipes(name, official, batch, lr, steps):
    """Oracle: names and shapes of the official file; batch, learning rate and diffusion of the authors' README."""
    run, system = load(name)
    with torch.device("meta"):
        state = system.networks()["denoiser"].state_dict()
    assert {key: list(tensor.shape) for key, tensor in state.items()} == KEYS[official]["keys"]
    assert (run.batch.global_, run.optimizer.lr, run.steps, run.ema.decays) == (batch, lr, steps, (0.9999,))
    flags, vlb = KEYS[official]["flags"], name.endswith("vlb")
    known = dict(flags, use_kl=vlb)
    if official == "upsampler_64_256":  # the file of keys has the script's defaults
        known |= {"diffusion_steps": 4000, "rescale_timesteps": False, "rescale_learned_sigmas": False}
    for flag in (
        "diffusion_steps",
        "noise_schedule",
        "use_kl",
        "predict_xstart",
        "rescale_timesteps",
        "rescale_learned_sigmas",
        "dropout",
        "num_heads",
    ):
        assert getattr(system.config, flag) == known[flag], flag
    assert system.config.schedule_sampler == ("loss-second-moment" if vlb else "uniform")
    assert system.config.list_conflicts(run) == []


def test_small_recipes_chain():
    """Oracle: the header of the upsampler's recipe: a base at the small size, whose pictures it takes."""
    changes = ["data.image_size=14", "model.channel_mult=[1,2]"]
    base = recipe.load_recipe(ROOT / "launch" / "recipes" / "iddpm-small.yaml", changes)
    base = systems.build("iddpm", recipe.complete_model_section(base, systems.find_config_class("iddpm")).model)
    run, upsampler = load("iddpm-small-upsampler")
    _, small = load("iddpm-small")
    assert base.shape[1:] == (upsampler.config.small_size,) * 2 and upsampler.shape == small.shape
    pictures = base.synthetic(2)["image"]
    assert upsampler.conditions_from(pictures)["low_res"].shape == (2, 1, 14, 14)
    assert run.model["num_classes"] == base.config.num_classes
