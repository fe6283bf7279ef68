"""Our chains in the words of diffusers' schedulers."""

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler

from dstrain.diffusion import schedule
from dstrain.diffusion.gaussian import GaussianDiffusion
from dstrain.diffusion.published import even_steps, scheduler_arguments


@pytest.mark.parametrize("name", schedule.SCHEDULES)
@pytest.mark.parametrize("kind", [DDIMScheduler, DDPMScheduler])
def test_the_same_betas(tmp_path, name, kind):
    """Oracle: diffusers' own tables, after a way through scheduler_config.json, against ours in float64."""
    diffusion = GaussianDiffusion(schedule.betas(name, 500), prediction="v", variance="fixed_small")
    kind(**scheduler_arguments(diffusion, name, clip=False)).save_pretrained(tmp_path)
    found = kind.from_pretrained(tmp_path)
    torch.testing.assert_close(found.betas.double(), diffusion.tables["betas"], rtol=1e-6, atol=1e-8)
    assert found.config.prediction_type == "v_prediction" and not found.config.clip_sample
    assert found.config.num_train_timesteps == 500


def test_what_they_do_not_know():
    """Oracle: the contract: the prediction and what is known, by name."""
    diffusion = GaussianDiffusion(schedule.betas("linear", 100), prediction="previous_x", variance="fixed_small")
    with pytest.raises(ValueError, match="prediction: previous_x .* know eps, x_start, v .*safetensors"):
        scheduler_arguments(diffusion, "linear", clip=True)


@pytest.mark.parametrize("count, steps", [(1000, 20), (400, 20), (99, 11), (97, 1), (14, 14), (996, 12)])
def test_steps_that_stride_alike(count, steps):
    """Oracle: diffusers' timesteps of so many steps against ours of the same name, and division by hand."""
    assert even_steps(count) == steps
    scheduler = DDIMScheduler(num_train_timesteps=count)
    scheduler.set_timesteps(steps)
    assert scheduler.timesteps.tolist() == schedule.space_timesteps(count, f"ddim{steps}")[::-1]
