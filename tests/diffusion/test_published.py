"""Our chains in the words of diffusers' schedulers, and our pipelines in folders of its own."""

import json

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, DiffusionPipeline, UNet2DModel

from dstrain.diffusion import schedule
from dstrain.diffusion.gaussian import GaussianDiffusion
from dstrain.diffusion.published import add_to_model_index, find_largest_divisor, make_diffusers_scheduler_arguments
from dstrain.systems.iddpm.pipeline import ConditionalUNetPipeline


@pytest.mark.parametrize("name", schedule.SCHEDULES)
@pytest.mark.parametrize("kind", [DDIMScheduler, DDPMScheduler])
def test_the_same_betas(tmp_path, name, kind):
    """Oracle: diffusers' own tables, after a way through scheduler_config.json, against ours in float64."""
    diffusion = GaussianDiffusion(schedule.make_betas(name, 500), prediction="v", variance="fixed_small")
    kind(**make_diffusers_scheduler_arguments(diffusion, name, clip=False)).save_pretrained(tmp_path)
    found = kind.from_pretrained(tmp_path)
    torch.testing.assert_close(found.betas.double(), diffusion.tables["betas"], rtol=1e-6, atol=1e-8)
    assert found.config.prediction_type == "v_prediction" and not found.config.clip_sample
    assert found.config.num_train_timesteps == 500


def test_what_they_do_not_know():
    """Oracle: the contract: the prediction and what is known, by name."""
    diffusion = GaussianDiffusion(schedule.make_betas("linear", 100), prediction="previous_x", variance="fixed_small")
    with pytest.raises(ValueError, match="prediction: previous_x .* know eps, x_start, v .*safetensors"):
        make_diffusers_scheduler_arguments(diffusion, "linear", clip=True)


@pytest.mark.parametrize("count, steps", [(1000, 20), (400, 20), (420, 20), (99, 11), (97, 1), (14, 14), (996, 12)])
def test_steps_that_stride_alike(count, steps):
    """Oracle: diffusers' timesteps of so many steps against ours of the same name, and division by hand."""
    assert find_largest_divisor(count) == steps
    scheduler = DDIMScheduler(num_train_timesteps=count)
    scheduler.set_timesteps(steps)
    assert scheduler.timesteps.tolist() == schedule.space_timesteps(count, f"ddim{steps}")[::-1]


def test_a_pipeline_of_ours(tmp_path):
    """Oracle: diffusers itself, which takes the class from the folder's own file; the JSON module for the index, whose
    earlier entries stay.
    """
    unet = UNet2DModel(
        8,
        1,
        1,
        layers_per_block=1,
        block_out_channels=(8,),
        norm_num_groups=4,
        num_class_embeds=2,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
    )
    diffusion = GaussianDiffusion(schedule.make_betas("cosine", 10), variance="fixed_small")
    scheduler = DDPMScheduler(**make_diffusers_scheduler_arguments(diffusion, "cosine", clip=True))
    ConditionalUNetPipeline(unet, scheduler).save_pretrained(tmp_path)
    add_to_model_index(tmp_path, id2label={"0": "cat", "1": "dog"})
    text = (tmp_path / "model_index.json").read_text(encoding="utf-8")
    assert text == json.dumps(json.loads(text), indent=2) + "\n"
    loaded = DiffusionPipeline.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(loaded).__name__ == "ConditionalUNetPipeline" and type(loaded) is not ConditionalUNetPipeline
    assert loaded.config.id2label == {"0": "cat", "1": "dog"} and torch.equal(loaded.scheduler.betas, scheduler.betas)
    assert loaded.scheduler.config.clip_sample and loaded.scheduler.config.prediction_type == "epsilon"
    for name, weight in unet.state_dict().items():
        assert torch.equal(loaded.unet.state_dict()[name], weight)
