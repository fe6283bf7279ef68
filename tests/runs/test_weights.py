"""Weights to start from and to draw with: of a real run, of published files, and what is refused."""

import argparse
import json
import os
import pickle
import shutil
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from dstrain import recipe, systems
from dstrain.engine.checkpoint import read_weights
from dstrain.runs.weights import (
    choose_raw_or_ema_weights,
    read_state_dict,
    read_weights_adapted_to_system,
    write_part_weights,
)
from dstrain.systems.base import System
from tests.support.launch import ROOT, here, launch

MODEL = {
    "patch_size": 8,
    "hidden_size": 32,
    "depth": 2,
    "num_heads": 2,
    "image_size": 32,
    "in_channels": 1,
    "num_classes": 10,
}
CLASSES = "y_embedder.embedding_table.weight"
RECIPE = ROOT / "tests" / "launch" / "tiny.yaml"


def dit(**changes) -> System:
    return systems.build("dit", MODEL | changes)


def weights(**changes) -> dict[str, Tensor]:
    """A tiny DiT's state dict, every value another: fresh ones hold many zeros."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = dit(**changes).networks()["denoiser"]
        return {name: torch.randn_like(value) for name, value in network.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def told(path: Path, replaced: int = 0) -> str:
    """The line of what was loaded of a tiny DiT."""
    return f"denoiser: {len(weights()) - replaced} tensors loaded, {replaced} replaced, 0 left, from {path}"


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step_{step:08d}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path, str]:
    """Two real runs: 4 steps with checkpoints of steps 2 and 4; one step of rate 0 that starts from these, without
    label drop. Their folders, which no test changes, and what both said.
    """
    folder = tmp_path_factory.mktemp("runs")
    (folder / "zero2.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    common = [
        "--recipe",
        str(RECIPE),
        "--ds_config",
        str(folder / "zero2.json"),
        "data.workers=0",
        "every.sample=0",
        "optimizer.warmup=0",
    ]
    trained, begun = folder / "trained", folder / "begun"
    arguments = [
        [*common, f"folder={trained}", "steps=4", "every.save=2", "optimizer.lr=0.01"],
        [
            *common,
            f"folder={begun}",
            "steps=1",
            "every.save=1",
            f"init_from={trained}",
            "optimizer.lr=0",
            "optimizer.weight_decay=0",
            "model.class_dropout_prob=0",
            "samples.guidance_scale=1",
        ],
    ]
    arguments.insert(1, [word.replace("begun", "dry") for word in arguments[1]] + ["--dry-run"])
    said = [launch("launch/train.py", *words, num=1).stdout for words in arguments]
    return trained, begun, "".join(said)


@pytest.fixture
def trained(runs) -> Path:
    return runs[0]


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    return shutil.copytree(trained, tmp_path / "copy")


# ------------------------------------------------------------------------------------------ what a run begins with


def test_parts_of_a_checkpoint(trained, tmp_path):
    """Oracle: read_weights of the same checkpoint, by the library's reader; an average that is not
    there is not taken.
    """
    at = trained / "checkpoints" / "step_00000004"
    for number, (ema, kind) in enumerate(((None, "ema.0.9"), (0.99, "ema.0.99"), (0.5, "ema.0.9"))):
        write_part_weights(at, ["denoiser"], ema, tmp_path / str(number))
        found, expected = load_file(tmp_path / str(number) / "denoiser.safetensors"), read_weights(at, "denoiser", kind)
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_a_bare_safetensors_file(tmp_path):
    """Oracle: the tensors that were written."""
    state = weights()
    save_file(state, tmp_path / "weights.safetensors")
    ((values, notes),) = read_weights_adapted_to_system(tmp_path / "weights.safetensors", dit()).values()
    assert same(values, state) and notes == [told(tmp_path / "weights.safetensors")]


def test_a_folder_of_safetensors_files(tmp_path):
    """Oracle: the tensors that were written, over two files; names as a wrapper has written them."""
    state = weights()
    for number, names in enumerate((list(state)[:9], list(state)[9:])):
        save_file({f"module._orig_mod.{name}": state[name] for name in names}, tmp_path / f"part{number}.safetensors")
    ((values, notes),) = read_weights_adapted_to_system(tmp_path, dit()).values()
    assert same(values, state) and notes == [told(tmp_path)]


@pytest.mark.parametrize("layout", ["train.py", "no ema", "bare", "data parallel", "of torch < 1.6", "packed"])
def test_a_file_of_dits_train_py(tmp_path, layout):
    """Oracle: DiT's train.py:233-240, which saves model, ema, opt and args: its EMA, else its model; by the process's
    own memory map, a file is mapped where its format allows that, so that ranks share it.
    """
    state, other = weights(), {name: value + 1 for name, value in weights().items()}
    moments = {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 1e-4, "params": [0]}]}
    content = {
        "train.py": {
            "model": other,
            "ema": state,
            "opt": moments,
            "args": argparse.Namespace(data_path="/data", model="DiT-XL/2", epochs=1400),
        },
        "no ema": {"model": state, "args": argparse.Namespace(model="DiT-XL/2")},
        "bare": state,
        "data parallel": {"model": {f"module.{name}": value for name, value in state.items()}},
    }
    content = content.get(layout, state)
    legacy = layout == "of torch < 1.6"
    torch.save(content, tmp_path / "0400000.pt", _use_new_zipfile_serialization=not legacy)
    if packed := layout == "packed":  # by a zip program, which compresses
        (tmp_path / "0400000.pt").rename(tmp_path / "plain.pt")
        with ZipFile(tmp_path / "plain.pt") as plain, ZipFile(tmp_path / "0400000.pt", "w", ZIP_DEFLATED) as other:
            for member in plain.namelist():
                other.writestr(member, plain.read(member))
    ((values, notes),) = read_weights_adapted_to_system(tmp_path / "0400000.pt", dit()).values()
    assert same(values, state) and notes == [told(tmp_path / "0400000.pt")]
    assert (str(tmp_path / "0400000.pt") in Path("/proc/self/maps").read_text()) != (legacy or packed)


def test_other_sizes_are_told(tmp_path):
    """Oracle: bicubic interpolation by torch of positions from 4 x 4 to 8 x 8; three class rows and "no label"."""
    state = weights()
    save_file(state, tmp_path / "w.safetensors")
    ((values, notes),) = read_weights_adapted_to_system(
        tmp_path / "w.safetensors", dit(image_size=64, num_classes=3)
    ).values()
    grid = state["pos_embed"].view(1, 4, 4, 32).permute(0, 3, 1, 2)
    grid = torch.nn.functional.interpolate(grid, size=(8, 8), mode="bicubic", align_corners=False)
    torch.testing.assert_close(values["pos_embed"], grid.permute(0, 2, 3, 1).reshape(1, 64, 32))
    assert values[CLASSES].shape == (4, 32) and torch.equal(values[CLASSES][-1], state[CLASSES][-1])
    assert notes.pop(0) == told(tmp_path / "w.safetensors", replaced=2)
    assert [note.partition(":")[0] for note in notes] == ["pos_embed", CLASSES]
    same_names = state.keys() - {"pos_embed", CLASSES}
    assert same({name: values[name] for name in same_names}, {name: state[name] for name in same_names})


def test_a_run_and_its_checkpoints(trained):
    """Oracle: the checkpoint's own fragments: the newest one, the first EMA; a checkpoint's folder is that one."""
    newest, older = (read_weights(checkpoint(trained, step), "denoiser", "ema.0.9") for step in (4, 2))
    assert not same(newest, older) and not same(newest, read_weights(checkpoint(trained, 4), "denoiser", "ema.0.99"))
    assert not same(newest, read_weights(checkpoint(trained, 4), "denoiser"))
    for path, expected in ((trained, newest), (checkpoint(trained, 4), newest), (checkpoint(trained, 2), older)):
        ((values, notes),) = read_weights_adapted_to_system(path, dit()).values()
        assert same(values, expected)
        assert notes == [told(path if path.parent.name == "checkpoints" else checkpoint(path, 4))]
        dit().networks()["denoiser"].load_state_dict(values)


def test_the_kind_of_weights(trained):
    """Oracle: the recipe's decays, 0.9 and 0.99."""
    path = checkpoint(trained, 4)
    assert (
        choose_raw_or_ema_weights(path, "denoiser") == "ema.0.9"
        and choose_raw_or_ema_weights(path, "denoiser", 0.99) == "ema.0.99"
    )
    with pytest.raises(ValueError, match=r"no EMA of decay 0.5; it holds 0.9, 0.99"):
        choose_raw_or_ema_weights(path, "denoiser", 0.5)


