"""Fits weights of other trainers to the networks: vae.pt and DALL-E checkpoints, diffusers' AutoencoderKL."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dstrain.nn.fitting import (
    Remedies,
    collect_weight_shapes,
    require_matching_diffusers_config,
    require_matching_shapes,
)
from dstrain.recipe import ConfigError

_PART = "vae."  # prefix in a DALL-E checkpoint, whose other entries are the transformer's

# Layers of attention in older files of diffusers, such as Stable Diffusion's, and their names of today.
_ATTENTION = re.compile(r"(attentions\.\d+\.)(query|key|value|proj_attn)\.")
_NEW_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def adapt_weights(
    state: dict[str, Tensor], network: nn.Module, remedies: Remedies
) -> tuple[dict[str, Tensor], list[str]]:
    """Returns `state` with the names and shapes of `network`, and notes for the user on what was changed. Of a DALL-E
    checkpoint only the VAE is taken. diffusers' old names of attention layers become those of today.

    Raises ConfigError if the file is of a discrete VAE and the network a KL autoencoder, or the other way round, if it
    holds ZeRO-3's placeholders instead of weights, or if any other name or shape differs. `remedies` gives the fields
    of the recipe that the message names.
    """
    shapes, notes = collect_weight_shapes(network), []
    inner = {name.removeprefix(_PART): tensor for name, tensor in state.items() if name.startswith(_PART)}
    if inner and not shapes.keys() & state.keys():
        notes.append(f"{len(inner)} weights of the part {_PART} were taken, {len(state) - len(inner)} others left out")
        state = inner
    state = {
        _ATTENTION.sub(lambda match: f"{match[1]}{_NEW_NAMES[match[2]]}.", name): tensor
        for name, tensor in state.items()
    }
    other_kind = {"codebook.weight", "encoder.conv_in.weight"} & (state.keys() ^ shapes.keys())
    if len(other_kind) == 2:
        in_file, in_recipe = ("discrete", "kl") if "codebook.weight" in state else ("kl", "discrete")
        raise ConfigError(f"weights: the file is a {in_file} autoencoder, not model.{in_recipe}: set model.{in_file}")
    differing = {
        name: tuple(tensor.shape)
        for name, tensor in state.items()
        if name in shapes and tuple(tensor.shape) != shapes[name]
    }
    if len(differing) > 1 and set(differing.values()) <= {(0,), (1,)}:
        name, shape = next(iter(differing.items()))
        raise ConfigError(
            f"weights: {name} has shape {shape} in the file and {shapes[name]} in the network: a "
            "placeholder, which ZeRO-3 leaves for a weight on other ranks. Gather the weights from the "
            "DeepSpeed folder beside it (vae-ds-cp, with zero_to_fp32.py) and give that file"
        )
    for name, shape in differing.items():
        if shape == (*shapes[name], 1, 1):
            state[name] = state[name][:, :, 0, 0]  # a convolution of 1 x 1, which is a linear layer here
    require_matching_shapes(state, shapes, [*shapes, *(name for name in state if name not in shapes)], remedies)
    return state, notes


def require_same_config(diffusers_config: Mapping[str, Any], network_config: Mapping[str, Any]) -> None:
    """Raises ConfigError unless `diffusers_config`, the content of diffusers' config.json, is that of an AutoencoderKL
    and has the norm_num_groups and act_fn of `network_config`. For an empty network_config (a discrete VAE) only the
    class is checked.
    """
    loaded = {"norm_num_groups": 32, "act_fn": "silu"} | {**diffusers_config}
    expected = {name: network_config[name] for name in ("norm_num_groups", "act_fn") if network_config}
    fields = {"norm_num_groups": "kl.norm_num_groups"}
    require_matching_diffusers_config(loaded, ("AutoencoderKL",), "vae", expected, fields)
