"""A run's folder without training: its recipe and one checkpoint, written by the engine's own writers."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dstrain import recipe
from dstrain.engine.fragments import Fragment, shard_name, write_shard
from dstrain.engine.manifest import NAME, hash_files, render
from dstrain.recipe import Run


def write(folder: Path, run: Run, nets: Mapping[str, nn.Module], step: int = 7, data: str = "made of nothing") -> Path:
    """`folder` as a run of one rank leaves it, with the networks' weights as the masters and the average 0.9 of each."""
    at = folder / "checkpoints" / f"step_{step:08d}"
    at.mkdir(parents=True)
    (folder / "run.yaml").write_text(recipe.dump(run), encoding="utf-8")
    (folder / "data.txt").write_text(data + "\n", encoding="utf-8")
    common = {"system/history": torch.zeros(2)}
    for part, network in nets.items():
        entries = [(kind, Fragment(name, tuple(value.shape), 0, value.numel()), value.detach().flatten())
                   for kind in ("master", "ema.0.9") for name, value in network.named_parameters()]
        write_shard(at / shard_name(part, 0, 1), entries, {"part": part})
        persistent = network.state_dict().keys()
        common |= {f"buffer/{part}/{name}": value for name, value in network.named_buffers() if name in persistent}
    save_file(common, at / "common.safetensors", {"counters": "{}"})
    body = {"files": hash_files(at, sorted(path.name for path in at.iterdir())), "step": step, "world": 1,
            "extra": {"score": None}, "versions": {"dstrain": "0.0", "torch": "2.99"}}
    (at / NAME).write_bytes(render(body))
    return folder


def edited(folder: Path, **changes) -> None:
    """Changes entries of a diffusers folder's config.json."""
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, **changes}))


def lacking(folder: Path, name: str, value: torch.Tensor | None = None) -> None:
    """Takes a weight out of a diffusers folder, or puts another in its place."""
    path = folder / "diffusion_pytorch_model.safetensors"
    state = load_file(path)
    del state[name]
    save_file(state | ({name: value} if value is not None else {}), path)