def test_a_damaged_checkpoint_is_passed_over(copy, capsys):
    """Oracle: the older checkpoint; the damaged one is named. When both are damaged the run holds none."""
    older = read_weights(checkpoint(copy, 2), "denoiser", "ema.0.9")
    for step in (4, 2):
        shard = next(checkpoint(copy, step).glob("denoiser-*"))
        content = bytearray(shard.read_bytes())
        content[-100] ^= 1
        shard.write_bytes(content)
        if step == 4:
            ((values, _),) = read_weights_adapted_to_system(copy, dit()).values()
            assert same(values, older) and "step_00000004 is damaged" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"init_from=.*copy: the run has no whole checkpoint; train it first"):
        read_weights_adapted_to_system(copy, dit())


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch EXECUTED",)


REFUSED = {
    "a missing file": ("missing.safetensors", "there is no file"),
    "a missing folder": ("missing", "there is no file"),
    "an empty folder": ("empty", "nor a folder with *.safetensors"),
    "a run that has saved nothing": ("young", "train it first, or name another"),
    "no safetensors": ("text.safetensors", "fetch it again"),
    "a truncated file": ("half.safetensors", "fetch it again"),
    "a truncated pickle": ("half.pt", "convert it to safetensors"),
    "a web page": ("page.pt", "convert it to safetensors"),
    "a pickle that runs commands": ("evil.pt", "was not loaded"),
    "a plain pickle that runs commands": ("evil.pkl", "was not loaded"),
    "no state dict": ("list.pt", "save the network's state_dict() there"),
    "no tensors": ("words.pt", "save the network's state_dict() there"),
    "other images": ("rgb.safetensors", "(384,) in the file and (128,) in the network; set learn_sigma, in_channels"),
    "a wider network": ("wide.safetensors", "(384,) in the file and (192,) in the network; set depth and hidden_size"),
    "a deeper network": ("deep.safetensors", "(192,) in the file and absent in the network; set depth and hidden_size"),
    "a shallower network": ("flat.safetensors", "absent in the file and (192,) in the network; set depth and"),
    "fixed variances": (
        "fixed.safetensors",
        "final_layer.linear.bias is (64,) in the file and (128,) in the network; set learn_sigma",
    ),
}


