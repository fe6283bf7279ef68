"""A tiny video tokenizer with random weights, as launch/export.py --format safetensors leaves a trained one."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from dstrain import recipe, systems
from dstrain.recipe import Run
from dstrain.systems.base import System

MODEL = {
    "dim": 16,
    "codebook_size": 16,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_depth": 1,
    "temporal_depth": 1,
    "dim_head": 8,
    "heads": 2,
}


def save(
    folder: Path, videos: str = "builtin:moving-fashion", num_frames: int = 5, seed: int = 0, **data
) -> tuple[System, dict[str, torch.nn.Module]]:
    """Writes the export of a run on `videos`, grey clips of 8 x 12 pixels: tokens are (1 + (T - 1) / 2, 2, 3)."""
    defaults = {"path": videos, "image_size": 12, "height": 8, "num_frames": num_frames, "channels": 1, "flip": False}
    run = Run.model_validate({"name": "tiny", "system": "phenaki.tokenizer", "model": MODEL, "data": defaults | data})
    run = recipe.complete_model_section(run, systems.find_config_class(run.system))
    system = systems.build(run.system, run.model)
    torch.manual_seed(seed)
    network = system.networks()["tokenizer"].eval()
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(recipe.dump_run(run))
    save_file(network.state_dict(), folder / "tokenizer.safetensors")
    return system, {"tokenizer": network}
