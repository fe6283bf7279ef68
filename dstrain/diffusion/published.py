"""Makes the keyword arguments of diffusers' schedulers for a chain, without importing diffusers.

The schedulers of diffusers compute in float32, from the name or a list of betas; gaussian.py computes in float64. Both
follow the same chain.
"""

import json
from pathlib import Path
from typing import Any

from dstrain.diffusion.gaussian import GaussianDiffusion
from dstrain.diffusion.schedule import BETA_END, BETA_START
from dstrain.recipe import ConfigError

PREDICTIONS = {"eps": "epsilon", "x_start": "sample", "v": "v_prediction"}  # dstrain's -> diffusers'


def make_diffusers_scheduler_arguments(diffusion: GaussianDiffusion, schedule: str, clip: bool) -> dict[str, Any]:
    """Returns the keyword arguments with which diffusers' DDIMScheduler and DDPMScheduler follow this chain.

    schedule  the name of the chain's betas, see schedule.make_betas.
    clip      whether the predicted x_start is kept in [-1, 1].

    Raises ConfigError if these schedulers do not know the network's prediction.
    """
    if diffusion.prediction not in PREDICTIONS:
        raise ConfigError(
            f"prediction: {diffusion.prediction} has no prediction_type in diffusers' schedulers, which "
            f"know {', '.join(PREDICTIONS)} by other names; take --format safetensors"
        )
    count = diffusion.num_timesteps
    common = {"num_train_timesteps": count, "prediction_type": PREDICTIONS[diffusion.prediction], "clip_sample": clip}
    if schedule == "linear":
        scale = 1000 / count
        return common | {"beta_schedule": "linear", "beta_start": scale * BETA_START, "beta_end": scale * BETA_END}
    if schedule in ("cosine", "squaredcos_cap_v2"):
        return common | {"beta_schedule": "squaredcos_cap_v2"}
    return common | {"trained_betas": diffusion.tables["betas"].float().tolist()}


def add_to_model_index(folder: Path, **entries: Any) -> None:
    """Writes `entries` into model_index.json in a diffusers pipeline's folder. Entries of the same names are replaced,
    others are kept.
    """
    path = folder / "model_index.json"
    index = json.loads(path.read_text(encoding="utf-8")) | entries
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def find_largest_divisor(count: int, max_divisor: int = 20) -> int:
    """Returns the largest divisor of `count` that is at most `max_divisor`. In so many steps, DDIM of diffusers and of
    dstrain visit the same timesteps of a chain of `count`.
    """
    return max(steps for steps in range(1, max_divisor + 1) if count % steps == 0)
