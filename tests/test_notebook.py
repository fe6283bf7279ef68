"""A trained run in one process: the lines of docs/guides/notebook.md, against files of the verbs."""

import json
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

import dstrain
from dstrain import recipe, systems
from dstrain.commands.export import ExportOptions, export_run
from dstrain.commands.generate import GenerateOptions, generate_samples
from dstrain.engine.checkpoint import read_weights
from dstrain.recipe import ConfigError
from tests.support import checkpoints, counting
from tests.support.launch import ROOT, environment
from tests.support.runs import finish, train


@pytest.fixture
def folder(tmp_path):
    """A run as an untrained network leaves it, with random weights throughout and an average that is its weights."""
    run = recipe.load_recipe(ROOT / "tests/launch/tiny.yaml", ["ema.decays=[0.9]"])
    run = recipe.complete_model_section(run, systems.find_config_class("dit"))
    torch.manual_seed(0)
    networks = systems.build("dit", run.model).networks()
    with torch.no_grad():
        for weight in networks["denoiser"].parameters():
            weight.normal_(std=0.1)
    return checkpoints.write(tmp_path / "run", run, networks)


@pytest.mark.slow
def test_the_lines_of_the_page(tmp_path, monkeypatch, capsys):
    """Oracle: launch/generate.py's verb on the same trained run, the checkpoint's own files, metrics.jsonl."""
    lines = (ROOT / "docs/guides/notebook.md").read_text().partition("without DeepSpeed:\n\n")[2]
    code = textwrap.dedent(lines[: lines.index("\n\n`run.recipe`")])
    assert 5 < len(code.splitlines()) <= 10
    folder = tmp_path / "runs" / "dit-small"
    folder.parent.mkdir()
    finish(train(folder, 1, "steps=4", "every.evaluate=4", "every.evaluate_samples=64", num=1))
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(code, "notebook.md", "exec"), names)
    out = generate_samples(GenerateOptions(folder, num=16, labels=(3, 5), guidance_scale=4, pngs=False))
    drawn = np.load(next(out.glob("samples_*.npz")))["arr_0"]
    assert np.array_equal(names["images"].permute(0, 2, 3, 1).expand(-1, -1, -1, 3).numpy(), drawn)
    assert torch.equal(names["eighth"][0], names["images"][7])
    saved = read_weights(folder / "checkpoints/step_00000004", "denoiser", "ema.0.9")
    assert all(torch.equal(value, saved[name]) for name, value in names["network"].state_dict().items())
    assert names["count"] == sum(weight.numel() for weight in names["network"].parameters())
    assert "tiny 4 {'denoiser': 'ema.0.9'}" in capsys.readouterr().out
    assert names["run"].step == 4 and repr(names["run"]).endswith("dit, step 4, denoiser: ema.0.9, cpu)")


def test_choices(folder):
    """Oracle: the folder as written: master and average are the same weights; the words of what is not there."""
    run, raw = dstrain.load(folder), dstrain.load(folder, raw=True, step=7, dtype=torch.float64)
    assert (run.weights, raw.weights) == ({"denoiser": "ema.0.9"}, {"denoiser": "master"})
    assert run.step == raw.step == 7 and not run.networks["denoiser"].training
    for ours, theirs in zip(run.networks["denoiser"].parameters(), raw.networks["denoiser"].parameters()):
        assert theirs.dtype == torch.float64 and torch.equal(ours.double(), theirs)
    assert torch.equal(run.sample(3, num_steps=2), run.sample(5, num_steps=2, batch=2)[:3])
    assert run.sample(1, labels=[3], num_steps=2).shape == (1, 1, 32, 32)
    with pytest.raises(ConfigError, match="no checkpoint of that step; it holds 7"):
        dstrain.load(folder, step=8)
    with pytest.raises(ConfigError, match="no EMA of decay 0.5; it holds 0.9"):
        dstrain.load(folder, ema=0.5)
    with pytest.raises(ConfigError, match="takes no texts"):
        run.sample(2, prompts=["a hat"])
    with pytest.raises(ConfigError, match="holds no run.yaml"):
        dstrain.load(folder / "checkpoints")


def test_held_out(folder):
    """Oracle: the mean over the first ten held-out samples in one batch, where evaluate takes batches of four."""
    from dstrain.data.batches import iterate_held_out
    from dstrain.data.open import open_sources

    run = dstrain.load(folder)
    batch = next(iterate_held_out(open_sources(run.recipe.data)[1], 10, seed=run.recipe.seed))
    batch.pop("valid")
    with torch.no_grad():
        each = run.system.evaluate(run.networks, run.system.encode(batch))["loss"]
    assert run.evaluate(10, batch=4)["loss"] == pytest.approx(each.mean().item(), rel=1e-5)


def test_an_export(folder, tmp_path):
    """Oracle: the run that was exported: the same samples; its weights are of one kind."""
    export_run(ExportOptions(folder, tmp_path / "out", "safetensors"))
    run = dstrain.load(tmp_path / "out")
    assert run.step is None and run.weights == {"denoiser": "exported"}
    assert torch.equal(run.sample(3, num_steps=2), dstrain.load(folder).sample(3, num_steps=2))
    with pytest.raises(ConfigError, match="is an export and holds one set of weights"):
        dstrain.load(tmp_path / "out", raw=True)


def test_videos_from_texts_and_frames(tmp_path, monkeypatch):
    """Oracle: the counting system: frame i is start + i, the corner is the text's length; clips go on counting."""
    counting.register(monkeypatch)
    folder = counting.folder(tmp_path / "run")
    (folder / "checkpoints").mkdir()
    monkeypatch.setattr(
        "dstrain.runs.trained.find_checkpoint", lambda folder, step=None, ema=None: folder / "step_00000003"
    )
    run = dstrain.load(folder)
    clips = run.sample(3, prompts=["hat", "a coat"], seed=2, num_frames=3)
    assert clips.shape == (3, 3, 1, *counting.SIZE)
    assert clips[:, :, 0, 0, 0].tolist() == [[3] * 3, [6] * 3, [3] * 3]
    assert clips[:, :, 0, -1, -1].tolist() == [[6, 7, 8], [9, 10, 11], [12, 13, 14]]
    longer = run.sample(3, images=clips)
    assert longer[:, :, 0, -1, -1].tolist() == [[6, 7, 8, 9, 10], [9, 10, 11, 12, 13], [12, 13, 14, 15, 16]]


def test_the_import_is_light():
    """Oracle: a fresh interpreter: `import dstrain` loads no torch, and an unknown name is an AttributeError."""
    program = (
        "import sys, json, dstrain\n"
        "print(json.dumps(['torch' in sys.modules, hasattr(dstrain, 'nothing'), dstrain.__version__]))\n"
        "from dstrain import load\nassert load.__module__ == 'dstrain.notebook'\n"
        "print('deepspeed' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), text=True, capture_output=True, timeout=60
    )
    first, second = done.stdout.splitlines()
    assert json.loads(first) == [False, False, dstrain.__version__] and second == "False", done.stderr
