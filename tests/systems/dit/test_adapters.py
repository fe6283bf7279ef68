"""Adapters of SD3 and PixArt under the names of diffusers' transformers."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from diffusers import PixArtTransformer2DModel, SD3Transformer2DModel
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from dstrain import systems
from dstrain.commands import export
from dstrain.commands.export import _save_adapters_for_pipeline
from dstrain.commands.options.export import ExportOptions
from dstrain.nn.lora import ATTENTION, Lora, convert_adapters_to_peft
from dstrain.nn.measures import measure_relative_error
from dstrain.recipe import ConfigError
from dstrain.runs import trained
from dstrain.runs.weights import read_weights_adapted_to_system
from dstrain.systems.dit.to_diffusers import rename_adapters_to_diffusers, save_export
from tests.support.launch import ROOT, launch
from tests.systems.dit import test_pixart, test_sd3

# The first patterns are the default's; the second those of all layers that can have adapters.
TARGETS = [ATTENTION, ("*",)]


def build(name: str, folder: Path, targets: tuple[str, ...]) -> tuple[Any, nn.Module, nn.Module, Lora]:
    """A system without adapters, its network with random ones on the golden weights, diffusers' network of these."""
    maker = {"sd3": test_sd3, "pixart": test_pixart}[name]
    lora = Lora(rank=2, alpha=6.0, targets=targets)
    changes = {"block": test_sd3.DUAL, "depth": 3, "sines_within": [12, 4]} if name == "sd3" else {}
    plain, _ = maker.build_told(folder, **changes)
    adapted, _ = maker.build_told(folder, **changes, lora=lora.model_dump())
    network = adapted.networks()["denoiser"].eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_(0.2 * torch.randn(weight.shape, generator=draw))
    theirs = write_base(name, plain, network, folder)
    return plain, network, theirs, lora


def write_base(name: str, system: Any, network: nn.Module, folder: Path) -> nn.Module:
    """diffusers' network with the weights beside the adapters, by the export that is tested for itself."""
    base = system.networks()["denoiser"]
    base.load_state_dict({key: network.state_dict()[key] for key in base.state_dict()})
    save_export(system, {"denoiser": base}, folder / "out")
    kind = {"sd3": SD3Transformer2DModel, "pixart": PixArtTransformer2DModel}[name]
    return kind.from_pretrained(folder / "out" / "transformer").eval()


@torch.no_grad()
def predict_both(name: str, system: Any, network: nn.Module, theirs: nn.Module) -> tuple[Tensor, Tensor]:
    """What diffusers' network and ours predict."""
    example = system.encode(system.synthetic(2))
    told, t = system._make_condition_arguments(example), torch.tensor([3.0, 40.0])
    x = torch.randn(2, *system.shape, generator=torch.Generator().manual_seed(2))
    if name == "sd3":
        text, pooled = told["text"][:, 1:], told["text"][:, 0, :10]
        found = theirs(x, encoder_hidden_states=text, pooled_projections=pooled, timestep=t).sample
    else:
        found = theirs(x, told["text"], timestep=t, encoder_attention_mask=told["mask"]).sample
    return found, network(x, t, **told)


