"""launch/evaluate.py on a real run: one rank and two, every option, and what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from dstrain import rng, systems
from dstrain.commands.options.command import list_option_specs
from dstrain.commands.options.evaluate import EvaluateOptions
from dstrain.data.builtin.fashion import Fashion
from dstrain.engine.checkpoint import read_weights
from tests.support.launch import command, here
from tests.support.pictures import break_file, picture
from tests.support.runs import finish, train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of 6 steps on 2 ranks over a chain of 20 timesteps, with checkpoints of steps 3 and 6."""
    folder = tmp_path_factory.mktemp("run") / "tiny"
    finish(
        train(
            folder,
            2,
            "steps=6",
            "every.save=3",
            "every.sample=0",
            "data.workers=0",
            "optimizer.lr=0.01",
            "optimizer.warmup=0",
            "model.diffusion={num_steps: 20, schedule: cosine}",
        )
    )
    return folder


@pytest.fixture
def evaluate(monkeypatch, capsys):
    """launch/evaluate.py in this process: exit code, stdout, stderr."""
    return lambda *words: here("evaluate.py", words, monkeypatch, capsys)


def only(folder: Path) -> dict:
    """The one result in a folder; there is a plot beside it, and nothing half-written."""
    (path,) = folder.glob("*.json")
    assert sorted(file.name for file in folder.iterdir()) == [path.name, path.with_suffix(".png").name]
    assert Image.open(path.with_suffix(".png")).size[0] > 800
    return json.loads(path.read_text())


def assert_same(result: dict, expected: dict, rel: float) -> None:
    assert expected["figures"] and expected["curves"]
    for group in ("figures", "curves"):
        assert result[group].keys() == expected[group].keys()
        for name, values in expected[group].items():
            assert result[group][name] == pytest.approx(values, rel=rel, abs=1e-9), name


def test_one_rank_and_two(run, tmp_path):
    """Oracle: one rank and two, with different batches, agree; the total is the sum of its parts."""
    common = ["--split", "held_out", "--num-samples", "37", "--steps", "7", "--ema", "0.99", "--checkpoint", "6"]
    results = []
    for ranks, batch in ((1, 16), (2, 5)):
        out = tmp_path / str(ranks)
        output = finish(
            command(
                "launch/evaluate.py", run, *common, "--batch", str(batch), "--out", out, num=ranks, launcher=ranks > 1
            )
        )
        results.append(only(out))
        assert results[-1]["ranks"] == ranks and "7 timesteps" in output
        assert f"{results[-1]['figures']['total']:.5g}" in output
    assert_same(results[1], results[0], 1e-6)
    one = results[0]
    assert sum(one["curves"]["vb"]) + one["figures"]["prior"] == pytest.approx(one["figures"]["total"], rel=1e-6)
    assert one["timesteps"] == [0, 3, 6, 10, 13, 16, 19] and one["samples"] == 37 and one["samples_of_split"] == 500
    assert (
        one["weights"] == {"denoiser": "ema.0.99"}
        and one["step"] == 6
        and one["data"]["fingerprint"].startswith("builtin:fashion held_out n=500")
    )


