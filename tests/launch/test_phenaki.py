"""Phenaki by its commands: a tokenizer, its tokens, MaskGit with its critic, clips of texts and scenes."""

import json
from functools import partial

import numpy as np
import pytest
import yaml
from PIL import Image

from tests.support.launch import ROOT, command, here
from tests.support.runs import assert_equal_runs, finish, kill_in_the_middle, train

TOKENIZER, MASKGIT = (ROOT / "tests" / "launch" / f"{name}.yaml" for name in ("tiny-phenaki-tokenizer", "tiny-phenaki"))
STEPS = 40

pytestmark = pytest.mark.slow


def killed_and_whole(folder, stage, *words, recipe):
    """The folder of an undisturbed run on 2 ranks; asserts that a killed and resumed run ends with the same bits."""
    whole, killed = folder / "whole", folder / "killed"
    assert f"complete: {STEPS} steps" in finish(train(whole, stage, *words, recipe=recipe))
    command_again = partial(train, killed, stage, *words, recipe=recipe)
    kill_in_the_middle(command_again(), killed, 10)
    assert not (killed / "checkpoints" / f"step_{STEPS:08d}").exists(), "killed too late to show anything"
    finish(command_again())
    assert_equal_runs(whole, killed, STEPS)
    return whole


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tokenizer with its adversary, its tokens, MaskGit with its critic: each run killed -9 and
    resumed on the way.
    """
    root = tmp_path_factory.mktemp("phenaki")
    (root / "first").mkdir()
    (root / "second").mkdir()
    tokenizer = killed_and_whole(root / "first", 3, recipe=TOKENIZER)
    words = ["--out", root / "tokens", "--split", "held_out", "--shard-size", "625"]  # a quarter as many clips
    output = finish(command("launch/encode.py", tokenizer, *words, num=2))
    assert "2500 samples" in output and "tokens int32 [3, 4, 4]" in output
    finish(command("launch/export.py", tokenizer, "--format", "safetensors", "--out", root / "export", num=1))
    words = [f"data.path={root / 'tokens'}", "data.held_out=0.08", f"model.tokenizer.path={root / 'export'}"]
    maskgit = killed_and_whole(root / "second", 1, *words, recipe=MASKGIT)
    return root, tokenizer, maskgit


def test_both_stages_resume(made):
    """Oracle: the undisturbed runs (in the fixture, to the bit); what a run of each stage must have said and shown."""
    _, tokenizer, maskgit = made
    lines = [
        json.loads(line) for run in (tokenizer, maskgit) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    names = set().union(*lines)
    assert {"discriminator/loss", "held_out/psnr", "held_out/perplexity"} <= names
    assert {"maskgit/cross_entropy", "critic/accuracy", "held_out/accuracy", "held_out/critic_accuracy"} <= names
    assert {"metrics/fd", "metrics/accuracy", "metrics/accuracy_item", "metrics/accuracy_motion"} <= names
    with Image.open(tokenizer / "samples" / f"step_{STEPS:08d}_reconstruction.gif") as shown:
        assert shown.n_frames == 5
    with Image.open(maskgit / "samples" / f"step_{STEPS:08d}.gif") as shown:
        assert shown.n_frames == 5


def test_metrics_of_clips(made, tmp_path, monkeypatch, capsys):
    """Oracle: the training's own last line, of 2 ranks: evaluate draws the same captions, and
    finds the same figures.
    """
    maskgit = made[2]
    [trained] = [
        line for line in map(json.loads, (maskgit / "metrics.jsonl").read_text().splitlines()) if "metrics/fd" in line
    ]
    code, _, err = here(
        "evaluate.py",
        [maskgit, "--metrics", "fd,accuracy", "--split", "held_out", "--num-samples", "60", "--out", tmp_path],
        monkeypatch,
        capsys,
    )
    assert code == 0, err
    figures = json.loads(next(tmp_path.glob("*.json")).read_text())["figures"]
    for name in ("fd", "accuracy", "accuracy_item", "accuracy_motion"):
        assert figures[name] == pytest.approx(trained[f"metrics/{name}"], rel=1e-3), name


def test_the_loss_falls(made):
    """Oracle: by hand: a codebook of 64 guessed evenly has the cross-entropy log(64) = 4.16."""
    maskgit = made[2]
    lines = map(json.loads, (maskgit / "metrics.jsonl").read_text().splitlines())
    losses = [line["maskgit/cross_entropy"] for line in lines if "maskgit/cross_entropy" in line]
    assert losses[-1] < losses[0] < 6 and losses[-1] < 4.1


def test_clips_of_texts_and_scenes(made, tmp_path):
    """Oracle: one process: 2 ranks draw the same clips; files as named; scenes go on for as many frames as they add."""
    _root, _, maskgit = made
    (tmp_path / "texts.txt").write_text("a trouser moving right\nan ankle boot / bouncing\na bag moving up\n")
    clips = []
    for num in (1, 2):
        out = tmp_path / f"drawn{num}"
        finish(
            command(
                "launch/generate.py",
                maskgit,
                "--prompts",
                tmp_path / "texts.txt",
                "--num-samples",
                "3",
                "--batch",
                "2",
                "--out",
                out,
                num=num,
            )
        )
        clips.append(np.load(next(out.glob("*.npz")))["arr_0"])
        assert len(list(out.glob("samples/*.gif"))) == len(list(out.glob("samples/*.mp4"))) == 3
        assert (out / "samples" / "000001-an-ankle-boot-bouncing.gif").exists()
    assert clips[0].shape == (3, 5, 16, 16, 3)
    np.testing.assert_array_equal(*clips)
    out = tmp_path / "story"
    finish(
        command(
            "launch/generate.py", maskgit, "--scenes", tmp_path / "texts.txt", "--num-samples", "2", "--out", out, num=1
        )
    )
    story = np.load(next(out.glob("*.npz")))["arr_0"]
    assert story.shape == (2, 5 + 4 + 4, 16, 16, 3)  # each scene is primed by 1 of 5 frames
    output = finish(
        command("launch/generate.py", maskgit, "--prompts", tmp_path / "texts.txt", "--num-frames", "4", num=1), code=2
    )
    assert "num_frames" in output or "--num-frames" in output


@pytest.mark.parametrize(
    "words, message",
    [
        (["model.codebook_size=32"], "64"),
        (["data.num_frames=6"], "num_frames"),
        (["samples.sampler=ddim"], "sampler"),
        (["data.flip=true"], "data.flip"),
        (["model.tokenizer.path=/nowhere"], "/nowhere"),
        (["data.path=builtin:moving-fashion", "data.held_out=0", "data.num_frames=4"], "temporal"),
    ],
)
def test_bad_input_is_refused(made, tmp_path, words, message):
    """Oracle: exit code 2 and one message that names the key; no traceback, no run."""
    root, _, _maskgit = made
    overrides = [f"data.path={root / 'tokens'}", f"model.tokenizer.path={root / 'export'}", *words]
    output = finish(train(tmp_path / "run", 2, *overrides, recipe=MASKGIT, num=1), code=2)
    assert message in output and "Traceback" not in output and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "name", ["phenaki-tokenizer-small", "phenaki-tokenizer", "phenaki-tokenizer-readme", "phenaki-tokenizer-images"]
)
def test_recipes(name, tmp_path):
    """Oracle: the launcher's own checks of what a recipe says; only data and published weights may be missing."""
    recipe = ROOT / "launch" / "recipes" / f"{name}.yaml"
    words = command("launch/train.py", "--recipe", recipe, "--dry-run", f"folder={tmp_path / 'run'}", num=1)
    small = yaml.safe_load(recipe.read_text())["data"]["path"].startswith("builtin:")
    output = finish(words, code=0 if small else 2)
    problems = [line.strip() for line in output.splitlines() if line.startswith("  ")] if not small else []
    missing = ("data.path=/data/", "data.images=/data/", "model.perceptual.path=weights/", "init_from=runs/")
    assert all(line.startswith(missing) for line in problems), output
