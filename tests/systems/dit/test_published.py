"""Networks of other projects as choices of one trunk. Oracle: outputs of the originals, run live (tests/golden/dit)."""

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dstrain.commands.import_weights import import_weights
from dstrain.nn.layers import compute_timestep_features
from dstrain.nn.positions import make_rotary_embedding, make_sincos_positions
from dstrain.recipe import ConfigError, Run
from dstrain.runs.weights import read_weights_adapted_to_system
from dstrain.systems.base import Request
from dstrain.systems.dit.blocks import Block, BlockInputs, FinalLayer, JointBlock
from dstrain.systems.dit.config import Config
from dstrain.systems.dit.layouts import (
    LAYOUTS,
    recognise_layout,
    reverse_time_in_weights,
    translate_weights_from_layout,
)
from dstrain.systems.dit.network import DiT
from dstrain.systems.dit.system import DiTSystem
from dstrain.systems.dit.trunk import Trunk

GOLDEN = Path(__file__).parents[2] / "golden" / "dit"
MODERN = {"norm": "rms", "mlp": "swiglu"}
# File -> layout, and the arguments that its config does not name.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sit_network": ("sit", {}),
    "repa": ("repa", {"learn_sigma": False}),
    "lightningdit_network": ("lightningdit", {"block": MODERN, "rope": True, "learn_sigma": False}),
    "jit": ("jit", {"block": MODERN | {"qk_norm": "rms"}, "rope": True, "learn_sigma": False, "class_dropout_prob": 1}),
    "rae_ddt": ("rae", {"block": MODERN, "rope": True, "learn_sigma": False, "time_freq": "fourier"}),
    "raev2_label": ("raev2", {}),
    "raev2_text": ("raev2", {"num_classes": 0}),
}


def read(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Returns a golden file's weights, its inputs and outputs, and its config."""
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}
        config = json.loads(file.metadata()["config"])
    state = {key.removeprefix("state/"): value for key, value in tensors.items() if key.startswith("state/")}
    return state, {key: value for key, value in tensors.items() if not key.startswith("state/")}, config


