"""Fits published weights to a UNet, and renames weights to and from diffusers' names.

Published files have the names of network.py, but few flags can be read from them. diffusers' UNet2DModel has the same
layers in other lists. Its attention has three linear layers, whose rows are ordered by head; here one layer, qkv, holds
query, key and value of the first head, then those of the second.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dstrain.nn import fitting
from dstrain.nn.layers import compute_timestep_features
from dstrain.recipe import ConfigError
from dstrain.systems.iddpm.config import Config
from dstrain.systems.iddpm.network import GROUPS

_LABELS = "label_emb.weight"

# Pattern of a weight's name -> fields of the recipe that decide its shape or presence; the first match counts.
_REMEDIES = (
    (r"^time_embed", "num_channels"),
    (r"^label_emb", "class_cond (and num_channels)"),
    (r"^input_blocks\.0\.0", "small_size (super-resolution sees twice the channels), in_channels and num_channels"),
    (r"^out\.2", "learn_sigma and in_channels"),
    (r"\.emb_layers\.", "use_scale_shift_norm (or channel_mult and num_res_blocks)"),
    (r"_blocks\.\d+\.1\.(norm|qkv|proj_out)", "attention_resolutions (for the image_size of the file)"),
    (r"", "num_res_blocks and channel_mult (or num_channels)"),
)

# Names in the order of a network, so that the first difference is the one nearest to the input.
_ORDER = (
    "time_embed",
    "label_emb",
    "input_blocks",
    "middle_block",
    "output_blocks",
    "out",
    "in_layers",
    "emb_layers",
    "out_layers",
    "skip_connection",
    "norm",
    "qkv",
    "proj_out",
    "op",
    "conv",
    "weight",
    "bias",
)

# Flags that neither names nor shapes of weights show.
_HIDDEN = (
    "image_size",
    "small_size",
    "num_heads",
    "num_heads_upsample",
    "dropout",
    "objective",
    "diffusion_steps",
    "noise_schedule",
    "rescale_timesteps",
)


def adapt_weights(state: dict[str, Tensor], network: nn.Module, config: Config) -> fitting.Fitted:
    """Returns a copy of the state dict that fits `network`, and notes for the user. Reads only names and shapes of the
    network, so it may be on the meta device.

    Makes a label table fit: adds a missing null row, or removes one that the model does not need. Replaces a table with
    any other number of rows by new rows, normal(1). Raises ConfigError for the first other difference, with both shapes
    and the flags that decide them.

    The notes say how the rows were understood. They also list flags that cannot be checked against the file: if the
    recipe has one of these wrong, no error is raised and pictures are wrong.
    """
    shapes = fitting.collect_weight_shapes(network)
    state = dict(state)
    notes = _add_or_remove_null_label(state, config) if config.class_cond and _LABELS in state else []
    notes += fitting.redraw_resized_embedding_table(state, shapes, _LABELS, std=1.0)
    fitting.require_matching_shapes(
        state, shapes, sorted(shapes.keys() | state.keys(), key=_make_network_order_sort_key), _REMEDIES
    )
    hidden = [f"{flag}={getattr(config, flag)}" for flag in _HIDDEN]
    hidden += [
        f"{name}={value}"
        for name, value in config.make_diffusion_arguments().items()
        if name in ("prediction", "loss") or (name == "variance" and not config.learn_sigma)
    ]
    notes.append(f"names and shapes fit; what they cannot tell is as the recipe says: {', '.join(hidden)}")
    return state, notes


def _add_or_remove_null_label(state: dict[str, Tensor], config: Config) -> list[str]:
    """Changes the label table in `state`, in place: adds a null row, the mean of all rows, if the model needs one and
    the table has none; removes the null row if the model has none.

    Returns a list with one note on how the rows were understood. Returns [] if the table fits without a null row, or if
    it has neither num_classes nor num_classes + 1 rows.
    """
    table, count = state[_LABELS], config.num_classes
    if config.has_null_label and len(table) == count:
        state[_LABELS] = torch.cat((table, table.float().mean(dim=0, keepdim=True).to(table.dtype)))
        return [
            f"{_LABELS}: the {count} rows in the file are taken for the labels; the null row is their mean, and "
            "has to be trained before it guides"
        ]
    if len(table) != count + 1:
        return []
    state[_LABELS] = table if config.has_null_label else table[:count]
    return [
        f"{_LABELS}: the last of the {count + 1} rows in the file is taken for the null label"
        + ("" if config.has_null_label else ", and left out")
    ]


def _make_network_order_sort_key(weight_name: str) -> tuple[int, ...]:
    """Returns a key that sorts names of weights in the order of the network, from input to output."""
    return tuple(
        int(word) if word.isdigit() else _ORDER.index(word) if word in _ORDER else len(_ORDER)
        for word in weight_name.split(".")
    )


_TIMES = "time_proj.weight"
_ENDS = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "label_emb": "class_embedding",
    "input_blocks.0.0": "conv_in",
    "out.0": "conv_norm_out",
    "out.2": "conv_out",
}
_RESIDUAL = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
_ATTENTION = {"norm": "group_norm", "proj_out": "to_out.0"}
_QKV = ("to_q", "to_k", "to_v")

# Field of config.json -> the recipe's fields that decide it.
_FIELDS = {
    "in_channels": "in_channels (twice with small_size)",
    "out_channels": "in_channels, twice with learn_sigma",
    "down_block_types": "attention_resolutions",
    "up_block_types": "attention_resolutions",
    "block_out_channels": "num_channels and channel_mult",
    "layers_per_block": "num_res_blocks",
    "resnet_time_scale_shift": "use_scale_shift_norm",
    "time_embedding_type": "rescale_timesteps and diffusion_steps",
    "num_train_timesteps": "rescale_timesteps and diffusion_steps",
    "num_class_embeds": "class_cond",
}


def make_diffusers_arguments(config: Config) -> dict[str, Any]:
    """Returns the keyword arguments with which diffusers' UNet2DModel builds the network of this config. Raises
    ConfigError if UNet2DModel cannot express one of the flags.
    """
    if config.resolved_channel_mult[0] != 1:
        raise ConfigError(
            f"channel_mult: diffusers' UNet2DModel takes the first level as wide as the timesteps' "
            f"sinusoids, num_channels, and channel_mult begins with {config.resolved_channel_mult[0]}; take safetensors"
        )
    attends = [side in config.attention_resolutions for side in config.feature_map_sides]
    learned = _diffusers_needs_timestep_table(config)
    return {
        "sample_size": config.image_size,
        "center_input_sample": False,
        "in_channels": config.in_channels * (2 if config.small_size else 1),
        "out_channels": config.in_channels * (1 + config.learn_sigma),
        "time_embedding_type": "learned" if learned else "positional",
        "freq_shift": 0,
        "flip_sin_to_cos": True,
        "down_block_types": tuple("AttnDownBlock2D" if attention else "DownBlock2D" for attention in attends),
        "up_block_types": tuple("AttnUpBlock2D" if attention else "UpBlock2D" for attention in reversed(attends)),
        "block_out_channels": tuple(factor * config.num_channels for factor in config.resolved_channel_mult),
        "layers_per_block": config.num_res_blocks,
        "downsample_padding": 1,
        "dropout": config.dropout,
        "act_fn": "silu",
        "attention_head_dim": _compute_head_width(config),
        "norm_num_groups": GROUPS,
        "attn_norm_num_groups": GROUPS,
        "norm_eps": 1e-5,
        "resnet_time_scale_shift": "scale_shift" if config.use_scale_shift_norm else "default",
        "num_class_embeds": config.make_network_arguments()["num_classes"],
        "num_train_timesteps": config.diffusion_steps if learned else None,
    }


def rename_to_diffusers(state: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Returns a copy of our weights under the names of a UNet2DModel built with `make_diffusers_arguments`."""
    renamed = {
        f"{diffusers_name}.{kind}": state[f"{name}.{kind}"]
        for name, diffusers_name in _pair_layer_names_with_diffusers(config)
        for kind in ("weight", "bias")
        if f"{name}.{kind}" in state
    }
    for name, diffusers_name, heads in _pair_attention_names_with_diffusers(config):
        output = f"{diffusers_name}.to_out.0.weight"
        renamed[output] = renamed[output].squeeze(2)
        for kind in ("weight", "bias"):
            rows = state[f"{name}.qkv.{kind}"]
            rows = rows.view(heads, 3, -1, *rows.shape[1:2])  # (heads, 3, d, C or nothing)
            for third, part in zip(_QKV, rows.unbind(1)):
                renamed[f"{diffusers_name}.{third}.{kind}"] = part.flatten(0, 1)
    if _diffusers_needs_timestep_table(config):
        renamed[_TIMES] = _compute_timestep_table(config)
    return {name: value.detach().clone().contiguous() for name, value in renamed.items()}


