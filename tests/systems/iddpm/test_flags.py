"""The flags of IDDPM: what the original makes of them, lists, sizes, and what is refused, with the remedy."""

import pytest

from dstrain.recipe import Data, Run, Samples
from dstrain.systems.iddpm import Config
from tests.support.tiny_iddpm import LABELS, TINY, build


@pytest.mark.parametrize(
    "flags, expected",
    [
        ({}, ("eps", "fixed_large", "rescaled_mse")),
        ({"learn_sigma": True}, ("eps", "learned_range", "rescaled_mse")),
        ({"learn_sigma": True, "rescale_learned_sigmas": False}, ("eps", "learned_range", "mse")),
        ({"learn_sigma": True, "sigma_small": True, "use_kl": True}, ("eps", "learned_range", "rescaled_kl")),
        ({"sigma_small": True, "predict_xstart": True}, ("x_start", "fixed_small", "rescaled_mse")),
        ({"prediction": "previous_x", "loss": "kl", "use_kl": True}, ("previous_x", "fixed_large", "kl")),
    ],
)
def test_flags(flags, expected):
    """Oracle: what the original makes of its flags."""
    diffusion = build(**flags).diffusion
    assert (diffusion.prediction, diffusion.variance, diffusion.loss) == expected
    assert diffusion.rescale_timesteps and not build(rescale_timesteps=False).diffusion.rescale_timesteps


def test_lists_as_the_original_writes_them():
    """Oracle: the same values as lists; one number is a list of one."""
    config = Config(image_size=32, attention_resolutions="16,8", channel_mult="1,2,2,2")
    assert (config.attention_resolutions, config.channel_mult) == ((16, 8), (1, 2, 2, 2))
    assert Config(image_size=32, attention_resolutions=16).attention_resolutions == (16,)
    assert Config(image_size=32, attention_resolutions="").make_network_arguments()["attention_levels"] == []
    assert Config(**config.model_dump()) == config
    assert {
        size: Config(image_size=size, attention_resolutions=8).resolved_channel_mult for size in (32, 64, 128, 256)
    } == {
        32: (1, 2, 2, 2),
        64: (1, 2, 3, 4),
        128: (1, 1, 2, 3, 4),
        256: (1, 1, 2, 2, 4, 4),
    }
    assert (
        Config(num_heads=2).resolved_heads_upsample == 2
        and Config(num_heads=2, num_heads_upsample=4).resolved_heads_upsample == 4
    )


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"image_size": 9}, "image_size 9 is no multiple of 2, by which the 2 levels of channel_mult"),
        (
            {"image_size": 28, "channel_mult": None},
            r"channel_mult must be given .* 28, for example \[1, 2, 2\].*256, 128",
        ),
        ({"channel_mult": []}, "needs a factor of 1 or more"),
        ({"channel_mult": [1, 0]}, "needs a factor of 1 or more"),
        ({"attention_resolutions": "16,4"}, "attention_resolutions: 16 never occurs; .* 8 are 8, 4"),
        ({"num_channels": 48}, "num_channels 48 is no multiple of 32.*take 64"),
        ({"num_heads": 3}, "num_heads 3 does not divide 32"),
        ({"num_heads": 0}, "num_heads"),
        ({"num_heads_upsample": 5}, "num_heads_upsample 5 does not divide 32"),
        ({"num_heads_upsample": 0}, "num_heads_upsample 0 is no number"),
        ({"small_size": 3}, "small_size 3 does not divide image_size 8"),
        ({"small_size": 8}, "small_size 8 does not"),
        ({"noise_schedule": "sine"}, "(?s)noise_schedule.*'linear', 'cosine'"),
        ({"noise_schedule": "linear", "diffusion_steps": 10}, "'linear' over 10 steps leaves"),
        ({"timestep_respacing": "30"}, "timestep_respacing '30' does not fit 20 diffusion_steps .*write 250, ddim50"),
        ({"timestep_respacing": "ddim3000"}, "timestep_respacing 'ddim3000'.*no integer stride"),
        ({"timestep_respacing": "fast"}, "timestep_respacing 'fast'"),
        ({"objective": "flow", "timestep_respacing": "5"}, "objective: .* leave timestep_respacing and"),
        ({"objective": "flow", "schedule_sampler": "loss-second-moment"}, "set objective=diffusion"),
        ({"schedule_sampler": "loss"}, "(?s)schedule_sampler.*'uniform' or 'loss-second-moment'"),
        ({"in_channels": 4}, "in_channels"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_config_errors(changes, words):
    """Oracle: a ValueError that names the field, what is there and the remedy."""
    with pytest.raises(ValueError, match=words):
        build(**changes)


@pytest.mark.parametrize("size", [8, 12, 28, 48, 96, 100, 512])
def test_proposals_are_accepted(size):
    """Oracle: the config itself, which takes the channel_mult that its message proposes."""
    with pytest.raises(ValueError, match="for example") as error:
        Config(image_size=size, attention_resolutions="")
    proposed = str(error.value).split("for example [")[1].split("]")[0]
    config = Config(image_size=size, attention_resolutions="", channel_mult=proposed)
    assert size % 2 or len(config.resolved_channel_mult) > 1 or size <= 8


def test_completed_and_conflicts():
    """Oracle: what the other sections of a recipe say; one line for each thing that does not fit."""

    def conflicts(model, samples=None):
        run = Run(
            system="iddpm", data=Data(image_size=8, channels=1), samples=Samples(**{"num_steps": 10} | (samples or {}))
        )
        return Config(**Config.complete_section(TINY | model, run)).list_conflicts(run)

    silent = {name: value for name, value in TINY.items() if name not in ("image_size", "in_channels")}
    completed = Config.complete_section(silent, Run(data=Data(image_size=8, channels=1)))
    assert (completed["image_size"], completed["in_channels"]) == (8, 1)
    assert conflicts({}) == conflicts(LABELS, {"labels": [3, 9]}) == []
    assert conflicts({"timestep_respacing": "ddim10"}) == []
    assert conflicts(LABELS | {"class_dropout_prob": 0.1}, {"guidance_scale": 2.0}) == []
    assert len(conflicts({"class_dropout_prob": 0.1}, {"guidance_scale": 2.0})) == 1, "without labels there is no null"
    for model, samples, words in (
        ({"image_size": 16, "attention_resolutions": [8]}, {}, "data.image_size=8 and model.image_size=16"),
        ({"in_channels": 3}, {}, "data.channels=1 and model.in_channels=3"),
        ({}, {"num_steps": 21}, "samples.num_steps=21 is above model.diffusion_steps=20"),
        ({"timestep_respacing": "5"}, {}, "samples.num_steps=10 and model.timestep_respacing=5"),
        ({}, {"guidance_scale": 2.0}, "write samples.guidance_scale=1, or model.class_cond=true model.class_drop"),
        ({}, {"labels": [1]}, "model.class_cond is false"),
    ):
        found = conflicts(model, samples)
        assert len(found) == 1 and words in found[0]
