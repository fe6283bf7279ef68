"""Fitting files of the original trainers to our networks: vae.pt and DALL-E checkpoints, diffusers' AutoencoderKL."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dstrain.nn.fitting import Remedies, require_fit, shapes_of
from dstrain.recipe import ConfigError

_CLASS = "AutoencoderKL"
_PART = "vae."                                    # of a DALL-E checkpoint, whose other entries are the transformer's

# What diffusers called the attention of older files, Stable Diffusion's among them.
_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def adapt(state: dict[str, Tensor], network: nn.Module, remedies: Remedies) -> tuple[dict[str, Tensor], list[str]]:
    """A state dict that fits `network` (only its names and shapes are read: meta tensors do), and what was changed.

    Raises ConfigError at the first other difference, with both shapes and the remedy, and for files whose weights are
    elsewhere.
    """
    shapes, notes = shapes_of(network), []
    inner = {name.removeprefix(_PART): tensor for name, tensor in state.items() if name.startswith(_PART)}
    if inner and not shapes.keys() & state.keys():
        notes.append(f"{len(inner)} weights of the part {_PART} were taken, {len(state) - len(inner)} others left out")
        state = inner
    state = {_renamed(name): tensor for name, tensor in state.items()}
    other_kind = {"codebook.weight", "encoder.conv_in.weight"} & (state.keys() ^ shapes.keys())
    if len(other_kind) == 2:
        theirs, ours = ("discrete", "kl") if "codebook.weight" in state else ("kl", "discrete")
        raise ConfigError(f"weights: the file is of a {theirs} autoencoder, the model is model.{ours}: give "
                          f"model.{theirs} instead")
    differing = [name for name, tensor in state.items() if name in shapes and tuple(tensor.shape) != shapes[name]]
    empty = differing and all(tuple(state[name].shape) in ((0,), (1,)) for name in differing)
    for name, tensor in state.items():
        if empty and len(differing) > 1 and name == differing[0]:
            raise ConfigError(f"weights: {name} has shape {tuple(tensor.shape)} in the file and {shapes[name]} in the "
                              "network: a placeholder, which ZeRO-3 leaves where a rank does not hold a weight. Gather "
                              "the weights from the DeepSpeed folder saved beside it (vae-ds-cp, zero_to_fp32.py in "
                              "it) and give that file")
        if name in shapes and tuple(tensor.shape) == (*shapes[name], 1, 1):
            state[name] = tensor[:, :, 0, 0]                              # attention as convolutions of 1 x 1
    require_fit(state, shapes, [*shapes, *(name for name in state if name not in shapes)], remedies)
    return state, notes


def require_same(said: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Whether a config.json of diffusers is of this network as far as weights do not show it; `config`: its own.

    ConfigError: the first difference.
    """
    if said.get("_class_name") != _CLASS:
        raise ConfigError(f"weights: config.json is of class {said.get('_class_name')}, system vae takes an {_CLASS}")
    for name, usual, remedy in (("norm_num_groups", 32, "set model.kl.norm_num_groups to it"),
                                ("act_fn", "silu", "this network has no other")):
        if config and said.get(name, usual) != config[name]:
            raise ConfigError(f"weights: {name} is {said.get(name, usual)} in config.json and {config[name]} in the "
                              f"network; {remedy}")


def _renamed(name: str) -> str:
    return re.sub(r"(attentions\.\d+\.)(query|key|value|proj_attn)\.", lambda m: m[1] + _ATTENTION[m[2]] + ".", name)