@pytest.fixture(scope="module")
def wrong(tmp_path_factory) -> Path:
    """A folder with weights that are none, or of other networks."""
    folder = tmp_path_factory.mktemp("wrong")
    for name, changes in (
        ("rgb", {"in_channels": 3}),
        ("wide", {"hidden_size": 64}),
        ("deep", {"depth": 3}),
        ("flat", {"depth": 1}),
        ("fixed", {"learn_sigma": False}),
        ("whole", {}),
    ):
        save_file(weights(**changes), folder / f"{name}.safetensors")
    torch.save(weights(), folder / "half.pt")
    for name, whole in (("half.pt", "half.pt"), ("half.safetensors", "whole.safetensors")):
        content = (folder / whole).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])
    (folder / "text.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 12345\n")
    (folder / "page.pt").write_text("<html>404</html>")
    torch.save({"model": weights(), "extra": Evil()}, folder / "evil.pt")
    (folder / "evil.pkl").write_bytes(pickle.dumps(Evil(), protocol=2))
    torch.save([torch.zeros(2)], folder / "list.pt")
    torch.save({"model": {"epoch": 3}}, folder / "words.pt")
    (folder / "empty").mkdir()
    (folder / "young" / "checkpoints" / "step_00000002.tmp").mkdir(parents=True)
    return folder


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(wrong, tmp_path, monkeypatch, case):
    """Oracle: the fault put in, and a remedy; what a pickle would run is not run."""
    monkeypatch.chdir(tmp_path)
    name, expected = REFUSED[case]
    with pytest.raises(ValueError) as caught:
        read_weights_adapted_to_system(wrong / name, dit())
    assert expected in str(caught.value) and len(str(caught.value).splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_pickle_would_run_its_command(wrong, tmp_path, monkeypatch):
    """Oracle: Python's own unpickler on the file refused above: without this that test shows nothing."""
    monkeypatch.chdir(tmp_path)
    pickle.loads((wrong / "evil.pkl").read_bytes())
    assert (tmp_path / "EXECUTED").exists()


def test_a_run_of_another_system(trained):
    """Oracle: the run's own recipe, and what was asked for."""
    vae = systems.build("vae", {"kl": {"block_out_channels": [8, 16], "norm_num_groups": 4}, "image_size": 16})
    with pytest.raises(ValueError, match="init_from=.* of system dit, which trains denoiser and no autoencoder; name"):
        read_weights_adapted_to_system(trained, vae)


def test_folders_that_are_none(tmp_path):
    """Oracle: the faults put in: DeepSpeed's own files, and a config.json that says nothing."""
    (tmp_path / "theirs" / "global_step3").mkdir(parents=True)
    (tmp_path / "theirs" / "global_step3" / "mp_rank_00_model_states.pt").write_bytes(b"")
    for path in (tmp_path / "theirs", tmp_path / "theirs" / "global_step3"):
        with pytest.raises(ValueError, match=r"DeepSpeed's own files: merge .*dstrain consolidate .*name DIR"):
            read_weights_adapted_to_system(path, dit())
    for content in ("[]", "3", '"_class_name"'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match="config.json is damaged: copy it again"):
            read_weights_adapted_to_system(tmp_path, dit())


def test_a_checkpoint_of_another_network(trained):
    """Oracle: the shapes of both networks."""
    with pytest.raises(ValueError, match=r"is \(192,\) in the file and \(384,\) in the network; set depth and hidden"):
        read_weights_adapted_to_system(trained, dit(hidden_size=64))


def test_init_from_a_run(runs):
    """Oracle: the EMA of the run that was named, after one step of rate 0, which changes nothing; fresh class rows."""
    trained, folder, said = runs
    source = read_weights(checkpoint(trained, 4), "denoiser", "ema.0.9")
    ((expected, notes),) = read_weights_adapted_to_system(trained, dit(class_dropout_prob=0)).values()
    assert len(notes) == 2 and all(said.count(f"init_from: {note}\n") == 2 for note in notes)  # a dry run, a run
    assert notes[0] == told(checkpoint(trained, 4), replaced=1) and "complete: 1 steps" in said
    assert {name for name in source if not torch.equal(source[name], expected[name])} == {CLASSES}
    for kind in ("master", "ema.0.9", "ema.0.99"):
        assert same(read_weights(checkpoint(folder, 1), "denoiser", kind), expected)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1] and (folder / "saved").read_text() == "1\n"
    assert recipe.load_recipe(folder / "run.yaml").init_from == trained


