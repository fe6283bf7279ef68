"""Folders of encoders that were made to run code, given to all that loads them."""

from pathlib import Path

import pytest
import torch
from transformers import Dinov2Config, Dinov2Model, dynamic_module_utils

from dstrain.encoders.autoencoder import Autoencoder
from dstrain.encoders.image import ImageEncoder, VisionTower
from dstrain.encoders.text import TextEncoder
from dstrain.recipe import ConfigError
from tests.support import first_stage, towers
from tests.support.audit import watched
from tests.support.hostile import WAYS, plant


def make_dinov2(folder: Path) -> None:
    Dinov2Model(Dinov2Config(hidden_size=12, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(folder)


LOADERS = {
    "text of CLIP": (towers.clip, TextEncoder),
    "text of BERT": (towers.sentences, TextEncoder),
    "images of CLIP": (towers.clip, ImageEncoder),
    "dinov2": (make_dinov2, lambda path: VisionTower(Path(path), "dinov2")),
    "autoencoder": (first_stage.save, Autoencoder),
}
# Ways in which nothing is left that can be read. Autoencoders of diffusers know neither kinds nor kernels.
REFUSED = {"pickles alone", "adapter", "unknown kind", "kernel", "quantized", "cut", "half", "other sizes", "no object"}
_OF_DIFFUSERS = {"unknown kind", "kernel"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loader", LOADERS)
def test_nothing_of_a_folder_runs(tmp_path, monkeypatch, loader, way):
    """Oracle: Python's audit events: no code of the folder, no pickle, no question, no connection, no file written; the
    encoder is that of the untouched folder, or one error names its key.
    """
    make, load = LOADERS[loader]
    folder = tmp_path / "encoder"
    make(folder)
    torch.manual_seed(0)
    expected = load(str(folder)).state_dict()
    plant(folder, way)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    monkeypatch.setattr(dynamic_module_utils, "TIME_OUT_REMOTE_CODE", 15)
    monkeypatch.chdir(folder)
    error = ""
    with watched(tmp_path, tmp_path / "out") as found:
        try:
            state = load(str(folder)).state_dict()
        except ConfigError as raised:
            error = str(raised)
    assert found == [] and not list(tmp_path.rglob("EXECUTED"))
    if way in REFUSED - (_OF_DIFFUSERS if loader == "autoencoder" else set()):
        assert error.startswith(
            ("model.text_encoder: ", "image_encoder: ", "model.first_stage.path: ", "--features")
        ), error
        assert "trust_remote_code" not in error and "\n" not in error
    elif not error:
        assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)
    else:
        assert way == "tokenizer's class" or "modules.json" in error, error
