"""Reading and fitting published weights."""

import argparse
import os
import re

import pytest
import torch
from safetensors.torch import save_file

from dstrain import systems
from dstrain.runs.weights import read_state_dict
from dstrain.systems.dit import weights
from dstrain.systems.dit.network import DiT
from tests.systems.dit.cases import TINY

SMALL = {
    "input_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "hidden_size": 32,
    "depth": 2,
    "num_heads": 2,
    "num_classes": 10,
}


def small(**changes):
    torch.manual_seed(0)
    network = DiT(**SMALL | changes)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_()
    return network


class Malice:
    """An object whose unpickling would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", ["safetensors", "folder", "bare", "compiled", "train"])
def test_files(tmp_path, kind):
    """Oracle: the state dict that was written; of a train.py file its EMA."""
    state = small().state_dict()
    if kind == "safetensors":
        path = tmp_path / "w.safetensors"
        save_file(state, path)
    elif kind == "folder":
        path = tmp_path
        names = sorted(state)
        for part in range(2):
            save_file({name: state[name] for name in names[part::2]}, tmp_path / f"w-{part}.safetensors")
    else:
        path = tmp_path / "w.pt"
        wrapped = {f"module._orig_mod.{name}": value for name, value in state.items()}
        torch.save(
            {
                "bare": state,
                "compiled": wrapped,
                "train": {
                    "model": {"other": torch.ones(1)},
                    "ema": state,
                    "opt": {"state": {}, "lr": 1e-4},
                    "args": argparse.Namespace(model="DiT-XL/2", image_size=256),
                },
            }[kind],
            path,
        )
    found = read_state_dict(path)
    assert same(found, state)
    fitted, notes = weights.adapt_weights(found, small())
    assert same(fitted, state) and notes == []
    small().load_state_dict(fitted)


def test_malicious_pickle_is_refused(tmp_path):
    """Oracle: the file that the pickle would create does not exist."""
    for content in (Malice(tmp_path / "harm"), {"ema": {}, "args": Malice(tmp_path / "harm")}):
        torch.save(content, tmp_path / "w.pt")
        with pytest.raises(ValueError, match="was not loaded"):
            read_state_dict(tmp_path / "w.pt")
    assert not (tmp_path / "harm").exists()


def test_unreadable_files(tmp_path):
    """Oracle: a ValueError that names the path, for every way to be no state dict."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "noise.pt").write_bytes(b"no pickle")
    (tmp_path / "noise.safetensors").write_bytes(b"no header")
    torch.save({"step": 3}, tmp_path / "other.pt")
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    for name in ("absent.pt", "empty", "noise.pt", "noise.safetensors", "other.pt", "list.pt"):
        with pytest.raises(ValueError, match=re.escape(name)):
            read_state_dict(tmp_path / name)


def test_other_resolution():
    """Oracle: the network's own positions, which a smooth interpolation comes near within the trained range."""
    state, notes = weights.adapt_weights(small().state_dict(), small(input_size=16))
    assert state["pos_embed"].shape == (1, 64, 32) and notes == ["pos_embed: interpolated from 4 x 4 to 8 x 8 patches"]
    small(input_size=16).load_state_dict(state)
    # Patch (i, j) of 8 x 8 lies at (i - 0.5) / 2 of 4 x 4; the middle columns are away from the border.
    column = state["pos_embed"].view(8, 8, 32)[4, 2:6, 0]
    torch.testing.assert_close(column, torch.sin((torch.arange(2, 6) - 0.5) / 2), rtol=0, atol=0.06)


@pytest.mark.parametrize("classes", [3, 20])
def test_other_classes(classes):
    """Oracle: the row of "no label" stays, all else but the table is untouched."""
    before, network = small().state_dict(), small(num_classes=classes)
    state, notes = weights.adapt_weights(before, network)
    network.load_state_dict(state)
    table = state.pop("y_embedder.embedding_table.weight")
    assert torch.equal(table[-1], before.pop("y_embedder.embedding_table.weight")[-1])
    assert 0.01 < float(table[:-1].std()) < 0.03 and len(table) == classes + 1
    assert same(state, before) and len(notes) == 1 and "11 rows" in notes[0]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"in_channels": 3}, r"final_layer.linear.bias is \(32,\) in the file and \(24,\).*in_channels"),
        ({"learn_sigma": False}, r"final_layer.linear.bias is \(32,\) in the file and \(16,\).*learn_sigma"),
        ({"depth": 3}, r"blocks.2.adaLN_modulation.1.bias is absent in the file and \(192,\).*depth"),
        ({"depth": 1}, r"blocks.1.adaLN_modulation.1.bias is \(192,\) in the file and absent.*depth"),
        ({"mlp_ratio": 2.0}, r"blocks.0.mlp.fc1.bias is \(128,\) in the file and \(64,\).*mlp_ratio"),
        ({"hidden_size": 64}, r"hidden_size"),
    ],
)
def test_what_does_not_fit(changes, words):
    """Oracle: the message names the first differing key, both shapes and the field to change."""
    with torch.device("meta"):
        network = DiT(**SMALL | changes)
    with pytest.raises(ValueError, match=words):
        weights.adapt_weights(small().state_dict(), network)


STRAIGHT = {"path": "linear", "prediction": "velocity", "t_min": 0.0, "time_scale": 1000.0}


@pytest.mark.parametrize(
    "theirs, changes, expected",
    [
        (None, {}, None),
        (STRAIGHT, {"objective": "flow"}, None),
        (STRAIGHT, {}, "model.objective=flow, and their predictions are wrong for model.objective=diffusion"),
        (None, {"objective": "flow"}, "model.objective=diffusion, and"),
        (
            STRAIGHT,
            {"objective": "flow", "flow": {"prediction": "x", "t_min": 0.05}},
            "write model.flow.prediction=velocity",
        ),
        (STRAIGHT | {"path": "gvp"}, {"objective": "flow"}, "write model.flow.path=gvp"),
        (STRAIGHT | {"time_scale": 1.0}, {"objective": "flow"}, "write model.flow.time_scale=1.0"),
    ],
)
def test_weights_of_another_target(theirs, changes, expected):
    """Oracle: by hand: a note says what an export's weights were trained to predict, where that is another thing."""
    system = systems.build("dit", TINY | changes)
    described = {"_class_name": "ClassTransformer", "network": system.config.make_network_arguments(), "flow": theirs}
    state, notes = system.from_diffusers({"a": torch.ones(1)}, described)
    assert list(state) == ["a"] and len(notes) == (expected is not None)
    assert expected is None or expected in notes[0]
