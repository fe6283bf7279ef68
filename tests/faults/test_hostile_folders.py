"""Folders of encoders, exports and data that one was sent, given to every verb that takes one.

tests/runs/test_trust.py has the folders of runs, test_hostile_files.py single files, tests/encoders/test_hostile.py the
ways in which an encoder's folder can be spoiled.
"""

import io
import json
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dstrain import recipe, systems
from dstrain.recipe import Run
from dstrain.systems.dit import to_diffusers
from tests.support import checkpoints, first_stage, pictures, tokenizers, towers
from tests.support.audit import watched
from tests.support.hostile import _Evil, plant, plant_code
from tests.support.launch import ROOT, here
from tests.systems.phenaki.cases import TOKEN_CLIPS

DIT = [
    "model.hidden_size=32",
    "model.depth=1",
    "model.num_heads=2",
    "every.sample=0",
    "every.evaluate=0",
    "data.workers=0",
]
TRAIN = ["train.py", "folder=OUT/run", "--dry-run", *DIT]
LATENT = [
    *("data.path=DATA", "data.image_size=16", "data.channels=3", "model.num_classes=2"),
    *("model.first_stage.path=VAE", "model.first_stage.factor=4", "model.in_channels=3"),
]
PHENAKI = [
    "--recipe",
    str(ROOT / "tests/launch/tiny-phenaki.yaml"),
    "every.metrics=0",
    "every.sample=0",
    "samples.metrics=null",
    "data.path=builtin:moving-fashion",
    "data.held_out=0",
]
ENCODE = ["encode.py", "--out", "OUT/codes", "--data", "DATA", "--image-size", "16", "--batch", "4"]
MEASURE = ["evaluate.py", "--images", "DATA", "--against", "DATA", "--features"]
# What is typed, its exit code, and a word of the refusal. BERT, CLIP, VAE, DINO: encoders; EXPORT: of diffusers, with a
# pipeline.py; OURS: of a tokenizer; DATA, TARS, ZIP, HF: data.
VERBS = {
    "train by a first stage": (
        [
            *TRAIN,
            *LATENT,
        ],
        0,
        "",
    ),
    "train by a text encoder": (
        [*TRAIN[:3], *PHENAKI, "model.tokenizer.path=OURS", "model.text_encoder=BERT", "model.text_encodings_dim=12"],
        0,
        "",
    ),
    "train from an export": ([*TRAIN[:3], "--recipe", "YAML", "init_from=EXPORT"], 0, ""),
    "train from a tokenizer": ([*TRAIN[:3], "--recipe", "YAML", "init_from=OURS"], 2, "weights of "),
    "train on a tokenizer": ([*TRAIN[:3], *PHENAKI, "model.tokenizer.path=OURS"], 0, ""),
    "train on images": (
        [*TRAIN, "data.path=DATA", "data.image_size=16", "data.channels=1", "model.num_classes=2"],
        0,
        "",
    ),
    "train on tars": ([*TRAIN, "data.path=TARS", "data.image_size=16", "model.num_classes=1"], None, ""),
    "train on a zip": ([*TRAIN, "data.path=ZIP", "data.image_size=16", "model.num_classes=1"], None, ""),
    "train on what save_to_disk wrote": ([*TRAIN, "data.path=HF"], 2, ""),
    "encode by a first stage": ([*ENCODE, "--first-stage", "VAE"], 0, ""),
    "encode by a tokenizer": ([*ENCODE, "OURS"], None, ""),
    "encode by an export": ([*ENCODE, "EXPORT"], 2, ""),
    "encode pairs": (
        ["encode.py", "--out", "OUT/pairs", "--data", "CAPTIONED", "--image-encoder", "CLIP", "--text-encoder", "BERT"],
        0,
        "",
    ),
    "encode pairs with CLIP": (
        ["encode.py", "--out", "OUT/pairs", "--data", "CAPTIONED", "--image-encoder", "CLIP", "--text-encoder", "CLIP"],
        0,
        "",
    ),
    "evaluate with CLIP": ([*MEASURE, "clip:CLIP", "--metrics", "fd_clip"], 0, ""),
    "evaluate with DINOv2": ([*MEASURE, "dinov2:DINO", "--metrics", "fd_dinov2"], 0, ""),
    "generate for texts": (["generate.py", "RUN", "--num", "1", "--prompts", "TEXTS", "--text-encoder", "BERT"], 0, ""),
    "generate by a tokenizer": (
        ["generate.py", "RUN", "--num", "1", "--prompts", "TEXTS", "--text-encoder", "BERT", "--tokenizer", "OURS"],
        0,
        "",
    ),
    "plan": (
        [
            "plan.py",
            *DIT,
            *LATENT,
        ],
        0,
        "",
    ),
    "import an export": (["import.py", "EXPORT", "--recipe", "YAML", "--out", "OUT/imported"], 0, ""),
    "import an encoder": (["import.py", "BERT", "--recipe", "YAML", "--out", "OUT/imported"], 2, ""),
    "pack": (["pack.py", "DATA", "--out", "OUT/packed"], 0, ""),
    "pack tars": (["pack.py", "TARS", "--out", "OUT/packed"], None, ""),
    "index": (["index.py", "DATA"], None, ""),
    "convert": (["convert.py", "npz", "DATA/evil.npz", "--out", "OUT/converted"], 2, ""),
    "convert latents": (["convert.py", "latents", "DATA", "--out", "OUT/converted", "--first-stage", "VAE"], 2, ""),
}


