"""Adapters: what they compute, their names and shapes, what is merged, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dstrain import systems
from dstrain.nn.lora import ATTENTION, Lora, add_adapters, convert_adapters_to_peft, merge_adapters_into_weights
from dstrain.nn.measures import measure_relative_error
from dstrain.recipe import ConfigError
from dstrain.runs.weights import read_weights_adapted_to_system
from tests.systems.dit.cases import TINY
from tests.systems.iddpm.cases import UNET

CASES = {
    "dit": ("dit", TINY, ATTENTION),
    "dit as before": ("dit", TINY, None),
    "dit everywhere": ("dit", TINY, ["*"]),
    "linear layers": ("dit", TINY, ["blocks.*", "t_embedder.*", "final_layer.*"]),
    "unet": ("iddpm", UNET, ATTENTION),
    "unet as before": ("iddpm", UNET, None),
    "unet everywhere": ("iddpm", UNET, ["*"]),
}


def trained(case):
    """A system with adapters, its network with random weights everywhere, its section, and a batch's prediction."""
    name, model, targets = CASES[case]
    lora = {"rank": 3, "alpha": 7.5, "targets": targets}
    system = systems.build(name, model | {"lora": lora})
    torch.manual_seed(0)
    network = system.networks()["denoiser"].eval()
    for weight in network.parameters():
        nn.init.normal_(weight, std=0.1)
    return system, network, Lora(**lora)


