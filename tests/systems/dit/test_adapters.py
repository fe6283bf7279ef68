"""Adapters of SD3 and PixArt under the names of diffusers' transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import PixArtTransformer2DModel, SD3Transformer2DModel
from safetensors.torch import save_file
from torch import Tensor, nn

from dstrain.commands.export import _save_for_pipeline
from dstrain.nn.lora import ATTENTION, Lora, describe_for_peft
from dstrain.nn.measures import measure_relative_error
from dstrain.systems.dit.to_diffusers import rename_adapters
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
    from dstrain.systems.dit.to_diffusers import save_export

    base = system.networks()["denoiser"]
    base.load_state_dict({key: network.state_dict()[key] for key in base.state_dict()})
    save_export(system, {"denoiser": base}, folder / "out")
    kind = {"sd3": SD3Transformer2DModel, "pixart": PixArtTransformer2DModel}[name]
    return kind.from_pretrained(folder / "out" / "transformer").eval()


@torch.no_grad()
def predict_both(name: str, system: Any, network: nn.Module, theirs: nn.Module) -> tuple[Tensor, Tensor]:
    """What diffusers' network and ours predict."""
    example = system.encode(system.synthetic(2))
    told, t = system._read_conditions(example), torch.tensor([3.0, 40.0])
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
    adapters, into_pipeline = rename_adapters(system, network.state_dict())
    assert into_pipeline == (name == "sd3")
    found, expected = predict_both(name, system, network, theirs)
    assert measure_relative_error(found, expected) > 1e-2
    named, described = describe_for_peft(adapters, lora, "weights")
    save_file(named, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(described))
    adapted = PeftModel.from_pretrained(theirs, tmp_path).eval()
    found, expected = predict_both(name, system, network, adapted)
    assert measure_relative_error(found, expected) < 1e-5
    assert len([key for key in adapted.state_dict() if ".lora_" in key]) == len(named)


@pytest.mark.parametrize("targets", TARGETS, ids=["usual", "all"])
def test_pipeline_loads_them(targets: tuple[str, ...], tmp_path: Path) -> None:
    """Oracle: the network with its adapters, within 1e-5: after StableDiffusion3Pipeline.load_lora_weights."""
    from diffusers import StableDiffusion3Pipeline

    system, network, _, lora = build("sd3", tmp_path, targets)
    adapters, _ = rename_adapters(system, network.state_dict())
    _, described = describe_for_peft(adapters, lora, "weights")
    (tmp_path / "adapters").mkdir()
    _save_for_pipeline(adapters, described, tmp_path / "adapters" / "pytorch_lora_weights.safetensors")
    pipeline = StableDiffusion3Pipeline.from_pretrained(tmp_path / "out")
    pipeline.load_lora_weights(tmp_path / "adapters")
    found, expected = predict_both("sd3", system, network, pipeline.transformer.eval())
    assert measure_relative_error(found, expected) < 1e-5
