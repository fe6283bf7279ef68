"""Both kinds of autoencoder through the real launch script: an adversary that joins, figures, pictures, resume."""

import json

import pytest
import torch
import yaml
from PIL import Image

from dstrain.engine.checkpoint import read_weights
from tests.support.launch import launch

pytestmark = pytest.mark.slow

RUN = {
    "system": "vae",
    "steps": 6,
    "data": {"path": "builtin:fashion", "image_size": 16, "channels": 1, "workers": 0},
    "batch": {"global": 8},
    "optimizer": {"lr": 1e-3},
    "ema": {"decays": [0.9]},
    "samples": {"num": 3},
    "every": {"report": 2, "report_page": 0, "sample": 6, "evaluate": 6, "save": 3},
    "track": {"wandb": "disabled"},
}
MODELS = {
    "kl": {
        "kl": {
            "block_out_channels": [8, 16],
            "norm_num_groups": 4,
            "layers_per_block": 1,
            "discriminator": {"start": 4, "n_layers": 1, "base_channels": 8},
        }
    },
    "discrete": {
        "discrete": {"num_tokens": 32, "codebook_dim": 8, "num_layers": 2, "hidden_dim": 8, "temperature": {"steps": 4}}
    },
}


def train(tmp_path, kind, folder, *words):
    """The run's lines of metrics without timing, in which equal runs differ."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RUN | {"name": f"{kind}-tiny", "model": MODELS[kind]}))
    (tmp_path / "zero2.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    launch(
        "launch/train.py",
        "--recipe",
        tmp_path / "recipe.yaml",
        "--ds_config",
        tmp_path / "zero2.json",
        f"folder={folder}",
        *words,
        num=1,
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "timing"} for line in lines]


@pytest.mark.parametrize("kind", MODELS)
def test_a_run(tmp_path, kind):
    """Oracle: what the run's folder must hold; after a break at step 3 the uninterrupted run, to the bit."""
    lines = train(tmp_path, kind, tmp_path / "whole")
    names = set().union(*lines)
    assert {"held_out/psnr", "held_out/ssim", "held_out/raw/psnr", "held_out/kl"} <= names
    if kind == "kl":
        assert {"held_out/scaling_factor", "autoencoder/recon", "autoencoder/kl"} <= names
        before, after = lines[1], lines[2]
        assert "discriminator/loss" not in before and "autoencoder/critique" not in before
        assert {"discriminator/loss", "discriminator/real", "autoencoder/critique_weight"} <= after.keys()
        assert after["skipped"] == 0
    else:
        assert {"held_out/perplexity", "held_out/dead_tokens", "temperature", "kl_weight"} <= names
    with Image.open(tmp_path / "whole" / "samples" / "step_00000006_reconstruction.png") as picture:
        assert picture.width > picture.height > 64  # three strips of three pictures
    train(tmp_path, kind, tmp_path / "broken", "steps=3")
    assert train(tmp_path, kind, tmp_path / "broken")[-2:] == lines[-2:]
    parts = ("autoencoder", "discriminator") if kind == "kl" else ("autoencoder",)
    for part in parts:
        one, other = (
            read_weights(tmp_path / name / "checkpoints" / "step_00000006", part) for name in ("whole", "broken")
        )
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_adversary_that_joins_later(tmp_path):
    """Oracle: the weights of the first run; with learning rate 0 the second run keeps its averages."""
    train(tmp_path, "kl", tmp_path / "first", "steps=1", "model.kl.discriminator=null")
    train(tmp_path, "kl", tmp_path / "second", "steps=1", f"init_from={tmp_path / 'first'}", "optimizer.lr=0")
    one, other = (
        read_weights(tmp_path / name / "checkpoints" / "step_00000001", "autoencoder", kind)
        for name, kind in (("first", "ema.0.9"), ("second", "master"))
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert "discriminator is not in" in (tmp_path / "second" / "log.txt").read_text()