def rename_from_diffusers(
    state: Mapping[str, Tensor], diffusers_config: Mapping[str, Any], config: Config
) -> fitting.Fitted:
    """Returns the weights of a UNet2DModel under our names, for `adapt_weights`, and a note on weights that are not
    used. diffusers_config: the content of its config.json.

    Raises ConfigError if the class, a field or the table of timesteps differs from the recipe. Leaves it to
    `adapt_weights` to report missing weights.
    """
    _require_same_config(diffusers_config, config)
    state, renamed = dict(state), {}
    expected = _compute_timestep_table(config)
    times = state.pop(_TIMES, expected)
    if times.shape != expected.shape or not torch.allclose(times.float(), expected, rtol=0, atol=1e-5):
        raise ConfigError(
            f"weights: {_TIMES} holds other timesteps than rescale_timesteps over "
            f"{config.diffusion_steps} diffusion_steps; set both to what the file was made with"
        )
    for name, diffusers_name, heads in _pair_attention_names_with_diffusers(config):
        for kind in ("weight", "bias"):
            parts = [state.pop(f"{diffusers_name}.{third}.{kind}", None) for third in _QKV]
            if all(part is not None for part in parts):
                rows = torch.stack([part.view(heads, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 2)
                renamed[f"{name}.qkv.{kind}"] = rows[..., None] if kind == "weight" else rows
    for name, diffusers_name in _pair_layer_names_with_diffusers(config):
        for kind in ("weight", "bias"):
            if (value := state.pop(f"{diffusers_name}.{kind}", None)) is not None:
                is_map = name.endswith(".proj_out") and kind == "weight"
                renamed[f"{name}.{kind}"] = value[..., None] if is_map else value
    return renamed, fitting.describe_unused_weights(state)


def _require_same_config(diffusers_config: Mapping[str, Any], config: Config) -> None:
    """Raises ConfigError if the content of diffusers' config.json does not describe the network of this config."""
    expected = make_diffusers_arguments(config) | {
        "class_embed_type": None,
        "add_attention": True,
        "mid_block_scale_factor": 1,
        "downsample_type": "conv",
        "upsample_type": "conv",
        "time_embedding_dim": None,
    }
    del expected["sample_size"], expected["dropout"]  # they change no output
    loaded = {**expected, **diffusers_config}  # an older diffusers did not write some fields, and had only these values
    if loaded["attn_norm_num_groups"] is None and not config.use_scale_shift_norm:
        loaded["attn_norm_num_groups"] = loaded["norm_num_groups"]
    if expected["num_class_embeds"] is not None and loaded["num_class_embeds"] is not None:
        del expected["num_class_embeds"]  # `adapt_weights` takes another number of rows
    heads, needed = (_list_head_counts(config, values["attention_head_dim"]) for values in (loaded, expected))
    del expected["attention_head_dim"]  # None and one width for all may mean the same
    fitting.require_matching_diffusers_config(loaded, ("UNet2DModel",), "iddpm", expected, _FIELDS)
    if heads != needed:
        raise ConfigError(
            f"weights: attention_head_dim is {loaded['attention_head_dim']} in config.json, which makes "
            f"{heads[-1]} heads, and model.num_heads is {config.num_heads}; set that of the file"
        )


def _list_head_counts(config: Config, head_width: int | None) -> list[int]:
    """Returns the number of attention heads of each level with attention, then that of the middle block. head_width:
    channels of each head (attention_head_dim of diffusers); None: each has one head.
    """
    return [1 if head_width is None else channels // head_width for channels in _list_attention_channels(config)]


def _list_attention_channels(config: Config) -> list[int]:
    """Returns the number of channels of each level with attention, then that of the middle block."""
    return [
        factor * config.num_channels
        for factor, side in zip(config.resolved_channel_mult, config.feature_map_sides)
        if side in config.attention_resolutions
    ] + [config.resolved_channel_mult[-1] * config.num_channels]


def _compute_head_width(config: Config) -> int | None:
    """Returns the number of channels of an attention head; None if there is only one head. Raises ConfigError where
    diffusers cannot express the heads: if they differ in width between levels, or in number between the ways down and
    up.
    """
    widths = sorted({channels // config.num_heads for channels in _list_attention_channels(config)})
    if config.attention_resolutions and config.resolved_heads_upsample != config.num_heads:
        raise ConfigError(
            f"num_heads_upsample: diffusers' UNet2DModel has as many heads on the way up as on the way "
            f"down, and these are {config.resolved_heads_upsample} and {config.num_heads}; take safetensors"
        )
    if config.num_heads == 1:
        return None
    if len(widths) > 1:
        raise ConfigError(
            f"num_heads: diffusers' UNet2DModel takes one width for all heads, and {config.num_heads} "
            f"heads at levels of different width (channel_mult, attention_resolutions) are "
            f"{' and '.join(map(str, widths))} wide; take --format safetensors"
        )
    return widths[0]


def _diffusers_needs_timestep_table(config: Config) -> bool:
    """Returns whether UNet2DModel needs a table of the timesteps' sinusoids: True if the network sees rescaled
    timesteps other than 0, 1, 2, ...
    """
    return config.rescale_timesteps and config.diffusion_steps != 1000


def _compute_timestep_table(config: Config) -> Tensor:
    """Returns the sinusoids that the network reads for all timesteps: float32 (diffusion_steps, num_channels)."""
    scale = 1000.0 / config.diffusion_steps if config.rescale_timesteps else 1.0
    return compute_timestep_features(torch.arange(config.diffusion_steps).float() * scale, config.num_channels)


def _pair_layer_names_with_diffusers(config: Config) -> Iterator[tuple[str, str]]:
    """Yields (our name, diffusers' name) of each layer but the qkv of attentions. Some are names of layers that a
    network may not have, such as skip_connection.
    """
    yield from _ENDS.items()
    for name, diffusers_name, kind in _pair_block_names_with_diffusers(config):
        if kind == "change of size":
            yield name, diffusers_name
        else:
            layers = _ATTENTION if kind == "attention" else _RESIDUAL
            yield from ((f"{name}.{a}", f"{diffusers_name}.{b}") for a, b in layers.items())


def _pair_attention_names_with_diffusers(config: Config) -> Iterator[tuple[str, str, int]]:
    """Yields (our name, diffusers' name, number of heads) of each attention."""
    for name, diffusers_name, kind in _pair_block_names_with_diffusers(config):
        if kind == "attention":
            yield (
                name,
                diffusers_name,
                config.resolved_heads_upsample if name.startswith("output") else config.num_heads,
            )


def _pair_block_names_with_diffusers(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yields (our name, diffusers' name, kind) of each block in the order of the network. The kind is "residual",
    "attention" or "change of size".
    """
    attends, last = (
        [side in config.attention_resolutions for side in config.feature_map_sides],
        len(config.resolved_channel_mult) - 1,
    )
    number = 0
    for level, attention in enumerate(attends):
        for index in range(config.num_res_blocks):
            number += 1
            yield f"input_blocks.{number}.0", f"down_blocks.{level}.resnets.{index}", "residual"
            if attention:
                yield f"input_blocks.{number}.1", f"down_blocks.{level}.attentions.{index}", "attention"
        if level < last:
            number += 1
            yield f"input_blocks.{number}.0.op", f"down_blocks.{level}.downsamplers.0.conv", "change of size"
    yield "middle_block.0", "mid_block.resnets.0", "residual"
    yield "middle_block.1", "mid_block.attentions.0", "attention"
    yield "middle_block.2", "mid_block.resnets.1", "residual"
    number = -1
    for up, attention in enumerate(reversed(attends)):
        for index in range(config.num_res_blocks + 1):
            number += 1
            yield f"output_blocks.{number}.0", f"up_blocks.{up}.resnets.{index}", "residual"
            if attention:
                yield f"output_blocks.{number}.1", f"up_blocks.{up}.attentions.{index}", "attention"
        if up < last:
            yield f"output_blocks.{number}.{1 + attention}.conv", f"up_blocks.{up}.upsamplers.0.conv", "change of size"
