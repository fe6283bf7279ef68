"""Fitting published weights to a network: other resolutions and numbers of classes; diffusers' names, there and back.

The published files have our names. diffusers' DiTTransformer2DModel splits qkv in three, gives every block a copy of
the timestep's and the label's embedders, calls the last layer proj_out, and computes positions anew.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dstrain.nn import fitting
from dstrain.nn.layers import sincos_positions
from dstrain.recipe import ConfigError
from dstrain.systems.dit.config import Config

_CLASSES = "y_embedder.embedding_table.weight"
_POSITIONS = "pos_embed"
CLASSES = ("DiTTransformer2DModel", "Transformer2DModel")       # the second is what older files of diffusers say

# Layers: ours -> diffusers'; of the embedders the first block's copy.
_ENDS = {"x_embedder.proj": "pos_embed.proj", "final_layer.adaLN_modulation.1": "proj_out_1",
         "final_layer.linear": "proj_out_2"}
_EMBEDDERS = {"t_embedder.mlp.0": "timestep_embedder.linear_1", "t_embedder.mlp.2": "timestep_embedder.linear_2",
              "y_embedder.embedding_table": "class_embedder.embedding_table"}
_IN_BLOCKS = {"attn.proj": "attn1.to_out.0", "mlp.fc1": "ff.net.0.proj", "mlp.fc2": "ff.net.2",
              "adaLN_modulation.1": "norm1.linear"}
_QKV = ("to_q", "to_k", "to_v")

# What config.json of diffusers and the recipe both say: field there -> field here.
_FIELDS = {"patch_size": "patch_size", "num_layers": "depth", "num_attention_heads": "num_heads",
           "attention_head_dim": "hidden_size / num_heads", "in_channels": "in_channels",
           "out_channels": "in_channels, twice with learn_sigma"}

# What decides a weight's shape or presence: pattern of its name -> the recipe's fields.
_REMEDIES = (
    (r"^x_embedder", "in_channels, patch_size and hidden_size (or size)"),
    (r"^final_layer\.linear", "learn_sigma, in_channels, patch_size and hidden_size (or size)"),
    (r"^blocks\.\d+\.mlp", "depth, mlp_ratio and hidden_size (or size)"),
    (r"^blocks", "depth and hidden_size (or size)"),
    (r"", "size, or hidden_size and depth"),
)


def adapt(state: dict[str, Tensor], network: nn.Module) -> tuple[dict[str, Tensor], list[str]]:
    """A state dict that fits `network` (only its names and shapes are read: meta tensors do), and what was changed.

    Positions are interpolated to another resolution (bicubic, on the square grid). A class table with another number of
    rows is replaced by fresh rows, normal(0.02), of which the last, "no label", is kept from the file.
    Raises ConfigError at the first other difference, with both shapes and the remedy.
    """
    wanted = fitting.shapes_of(network)
    state, notes = dict(state), []
    if "pos_embed" in state and _same_width(state["pos_embed"], wanted["pos_embed"]):
        state["pos_embed"] = _interpolated(state["pos_embed"], wanted["pos_embed"], notes)
    if fitting.other_rows(state, wanted, _CLASSES):
        state[_CLASSES] = _replaced(state[_CLASSES], wanted[_CLASSES], notes)
    fitting.require_fit(state, wanted, sorted(wanted.keys() | state.keys(), key=_natural), _REMEDIES)
    return state, notes


def _same_width(theirs: Tensor, ours: tuple[int, ...]) -> bool:
    return theirs.ndim == len(ours) and theirs.shape[-1] == ours[-1] and tuple(theirs.shape) != ours


def _interpolated(positions: Tensor, shape: tuple[int, ...], notes: list[str]) -> Tensor:
    old, new = round(positions.shape[1] ** 0.5), round(shape[1] ** 0.5)
    if old * old != positions.shape[1]:
        return positions                          # not a square grid: reported as a difference of shapes
    grid = positions.float().view(1, old, old, -1).permute(0, 3, 1, 2)                            # (1, D, g, g)
    grid = F.interpolate(grid, size=(new, new), mode="bicubic", align_corners=False)
    notes.append(f"pos_embed: interpolated from {old} x {old} to {new} x {new} patches")
    return grid.flatten(2).transpose(1, 2).contiguous().to(positions.dtype)


def _replaced(table: Tensor, shape: tuple[int, ...], notes: list[str]) -> Tensor:
    fresh = fitting.fresh_rows(table, shape, std=0.02)
    fresh[-1] = table[-1]
    notes.append(f"{_CLASSES}: {len(table)} rows in the file, {shape[0]} in the network; replaced by fresh rows, the "
                 "last (no label) kept")
    return fresh


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts blocks.2 before blocks.10, so that the first difference is the lowest block's."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


# ----------------------------------------------------------------------------------------------------- diffusers' names

def to_diffusers(state: Mapping[str, Tensor], rows: int, has_null: bool) -> dict[str, Tensor]:
    """The state dict of a DiTTransformer2DModel with a label table of `rows` + 1, of which the last is "no label".

    Rows that no class has repeat the last one, or are 0 where the network has none.
    """
    table = state[_CLASSES]
    classes, null = (table[:-1], table[-1:]) if has_null else (table, torch.zeros_like(table[:1]))
    padded = torch.cat((classes, null.expand(rows + 1 - len(classes), -1)))
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        layer, _, kind = name.rpartition(".")
        block = re.fullmatch(r"blocks\.(\d+)\.(.+)", layer)
        if name == _POSITIONS:
            continue
        if layer in _ENDS:
            found[f"{_ENDS[layer]}.{kind}"] = value
        elif layer in _EMBEDDERS:
            for number in range(depth_of(state)):
                found[f"{_embedders(number)}.{_EMBEDDERS[layer]}.{kind}"] = padded if name == _CLASSES else value
        elif block[2] == "attn.qkv":
            for third, part in zip(_QKV, value.chunk(3)):
                found[f"transformer_blocks.{block[1]}.attn1.{third}.{kind}"] = part
        else:
            found[f"transformer_blocks.{block[1]}.{_IN_BLOCKS[block[2]]}.{kind}"] = value
    return {name: value.detach().clone().contiguous() for name, value in found.items()}


def from_diffusers(state: Mapping[str, Tensor], said: Mapping[str, Any],
                   config: Config) -> tuple[dict[str, Tensor], list[str]]:
    """Our names of a DiTTransformer2DModel's weights, for `adapt`, and what to know of them; `said`: its config.json.

    ConfigError: another class, a field that differs from the recipe's, weights that are missing, or blocks whose
    embedders differ, since this network has one for all of them.
    """
    _require(said, config)
    depth, found, taken = said["num_layers"], {}, set()

    def take(name: str) -> Tensor:
        if name not in state:
            raise ConfigError(f"weights: {name} is missing, and num_layers in config.json is {depth}; fetch the file "
                              "again")
        taken.add(name)
        return state[name]

    for kind in ("weight", "bias"):
        for ours, theirs in _ENDS.items():
            found[f"{ours}.{kind}"] = take(f"{theirs}.{kind}")
        for number in range(depth):
            block = f"transformer_blocks.{number}"
            for ours, theirs in _IN_BLOCKS.items():
                found[f"blocks.{number}.{ours}.{kind}"] = take(f"{block}.{theirs}.{kind}")
            parts = [take(f"{block}.attn1.{third}.{kind}") for third in _QKV]
            found[f"blocks.{number}.attn.qkv.{kind}"] = torch.cat(parts)
        for ours, theirs in _EMBEDDERS.items():
            if (ours, kind) == ("y_embedder.embedding_table", "bias"):
                continue
            first, *others = (take(f"{_embedders(number)}.{theirs}.{kind}") for number in range(depth))
            for number, other in enumerate(others, 1):
                if not torch.equal(first, other):
                    raise ConfigError(f"weights: {_embedders(number)}.{theirs}.{kind} is not that of block 0: "
                                      "diffusers has trained the copies apart, and this network has one for all "
                                      "blocks; train with dstrain from weights whose copies agree")
            found[f"{ours}.{kind}"] = first
    notes = [f"{len(left)} weights of the folder have no place here and are left: {', '.join(left[:3])}"
             for left in [sorted(set(state) - taken)] if left]
    grid = said["sample_size"] // said["patch_size"]
    found[_POSITIONS] = sincos_positions(found["x_embedder.proj.weight"].shape[0], grid, grid)[None]
    found[_CLASSES] = _unpadded(found[_CLASSES], config, notes)
    if config.time_freq == "official":
        notes.append("time_freq=official: right for weights converted from published ones; those that diffusers has "
                     "trained, or dstrain has exported, need model.time_freq=diffusers")
    return found, notes


def depth_of(state: Mapping[str, Tensor]) -> int:
    return 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))


def _embedders(block: int) -> str:
    return f"transformer_blocks.{block}.norm1.emb"


def _unpadded(table: Tensor, config: Config, notes: list[str]) -> Tensor:
    """Without the rows that only fill diffusers' table up, which all repeat its last."""
    count = config.num_classes
    if len(table) <= count or not torch.equal(table[count:], table[-1:].expand_as(table[count:])):
        return table
    if config.class_dropout_prob:
        return torch.cat((table[:count], table[-1:]))
    if table[-1].any():
        notes.append(f"{_CLASSES}: the row of no label is left, since class_dropout_prob is 0")
    return table[:count]


