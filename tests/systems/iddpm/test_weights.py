"""Fitting published weights: what loads unchanged, what is replaced, what is refused, what no file can tell."""

import json

import pytest
import torch
from safetensors.torch import save_file

from dstrain import systems
from dstrain.nn import fitting
from dstrain.runs.weights import read_state_dict
from dstrain.systems.iddpm import weights
from tests.support import golden
from tests.systems.iddpm.test_golden import section

KEYS = json.loads((golden.FOLDER / "iddpm_keys.json").read_text())
SMALL = {
    "image_size": 16,
    "in_channels": 3,
    "num_channels": 32,
    "num_res_blocks": 1,
    "channel_mult": [1, 2],
    "attention_resolutions": [8],
    "num_heads": 2,
    "learn_sigma": True,
}


def build(**changes):
    return systems.build("iddpm", SMALL | changes)


def state_of(system):
    torch.manual_seed(0)
    network = system.networks()["denoiser"]
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_()
    return network.state_dict()


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", KEYS)
def test_every_published_flag_set_loads(name):
    """Oracle: names and shapes of the published file: all fit, none is changed."""
    state = {key: torch.empty(shape, device="meta") for key, shape in KEYS[name]["keys"].items()}
    fitted, notes = systems.build("iddpm", section(KEYS[name]["flags"])).adapt_weights("denoiser", state)
    assert list(fitted) == list(state) and all(fitted[key] is state[key] for key in state)
    flags = KEYS[name]["flags"]
    for flag in ("num_heads", "dropout", "diffusion_steps", "noise_schedule", "rescale_timesteps"):
        assert f"{flag}={flags[flag]}" in notes[-1]


@pytest.mark.parametrize("changes", [{}, {"class_cond": True, "num_classes": 7}, {"small_size": 8}])
def test_round_trip(tmp_path, changes):
    """Oracle: the state dict that was written, loaded by a network of the same flags: the same output."""
    system = build(**changes)
    state = state_of(system)
    save_file(state, tmp_path / "w.safetensors")
    fitted, notes = system.adapt_weights("denoiser", read_state_dict(tmp_path / "w.safetensors"))
    network = system.networks()["denoiser"]
    network.load_state_dict(fitted)
    assert same(network.state_dict(), state) and len(notes) == 1


def test_order_of_names():
    """Oracle: the order of every published state dict."""
    for official in KEYS.values():
        assert sorted(official["keys"], key=weights._make_network_order_sort_key) == list(official["keys"])


@pytest.mark.parametrize("classes", [3, 20])
def test_other_classes(classes):
    """Oracle: all but the label table is the file's; fresh rows are normal(1), as torch makes them."""
    before, system = state_of(build(class_cond=True, num_classes=7)), build(class_cond=True, num_classes=classes)
    state, notes = system.adapt_weights("denoiser", before)
    table = state.pop("label_emb.weight")
    assert same(state, {name: value for name, value in before.items() if name != "label_emb.weight"})
    assert table.shape == (classes, 128) and float(table.std()) == pytest.approx(1, abs=0.1)
    assert len(notes) == 2 and f"7 rows in the file, {classes} in the network" in notes[0]


def test_a_null_label_is_added():
    """Oracle: the file's rows, and behind them their mean; the rows without the last; other numbers of rows are fresh.
    The notes say what the last row was taken for.
    """
    before = state_of(build(class_cond=True, num_classes=7))["label_emb.weight"]

    def guided(classes):
        return build(class_cond=True, num_classes=classes, class_dropout_prob=0.1)

    table, notes = fit_labels(guided(7), before)
    torch.testing.assert_close(table, torch.cat((before, before.mean(dim=0, keepdim=True))))
    assert len(notes) == 2 and "the 7 rows in the file are taken for the labels; the null row is their mean" in notes[0]
    again, notes = fit_labels(guided(7), table)
    assert again is table and len(notes) == 2
    assert notes[0].endswith("the last of the 8 rows in the file is taken for the null label")
    back, notes = fit_labels(build(class_cond=True, num_classes=7), table)
    assert torch.equal(back, before) and notes[0].endswith("taken for the null label, and left out")
    fewer, notes = fit_labels(guided(4), table)
    assert fewer.shape == (5, 128) and not torch.isin(table, fewer).any() and "replaced by fresh rows" in notes[0]


