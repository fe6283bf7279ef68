"""The prior through the real launcher: killed and resumed, other stages, uneven ranks, wrong words."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import yaml

from dstrain.data.open import open_split
from dstrain.runs import trained
from tests.support import towers
from tests.support.launch import ROOT, command, launch
from tests.support.runs import files, finish, kill_in_the_middle, metrics, train

RECIPE = ROOT / "tests" / "launch" / "tiny-prior.yaml"

pytestmark = pytest.mark.slow


def same(a: Path, b: Path) -> None:
    """Weights, moments, averages and counters bit by bit, and every figure that was reported."""
    assert files(a, 60) == files(b, 60) and metrics(a) == metrics(b)
    assert any("held_out/similarity/3/other_text" in line for line in metrics(a))


def encoded(pairs: Path) -> list[str]:
    """Pairs with the encodings of one to three text tokens, and the overrides that train on them."""
    draw = np.random.default_rng(0)
    arrays = {
        "img_emb": draw.standard_normal((200, 12)),
        "text_emb": draw.standard_normal((200, 12)),
        "text_encodings": draw.standard_normal((200, 3, 5)),
        "text_mask": np.arange(3) < draw.integers(1, 4, (200, 1)),
    }
    for folder, array in arrays.items():
        (pairs / folder).mkdir(parents=True)
        np.save(pairs / folder / f"{folder}_0.npy", array if array.dtype == bool else array.astype(np.float32))
    return [f"data.path={pairs}", "model.image_embed_dim=12", "model.text_encodings_dim=5", "model.max_text_len=3"]


# CI kills runs of other systems: at stage 1 in test_phenaki.py, at 2 in test_iddpm.py, at 3 in test_resume.py. And
# engine/test_systems.py resumes the prior on another number of ranks.
@pytest.mark.faults
@pytest.mark.parametrize("stage", (1, 2, 3))
def test_kill_minus_nine(tmp_path, stage):
    """Oracle: the undisturbed run on 2 ranks: after kill -9 the same command ends with the same bits of everything.

    Only the killed one writes report.html, which changes nothing.
    """
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    words = encoded(tmp_path / "pairs") if stage == 3 else []  # text tokens, and a null text for them
    assert "complete: 60 steps" in finish(train(whole, stage, *words, recipe=RECIPE))
    command_again = partial(train, killed, stage, *words, "every.report_page=20", recipe=RECIPE)
    kill_in_the_middle(command_again(), killed, 20)
    assert not (killed / "checkpoints" / "step_00000060").exists(), "killed too late to show anything"
    finish(command_again())
    same(whole, killed)
    assert (killed / "report.html").exists() and not (whole / "report.html").exists()


@pytest.mark.faults  # in CI: the engines' in engine/test_systems.py, and by the command the DiT's and IDDPM's
def test_one_rank_trains_the_same_curve(tmp_path):
    """Oracle: the same run on 2 ranks, without dropout, which draws by rank: all figures but for rounding."""
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, num in ((one, 1), (two, 2)):
        finish(train(folder, 2, "model.dropout=0", "steps=30", recipe=RECIPE, num=num))
    assert len(metrics(one)) == len(metrics(two))
    for a, b in zip(metrics(one), metrics(two)):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)


def test_embeddings_for_prompts(tmp_path):
    """Oracle: one process: 2 ranks write the same embeddings for the same prompts, of unit length where asked."""
    towers.sentences(tmp_path / "words")
    words = [
        "model.image_embed_dim=12",
        f"model.text_encoder={tmp_path / 'words'}",
        "model.sampling_final_clamp_l2norm=true",
    ]
    pairs = tmp_path / "pairs"
    for folder in ("img_emb", "text_emb"):
        (pairs / folder).mkdir(parents=True)
        np.save(pairs / folder / "0.npy", np.random.default_rng(0).standard_normal((40, 12)).astype(np.float32))
    run = tmp_path / "run"
    finish(
        train(
            run,
            2,
            *words,
            f"data.path={pairs}",
            "data.splits=[0.7,0.2,0.1]",
            "steps=10",
            "data.workers=0",
            "every.save=10",
            recipe=RECIPE,
        )
    )
    (tmp_path / "prompts.txt").write_text("a red cat\nthe moon\nthe dog on the house\n")
    arrays = []
    for num in (1, 2):
        out = tmp_path / f"drawn{num}"
        finish(
            command(
                "launch/generate.py",
                run,
                "--prompts",
                tmp_path / "prompts.txt",
                "--num-samples",
                "5",
                "--batch",
                "2",
                "--out",
                out,
                num=num,
            )
        )
        arrays.append(np.load(out / "embeddings.npy"))
    assert arrays[0].shape == (5, 12) and arrays[0].dtype == np.float32
    np.testing.assert_allclose(arrays[0], arrays[1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(arrays[0], axis=1), 1, rtol=1e-5)
    assert not np.allclose(arrays[0][0], arrays[0][3])  # the same prompt, another seed


def test_evaluation(tmp_path):
    """Oracle: one process: the table of similarities is the same on 2 ranks and with another batch."""
    run = tmp_path / "run"
    finish(train(run, 2, "steps=10", "every.save=10", recipe=RECIPE))
    tables = []
    for num, batch in ((1, "64"), (2, "7")):
        out = tmp_path / f"found{num}"
        launch("launch/evaluate.py", run, "--steps", "4", "--batch", batch, "--out", out, num=num)
        tables.append(json.loads(next(out.glob("*.json")).read_text()))
    figures = [table["figures"] for table in tables]
    assert figures[0] == pytest.approx(figures[1], abs=1e-6)
    held_out, other = tmp_path / "held_out", tmp_path / "other"
    source = open_split(trained.read_recipe(run).data, "validation")
    for folder, name in (("img_emb", "image_embed"), ("text_emb", "text_embed")):
        (held_out / folder).mkdir(parents=True)
        np.save(held_out / folder / "0.npy", np.stack([source[i][name] for i in range(len(source))]))
    launch("launch/evaluate.py", run, "--steps", "4", "--data", held_out, "--out", other, num=1)
    table = json.loads(next(other.glob("*.json")).read_text())  # the same pairs in another order
    assert table["split"] == "all" and table["samples"] == tables[0]["samples"] == len(source)
    assert table["figures"]["similarity/text_image"] == pytest.approx(figures[0]["similarity/text_image"], abs=1e-6)
    assert "similarity/4/other_text" in table["figures"]
    for name in (
        "loss",
        "similarity/text_image",
        *(f"similarity/4/{kind}" for kind in ("image", "text", "other_text", "above_baseline")),
    ):
        assert np.isfinite(figures[0][name])


def test_another_encoder_of_captions_is_refused(tmp_path):
    """Oracle: the undisturbed run, whose captions are encoded live: another encoder at the same path ends the command
    with exit code 2; with the first one back the same bits are reached."""
    pairs, encoder = tmp_path / "pairs", tmp_path / "words"
    for folder in ("img_emb", "metadata"):
        (pairs / folder).mkdir(parents=True)
    np.save(pairs / "img_emb" / "0.npy", np.random.default_rng(0).standard_normal((40, 12)).astype(np.float32))
    captions = [f"the {towers.WORDS[1 + n % 3]} {towers.WORDS[4 + n // 3 % 3]}" for n in range(40)]
    pyarrow.parquet.write_table(pyarrow.table({"caption": captions}), pairs / "metadata" / "0.parquet")
    towers.sentences(encoder)
    words = [
        "model.image_embed_dim=12",
        f"model.text_encoder={encoder}",
        f"data.path={pairs}",
        "every.save=10",
        "data.splits=[0.7,0.2,0.1]",
        "optimizer.decay_steps=20",
        "every.evaluate=10",
    ]
    whole, halted = tmp_path / "whole", tmp_path / "halted"
    finish(train(whole, 2, *words, "steps=20", recipe=RECIPE, num=1))
    finish(train(halted, 2, *words, "steps=10", recipe=RECIPE, num=1))
    encoder.rename(tmp_path / "first")
    towers.sentences(encoder, seed=1)
    again = train(halted, 2, *words, "steps=20", recipe=RECIPE, num=1)
    output = finish(again, code=2)
    assert output.count("text_encoder=") == 2 and "--allow-change" in output and "Traceback" not in output
    shutil.rmtree(encoder)
    (tmp_path / "first").rename(encoder)
    finish(again)
    assert files(whole, 20) == files(halted, 20)


def spoiled(tmp_path: Path, how: str) -> list[str]:
    """Overrides that should be refused."""
    pairs = tmp_path / "pairs"
    for folder in ("img_emb", "text_emb"):
        (pairs / folder).mkdir(parents=True)
        array = np.random.default_rng(0).standard_normal((40, 384)).astype(np.float32)
        if how == "nan" and folder == "text_emb":
            array[17, 3] = np.nan
        np.save(pairs / folder / "0.npy", array[:39] if how == "rows" and folder == "text_emb" else array)
    return [f"data.path={pairs}", "data.workers=0", "data.splits=[0.7,0.2,0.1]"]


@pytest.mark.parametrize(
    "how, overrides, message",
    [
        ("", ["model.image_embed_dim=100"], "set model.image_embed_dim=384"),
        ("nan", [], "text_emb/0.npy[17] holds NaN"),
        ("rows", [], "img_emb/0.npy has 40 rows and text_emb/0.npy 39"),
        ("", ["data.splits=[0.7,0.2,0.2]"], "which sum to 1"),
        ("", ["data.splits=[0.97,0.02,0.01]"], "leaves 1 for validation"),
        ("", ["data.path=builtin:fashion"], "holds images, and prior learns from embedding pairs"),
        ("", ["data.path=builtin:emojis"], "builtin:emoji-pairs"),
        ("", ["data.held_out=0.1"], "data.splits"),
        ("", ["samples.sampler=euler"], "ddpm, ddim: name one"),
    ],
)
def test_bad_input_is_refused(tmp_path, how, overrides, message):
    """Oracle: exit code 2 on 2 ranks, and one message that names key, file or row; no traceback, no run."""
    words = spoiled(tmp_path, how)
    done = launch(
        "launch/train.py",
        "--recipe",
        RECIPE,
        f"folder={tmp_path / 'run'}",
        *words,
        *overrides,
        check=False,
    )
    assert done.returncode == 2 and message in done.stdout and "Traceback" not in done.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["prior-small", "prior-1b", "prior-laion"])
def test_recipes(name, tmp_path):
    """Oracle: the launcher's own checks of what a recipe says; only /data/pairs may be missing."""
    done = launch(
        "launch/train.py",
        "--recipe",
        ROOT / "launch" / "recipes" / f"{name}.yaml",
        "--dry-run",
        f"folder={tmp_path / 'run'}",
        num=1,
        check=False,
    )
    problems = [line.strip() for line in done.stdout.splitlines() if line.startswith("  ")]
    missing = [line for line in problems if not line.startswith("data.path=/data/pairs does not exist")]
    assert missing == [] and (name != "prior-small" or done.returncode == 0), done.stdout
    assert yaml.safe_load((ROOT / "launch" / "recipes" / f"{name}.yaml").read_text())["system"] == "prior"
