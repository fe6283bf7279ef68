"""Tiny video tokenizers of the real class with random weights, in folders like those that an export writes."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from dstrain import recipe, systems
from dstrain.recipe import Run

TINY = {
    "image_size": 16,
    "num_frames": 5,
    "channels": 1,
    "dim": 16,
    "codebook_size": 64,
    "spatial_depth": 1,
    "temporal_depth": 1,
    "dim_head": 8,
    "heads": 2,
}  # clips of 5 frames are tokens (3, 2, 2)


def save(folder: Path, seed: int = 0, **changes) -> Path:
    """A folder with recipe.yaml and tokenizer.safetensors."""
    torch.manual_seed(seed)
    run = Run.model_validate({"name": "tiny", "system": "phenaki.tokenizer", "model": TINY | changes})
    network = systems.build(run.system, run.model).networks()["tokenizer"]
    with torch.no_grad():
        for weight in network.parameters():  # large enough that other tokens are other pictures
            weight.add_(0.2 * torch.randn(weight.shape))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(recipe.dump_run(run), encoding="utf-8")
    save_file(network.state_dict(), folder / "tokenizer.safetensors")
    return folder