def _require(said: Mapping[str, Any], config: Config) -> None:
    if said.get("_class_name") not in CLASSES:
        raise ConfigError(f"weights: config.json is of class {said.get('_class_name')}, system dit takes a "
                          "DiTTransformer2DModel, or the DiTPipeline around one")
    ours = arguments(config)
    del ours["norm_eps"]                          # 1e-5 in folders that were converted from weights trained with 1e-6
    del ours["sample_size"]                       # positions are brought to another resolution
    size = said.get("sample_size")
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"weights: sample_size is {size} in config.json, and no side of a picture; fetch it again")
    if said.get("out_channels", 0) is None:
        said = {**said, "out_channels": said.get("in_channels")}
    for name, value in ours.items():
        if said.get(name) != value:
            fields = f"model.{_FIELDS[name]}" if name in _FIELDS else "this network"
            remedy = "; set it to what the file was made with" if name in _FIELDS else ", which has no other"
            raise ConfigError(f"weights: {name} is {said.get(name)} in config.json, and {value} by {fields}{remedy}")


def arguments(config: Config) -> dict[str, Any]:
    """What config.json of the same network says; its label table is the writer's to choose."""
    shape = config.network_shape()
    return {"num_attention_heads": shape["num_heads"], "attention_head_dim": shape["hidden_size"] // shape["num_heads"],
            "in_channels": config.in_channels, "out_channels": config.in_channels * (1 + config.learn_sigma),
            "num_layers": shape["depth"], "attention_bias": True, "sample_size": config.input_size,
            "patch_size": shape["patch_size"], "activation_fn": "gelu-approximate", "norm_type": "ada_norm_zero",
            "norm_elementwise_affine": False, "norm_eps": 1e-6}