def arguments(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of DiT for a golden file's config."""
    fields = ("input_size", "patch_size", "in_channels", "hidden_size", "depth", "num_heads", "mlp_ratio")
    plain = {field: config[field] for field in (*fields, "class_dropout_prob", "num_classes") if field in config}
    plain |= CASES[name][1]
    if name == "jit":
        plain["patch_bottleneck"] = config["bottleneck_dim"]
        plain["tokens"] = {"label": config["in_context_len"], "joins": config["in_context_start"]}
    if name == "rae_ddt":
        (plain["hidden_size"], width), (plain["depth"], depth), (plain["num_heads"], heads) = (
            config[field] for field in ("hidden_size", "depth", "num_heads")
        )
        plain["wide"] = {"hidden_size": width, "depth": depth, "num_heads": heads}
    if name == "repa":
        plain["align"] = {
            "depth": config["encoder_depth"],
            "widths": config["z_dims"],
            "hidden": config["projector_dim"],
        }
    if name.startswith("raev2"):
        plain |= {"block": MODERN | {"qk_norm": "rms", "modulation": "none"}, "rope": True, "sines": False}
        plain |= {"learn_sigma": False, "time_freq": "fourier"}
        plain["tokens"] = {"time": config["cond_arch"]["num_t_tokens"]}
        if config.get("condition_type") == "text":
            plain["text"] = {"encodings_dim": config["context_dim"]}
            plain["align"] = {"depth": config["repa_layer_depth"], "widths": [config["z_dim"]]}
        else:
            plain["tokens"]["label"] = config["cond_arch"]["num_c_tokens"]
            plain["base_depth"] = config["base_model_depth"]
    return plain


@pytest.mark.parametrize("name", CASES)
def test_golden_networks(name: str) -> None:
    """Oracle: the original's output, 1e-5; every weight of its file has a place, and none of ours is without."""
    state, tensors, config = read(name)
    layout, network = CASES[name][0], DiT(**arguments(name, config))
    assert layout == "sit" or recognise_layout(state) == layout
    heads = [network.head_dim, network.final_layer.head_dim] if network.wide else [network.head_dim]
    translated, _ = translate_weights_from_layout(state, layout, len(network.blocks), network.grid, heads)
    if "pos_embed" in translated:
        assert torch.allclose(translated["pos_embed"], network.pos_embed, atol=1e-6)
    network.load_state_dict(translated, strict="pos_embed" not in network.state_dict() or "pos_embed" in translated)
    x, t = tensors["in/x"], tensors["in/t"]
    if name == "jit":
        t_ = t.view(-1, 1, 1, 1)
        x = t_ * x + (1 - t_) * config["noise_scale"] * tensors["in/noise"]
    if LAYOUTS[layout].from_noise:
        t = 1 - t
    found = network(x, t, tensors.get("in/y"), text=tensors.get("in/text"), mask=tensors.get("in/mask"), extras=True)
    sign = -1 if LAYOUTS[layout].from_noise and not LAYOUTS[layout].predicts_x else 1
    expected = tensors.get("out/forward", tensors.get("out/x_pred"))
    out = sign * found["out"][:, : expected.shape[1]]  # SiT leaves the second half of its channels untrained
    assert torch.allclose(out, expected, atol=1e-5)
    if "out/base" in tensors:
        assert torch.allclose(found["base"], tensors["out/base"], atol=1e-5)
    for key in ("out/projected0", "out/projected"):
        if key in tensors:
            assert torch.allclose(found["projected"][0], tensors[key], atol=1e-5)


def chain(state: dict[str, Tensor], name: str, x: Tensor, act: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    """Two linear layers of a file, NAME.linear_1 and NAME.linear_2."""
    first, last = (linear(state, f"{name}.linear_{number}") for number in (1, 2))
    return last(act(first(x)))


def linear(state: dict[str, Tensor], name: str) -> Callable[[Tensor], Tensor]:
    return partial(F.linear, weight=state[f"{name}.weight"], bias=state[f"{name}.bias"])


def load(module: nn.Module, state: dict[str, Tensor], prefix: str, renamed: dict[str, str]) -> None:
    """Loads the weights of a file below `prefix`, whose names `renamed` gives; a, b, c lie in one of ours."""
    ours = {}
    for name, others in renamed.items():
        for kind in ("weight", "bias", ""):
            parts = [f"{prefix}{other}.{kind}".rstrip(".") for other in others.split(", ")]
            if parts[0] in state:
                ours[f"{name}.{kind}".rstrip(".")] = torch.cat(
                    [state[part].reshape(-1, *state[part].shape[1:]) for part in parts]
                )
    module.load_state_dict(ours)


CROSS = {
    "attn.qkv": "attn1.to_q, attn1.to_k, attn1.to_v",
    "attn.q_norm": "attn1.norm_q",
    "attn.k_norm": "attn1.norm_k",
    "attn.proj": "attn1.to_out.0",
    "cross.q": "attn2.to_q",
    "cross.kv": "attn2.to_k, attn2.to_v",
    "cross.q_norm": "attn2.norm_q",
    "cross.k_norm": "attn2.norm_k",
    "cross.proj": "attn2.to_out.0",
    "norm_cross": "norm2",
    "adaLN_modulation.table": "scale_shift_table",
}


def test_pixart_blocks() -> None:
    """Oracle: diffusers' PixArtTransformer2DModel, with a mask and without, 2e-5 (its sinusoids are in float32)."""
    state, tensors, config = read("pixart")
    dim, heads = 16, config["num_attention_heads"]
    trunk = Trunk(Block(dim, heads, modulation="shared", text="plain") for _ in range(config["num_layers"]))
    for number, block in enumerate(trunk):
        mlp = {"mlp.fc1": "ff.net.0.proj", "mlp.fc2": "ff.net.2"}
        load(block, state, f"transformer_blocks.{number}.", CROSS | mlp)
    head = FinalLayer(dim, 32, modulation="shared")
    load(head, state, "", {"linear": "proj_out", "adaLN_modulation.table": "scale_shift_table"})
    x = F.conv2d(tensors["in/x"], state["pos_embed.proj.weight"], state["pos_embed.proj.bias"], stride=2)
    x = x.flatten(2).transpose(1, 2) + make_sincos_positions(dim, 4, 4)
    time = chain(state, "adaln_single.emb.timestep_embedder", compute_timestep_features(tensors["in/t"], 256))
    shared = linear(state, "adaln_single.linear")(F.silu(time)).unflatten(-1, (6, -1))
    text = chain(state, "caption_projection", tensors["in/text"], partial(F.gelu, approximate="tanh"))
    for mask, expected in ((tensors["in/mask"].bool()[:, None, None], "out/masked"), (None, "out/unmasked")):
        tokens, _ = trunk(x, BlockInputs(None, shared, None, text, mask))
        out = head(tokens, None, time[:, None]).view(-1, 4, 4, 2, 2, 8).permute(0, 5, 1, 3, 2, 4).reshape(-1, 8, 8, 8)
        assert torch.allclose(out, tensors[expected], atol=2e-5)


def test_wan_blocks() -> None:
    """Oracle: diffusers' WanTransformer3DModel: positions in time, height and width, norms over all heads, 2e-5."""
    state, tensors, config = read("wan")
    dim, heads = 24, config["num_attention_heads"]
    choices = {"modulation": "shared", "text": "normed", "qk_norm": "rms_all"}
    trunk = Trunk(Block(dim, heads, config["ffn_dim"] / dim, **choices) for _ in range(config["num_layers"]))
    state = {key: value[0] if key.endswith("scale_shift_table") else value for key, value in state.items()}
    for number, block in enumerate(trunk):
        load(block, state, f"blocks.{number}.", CROSS | {"mlp.fc1": "ffn.net.0.proj", "mlp.fc2": "ffn.net.2"})
    head = FinalLayer(dim, 16, modulation="shared")
    load(head, state, "", {"linear": "proj_out", "adaLN_modulation.table": "scale_shift_table"})
    x = F.conv3d(tensors["in/x"], state["patch_embedding.weight"], state["patch_embedding.bias"], stride=(1, 2, 2))
    sides = x.shape[2:]
    time = chain(
        state, "condition_embedder.time_embedder", compute_timestep_features(tensors["in/t"], config["freq_dim"])
    )
    shared = linear(state, "condition_embedder.time_proj")(F.silu(time)).unflatten(-1, (6, -1))
    text = chain(state, "condition_embedder.text_embedder", tensors["in/text"], partial(F.gelu, approximate="tanh"))
    tokens, _ = trunk(
        x.flatten(2).transpose(1, 2), BlockInputs(None, shared, make_rotary_embedding(sides, dim // heads), text)
    )
    out = head(tokens, None, time[:, None]).view(-1, *sides, 1, 2, 2, 4).permute(0, 7, 1, 4, 2, 5, 3, 6)
    assert torch.allclose(out.reshape(tensors["in/x"].shape), tensors["out/velocity"], atol=2e-5)


def test_sd3_blocks() -> None:
    """Oracle: diffusers' SD3Transformer2DModel: two streams, the last of which ends with the images, 2e-5."""
    state, tensors, config = read("sd3")
    dim, heads, depth = 16, config["num_attention_heads"], config["num_layers"]
    trunk = Trunk(JointBlock(dim, heads, last=number == depth - 1) for number in range(depth))
    for number, block in enumerate(trunk):
        names = {
            "image.attn.qkv": "attn.to_q, attn.to_k, attn.to_v",
            "image.attn.proj": "attn.to_out.0",
            "image.mlp.fc1": "ff.net.0.proj",
            "image.mlp.fc2": "ff.net.2",
            "image.adaLN_modulation.1": "norm1.linear",
            "text.attn.qkv": "attn.add_q_proj, attn.add_k_proj, attn.add_v_proj",
            "text.attn.proj": "attn.to_add_out",
            "text.mlp.fc1": "ff_context.net.0.proj",
            "text.mlp.fc2": "ff_context.net.2",
            "text.adaLN_modulation.1": "norm1_context.linear",
        }
        own = dict(state)
        if block.last:
            swap_scale_and_shift(own, f"transformer_blocks.{number}.norm1_context.linear")
        load(block, own, f"transformer_blocks.{number}.", names)
    head = FinalLayer(dim, 16)
    swap_scale_and_shift(state, "norm_out.linear")
    load(head, state, "", {"linear": "proj_out", "adaLN_modulation.1": "norm_out.linear"})
    x = F.conv2d(tensors["in/x"], state["pos_embed.proj.weight"], state["pos_embed.proj.bias"], stride=2)
    table = state["pos_embed.pos_embed"].view(6, 6, dim)[1:5, 1:5].reshape(16, dim)
    c = chain(state, "time_text_embed.timestep_embedder", compute_timestep_features(tensors["in/t"], 256))
    c = c + chain(state, "time_text_embed.text_embedder", tensors["in/pooled"])
    text = linear(state, "context_embedder")(tensors["in/text"])
    tokens, _ = trunk(x.flatten(2).transpose(1, 2) + table, BlockInputs(c, images=16), text)
    out = head(tokens, c).view(-1, 4, 4, 2, 2, 4).permute(0, 5, 1, 3, 2, 4).reshape(-1, 4, 8, 8)
    assert torch.allclose(out, tensors["out/velocity"], atol=2e-5)


def swap_scale_and_shift(state: dict[str, Tensor], name: str) -> None:
    for kind in ("weight", "bias"):
        state[f"{name}.{kind}"] = torch.cat(state[f"{name}.{kind}"].chunk(2)[::-1])


MODEL = {"num_classes": 5, "objective": "flow", "learn_sigma": False}
SMALL = MODEL | {"image_size": 4, "patch_size": 1, "hidden_size": 24, "depth": 2}
# File -> the weights' file, the model's section, and the request.
TRAJECTORIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sit_trajectory": (
        "sit_network",
        {**MODEL, "image_size": 8, "patch_size": 2, "hidden_size": 24, "depth": 2, "num_heads": 3, "layout": "sit"}
        | {"learn_sigma": True, "guidance_channels": 3},
        {"num_steps": 6, "guidance_scale": 2.5},
    ),
    "lightningdit_trajectory": (
        "lightningdit_network",
        {**SMALL, "in_channels": 6, "num_heads": 3, "block": MODERN | {"rope": True}, "guidance_channels": 3}
        | {"flow": {"shift": 1 / 0.3}},
        {"num_steps": 7, "guidance_scale": 6.7, "guidance_interval": (0.0, 0.89 / 0.11)},
    ),
    "rae_trajectory": (
        "rae_ddt",
        {**SMALL, "in_channels": 6, "hidden_size": 16, "num_heads": 2, "block": MODERN | {"rope": True}}
        | {"time_freq": "fourier", "wide": {"hidden_size": 24, "depth": 1, "num_heads": 2}}
        | {"flow": {"shift": 6.928203, "t_last": 0.001}},
        {"num_steps": 6, "guidance_scale": 3.0, "guidance_interval": (0.1 / 0.9, 0.8 / 0.2)},
    ),
    "repa_trajectory": (
        "repa",
        {**SMALL, "num_heads": 3},
        {"num_steps": 6, "guidance_scale": 1.8, "guidance_interval": (0.0, 0.7 / 0.3)},
    ),
    "jit": (
        "jit",
        {**MODEL, "image_size": 16, "patch_size": 4, "in_channels": 3, "hidden_size": 24, "depth": 2, "num_heads": 2}
        | {"num_classes": 4, "block": MODERN | {"rope": True, "qk_norm": "rms"}, "tokens": {"label": 3, "joins": 1}}
        | {"patch_bottleneck": 8, "flow": {"prediction": "x", "loss": "velocity", "t_min": 0.05}},
        {"num_steps": 8, "sampler": "heun", "guidance_scale": 2.9, "guidance_interval": (0.0, 0.9 / 0.1)},
    ),
}


@pytest.mark.parametrize("name", TRAJECTORIES)
def test_golden_trajectories(name: str) -> None:
    """Oracle: what the originals draw with these weights, guided as they do, 1e-5, in our time and direction."""
    weights, model, asked = TRAJECTORIES[name]
    state, _, _ = read(weights)
    _, tensors, _ = read(name)
    model = model | {"flow": {"time_scale": 1.0, **model.get("flow", {})}}
    system = DiTSystem(Config(**model))
    renamed, notes = system.rename_published("denoiser", state)
    fitted, _ = system.adapt_weights("denoiser", renamed)
    assert notes[0].startswith("layout: ")
    network = system.networks()["denoiser"]
    network.load_state_dict(fitted, strict=True)
    start, y = tensors["in/start"], tensors["in/y"]
    request = Request(torch.zeros(len(y), dtype=torch.int64), {"label": y}, sampler="euler")
    request = replace(request, **asked)
    guided = system._make_guided_network({"denoiser": network}, request)
    drawn = system.process.sample(guided, start, torch.randn, request.sampler, request.num_steps)
    assert torch.allclose(drawn, tensors["out/drawn"], atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block": {"modulation": "none"}}, "block.modulation"),
        ({"block": {"modulation": "none"}, "tokens": {"time": 2, "label": 2}, "embedding_dim": 4}, "block.modulation"),
        ({"sines": False}, "sines"),
        ({"tokens": {"label": 2, "joins": 2}}, "tokens.joins"),
        ({"internal": {"depth": 2}}, "internal.depth"),
        ({"internal": {"depth": 1}, "objective": "diffusion"}, "internal"),
        ({"wide": {"hidden_size": 10, "depth": 1, "num_heads": 3}}, "wide.hidden_size"),
        ({"num_heads": 4, "block": {"rope": True}}, "block.rope"),
        ({"flow": {"cosine": 1.0}, "in_channels": 1}, "flow.cosine"),
        ({"flow": {"prediction": "x"}}, "flow.t_min"),
        ({"flow": {"path": "vp"}}, "flow.t_min"),
        ({"flow": {"loss": "likelihood"}}, "flow.t_min"),
        ({"flow": {"density": "mode", "t_max": 0.9}}, "flow.t_max"),
    ],
)
def test_choices_that_do_not_fit(changes: dict[str, Any], named: str) -> None:
    """Oracle: the message names the entry."""
    with pytest.raises(ValueError, match=re.escape(named)):
        Config(**(SMALL | {"num_heads": 3} | changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, "block.mlp"),
        ({"block": MODERN | {"rope": True, "qk_norm": "rms"}}, "block.qk_norm"),
        ({"patch_bottleneck": 2}, "patch_bottleneck"),
        ({"depth": 3}, "depth"),
        ({"block": MODERN}, "block.rope"),
        ({"num_heads": 2, "block": MODERN | {"rope": True}}, "num_heads"),
        ({"num_heads": 6, "block": MODERN | {"rope": True}}, "num_heads"),
        ({"objective": "diffusion"}, "model.objective"),
        ({"flow": {}}, "model.flow.time_scale"),
        ({"flow": {"time_scale": 1.0, "prediction": "x", "t_min": 0.05}}, "model.flow.prediction"),
        ({"image_size": 8}, "image_size"),
    ],
)
def test_weights_that_do_not_fit(changes: dict[str, Any], named: str) -> None:
    """Oracle: the message names the entry; LightningDiT's own loader fills what does not fit with zeros."""
    state, _, _ = read("lightningdit_network")
    if named == "block.mlp":
        state = {name: value for name, value in state.items() if ".w12." not in name}
    model = SMALL | {"in_channels": 6, "num_heads": 3, "block": MODERN | {"rope": True}, "flow": {"time_scale": 1.0}}
    system = DiTSystem(Config(**(model | changes)))
    with pytest.raises(ConfigError, match=re.escape(named)):
        system.adapt_weights("denoiser", system.rename_published("denoiser", state)[0])