# --------------------------------------------------------------------------------------------- launch/generate.py


WRONG = {
    "no folder": ([], "name the folder of a run"),
    "not a run": (["{strange}"], "is not a run's folder"),
    "not there": (["{strange}/x"], "is not a run's folder"),
    "no checkpoint": (["{young}"], "holds no whole checkpoint yet: train first"),
    "unknown checkpoint": (
        ["{run}", "--checkpoint", "3"],
        "--checkpoint 3: {run} holds no checkpoint of that step; it holds 2, 4",
    ),
    "unknown sampler": (["{run}", "--sampler", "dpm"], "ddpm, ddim: name one of them"),
    "sampler of another objective": (["{run}", "--sampler", "euler"], "ddpm, ddim: name one of them"),
    "too many steps": (["{run}", "--steps", "1001"], "between 1 and the 1000 timesteps"),
    "label out of range": (["{run}", "--labels", "3,10"], "[10] are not among the 10 classes, 0 to 9"),
    "label below zero": (["{run}", "--labels=-1"], "--labels"),
    "label in words": (["{run}", "--labels", "shoe"], "--labels"),
    "unknown average": (["{run}", "--ema", "0.5"], "holds no EMA of decay 0.5; it holds 0.9, 0.99"),
    "average and raw": (["{run}", "--ema", "0.9", "--raw"], "not allowed with"),
    "no pictures": (["{run}", "--num", "0"], "'0' is not a whole number above 0"),
    "half a picture": (["{run}", "--num-samples", "1.5"], "'1.5' is not a whole number above 0"),
    "empty batch": (["{run}", "--batch", "0"], "'0' is not a whole number above 0"),
    "negative seed": (["{run}", "--seed=-1"], "'-1' is not a whole number from 0 on"),
    "guidance untrained": (
        ["{begun}", "--guidance-scale", "4"],
        "sample with guidance_scale 1, or train with class_dropout_prob above 0",
    ),
    "unknown option": (["{run}", "--guidance", "4"], "--help shows what there is"),
    "a file for a folder": (["{run}", "--out", "{run}/run.yaml"], "name a folder that can be written"),
    "two runs": (["{run}", "{begun}"], "--help shows what there is"),
}