def write_data(root: Path) -> None:
    """Folders with images, and with code, pickles and names that lead outside beside or within them."""
    pictures.folder(root / "data", 2, 6)
    captioned = pictures.folder(root / "captioned", 1, 6) / "c0"
    for picture in captioned.glob("*.png"):
        picture.with_suffix(".txt").write_text("a red cat on the house")
    for folder in (root / "data", root / "data" / "c0", root / "captioned", captioned):
        plant_code(folder)
    np.save(root / "data" / "evil.npy", np.array([_Evil()], dtype=object), allow_pickle=True)
    np.savez(root / "data" / "evil.npz", arr_0=np.array([_Evil()], dtype=object))
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16)).save(buffer, "PNG")
    names = ("a.png", "../../escaped.png", "/tmp/escaped-from-a-tar.png", "b.png", "evil.py", "b.pkl")
    contents = {name: buffer.getvalue() if name.endswith("png") else pickle.dumps(_Evil()) for name in names}
    (root / "tars").mkdir()
    with tarfile.open(root / "tars" / "0.tar", "w") as tar, zipfile.ZipFile(root / "images.zip", "w") as archive:
        for name, data in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
            archive.writestr(name, data)
        link = tarfile.TarInfo("c.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        tar.addfile(link)
    for folder in (root / "hf", root / "pairs"):
        folder.mkdir()
        plant_code(folder)
    (root / "hf" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../../evil.arrow"}]}))
    (root / "hf" / "dataset_info.json").write_text(json.dumps({"builder_name": "evil", "features": {"image": {}}}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The hostile folders, by the words above, and a run of one's own."""
    root = tmp_path_factory.mktemp("sent")
    (root / "out").mkdir()
    write_data(root)
    towers.sentences(root / "bert")
    towers.clip(root / "clip")
    first_stage.save(root / "vae", channels=3)
    from transformers import Dinov2Config, Dinov2Model

    Dinov2Model(Dinov2Config(hidden_size=12, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(root / "dino")
    tokenizers.save(root / "ours")
    for name in ("bert", "clip", "vae", "dino"):
        plant(root / name, "pickles")
        (root / name / "modules.json").unlink()
    yaml = recipe.load_recipe(ROOT / "tests/launch/tiny.yaml", ["model.time_freq=diffusers", "model.learn_sigma=false"])
    yaml = recipe.complete_model_section(yaml, systems.find_config_class("dit"))
    (root / "recipe.yaml").write_text(recipe.dump_run(yaml))
    system = systems.build("dit", yaml.model)
    to_diffusers.save_export(system, system.networks(), root / "export")
    plant_code(root / "export")
    plant(root / "export" / "transformer", "pickles")
    (root / "export" / "transformer" / "modules.json").unlink()
    index = json.loads((root / "export" / "model_index.json").read_text())
    (root / "export" / "model_index.json").write_text(json.dumps(index | {"_class_name": ["pipeline", "Evil"]}))
    plant_code(root / "ours")
    model = TOKEN_CLIPS | {"text_encodings_dim": 12, "max_text_len": 8, "text_encoder": "evil/base"}
    model |= {"tokenizer": {"path": str(root / "ours")}}
    run = Run.model_validate({"system": "phenaki", "model": model, "ema": {"decays": []}})
    torch.manual_seed(0)
    run_folder = checkpoints.write(
        tmp_path_factory.mktemp("own") / "run", run, systems.build("phenaki", model).networks()
    )
    (root / "texts.txt").write_text("a red cat\n")
    return root, run_folder


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_runs_what_a_folder_holds(folders, tmp_path, monkeypatch, capsys, verb):
    """Oracle: Python's audit events: no code of a folder, no pickle, no question, no connection, no file written into
    or beside the folders; the exit code.
    """
    (words, code, message), (sent, run) = VERBS[verb], folders
    places = {name.stem.upper(): name for name in sent.iterdir()} | {"RUN": run}
    places |= {
        "OUT": tmp_path / "out",
        "ZIP": sent / "images.zip",
        "YAML": sent / "recipe.yaml",
        "TEXTS": sent / "texts.txt",
    }
    filled = []
    for word in words:
        for place in sorted(places, key=len, reverse=True):
            word = word.replace(place, str(places[place]))
        filled.append(word)
    if words[0] == "generate.py":
        filled += ["--out", tmp_path / "out", "--steps", "1"]
    monkeypatch.chdir(sent / "data")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with watched(sent, sent / "out") as found:
        ended, stdout, stderr = here(filled[0], filled[1:], monkeypatch, capsys)
    assert found == [] and not list(sent.rglob("EXECUTED")), stdout + stderr
    assert not list(sent.parent.rglob("escaped*")) and not Path("/tmp/escaped-from-a-tar.png").exists()
    assert code in (None, ended) and ended in (0, 2) and message in stderr, stdout + stderr
    assert "Traceback" not in stderr