def test_reversed_time_is_its_own_inverse() -> None:
    """Oracle: the weights themselves, 1e-6: to reverse time twice changes nothing."""
    state, _, _ = read("sit_network")
    again = dict(state)
    for _ in range(2):
        reverse_time_in_weights(again, negate_output=True)
    assert all(torch.allclose(again[name], value, atol=1e-6) for name, value in state.items())
    assert not torch.allclose(
        translate_weights_from_layout(state, "sit", 2, 4)[0]["t_embedder.mlp.0.weight"],
        state["t_embedder.mlp.0.weight"],
    )


def test_own_weights_are_not_translated_again(tmp_path: Path) -> None:
    """Oracle: the weights of an import: as a run and as an export they come in again unchanged, also with a layout."""
    (name, model, _), state = TRAJECTORIES["sit_trajectory"], read("sit_network")[0]
    assert name == "sit_network"
    save_file(state, tmp_path / "sit.safetensors")
    entries = model | {"flow": {"time_scale": 1.0}}
    run = Run(system="dit", model=entries, data={"image_size": 8, "channels": 4}, every={"sample": 0})
    import_weights(tmp_path / "sit.safetensors", run, tmp_path / "run")
    system = DiTSystem(Config(**entries))
    (once, _), (again, notes) = (
        read_weights_adapted_to_system(tmp_path / path, system)["denoiser"] for path in ("sit.safetensors", "run")
    )
    assert all(torch.equal(once[key], again[key]) for key in once) and "time: reversed" not in " ".join(notes)