def fit_labels(system, table):
    """(the label table as the network takes it, notes) of a file whose table is `table`."""
    state, notes = system.adapt_weights("denoiser", state_of(system) | {"label_emb.weight": table})
    return state["label_emb.weight"], notes


@pytest.mark.parametrize(
    "file, network, words",
    [
        ({}, {"num_channels": 64}, r"time_embed.0.weight is \(128, 32\) in the file and \(256, 64\).*num_channels"),
        (
            {},
            {"class_cond": True, "num_classes": 9},
            r"label_emb.weight is absent in the file and \(9, 128\).*class_cond",
        ),
        (
            {"class_cond": True, "num_classes": 9},
            {},
            r"label_emb.weight is \(9, 128\) in the file and absent.*class_cond",
        ),
        (
            {},
            {"small_size": 8},
            r"input_blocks.0.0.weight is \(32, 3, 3, 3\) in the file and \(32, 6, 3, 3\).*small_size",
        ),
        ({}, {"in_channels": 1}, r"input_blocks.0.0.weight is \(32, 3, 3, 3\).*\(32, 1, 3, 3\).*in_channels"),
        ({}, {"learn_sigma": False}, r"out.2.weight is \(6, 32, 3, 3\) in the file and \(3, 32, 3, 3\).*learn_sigma"),
        (
            {},
            {"use_scale_shift_norm": False},
            r"input_blocks.1.0.emb_layers.1.weight is \(64, 128\).*use_scale_shift_norm",
        ),
        ({}, {"channel_mult": [1, 3]}, r"input_blocks.3.0.in_layers.2.weight is \(64, 32.*\(96, 32.*channel_mult"),
        ({}, {"channel_mult": [1, 2, 2]}, r"input_blocks.4.0.op.weight is absent in the file.*channel_mult"),
        ({"num_res_blocks": 2}, {}, r"input_blocks.2.0.in_layers.0.weight is \(32,\) in the file and absent.*res_bl"),
        ({}, {"num_res_blocks": 2}, r"input_blocks.2.0.in_layers.0.weight is absent in the file.*num_res_blocks"),
        ({}, {"attention_resolutions": [16, 8]}, r"input_blocks.1.1.norm.weight is absent.*attention_resolutions"),
        ({"attention_resolutions": [16, 8]}, {}, r"input_blocks.1.1.norm.weight is \(32,\) in the file and absent"),
    ],
)
def test_what_does_not_fit(file, network, words):
    """Oracle: the message names the difference nearest to the input, both shapes and the flags that decide it."""
    with pytest.raises(ValueError, match=words):
        build(**network).adapt_weights("denoiser", state_of(build(**file)))


def test_what_a_file_cannot_tell():
    """Oracle: flags whose change leaves names and shapes: each is in the note, as the recipe says it."""
    told = {
        "num_heads": 4,
        "num_heads_upsample": 1,
        "dropout": 0.3,
        "diffusion_steps": 4000,
        "noise_schedule": "cosine",
        "rescale_timesteps": False,
        "predict_xstart": True,
        "use_kl": True,
    }
    _, notes = build(**told).adapt_weights("denoiser", state_of(build()))
    for words in (
        "image_size=16",
        "num_heads=4",
        "num_heads_upsample=1",
        "dropout=0.3",
        "diffusion_steps=4000",
        "noise_schedule=cosine",
        "rescale_timesteps=False",
        "prediction=x_start",
        "loss=rescaled_kl",
    ):
        assert words in notes[0]
    assert "variance" not in notes[0]  # learn_sigma shows in the shapes
    _, notes = build(learn_sigma=False).adapt_weights("denoiser", state_of(build(learn_sigma=False)))
    assert "variance=fixed_large" in notes[0]


def test_an_order_may_begin_anywhere():
    """Oracle: the first of the names in the order given, and the first remedy whose pattern is found."""
    state, shapes = {"a": torch.ones(2), "b": torch.ones(3)}, {"a": (1,), "b": (1,)}
    remedies = (("b", "beta"), ("", "the rest"))
    with pytest.raises(ValueError, match=r"b is \(3,\) in the file and \(1,\) in the network; set beta to"):
        fitting.require_matching_shapes(state, shapes, ["b", "a"], remedies)
    with pytest.raises(ValueError, match="a is .*the rest"):
        fitting.require_matching_shapes(state, shapes, ["a", "b"], remedies)
