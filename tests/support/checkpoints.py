"""A run's folder without training: its recipe and one checkpoint, written by the engine's own writers."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dstrain import recipe
from dstrain.checkpoint.fragments import Fragment, make_shard_file_name, write_shard
from dstrain.checkpoint.manifest import NAME, hash_files
from dstrain.disk.sealed import render_json_with_hash
from dstrain.recipe import Run


def write(folder: Path, run: Run, nets: Mapping[str, nn.Module], step: int = 7, data: str = "made of nothing") -> Path:
    """Fills `folder` like a run on one rank; master weights and the EMA of decay 0.9 are the networks' weights."""
    step_folder = folder / "checkpoints" / f"step_{step:08d}"
    step_folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(recipe.dump_run(run), encoding="utf-8")
    (folder / "data.txt").write_text(data + "\n", encoding="utf-8")
    common = {"system/history": torch.zeros(2)}
    for part, network in nets.items():
        entries = [
            (kind, Fragment(name, tuple(value.shape), 0, value.numel()), value.detach().flatten())
            for kind in ("master", "ema.0.9")
            for name, value in network.named_parameters()
        ]
        write_shard(step_folder / make_shard_file_name(part, 0, 1), entries, {"part": part})
        persistent = network.state_dict().keys()
        common |= {f"buffer/{part}/{name}": value for name, value in network.named_buffers() if name in persistent}
    save_file(common, step_folder / "common.safetensors", {"counters": "{}"})
    names = sorted(path.name for path in step_folder.iterdir())
    body = {
        "files": hash_files(step_folder, names),
        "step": step,
        "world": 1,
        "extra": {"score": None},
        "versions": {"dstrain": "0.0", "torch": "2.99"},
    }
    (step_folder / NAME).write_bytes(render_json_with_hash(body))
    return folder


def edited(folder: Path, **changes) -> None:
    """Changes entries of a diffusers folder's config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def lacking(folder: Path, name: str, value: torch.Tensor | None = None) -> None:
    """Removes a weight from a diffusers folder, or replaces it by `value`."""
    path = folder / "diffusion_pytorch_model.safetensors"
    state = load_file(path)
    del state[name]
    save_file(state | ({name: value} if value is not None else {}), path)


def convert(tag: Path, universal: Path) -> None:
    """Makes a universal folder of a tag's folder, by DeepSpeed's own tool in this process."""
    from dstrain.engine import set_deepspeed_environment

    set_deepspeed_environment()
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(tag),
            output_folder=str(universal),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