@pytest.mark.parametrize("targets", TARGETS, ids=["usual", "all"])
@pytest.mark.parametrize("name", ["sd3", "pixart"])
def test_peft_around_diffusers_network(name: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    """Oracle: the network with its adapters, within 1e-5: peft's files around diffusers' network; and without them it
    predicts something else. SD3's scale and shift of the last layers are swapped in diffusers, and so are the rows.
    """
    from peft import PeftModel

    system, network, theirs, lora = build(name, tmp_path, targets)
    adapters, into_pipeline = rename_adapters_to_diffusers(system, network.state_dict())
    assert into_pipeline == (name == "sd3")
    found, expected = predict_both(name, system, network, theirs)
    assert measure_relative_error(found, expected) > 1e-2
    named, described = convert_adapters_to_peft(adapters, lora, "weights")
    save_file(named, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(described))
    adapted = PeftModel.from_pretrained(theirs, tmp_path).eval()
    found, expected = predict_both(name, system, network, adapted)
    assert measure_relative_error(found, expected) < 1e-5
    assert len([key for key in adapted.state_dict() if ".lora_" in key]) == len(named)


def test_exported_run(tmp_path: Path) -> None:
    """Oracle: the trained network, within 1e-5: what the command exports of a run on captioned pictures, loaded by
    StableDiffusion3Pipeline.load_lora_weights and by peft around the network of the weights that it began from.
    """
    from diffusers import StableDiffusion3Pipeline
    from peft import PeftModel

    plain, _ = test_sd3.build_told(tmp_path)
    values, _ = read_weights_adapted_to_system(test_sd3.write(tmp_path / "weights", "folder"), plain)["denoiser"]
    base = plain.networks()["denoiser"]
    base.load_state_dict(values)
    save_export(plain, {"denoiser": base}, tmp_path / "out")
    save_captioned_pictures(tmp_path / "pictures")
    recipe = yaml.safe_load((ROOT / "tests/launch/tiny.yaml").read_text())
    del recipe["samples"]
    model = plain.config.model_dump(mode="json", exclude_unset=True) | {"lora": {"rank": 2, "alpha": 6.0}}
    recipe |= {"model": model, "steps": 3, "init_from": str(tmp_path / "weights"), "optimizer": {"lr": 0.1}}
    recipe |= {"data": {"path": str(tmp_path / "pictures"), "image_size": 16, "flip": False, "workers": 0}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    run = tmp_path / "run"
    words = (
        "--recipe",
        str(tmp_path / "recipe.yaml"),
        "--ds_config",
        "ds_configs/zero2_fp32.json",
    )  # bf16 rounds weights
    launch("launch/train.py", *words, f"folder={run}", "every.sample=0", num=1)
    export.export_run(ExportOptions(run, out=tmp_path / "adapters", format="diffusers-lora"))
    recipe = trained.read_recipe(run)
    system = systems.build(recipe.system, recipe.model)
    checkpoint = trained.find_checkpoint(run)
    network = trained.load_networks(
        system, checkpoint, trained.choose_raw_or_ema_by_part(system, checkpoint), torch.float32
    )
    pipeline = StableDiffusion3Pipeline.from_pretrained(tmp_path / "out")
    theirs = PeftModel.from_pretrained(deepcopy(pipeline.transformer), tmp_path / "adapters").eval()
    found, expected = predict_both("sd3", system, network["denoiser"], pipeline.transformer.eval())
    assert measure_relative_error(found, expected) > 1e-3
    pipeline.load_lora_weights(tmp_path / "adapters")
    for adapted in (theirs, pipeline.transformer.eval()):
        found, expected = predict_both("sd3", system, network["denoiser"], adapted)
        assert measure_relative_error(found, expected) < 1e-5


def save_captioned_pictures(folder: Path) -> None:
    """Eight random pictures of 16 pixels with a caption each beside them."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    for number in range(8):
        Image.fromarray(draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture {number}")


@pytest.mark.parametrize("targets", TARGETS, ids=["usual", "all"])
def test_pipeline_loads_them(targets: tuple[str, ...], tmp_path: Path) -> None:
    """Oracle: the network with its adapters, within 1e-5: after StableDiffusion3Pipeline.load_lora_weights."""
    from diffusers import StableDiffusion3Pipeline

    system, network, _, lora = build("sd3", tmp_path, targets)
    adapters, _ = rename_adapters_to_diffusers(system, network.state_dict())
    _, described = convert_adapters_to_peft(adapters, lora, "weights")
    (tmp_path / "adapters").mkdir()
    _save_adapters_for_pipeline(adapters, lora, described, tmp_path / "adapters" / "pytorch_lora_weights.safetensors")
    pipeline = StableDiffusion3Pipeline.from_pretrained(tmp_path / "out")
    pipeline.load_lora_weights(tmp_path / "adapters")
    found, expected = predict_both("sd3", system, network, pipeline.transformer.eval())
    assert measure_relative_error(found, expected) < 1e-5


def test_layers_without_a_place(tmp_path: Path) -> None:
    """Oracle: the message names the adapter's layer, which diffusers' network has not."""
    system, network, _, _ = build("pixart", tmp_path, ATTENTION)
    state = network.state_dict()
    state |= {f"projectors.0.lora_{name}.weight": torch.zeros(2, 2) for name in "AB"}
    with pytest.raises(ConfigError, match="projectors.0 has no place in the layout pixart; take --format peft"):
        rename_adapters_to_diffusers(system, state)


def test_interpolated_positions(tmp_path: Path) -> None:
    """Oracle: diffusers' network computes its own positions, so that adapters of others are refused."""
    system, network, _, _ = build("pixart", tmp_path, ATTENTION)
    state = network.state_dict()
    with pytest.raises(ConfigError, match="pos_embed: these positions were interpolated"):
        rename_adapters_to_diffusers(system, state | {"pos_embed": state["pos_embed"] + 0.1})