@pytest.mark.parametrize(
    "words, kind, split",
    [
        ((), "ema.0.9", "held_out"),
        (("--raw",), "master", "held_out"),
        (("--ema", 0.99, "--split", "train"), "ema.0.99", "train"),
    ],
)
def test_a_plain_loop(run, tmp_path, evaluate, words, kind, split):
    """Oracle: bits_per_dim called for one image at a time on the checkpoint's weights, averaged by numpy."""
    code, _out, err = evaluate(run, "--num-samples", 5, "--batch", 2, "--out", tmp_path, *words)
    assert code == 0, err
    model = yaml.safe_load((run / "run.yaml").read_text())["model"]
    system = systems.build("dit", model)
    network = system.networks()["denoiser"]
    network.load_state_dict(read_weights(run / "checkpoints" / "step_00000006", "denoiser", kind))
    images, rows = Fashion(32, 1, split), []
    for index in range(5):
        item = images[index * len(images) // 5]
        key, label = rng.keys(0, -1, torch.tensor([index])), torch.tensor([item["label"]])
        with torch.no_grad():
            rows.append(
                system.diffusion.compute_bits_per_dim(
                    lambda x, t: network(x, t, label),
                    item["image"][None] / 127.5 - 1,
                    lambda i: rng.normal(key, f"bound/{i}", (1, 32, 32)),
                )
            )
    mean = {name: np.mean([row[name][0].double().numpy() for row in rows], axis=0) for name in rows[0]}
    expected = {
        "figures": {name: mean[name] for name in ("total", "prior")},
        "curves": {name: mean[name][::-1] for name in ("vb", "mse", "x_start_mse")},
    }
    result = only(tmp_path)
    assert_same(result, expected, 1e-4)
    assert result["timesteps"] == list(range(20)) and result["weights"] == {"denoiser": kind}


def test_what_is_asked_is_what_is_written(run, tmp_path, evaluate):
    """Oracle: other weights, steps, splits and chains give other figures in other files; a repeated command replaces
    its file.
    """
    asked = {
        "": (),
        "raw": ("--raw",),
        "ema": ("--ema", 0.99),
        "old": ("--checkpoint", 3),
        "chain": ("--steps", 5),
        "split": ("--split", "train"),
        "bf16": ("--precision", "bf16"),
        "less": ("--num-samples", 4),
    }
    totals = {}
    for name, words in asked.items():
        known = set(tmp_path.glob("*.json"))
        code, out, err = evaluate(run, "--num-samples", 6, "--out", tmp_path, *words)
        (path,) = set(tmp_path.glob("*.json")) - known
        assert code == 0 and str(path) in out, err
        totals[name] = json.loads(path.read_text())["figures"]["total"]
    assert len(set(totals.values())) == len(asked)
    assert totals["bf16"] == pytest.approx(totals[""], rel=0.02)
    (path,) = (path for path in tmp_path.glob("step_00000006_ema0.9_n6.json"))
    path.write_text("left half-writt")
    assert evaluate(run, "--num-samples", 6, "--out", tmp_path, "--ema", 0.9, "--batch", 1)[0] == 0
    assert json.loads(path.read_text())["figures"]["total"] == pytest.approx(totals[""], rel=1e-6)
    assert len(list(tmp_path.glob("*.json"))) == len(asked)


def test_the_run_keeps_its_own_folder(run, tmp_path, evaluate, monkeypatch):
    """Oracle: the documented folder, RUN/evaluation; the progress bar appears only on a terminal."""
    copy = shutil.copytree(run, tmp_path / "copy")
    code, _, err = evaluate(copy, "--num-samples", 3, "--steps", 2)
    assert code == 0 and only(copy / "evaluation")["samples"] == 3 and "%" not in err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    code, _out, err = evaluate(copy, "--num-samples", 3, "--steps", 2, "--out", tmp_path / "again")
    assert code == 0 and "100%" in err and "2/2" in err


# --------------------------------------------------------------------------------------------------------- other data


def folder(root: Path, names: tuple[str, ...], size: int = 40, mode: str = "L", each: int = 2) -> Path:
    for number, name in enumerate(names):
        (root / name).mkdir(parents=True, exist_ok=True)
        for index in range(each):
            picture(10 * number + index, size, size, mode).save(root / name / f"{index}.png")
    return root


def test_images_of_another_folder(run, tmp_path, evaluate):
    """Oracle: labels by the names of the training classes (sneaker is 7, as in the plain loop); an unreadable image is
    replaced by the next and named.
    """
    images = folder(tmp_path / "photos", ("sneaker",), 32)
    assert evaluate(run, "--data", images, "--out", tmp_path / "out")[0] == 0
    result = only(tmp_path / "out")
    assert result["samples"] == 2 and result["split"] == "all" and result["data"]["path"] == str(images)
    system = systems.build("dit", yaml.safe_load((run / "run.yaml").read_text())["model"])
    network = system.networks()["denoiser"]
    network.load_state_dict(read_weights(run / "checkpoints" / "step_00000006", "denoiser", "ema.0.9"))
    pixels = torch.stack([torch.from_numpy(np.array(Image.open(images / "sneaker" / f"{i}.png"))) for i in range(2)])
    key = rng.keys(0, -1, torch.arange(2))
    terms = system.diffusion.compute_bits_per_dim(
        lambda x, t: network(x, t, torch.tensor([7, 7])),
        pixels[:, None] / 127.5 - 1,
        lambda i: rng.normal(key, f"bound/{i}", (1, 32, 32)),
    )
    assert result["figures"]["total"] == pytest.approx(float(terms["total"].double().mean()), rel=1e-5)
    break_file(images / "sneaker" / "0.png", "truncated")
    code, out, _err = evaluate(run, "--data", images, "--out", tmp_path / "out")
    assert code == 0 and "unreadable images, each replaced by the next one: 1" in out
    assert only(tmp_path / "out")["data"]["unreadable"] == ["sneaker/0.png"]


WRONG = {
    "no folder": ([], "name the folder of a run"),
    "not a run": (["{strange}"], "is not a run's folder"),
    "two runs": (["{run}", "{run}"], "--help shows what there is"),
    "no checkpoint": (["{young}"], "holds no whole checkpoint yet: train first"),
    "unknown checkpoint": (["{run}", "--checkpoint", "4"], "{run} holds no checkpoint of that step; it holds 3, 6"),
    "unknown average": (["{run}", "--ema", "0.5"], "holds no EMA of decay 0.5; it holds 0.9, 0.99"),
    "average and raw": (["{run}", "--ema", "0.9", "--raw"], "not allowed with"),
    "too many steps": (["{run}", "--steps", "21"], "num_steps: 21 is not between 1 and the 20 timesteps of the chain"),
    "no steps": (["{run}", "--steps", "0"], "'0' is not a whole number above 0"),
    "no samples": (["{run}", "--num-samples", "0"], "'0' is not a whole number above 0"),
    "empty batch": (["{run}", "--batch", "0"], "'0' is not a whole number above 0"),
    "unknown split": (["{run}", "--split", "middle"], "invalid choice: 'middle'"),
    "a split that images lack": (["{run}", "--split", "test"], "has no split test"),
    "abbreviation": (["{run}", "--num", "3"], "--help shows what there is"),
    "a file for a folder": (["{run}", "--out", "{run}/run.yaml"], "name a folder that can be written"),
    "nothing held out": (
        ["{all}"],
        "--data FOLDER, take those it was trained on with --split train, or train with data.held_out=0.05",
    ),
    "too little held out": (["{few}"], "leaves no image of 20 for the held_out split"),
    "missing data": (
        ["{run}", "--data", "{strange}/x"],
        "--data {strange}/x does not exist: give a folder of images\n",
    ),
    "empty data": (["{run}", "--data", "{strange}"], "--data {strange}: no images in it, and no other file"),
    "built-in data": (["{run}", "--data", "builtin:fashion"], "name a folder of images"),
    "data and split": (["{run}", "--data", "{small}", "--split", "train"], "leave out --split train"),
    "other size": (["{run}", "--data", "{small}"], "holds images of 16 pixels, data.image_size is 32"),
    "other channels": (["{run}", "--data", "{colour}"], "holds colour images (3 channels), data.channels is 1"),
    "other classes": (["{run}", "--data", "{cats}"], "class folders cat are not among the classes"),
    "no classes": (["{run}", "--data", "{flat}"], "has no class folders and the model knows 10 classes"),
    "too many classes": (["{more}", "--split", "train"], "has 11 classes, the model 10"),
}


def trained_on(run: Path, folder: Path, **data) -> Path:
    """The run as one that was trained on other data."""
    shutil.copytree(run, folder)
    recipe = yaml.safe_load((folder / "run.yaml").read_text())
    recipe["data"] |= {key: str(value) if isinstance(value, Path) else value for key, value in data.items()}
    (folder / "run.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.mark.parametrize("case", WRONG)
def test_refused(run, tmp_path, evaluate, case):
    """Oracle: the fault put in: exit code 2, one message that names it, no traceback, nothing written."""
    names = {"run": run, "strange": tmp_path / "strange", "young": tmp_path / "young"}
    names["strange"].mkdir()
    names["young"].mkdir()
    shutil.copy(run / "run.yaml", names["young"])
    ten = tuple(f"c{number}" for number in range(10))
    words, expected = WRONG[case]
    made = {
        "small": lambda path: folder(path, ("shirt",), 16),
        "colour": lambda path: folder(path, ("shirt",), 40, "RGB"),
        "cats": lambda path: folder(path, ("cat",)),
        "flat": lambda path: folder(path, (".",)),
        "all": lambda path: trained_on(run, path, path=folder(tmp_path / "ten", ten)),
        "few": lambda path: trained_on(run, path, path=folder(tmp_path / "ten", ten), held_out=1e-9),
        "more": lambda path: trained_on(run, path, path=folder(tmp_path / "eleven", (*ten, "c10"))),
    }
    for name, make in made.items():
        if any(f"{{{name}}}" in word for word in words):
            names[name] = make(tmp_path / name)
    before = sorted(tmp_path.rglob("*.json"))
    code, out, err = evaluate(*(word.format(**names) for word in words))
    assert code == 2 and not out and "Traceback" not in err, err
    assert err.count("evaluate.py: error:") == 1 and expected.format(**names) in err, err
    assert not list(run.rglob("evaluation/*")) and sorted(tmp_path.rglob("*.json")) == before


def test_help(evaluate):
    """Oracle: two screens of 40 x 120; every option that is declared is on it."""
    code, out, _ = evaluate("--help")
    assert code == 0 and len(out.splitlines()) <= 80 and max(map(len, out.splitlines())) <= 120
    names = [spec.name or entry.name.replace("_", "-") for entry, spec in list_option_specs(EvaluateOptions)]
    assert all(f"--{name}" in out for name in names if name != "folder")
