"""Fitting published weights to a UNet, whose flags leave few traces in a file; diffusers' names, there and back.

The published files have our names. diffusers' UNet2DModel has the same layers in other lists, and of an attention three
maps whose rows are ordered by head, where ours is one that holds query, key and value of the first head, then of the
second.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dstrain.nn import fitting
from dstrain.nn.layers import timestep_features
from dstrain.recipe import ConfigError
from dstrain.systems.iddpm.config import Config
from dstrain.systems.iddpm.network import GROUPS

_LABELS = "label_emb.weight"

# What decides a weight's shape or presence: pattern of its name -> the recipe's fields; the first one found counts.
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
_ORDER = ("time_embed", "label_emb", "input_blocks", "middle_block", "output_blocks", "out", "in_layers", "emb_layers",
          "out_layers", "skip_connection", "norm", "qkv", "proj_out", "op", "conv", "weight", "bias")

# Flags that leave names and shapes as they are.
_UNTOLD = ("image_size", "small_size", "num_heads", "num_heads_upsample", "dropout", "diffusion_steps",
           "noise_schedule", "rescale_timesteps")


def adapt(state: dict[str, Tensor], network: nn.Module, config: Config) -> tuple[dict[str, Tensor], list[str]]:
    """A state dict that fits `network` (only its names and shapes are read: meta tensors do), and what to know of it.

    A label table with another number of rows is replaced by fresh rows, normal(1) as they are born. The notes also list
    the flags that no file can tell, as the recipe has them: a wrong one gives wrong pictures and no error.
    Raises ConfigError at the first other difference, with both shapes and the flags that decide them.
    """
    wanted = fitting.shapes_of(network)
    state, notes = dict(state), []
    if fitting.other_rows(state, wanted, _LABELS):
        rows = len(state[_LABELS])
        state[_LABELS] = fitting.fresh_rows(state[_LABELS], wanted[_LABELS], std=1.0)
        notes.append(f"{_LABELS}: {rows} rows in the file, {len(state[_LABELS])} in the network; replaced by fresh "
                     "rows")
    fitting.require_fit(state, wanted, sorted(wanted.keys() | state.keys(), key=_place), _REMEDIES)
    told = [f"{flag}={getattr(config, flag)}" for flag in _UNTOLD]
    told += [f"{name}={value}" for name, value in config.diffusion_arguments().items()
             if name in ("prediction", "loss") or name == "variance" and not config.learn_sigma]
    notes.append(f"names and shapes fit; what they cannot tell is as the recipe says: {', '.join(told)}")
    return state, notes


def _place(name: str) -> tuple[int, ...]:
    return tuple(int(word) if word.isdigit() else _ORDER.index(word) if word in _ORDER else len(_ORDER)
                 for word in name.split("."))


# ----------------------------------------------------------------------------------------------------- diffusers' names

_TIMES = "time_proj.weight"
_ENDS = {"time_embed.0": "time_embedding.linear_1", "time_embed.2": "time_embedding.linear_2",
         "label_emb": "class_embedding", "input_blocks.0.0": "conv_in", "out.0": "conv_norm_out", "out.2": "conv_out"}
_RESIDUAL = {"in_layers.0": "norm1", "in_layers.2": "conv1", "emb_layers.1": "time_emb_proj", "out_layers.0": "norm2",
             "out_layers.3": "conv2", "skip_connection": "conv_shortcut"}
_ATTENTION = {"norm": "group_norm", "proj_out": "to_out.0"}
_QKV = ("to_q", "to_k", "to_v")

# Field of config.json -> the recipe's that decides it.
_FIELDS = {"in_channels": "in_channels (twice with small_size)", "out_channels": "in_channels, twice with learn_sigma",
           "down_block_types": "attention_resolutions", "up_block_types": "attention_resolutions",
           "block_out_channels": "num_channels and channel_mult", "layers_per_block": "num_res_blocks",
           "resnet_time_scale_shift": "use_scale_shift_norm",
           "time_embedding_type": "rescale_timesteps and diffusion_steps",
           "num_train_timesteps": "rescale_timesteps and diffusion_steps"}


def arguments(config: Config) -> dict[str, Any]:
    """The keyword arguments of the UNet2DModel that is this network. ConfigError: there is none, by flag."""
    if config.mults[0] != 1:
        raise ConfigError(f"channel_mult: diffusers' UNet2DModel takes the first level as wide as the timesteps' "
                          f"sinusoids, num_channels, and channel_mult begins with {config.mults[0]}; take --format "
                          "safetensors")
    attends = [side in config.attention_resolutions for side in config.sides]
    seen = config.in_channels * (2 if config.small_size else 1)
    learned = _learns_times(config)
    return {
        "sample_size": config.image_size, "in_channels": seen,
        "out_channels": config.in_channels * (1 + config.learn_sigma), "center_input_sample": False,
        "time_embedding_type": "learned" if learned else "positional", "freq_shift": 0, "flip_sin_to_cos": True,
        "down_block_types": tuple("AttnDownBlock2D" if attention else "DownBlock2D" for attention in attends),
        "up_block_types": tuple("AttnUpBlock2D" if attention else "UpBlock2D" for attention in reversed(attends)),
        "block_out_channels": tuple(factor * config.num_channels for factor in config.mults),
        "layers_per_block": config.num_res_blocks, "downsample_padding": 1, "dropout": config.dropout,
        "act_fn": "silu", "attention_head_dim": _head_width(config), "norm_num_groups": GROUPS,
        "attn_norm_num_groups": GROUPS, "norm_eps": 1e-5,
        "resnet_time_scale_shift": "scale_shift" if config.use_scale_shift_norm else "default",
        "num_class_embeds": config.num_classes if config.class_cond else None,
        "num_train_timesteps": config.diffusion_steps if learned else None}


def to_diffusers(state: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """The state dict of that UNet2DModel."""
    found = {f"{theirs}.{kind}": state[f"{ours}.{kind}"] for ours, theirs in _layers(config)
             for kind in ("weight", "bias") if f"{ours}.{kind}" in state}
    for ours, theirs, heads in _attentions(config):
        name = f"{theirs}.to_out.0.weight"
        found[name] = found[name].squeeze(2)
        for kind in ("weight", "bias"):
            rows = state[f"{ours}.qkv.{kind}"]
            rows = rows.view(heads, 3, -1, *rows.shape[1:2])                             # (heads, 3, d, C or nothing)
            for third, part in zip(_QKV, rows.unbind(1)):
                found[f"{theirs}.{third}.{kind}"] = part.flatten(0, 1)
    if _learns_times(config):
        found[_TIMES] = _times(config)
    return {name: value.detach().clone().contiguous() for name, value in found.items()}


def from_diffusers(state: Mapping[str, Tensor], said: Mapping[str, Any],
                   config: Config) -> tuple[dict[str, Tensor], list[str]]:
    """Our names of a UNet2DModel's weights, for `adapt`, and what to know of them; `said`: its config.json.

    ConfigError: another class, a field that differs from the recipe's, or timesteps that are no sinusoids. A weight
    that is missing is missing to `adapt`, too.
    """
    _require(said, config)
    state, found = dict(state), {}
    times = state.pop(_TIMES, None)
    if times is not None and not _same(times, _times(config)):
        raise ConfigError(f"weights: {_TIMES} holds other timesteps than rescale_timesteps over "
                          f"{config.diffusion_steps} diffusion_steps; set both to what the file was made with")
    for ours, theirs, heads in _attentions(config):
        for kind in ("weight", "bias"):
            parts = [state.pop(f"{theirs}.{third}.{kind}", None) for third in _QKV]
            if all(part is not None for part in parts):
                rows = torch.stack([part.view(heads, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 2)
                found[f"{ours}.qkv.{kind}"] = rows[..., None] if kind == "weight" else rows
    for ours, theirs in _layers(config):
        for kind in ("weight", "bias"):
            if (value := state.pop(f"{theirs}.{kind}", None)) is not None:
                is_map = ours.endswith(".proj_out") and kind == "weight"
                found[f"{ours}.{kind}"] = value[..., None] if is_map else value
    left = sorted(state)
    return found, [f"{len(left)} weights of the folder have no place here and are left: {', '.join(left[:3])}"
                   ] if left else []


def _require(said: Mapping[str, Any], config: Config) -> None:
    if said.get("_class_name") != "UNet2DModel":
        raise ConfigError(f"weights: config.json is of class {said.get('_class_name')}, system iddpm takes a "
                          "UNet2DModel")
    wanted = arguments(config) | {"class_embed_type": None, "add_attention": True, "mid_block_scale_factor": 1,
                                  "downsample_type": "conv", "upsample_type": "conv", "time_embedding_dim": None}
    for name, ours in wanted.items():
        theirs = said.get(name, ours)             # an older diffusers had no such field, and no other way
        theirs = tuple(theirs) if isinstance(theirs, list) else theirs
        if name in ("sample_size", "dropout"):    # decide no output
            continue
        if name == "attn_norm_num_groups" and theirs is None and not config.use_scale_shift_norm:
            theirs = said.get("norm_num_groups")
        if name == "num_class_embeds":            # another number of rows is bridged
            theirs, ours = theirs is not None, ours is not None
        if name == "attention_head_dim":          # None says what one width for all may say, too
            theirs, ours = (_heads(config, width) for width in (theirs, ours))
            if theirs != ours:
                raise ConfigError(f"weights: {name} is {said.get(name)} in config.json, which makes {theirs[-1]} "
                                  f"heads, and model.num_heads is {config.num_heads}; set it to what the file was made "
                                  "with")
        if theirs != ours:
            fields = _FIELDS.get(name)
            raise ConfigError(f"weights: {name} is {said.get(name)} in config.json, and {wanted[name]} by "
                              + (f"model.{fields}; set it to what the file was made with" if fields else
                                 "this network, which has no other"))


def _heads(config: Config, width: int | None) -> list[int]:
    """Heads of each level with attention, and of the middle, where diffusers is told a head's width."""
    return [1 if width is None else channels // width for channels in _attending(config)]


def _attending(config: Config) -> list[int]:
    """Channels of the levels with attention and of the middle."""
    return [factor * config.num_channels for factor, side in zip(config.mults, config.sides)
            if side in config.attention_resolutions] + [config.mults[-1] * config.num_channels]


def _head_width(config: Config) -> int | None:
    """diffusers is told one width of a head for all levels; here their number is the same at all levels."""
    widths = sorted({channels // config.num_heads for channels in _attending(config)})
    if config.attention_resolutions and config.heads_upsample != config.num_heads:
        raise ConfigError(f"num_heads_upsample: diffusers' UNet2DModel has as many heads on the way up as on the way "
                          f"down, and these are {config.heads_upsample} and {config.num_heads}; take --format "
                          "safetensors")
    if config.num_heads == 1:
        return None
    if len(widths) > 1:
        raise ConfigError(f"num_heads: diffusers' UNet2DModel takes one width for all heads, and {config.num_heads} "
                          f"heads at levels of different width (channel_mult, attention_resolutions) are "
                          f"{' and '.join(map(str, widths))} wide; take --format safetensors")
    return widths[0]


def _learns_times(config: Config) -> bool:
    """Whether timesteps are rescaled, so that sinusoids of t are not those of this network: then they are a table."""
    return config.rescale_timesteps and config.diffusion_steps != 1000


def _times(config: Config) -> Tensor:
    """The sinusoids of every timestep as the network sees it, (T, num_channels)."""
    scale = 1000.0 / config.diffusion_steps if config.rescale_timesteps else 1.0
    return timestep_features(torch.arange(config.diffusion_steps).float() * scale, config.num_channels)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.float(), b, rtol=0, atol=1e-5)


def _layers(config: Config) -> Iterator[tuple[str, str]]:
    """Names of what has weights, but for qkv: ours, diffusers'. Not all of them are there: see skip_connection."""
    yield from _ENDS.items()
    for ours, theirs, kind in _places(config):
        if kind == "attention":
            yield from ((f"{ours}.{a}", f"{theirs}.{b}") for a, b in _ATTENTION.items())
        elif kind == "residual":
            yield from ((f"{ours}.{a}", f"{theirs}.{b}") for a, b in _RESIDUAL.items())
        else:
            yield ours, theirs


def _attentions(config: Config) -> Iterator[tuple[str, str, int]]:
    """Names of the attentions, ours and diffusers', and their heads."""
    for ours, theirs, kind in _places(config):
        if kind == "attention":
            yield ours, theirs, config.heads_upsample if ours.startswith("output") else config.num_heads


def _places(config: Config) -> Iterator[tuple[str, str, str]]:
    """Every block in the order of our network: our name, diffusers', and what it is."""
    attends, last = [side in config.attention_resolutions for side in config.sides], len(config.mults) - 1
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