@pytest.mark.parametrize("case", WRONG)
def test_generate_refuses(runs, tmp_path, monkeypatch, capsys, case):
    """Oracle: the fault put in: exit code 2, one message that names it, no traceback, and no pictures."""
    trained, begun, _ = runs
    (tmp_path / "young").mkdir()
    shutil.copy(trained / "run.yaml", tmp_path / "young")
    (tmp_path / "strange").mkdir()
    names = {"run": trained, "begun": begun, "young": tmp_path / "young", "strange": tmp_path / "strange"}
    words, expected = WRONG[case]
    code, out, err = here("generate.py", (word.format(**names) for word in words), monkeypatch, capsys)
    assert code == 2 and not out and "Traceback" not in err, err
    assert err.count("generate.py: error:") == 1 and expected.format(**names) in err, err
    assert not [path for folder in names.values() for path in folder.rglob("*.png")]


def test_generate_takes_what_it_is_told(trained, tmp_path, monkeypatch, capsys):
    """Oracle: numpy and Pillow on the files: .npz, PNGs and grid say the same; weights and seeds make a difference."""

    def made(name: str, *words: object) -> np.ndarray:
        code, out, err = here(
            "generate.py", [trained, "--num", 5, "--steps", 2, "--out", tmp_path / name, *words], monkeypatch, capsys
        )
        assert code == 0 and out == f"5 samples in {tmp_path / name}\n", err
        return np.load(tmp_path / name / "samples_5x32x32x3.npz")["arr_0"]

    plain = made("plain")
    files = sorted((tmp_path / "plain" / "samples").iterdir())
    assert [path.name for path in files] == [f"{number:06d}.png" for number in range(5)]
    assert all((np.asarray(Image.open(path).convert("RGB")) == array).all() for path, array in zip(files, plain))
    assert (made("again", "--batch", 2, "--no-pngs") == plain).mean() > 0.999  # batched products round differently
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == ["grid.png", "samples_5x32x32x3.npz"]
    others = {
        "raw": ("--raw",),
        "ema": ("--ema", 0.99),
        "old": ("--checkpoint", 2),
        "ddim": ("--sampler", "ddim"),
        "seed": ("--seed", 7),
        "labels": ("--labels", "3,3,5"),
        "scale": ("--guidance-scale", 9),
    }
    for name, words in others.items():
        assert (made(name, "--no-pngs", *words) != plain).any(), name
    assert (made("first", "--ema", 0.9, "--checkpoint", 4, "--guidance-scale", 2.0, "--sampler", "ddpm") == plain).all()
    assert not list(trained.rglob("*.png"))  # --out is where all of it went


def test_read_is_what_was_written(tmp_path):
    """Oracle: values of every precision that published weights come in, bit for bit."""
    state = {
        "a.weight": torch.randn(3, 2),
        "b": torch.randn(5).bfloat16(),
        "c": torch.randn(2).half(),
        "d": torch.tensor(7),
        "e": torch.randn(2, dtype=torch.float64),
    }
    save_file(state, tmp_path / "w.safetensors")
    torch.save(state, tmp_path / "w.pt")
    for name in ("w.safetensors", "w.pt"):
        found = read_state_dict(tmp_path / name)
        assert same(found, state) and all(found[key].dtype == state[key].dtype for key in state)