def test_presets_are_overruled() -> None:
    """Oracle: by hand: an entry of one's own goes before a preset's, null too; the others stay."""
    sizes = {"size": "RAEv2-XL", "image_size": 16, "in_channels": 768, "objective": "flow"}
    assert Config(**sizes).wide.hidden_size == 2048 and Config(**sizes).internal.depth == 8
    own = Config(**sizes, wide=None, internal=None, block={"qk_norm": "none"}, learn_sigma=True)
    assert (own.wide, own.internal, own.learn_sigma) == (None, None, True)
    assert own.block.model_dump() == {
        "norm": "rms",
        "mlp": "swiglu",
        "qk_norm": "none",
        "rope": True,
        "modulation": "none",
        "joint": False,
        "dual": 0,
    }


def test_guides_of_the_same_noise() -> None:
    """Oracle: by hand: what alone concerns training may differ between a flow and its guide, predictions may not."""
    system = DiTSystem(Config(**(SMALL | {"num_heads": 3})))
    for changes, allowed in (
        ({"density": "mode", "cosine": 1.0, "t_last": 0.1}, True),
        ({"prediction": "x", "t_min": 0.05}, False),
        ({"path": "gvp"}, False),
    ):
        other = DiTSystem(Config(**(SMALL | {"num_heads": 3, "depth": 1, "flow": changes})))
        with nullcontext() if allowed else pytest.raises(ConfigError, match="model.flow differs"):
            system.require_guide(other)
