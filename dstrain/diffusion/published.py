"""A chain in the words of diffusers' schedulers: keyword arguments, so that nothing here imports that library.

Theirs compute in float32 from named betas or from a list; ours are float64 tables (gaussian.py). Both spell the same
chain, to float32's rounding.
"""

from typing import Any

from dstrain.diffusion.gaussian import GaussianDiffusion
from dstrain.diffusion.schedule import BETA_END, BETA_START
from dstrain.recipe import ConfigError

PREDICTIONS = {"eps": "epsilon", "x_start": "sample", "v": "v_prediction"}       # ours -> diffusers'


def scheduler_arguments(diffusion: GaussianDiffusion, schedule: str, clip: bool) -> dict[str, Any]:
    """What DDIMScheduler and DDPMScheduler share; `schedule` names the betas, `clip` keeps x_start in [-1, 1].

    ConfigError: a prediction that they do not know.
    """
    if diffusion.prediction not in PREDICTIONS:
        raise ConfigError(f"prediction: {diffusion.prediction} has no prediction_type in diffusers' schedulers, which "
                          f"know {', '.join(PREDICTIONS)} by other names; take --format safetensors")
    count = diffusion.num_timesteps
    found = {"num_train_timesteps": count, "prediction_type": PREDICTIONS[diffusion.prediction], "clip_sample": clip}
    if schedule == "linear":
        scale = 1000 / count
        return found | {"beta_schedule": "linear", "beta_start": scale * BETA_START, "beta_end": scale * BETA_END}
    if schedule in ("cosine", "squaredcos_cap_v2"):
        return found | {"beta_schedule": "squaredcos_cap_v2"}
    return found | {"trained_betas": diffusion.tables["betas"].float().tolist()}


def even_steps(count: int, most: int = 5) -> int:
    """The largest number of steps up to `most` that divides `count`: there DDIM strides alike here and in diffusers."""
    return max(steps for steps in range(1, most + 1) if count % steps == 0)
