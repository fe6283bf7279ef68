"""Two systems outside dstrain, each in a folder of its own: every command, at ZeRO-2 and ZeRO-3, on two ranks."""

import json
import os

import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open

from dstrain import recipe, systems
from dstrain.data.batches import Batches
from dstrain.data.open import fill_in_codes_entry, open_sources
from dstrain.recipe import trust
from tests.support.launch import ROOT, here, launch

pytestmark = pytest.mark.slow

NEWCOMER = ROOT / "tests" / "newcomer"
RUN = {
    "steps": 4,
    "batch": {"global": 8},
    "optimizer": {"lr": 1e-3},
    "ema": {"decays": [0.9]},
    "samples": {"num": 4, "num_steps": 4},
    "track": {"wandb": "disabled"},
    "every": {"report": 1, "report_page": 0, "sample": 4, "evaluate": 4, "evaluate_samples": 16, "save": 2},
}
IMAGES = {"path": "builtin:fashion", "image_size": 16, "channels": 1, "workers": 0}
VAE = {"discrete": {"num_tokens": 32, "codebook_dim": 8, "num_layers": 2, "hidden_dim": 8}}


@pytest.fixture(scope="module")
def entry_point(tmp_path_factory):
    """A folder for PYTHONPATH that holds what `pip install` writes for a package that announces a system."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "token_model-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: token-model\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[dstrain.systems]\ntoken-model = codes\n")
    return folder


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """A folder with a discrete VAE trained for three steps, its export, and a cache of its tokens."""
    root = tmp_path_factory.mktemp("tokens")
    write(root, {**RUN, "name": "first", "system": "vae", "steps": 3, "model": VAE, "data": IMAGES})
    launch("launch/train.py", *words(root, 2), f"folder={root / 'run'}", "every.evaluate=0", "every.sample=0", num=1)
    launch("launch/export.py", root / "run", "--format", "safetensors", "--out", root / "first_stage", num=1)
    launch("launch/encode.py", root / "run", "--out", root / "codes", "--no-flip", num=1)
    return root


def write(folder, run):
    (folder / "recipe.yaml").write_text(yaml.safe_dump(run))
    for stage in (2, 3):
        (folder / f"zero{stage}.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))


def words(folder, stage):
    return "--recipe", folder / "recipe.yaml", "--ds_config", folder / f"zero{stage}.json"


def first_loss(folder):
    """The first training loss in plain torch: the constructor's weights, one process, no engine."""
    run = recipe.load_recipe(folder / "recipe.yaml")
    run = run.model_copy(update={"data": fill_in_codes_entry(run.data)})
    system = systems.build(run.system, recipe.complete_model_section(run, systems.find_config_class(run.system)).model)
    torch.manual_seed(run.seed)
    nets = system.networks()
    with Batches(
        open_sources(run.data)[0], global_batch=8, micro_batch=8, seed=run.seed, flip=run.data.flip
    ) as batches:
        batch = next(batches.read_step(0))
    return system.loss(next(iter(system.parts)), nets, system.encode(batch))["loss"].item()


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def trained(folder, stages, path):
    """Trains two steps at the first ZeRO stage and two at the second, on two ranks; the lines of metrics.jsonl."""
    env = {"PYTHONPATH": os.pathsep.join(map(str, path))}
    run = f"folder={folder / 'run'}"
    launch("launch/train.py", *words(folder, stages[0]), run, "steps=2", "every.sample=2", **env)
    launch("launch/train.py", *words(folder, stages[1]), run, **env)
    return metrics(folder / "run")


@pytest.mark.parametrize("name, stages", [("edm", (2, 3)), ("token-model", (3, 2))])
def test_every_command(tmp_path, monkeypatch, capsys, request, entry_point, name, stages):
    """Oracle: plain torch for the first loss, training's own held-out loss for evaluate, state dicts for the export."""
    model, data = {"width": 8}, IMAGES
    if name == "token-model":
        root = request.getfixturevalue("tokens")
        model, data = (
            {"dim": 16, "first_stage": str(root / "first_stage")},
            {**IMAGES, "path": str(root / "codes"), "held_out": 0.1, "flip": False},
        )
    for folder in (entry_point, NEWCOMER):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(trust, "_trusted", {name})
    write(tmp_path, {**RUN, "name": "new", "system": name, "model": model, "data": data})

    lines = trained(tmp_path, stages, (NEWCOMER, entry_point, ROOT))
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 4 and losses[0] == pytest.approx(first_loss(tmp_path), rel=1e-6)
    run = tmp_path / "run"
    assert (run / "samples" / "step_00000004.png").is_file()

    monkeypatch.setattr(trust, "_trusted", set())
    named = ("--trust-system", name) if name == "edm" else ()  # An installed entry point needs no such word.
    code, stdout, stderr = here(
        "generate.py", [run, "--num-samples", 3, "--out", tmp_path / "drawn", *named], monkeypatch, capsys
    )
    assert code == 0, stdout + stderr
    with np.load(next((tmp_path / "drawn").glob("*.npz"))) as drawn:
        assert drawn["arr_0"].shape[:3] == (3, 16, 16)
    for label in (10, 77):  # The null class of others, and none at all.
        code, stdout, stderr = here(
            "generate.py", [run, "--num-samples", 3, "--labels", label, *named], monkeypatch, capsys
        )
        fault = f"--labels: [{label}] are not among the 10 classes" if name == "edm" else "knows no classes"
        assert code == 2 and fault in stdout + stderr, stdout + stderr
    code, stdout, stderr = here("evaluate.py", [run, "--num-samples", 16, *named], monkeypatch, capsys)
    assert code == 0, stdout + stderr
    measured = json.loads(next((run / "evaluation").glob("*.json")).read_text())["figures"]["loss"]
    held_out = [line["held_out/loss"] for line in lines if "held_out/loss" in line]
    assert measured == pytest.approx(held_out[-1], rel=1e-5)
    code, stdout, stderr = here(
        "export.py", [run, "--format", "safetensors", "--out", tmp_path / "out", *named], monkeypatch, capsys
    )
    assert code == 0, stdout + stderr
    system = systems.build(name, recipe.load_recipe(run / "run.yaml").model)
    part, network = next(iter(system.networks().items()))
    with safe_open(tmp_path / "out" / f"{part}.safetensors", "pt") as file:
        assert set(file.keys()) == set(network.state_dict())


def test_resumed_is_uninterrupted(tmp_path):
    """Oracle: the losses of an uninterrupted run of four steps, to the bit; the other run resumes after two."""
    write(tmp_path, {**RUN, "name": "new", "system": "edm", "model": {"width": 8}, "data": IMAGES})
    env = {"PYTHONPATH": os.pathsep.join((str(NEWCOMER), str(ROOT)))}
    for folder, steps in (("whole", [4]), ("broken", [2, 4])):
        for count in steps:
            launch(
                "launch/train.py",
                *words(tmp_path, 3),
                f"folder={tmp_path / folder}",
                f"steps={count}",
                "every.evaluate=0",
                "every.sample=0",
                num=2,
                **env,
            )
    whole, broken = ([line["loss"] for line in metrics(tmp_path / folder)] for folder in ("whole", "broken"))
    assert whole == broken and len(whole) == 4
