"""Runs with adapters, trained by the command: what every verb makes of them."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from dstrain import systems
from dstrain.commands import export
from dstrain.commands.options.export import ExportOptions
from dstrain.nn.measures import measure_relative_error
from dstrain.recipe import ConfigError
from dstrain.runs import trained
from dstrain.runs.weights import read_weights_adapted_to_system
from tests.support.launch import ROOT, launch

LORA = {"rank": 2, "alpha": 5.0}


@pytest.fixture
def train(tmp_path):
    """launch/train.py of tests/launch/tiny.yaml with adapters: exit code and output."""
    recipe = yaml.safe_load((ROOT / "tests/launch/tiny.yaml").read_text())
    torch.manual_seed(2)
    network = systems.build("dit", recipe["model"]).networks()["denoiser"]
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    save_file(network.state_dict(), tmp_path / "base.safetensors")

    def begin(*words, **sections):
        recipe["model"]["lora"] = LORA
        recipe.setdefault("init_from", str(tmp_path / "base.safetensors"))
        recipe.update(sections)
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        arguments = "--recipe", str(tmp_path / "recipe.yaml"), f"folder={tmp_path / 'run'}", *words
        done = launch("launch/train.py", *arguments, num=1, check=False)
        return done.returncode, done.stdout

    return begin


def test_exports(train, tmp_path):
    """Oracle: the trained network with its adapters: what is merged predicts the same within 1e-5; peft's files hold
    the adapters to the bit; a plain run begins by the merged weights.
    """
    code, output = train("steps=3")
    assert code == 0 and "16 tensors of adapters begin anew" in output, output
    run = tmp_path / "run"
    for format in ("peft", "safetensors"):
        export.export_run(ExportOptions(run, out=tmp_path / format, format=format))
    with pytest.raises(ConfigError, match="--format diffusers-lora: of models with texts alone"):
        export.export_run(ExportOptions(run, out=tmp_path / "out", format="diffusers-lora"))
    recipe = trained.read_recipe(run)
    system = systems.build(recipe.system, recipe.model)
    checkpoint = trained.find_checkpoint(run)
    kinds = trained.choose_raw_or_ema_by_part(system, checkpoint)
    network = trained.load_networks(system, checkpoint, kinds, torch.float32)["denoiser"]
    plain = systems.build(recipe.system, {name: value for name, value in recipe.model.items() if name != "lora"})
    ((values, _),) = read_weights_adapted_to_system(tmp_path / "safetensors", plain).values()
    merged = plain.networks()["denoiser"].eval()
    merged.load_state_dict(values)
    example = system.encode(system.synthetic(3))
    inputs = example["x_start"], torch.tensor([1, 20, 40]), example["label"]
    with torch.no_grad():
        assert measure_relative_error(merged(*inputs), network(*inputs)) < 1e-5
    adapters = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    state = network.state_dict()
    assert all(torch.equal(state[name.removeprefix("base_model.model.")], value) for name, value in adapters.items())
    assert sum(value.abs().sum() for name, value in adapters.items() if ".lora_B." in name) > 0
    described = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"]) == (2, 5.0)
    base = load_file(tmp_path / "base.safetensors")
    assert torch.equal(state["pos_embed"], base.pop("pos_embed"))  # a buffer; the weights are as the run computed
    assert all(torch.equal(state[name], value.bfloat16().float()) for name, value in base.items())


@pytest.mark.parametrize(
    "sections, message",
    [
        ({"init_from": None}, "model.lora adapts trained weights, and init_from names none: write init_from=FILE"),
        ({"save": {"format": "deepspeed"}}, "model.lora: no tool reads frozen weights"),
    ],
)
def test_refuses(train, sections, message):
    """Oracle: by hand: the key and the remedy, before anything starts."""
    code, output = train("--dry-run", **sections)
    assert code == 2 and message in output and "Traceback" not in output, output


def test_peft_is_of_adapters_alone(train, tmp_path):
    """Oracle: by hand: other weights have learned, too, and peft's files would lack them."""
    code, output = train("steps=1", "train_only=[final_layer.*]")
    assert code == 0, output
    with pytest.raises(ConfigError, match="take --format safetensors, which is merged"):
        export.export_run(ExportOptions(tmp_path / "run", out=tmp_path / "out", format="peft"))
