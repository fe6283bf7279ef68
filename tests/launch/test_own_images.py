"""docs/guides/own_images.md: its four commands as they are printed, on a tiny folder, and what comes of them."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.metrics.oracles import seeded_inception
from tests.support import first_stage
from tests.support.launch import ROOT, command, run

pytestmark = pytest.mark.slow

GUIDE = ROOT / "docs" / "guides" / "own_images.md"
TINY = {  # appended to each command: what makes it small
    "encode": ["--image-size", "32", "--batch", "4"],
    "train": [
        *("model.size=null", "model.patch_size=2", "model.hidden_size=32", "model.depth=1", "model.num_heads=2"),
        *("model.image_size=32", "data.image_size=32", "data.workers=0", "batch.global=4", "samples.num=2"),
        *("samples.num_steps=2", "samples.metrics_samples=4", "every.metrics=2", "every.sample=2", "every.save=2"),
        *("every.report=1", "optimizer.warmup=1"),
    ],
    "evaluate": ["--num-samples", "4", "--steps", "2", "--batch", "3"],
    "export": [],
}


def read_commands() -> list[list[str]]:
    """Returns the words of the guide's commands, in their order."""
    block = GUIDE.read_text(encoding="utf-8").partition("Four commands:\n")[2].partition("\n1. ")[0]
    lines = [line for line in block.splitlines() if line.startswith("    dstrain ")]
    assert [line.split()[1] for line in lines] == list(TINY)
    return [shlex.split(line) for line in lines]


def run_command(words: list[str], *more: str) -> str:
    """Runs a command of the guide in the working folder; its output. The first is a fresh `python -m dstrain`, and the
    others are forked, by the doors in launch/.
    """
    verb = words[1]
    line = [sys.executable, "-m", *words] if verb == "encode" else command(f"launch/{verb}.py", *words[2:], num=1)
    done = run([*line, *TINY[verb], *more], 600)
    assert done.returncode == 0, done.stdout
    return done.stdout


def read_curve(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "runs/dit-own-images/metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["metrics/fid"] for line in lines if "metrics/fid" in line}


def test_the_guide(tmp_path, monkeypatch):
    """Oracle: the guide: latents of each photo and its mirror image; a curve that goes on where the run stopped; the
    figure of another command, which compares with the same photos; a pipeline that diffusers opens and draws from.
    """
    random = np.random.default_rng(0)
    (tmp_path / "photos" / ".thumbnails").mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(tmp_path / "photos" / ".thumbnails" / "x.png")  # counts nowhere
    for number in range(4):
        size = [(40, 52), (64, 48)][number % 2]
        Image.fromarray(random.integers(0, 256, (*size, 3), np.uint8)).save(tmp_path / "photos" / f"{number}.jpg")
    first_stage.save(tmp_path / "sd-vae-ft-mse", channels=3, depth=4, latent_channels=4)
    seeded_inception(tmp_path / "pt_inception.pth")
    monkeypatch.chdir(tmp_path)
    encode, train, evaluate, export = read_commands()
    assert "4 samples in latents" in run_command(encode)
    run_command(train, "steps=2")
    before = read_curve(tmp_path)
    run_command(train, "steps=4")
    curve = read_curve(tmp_path)
    assert set(curve) == {2, 4} and curve[2] == before[2] and np.isfinite([*curve.values()]).all()
    described = list((tmp_path / "runs/dit-own-images").glob("metrics_data_*.npz"))
    assert len(described) == 1 and np.load(described[0])["inception.count"] == 4
    text = run_command(evaluate)
    assert re.search(r"^  fid +[0-9.]+$", text, re.M) and "against photos" in text and "kid" in text
    seen = json.loads(next((tmp_path / "runs/dit-own-images/evaluation").glob("*.json")).read_text())["figures"]["fid"]
    assert seen == pytest.approx(curve[4], rel=1e-3)  # the same seeds, the same average, the same photos
    run_command(export)
    from diffusers import DiffusionPipeline

    os.environ["HF_HUB_OFFLINE"] = "1"
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "pipeline")
    assert pipeline(class_labels=[0], num_inference_steps=2, guidance_scale=1.0).images[0].size == (32, 32)