def test_usual_layers():
    """Oracle: by hand: the layers of the attention and of the blocks' MLPs, and no others. null, which runs that were
    begun before have, takes the MLP of the timesteps, too, whose adapters their checkpoints hold.
    """

    def adapted(**lora):
        network = systems.build("dit", TINY | {"lora": {"rank": 2, **lora}}).networks()["denoiser"]
        return {name.partition(".lora_A.")[0] for name in network.state_dict() if ".lora_A." in name}

    of_blocks = {f"blocks.{i}.{name}" for i in (0, 1) for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
    assert adapted() == of_blocks
    assert adapted(targets=None) == of_blocks | {"t_embedder.mlp.0", "t_embedder.mlp.2"}


@torch.no_grad()
def predict(network, system):
    example = system.encode(system.synthetic(3))
    x, t = example["x_start"], torch.tensor([1, 20, 40])
    return network(x, t, example["label"]) if "label" in example else network(x, t)


@pytest.mark.parametrize("case", CASES)
def test_merged_is_unmerged(case):
    """Oracle: the network with its adapters, within 1e-5; without them it computes something else. The names of the
    merged state are those of the network without adapters.
    """
    system, network, lora = trained(case)
    name, model, _ = CASES[case]
    plain = systems.build(name, model).networks()["denoiser"].eval()
    merged = merge_adapters_into_weights(network.state_dict(), lora)
    plain.load_state_dict(merged)
    expected = predict(network, system)
    assert measure_relative_error(predict(plain, system), expected) < 1e-5
    plain.load_state_dict({name: network.state_dict()[name] for name in plain.state_dict()})
    assert measure_relative_error(predict(plain, system), expected) > 1e-2


@pytest.mark.parametrize("case", ["dit", "linear layers", "dit everywhere", "unet", "unet everywhere"])
def test_peft_computes_the_same(case, tmp_path):
    """Oracle: peft, from the folder, around a network without adapters."""
    from peft import PeftModel

    system, network, lora = trained(case)
    name, model, _ = CASES[case]
    plain = systems.build(name, model).networks()["denoiser"].eval()
    plain.load_state_dict({name: network.state_dict()[name] for name in plain.state_dict()})
    adapters, described = convert_adapters_to_peft(network.state_dict(), lora, "weights.pt")
    save_file(adapters, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(described))
    expected = predict(network, system)
    theirs = PeftModel.from_pretrained(plain, tmp_path).eval()
    assert measure_relative_error(predict(theirs, system), expected) < 1e-5
    assert {name for name in theirs.state_dict() if ".lora_" in name} == {
        name.replace(".weight", ".default.weight") for name in adapters
    }


def test_names_and_shapes_of_a_unet():
    """Oracle: peft's layers around torch's own convolutions of the same sizes, of one and of two dimensions."""
    from peft import LoraConfig, get_peft_model

    _, network, lora = trained("unet everywhere")
    layers = {
        name.replace(".", "_"): nn.Conv2d(*sizes)
        for name, module in network.named_modules()
        if hasattr(module, "lora_A") and isinstance(module, nn.Conv2d)
        for sizes in [(module.in_channels, module.out_channels, module.kernel_size, module.stride, module.padding)]
    }
    flat = {
        name.replace(".", "_"): nn.Conv1d(module.in_channels, module.out_channels, 1)
        for name, module in network.named_modules()
        if hasattr(module, "lora_A") and isinstance(module, nn.Conv1d)
    }
    plain = nn.ModuleDict(layers | flat)
    theirs = get_peft_model(plain, LoraConfig(r=lora.rank, target_modules=list(layers | flat)))
    shapes = {name: tuple(value.shape) for name, value in theirs.state_dict().items() if ".lora_" in name}
    own = {name: tuple(value.shape) for name, value in network.state_dict().items() if ".lora_" in name}
    for name, shape in own.items():
        layer, _, rest = name.partition(".lora_")
        key = f"base_model.model.{layer.replace('.', '_')}.lora_{rest.replace('.', '.default.')}"
        if key in shapes:
            assert shapes[key] == shape
    assert layers and flat and len(shapes) == 2 * len(plain)


@pytest.mark.parametrize("name, model", [("dit", TINY), ("iddpm", UNET)])
def test_begins_as_the_network_was(name, model, tmp_path):
    """Oracle: the network whose file init_from names: the same weights, the same prediction to the bit, and the
    adapters alone learn.
    """
    plain, system = systems.build(name, model), systems.build(name, model | {"lora": {"rank": 2}})
    torch.manual_seed(1)
    base, network = (each.networks()["denoiser"].eval() for each in (plain, system))
    for weight in base.parameters():
        nn.init.normal_(weight, std=0.1)
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    ((values, notes),) = read_weights_adapted_to_system(tmp_path / "base.safetensors", system).values()
    assert network.load_state_dict(values, strict=False).missing_keys == [
        weight for weight in network.state_dict() if ".lora_" in weight
    ]
    assert torch.equal(predict(network, system), predict(base, plain))
    assert all(weight.requires_grad == (".lora_" in name) for name, weight in network.named_parameters())
    assert any("tensors of adapters begin anew" in note for note in notes)


def test_other_adapters_are_refused(tmp_path):
    """Oracle: by hand: another rank, and a network without adapters: the name and the remedy. The same ones load."""
    systems_of = {rank: systems.build("dit", TINY | {"lora": {"rank": rank}}) for rank in (2, 3)}
    state = systems_of[2].networks()["denoiser"].state_dict()
    save_file({name: value.clone() for name, value in state.items()}, tmp_path / "file.safetensors")
    for system in (systems_of[3], systems.build("dit", TINY)):
        with pytest.raises(ConfigError, match="other adapters than the network, such as blocks.0.attn.proj.lora_A"):
            read_weights_adapted_to_system(tmp_path / "file.safetensors", system)
    ((values, _),) = read_weights_adapted_to_system(tmp_path / "file.safetensors", systems_of[2]).values()
    assert values.keys() == state.keys()


@pytest.mark.parametrize(
    "lora, message",
    [
        ({"rank": 0}, "model.lora.rank"),
        ({"alpha": 0}, "model.lora.alpha"),
        ({"dropout": 1}, "model.lora.dropout"),
        ({"targets": ["blocks.*.norm1"]}, "model.lora.targets: blocks.*.norm1 fits no linear layer or convolution"),
    ],
)
def test_refuses(lora, message):
    """Oracle: by hand: the key."""
    with pytest.raises(ConfigError, match=message):
        systems.build("dit", TINY | {"lora": lora}).networks()


def test_refuses_a_network_without_such_layers():
    """Oracle: by hand: the remedy."""
    with pytest.raises(ConfigError, match="no attention: write model.lora.targets"):
        add_adapters(nn.Sequential(nn.Conv2d(1, 1, 1)), Lora(), ("*.qkv",))
