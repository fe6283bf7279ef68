"""Fits weights to a network of another resolution or number of classes, and translates diffusers' names from and to
ours.

Published files have the names of network.py. diffusers' DiTTransformer2DModel splits qkv in three, gives every block a
copy of the timestep's and the label's embedders, calls the last layer proj_out, and computes positions itself.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dstrain.nn import fitting
from dstrain.nn.positions import make_sincos_positions
from dstrain.recipe import ConfigError
from dstrain.systems.dit.align import adapt_projectors_in_place
from dstrain.systems.dit.choices import BlockChoices
from dstrain.systems.dit.config import Config
from dstrain.systems.dit.layouts import LAYOUTS, translate_weights_from_layout
from dstrain.systems.dit.presets import PRESETS

_CLASSES = "y_embedder.embedding_table.weight"
_POSITIONS = "pos_embed"
NULL_TEXT = "text_tokens.null.weight"
_ADDED = ("s_embedder", "e_embedder")  # conditions that published files do not have
# The second in older files of diffusers.
CLASSES = ("DiTTransformer2DModel", "Transformer2DModel")
PIXART_CLASSES = ("PixArtTransformer2DModel", "Transformer2DModel")
_PIXART_FIELDS = (  # beside its blocks, what decides its network and chain
    "cross_attention",
    "text_projection",
    "objective",
    "mlp_ratio",
    "embedding_dim",
    "time_freq",
    "sines",
    "tokens",
    "patch_bottleneck",
    "wide",
    "internal",
    "text_pooled_dim",
    "sines_within",
)

_TARGETS = ("path", "prediction", "time_scale")  # fields of a flow that decide what its network predicts
_TOLD_AT = 128  # side of the latents of which PixArtAlphaPipeline tells the size

# Layers: our name -> diffusers'; that of an embedder lies in each block.
_ENDS = {
    "x_embedder.proj": "pos_embed.proj",
    "final_layer.adaLN_modulation.1": "proj_out_1",
    "final_layer.linear": "proj_out_2",
}
_EMBEDDERS = {"t_embedder.mlp.0": "timestep_embedder.linear_1", "t_embedder.mlp.2": "timestep_embedder.linear_2"}
_IN_BLOCKS = {
    "attn.proj": "attn1.to_out.0",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
    "adaLN_modulation.1": "norm1.linear",
}

# What both config.json of diffusers and the recipe hold: field of config.json -> field of the recipe.
_FIELDS = {
    "patch_size": "patch_size",
    "num_layers": "depth",
    "num_attention_heads": "num_heads",
    "attention_head_dim": "hidden_size / num_heads",
    "in_channels": "in_channels",
    "out_channels": "in_channels, twice with learn_sigma",
    "caption_channels": "text_encodings_dim",
    "cross_attention_dim": "hidden_size",
}

# What decides a weight's shape or presence: pattern of its name -> the recipe's fields.
_REMEDIES = (
    (r"^x_embedder", "in_channels, patch_size, patch_bottleneck, video and hidden_size (or size)"),
    (r"^final_layer\.linear", "learn_sigma, in_channels, patch_size and hidden_size (or size)"),
    (r"^(t|y)_tokens", "tokens"),
    (r"^text_tokens\.null", "null_text and class_dropout_prob"),
    (r"^text_tokens\.(fc|norm|proj)", "text_projection and text_encodings_dim"),
    (r"^text_tokens", "condition, num_words and max_text_len, or text_encodings_dim"),
    (r"^p_embedder", "text_pooled_dim, and num_words"),
    (r"^t_block|adaLN_modulation\.table$", "block.modulation"),
    (r"^blocks\.\d+\.cross", "cross_attention"),
    (r"^t_embedder\.W", "time_freq"),
    (r"^final_layer\.(x_embedder|projector|blocks|final_layer)", "wide"),
    (r"^base_layer", "internal"),
    (r"^projectors", "align.width and align.hidden"),
    (r"^x_embedder\.wide", "patch_bottleneck"),
    (r"^pos_embed", "sines and sines_within"),
    (r"^blocks\.\d+\.norm", "block.norm"),
    (r"^blocks\.\d+\.((image|text)\.)?attn2?\..*_norm", "block.qk_norm"),
    (r"^blocks\.\d+\.attn2", "block.dual"),
    (r"^blocks\.\d+\.(image|text)", "depth and hidden_size (or size), block.joint and block.dual"),
    (r"^blocks\.\d+\.mlp\.w", "block.mlp and mlp_ratio"),
    (r"^blocks\.\d+\.adaLN", "depth and hidden_size (or size), and block.modulation"),
    (r"^s_embedder", "data.size_conditions and size_embedding"),
    (r"^e_embedder", "embedding_dim"),
    (r"^blocks\.\d+\.mlp", "depth, mlp_ratio and hidden_size (or size)"),
    (r"^blocks", "depth and hidden_size (or size)"),
    (r"", "size, or hidden_size and depth"),
)


def adapt_weights(state: dict[str, Tensor], network: nn.Module) -> fitting.Fitted:
    """Returns a state dict that fits `network`, and notes on what was changed. Reads only names and shapes of the
    network.

    positions    are interpolated (bicubic) to the network's resolution.
    label table  gets new rows, normal(0.02), if it has another number of rows, but keeps its last row, "no label".
    embedders    of sizes or image embeddings are added if the file has none. Their last layer is zeros, so that the
                 output stays the same.
    null text    is added as normal(0.02) if the file has weights for texts, but none for the null text.
    projectors   of an alignment are left out if the network has none, and get initial values if the file has none.

    Raises ConfigError for the first other difference, with both shapes and the remedy.
    """
    shapes = fitting.collect_weight_shapes(network)
    state, notes = dict(state), []
    positions = state.get(_POSITIONS)
    if (
        positions is not None
        and _POSITIONS in shapes
        and positions.ndim == 3
        and positions.shape[-1] == shapes[_POSITIONS][-1]
    ):
        state[_POSITIONS] = _interpolate_positions(positions, shapes[_POSITIONS][1], notes)
    notes += fitting.redraw_resized_embedding_table(state, shapes, _CLASSES, std=0.02, keep_last=True)
    notes += adapt_projectors_in_place(state, shapes)
    if NULL_TEXT in shapes and NULL_TEXT not in state and any(name.startswith("text_tokens.") for name in state):
        fresh = torch.randn(shapes[NULL_TEXT], generator=torch.Generator().manual_seed(0))  # the same on every rank
        state[NULL_TEXT] = 0.02 * fresh
        notes.append(f"{NULL_TEXT}: not in the file; the null text begins anew")
    for added in _ADDED:
        fresh = [name for name in shapes if name.startswith(added)]
        if fresh and not any(name in state for name in fresh):
            generator = torch.Generator().manual_seed(0)  # the same on every rank
            state |= {name: torch.zeros(shapes[name]) for name in fresh}
            for name in fresh:
                if name.endswith(".0.weight"):
                    state[name].normal_(std=0.02, generator=generator)
            notes.append(f"{added}: not in the file; these conditions begin as zero")
    fitting.require_matching_shapes(
        state, shapes, sorted(shapes.keys() | state.keys(), key=fitting.make_natural_sort_key), _REMEDIES
    )
    return state, notes


def _interpolate_positions(positions: Tensor, count: int, notes: list[str]) -> Tensor:
    """Returns positions (1, M, D) of a square grid interpolated to another one, (1, count, D), and appends a note to
    `notes`. Returns them unchanged if the grid is the same, or if M is no square.
    """
    old, new = round(positions.shape[1] ** 0.5), round(count**0.5)
    if old == new or old * old != positions.shape[1]:
        return positions
    grid = positions.float().view(1, old, old, -1).permute(0, 3, 1, 2)  # (1, D, g, g)
    grid = F.interpolate(grid, size=(new, new), mode="bicubic", align_corners=False)
    notes.append(f"pos_embed: interpolated from {old} x {old} to {new} x {new} patches")
    return grid.flatten(2).transpose(1, 2).contiguous().to(positions.dtype)


def rename_to_diffusers(
    state: Mapping[str, Tensor], depth: int, label_rows: int, has_null_label: bool
) -> dict[str, Tensor]:
    """Returns our weights under the names of diffusers' DiTTransformer2DModel. Its label table has `label_rows` rows of
    labels and a last row, "no label".

    depth           number of blocks.
    label_rows      number of labels there. Rows for labels that our table lacks repeat "no label".
    has_null_label  whether our table ends with "no label"; if not, that row is zeros.
    """
    table = state[_CLASSES]
    classes, null = (table[:-1], table[-1:]) if has_null_label else (table, torch.zeros_like(table[:1]))
    state = {**state, _CLASSES: torch.cat((classes, null.expand(label_rows + 1 - len(classes), -1)))}
    renamed: dict[str, Tensor] = {}
    for name, diffusers_names in _iterate_own_and_diffusers_names(depth):
        value = state[name]
        parts = value.chunk(3) if ".qkv." in name else [value] * len(diffusers_names)
        renamed |= {other: part.detach().clone().contiguous() for other, part in zip(diffusers_names, parts)}
    return renamed


def rename_from_diffusers(
    state: Mapping[str, Tensor], diffusers_config: Mapping[str, Any], config: Config
) -> fitting.Fitted:
    """Returns the weights of a DiTTransformer2DModel under our names, for `adapt_weights`, and notes. diffusers_config:
    the content of its config.json.

    Raises ConfigError for another class, a field that differs from the recipe's, missing weights, or blocks whose
    embedders differ, since our network has one embedder for all blocks.
    """
    _require_same_config(diffusers_config, CLASSES, make_diffusers_dit_arguments(config))
    depth, unused, renamed = diffusers_config["num_layers"], dict(state), {}
    for name, diffusers_names in _iterate_own_and_diffusers_names(depth):
        missing = [other for other in diffusers_names if other not in unused]
        if missing:
            raise ConfigError(f"weights: {missing[0]} is missing, num_layers in config.json is {depth}; fetch it again")
        parts = {other: unused.pop(other) for other in diffusers_names}
        renamed[name] = torch.cat(list(parts.values())) if ".qkv." in name else _merge_equal_copies(parts)
    notes = fitting.describe_unused_weights(unused)
    grid = diffusers_config["sample_size"] // diffusers_config["patch_size"]
    renamed[_POSITIONS] = make_sincos_positions(renamed["x_embedder.proj.weight"].shape[0], grid, grid)[None]
    renamed[_CLASSES] = _remove_padding_rows(renamed[_CLASSES], config, notes)
    if config.time_freq == "official":
        notes.append(
            "time_freq=official: right for weights converted from published ones; those that diffusers has "
            "trained, or dstrain has exported, need model.time_freq=diffusers"
        )
    return renamed, notes


def rename_from_pixart(
    state: Mapping[str, Tensor], diffusers_config: Mapping[str, Any], config: Config
) -> fitting.Fitted:
    """Returns the weights of a PixArtTransformer2DModel under our names, for `adapt_weights`, and notes.
    diffusers_config: the content of its config.json. Raises ConfigError for another class, or a field that differs from
    the recipe's.
    """
    LAYOUTS["pixart"].require_config_fits_layout("pixart", config)
    _require_same_config(diffusers_config, PIXART_CLASSES, make_diffusers_pixart_arguments(config))
    size, scale = diffusers_config["sample_size"], diffusers_config.get("interpolation_scale")
    if scale is None:
        scale = max(size // 64, 1)  # as diffusers fills it in
    if scale != config.interpolation_scale:
        raise ConfigError(
            f"weights: interpolation_scale is {scale} by config.json (where silent, its sample_size // 64), and "
            f"{config.interpolation_scale} by model.interpolation_scale; make both equal"
        )
    reads_sizes = diffusers_config.get("use_additional_conditions")
    if reads_sizes is None:
        reads_sizes = size == 128  # as diffusers fills it in
    if reads_sizes and not (config.size_conditions and config.size_embedding == "pixart"):
        raise ConfigError(
            "weights: by config.json (use_additional_conditions) this network is told the size of pictures; write "
            "data.size_conditions=true and model.size_embedding=pixart"
        )
    depth, grid = diffusers_config["num_layers"], size // diffusers_config["patch_size"]
    return translate_weights_from_layout(state, "pixart", depth, grid, position_scale=config.interpolation_scale)


def project_text_states_by_weights(states: Tensor, projection_weights: Mapping[str, Tensor]) -> Tensor:
    """Maps a text encoder's states to tokens, (N, E) -> (N, D), by the two layers of text_projection=mlp, whose weights
    are in the state dict `projection_weights`.
    """
    first, last = (
        [projection_weights[f"text_tokens.{layer}.{kind}"].float() for kind in ("weight", "bias")]
        for layer in ("fc1", "fc2")
    )
    return F.linear(F.gelu(F.linear(states, *first), approximate="tanh"), *last)


def make_diffusers_pixart_arguments(config: Config) -> dict[str, Any]:
    """Returns the keyword arguments with which diffusers' PixArtTransformer2DModel builds the network of this config,
    all but interpolation_scale and use_additional_conditions.
    """
    return make_diffusers_dit_arguments(config) | {
        "norm_type": "ada_norm_single",
        "caption_channels": config.text_encodings_dim,
        "cross_attention_dim": config.get_network_shape()["hidden_size"],
    }


def _iterate_own_and_diffusers_names(depth: int) -> Iterator[tuple[str, list[str]]]:
    """Yields our name of each weight with a list of diffusers' names: three for a qkv, one for each block for an
    embedder's weight (each block there has a copy), and a single one for all other weights.
    """
    for kind in ("weight", "bias"):
        for name, other in _ENDS.items():
            yield f"{name}.{kind}", [f"{other}.{kind}"]
        for name, other in _EMBEDDERS.items():
            yield f"{name}.{kind}", [f"transformer_blocks.{block}.norm1.emb.{other}.{kind}" for block in range(depth)]
        for block in range(depth):
            inside = f"transformer_blocks.{block}"
            yield f"blocks.{block}.attn.qkv.{kind}", [f"{inside}.attn1.to_{letter}.{kind}" for letter in "qkv"]
            for name, other in _IN_BLOCKS.items():
                yield f"blocks.{block}.{name}.{kind}", [f"{inside}.{other}.{kind}"]
    yield (
        _CLASSES,
        [f"transformer_blocks.{block}.norm1.emb.class_embedder.embedding_table.weight" for block in range(depth)],
    )


def _merge_equal_copies(copies: dict[str, Tensor]) -> Tensor:
    """Returns the one value that all copies of a weight have; diffusers keeps a copy in each block. Raises ConfigError
    if two copies differ. copies: the copies by their names in diffusers.
    """
    first = next(iter(copies.values()))
    for name, copy in copies.items():
        if not torch.equal(first, copy):
            raise ConfigError(
                f"weights: {name} is not that of block 0: diffusers has trained the copies apart, and "
                "this network has one for all blocks; train with dstrain from weights whose copies agree"
            )
    return first


def _remove_padding_rows(label_table: Tensor, config: Config, notes: list[str]) -> Tensor:
    """Returns a label table without the rows that diffusers adds as padding: the rows from num_classes on, if all of
    them are equal. Returns a table without such rows unchanged.

    Keeps one of these rows, as "no label", if the model drops labels. If it does not, and the rows are not zeros,
    appends a note to `notes`.
    """
    count = config.num_classes
    if len(label_table) <= count or not torch.equal(
        label_table[count:], label_table[-1:].expand_as(label_table[count:])
    ):
        return label_table
    if config.class_dropout_prob:
        return torch.cat((label_table[:count], label_table[-1:]))
    if label_table[-1].any():
        notes.append(f"{_CLASSES}: the row of no label is left, since class_dropout_prob is 0")
    return label_table[:count]


def _require_same_config(diffusers_config: Mapping[str, Any], classes: Sequence[str], expected: dict[str, Any]) -> None:
    """Raises ConfigError if the content of diffusers' config.json is of none of the `classes`, differs from the
    `expected` fields, or has no valid sample_size. norm_eps and the value of sample_size may differ.
    """
    expected, size = dict(expected), diffusers_config.get("sample_size")
    del expected["norm_eps"]  # 1e-5 in folders that were converted from weights trained with 1e-6
    del expected["sample_size"]  # `adapt_weights` interpolates positions to another resolution
    if diffusers_config.get("out_channels", 0) is None:
        diffusers_config = {**diffusers_config, "out_channels": diffusers_config.get("in_channels")}
    fitting.require_matching_diffusers_config(diffusers_config, classes, "dit", expected, _FIELDS)
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"weights: sample_size is {size} in config.json, and no side of a picture; fetch it again")


def require_same_network(diffusers_config: Mapping[str, Any], config: Config) -> None:
    """Raises ConfigError if the network of an export by dstrain differs from the recipe's in a choice that shapes of
    weights do not show, such as the number of heads. diffusers_config: the content of its config.json.
    """
    theirs = {"interpolation_scale": 1, "base_depth": 0, **diffusers_config.get("network", {})}
    ours = json.loads(json.dumps(config.make_network_arguments()))  # with lists for tuples, as in the file
    choices = "num_heads", "time_freq", "block", "sines", "sines_within", "rope", "tokens", "interpolation_scale"
    for name in (*choices, "base_depth", "wide"):
        if theirs.get(name) != ours[name]:
            raise ConfigError(
                f"weights: {name} is {theirs.get(name)} in config.json, and {ours[name]} in the recipe's model: make "
                "both equal"
            )


def list_objective_differences(diffusers_config: Mapping[str, Any], config: Config) -> list[str]:
    """Returns one note, in a list, if the weights of an export by dstrain were trained for another objective or
    prediction than the recipe's; else []. diffusers_config: the content of its config.json.
    """
    learned = {"objective": "diffusion"}
    if theirs := diffusers_config.get("flow"):
        learned = {"objective": "flow"} | {f"flow.{name}": theirs.get(name) for name in _TARGETS}
    ours: dict[str, Any] = {"objective": config.objective}
    if config.objective == "flow":
        ours |= {f"flow.{name}": getattr(config.flow, name) for name in _TARGETS}
    different = [name for name, value in learned.items() if name in ours and ours[name] != value]
    if not different:
        return []
    found = ", ".join(f"model.{name}={learned[name]}" for name in different)
    return [
        f"target: by config.json these weights were trained with {found}, and their predictions are wrong for "
        f"model.{different[0]}={ours[different[0]]} until they are learned anew; to go on as they were, write {found}"
    ]


def describe_field_inexpressible_in_diffusers(config: Config) -> str | None:
    """Returns "FIELD: reason" for the first field that diffusers' DiTTransformer2DModel cannot express; None if it can
    hold the network. Always returns None for a model of texts, which other classes hold.
    """
    if config.reads_texts:
        return None
    names = "block", "sines", "sines_within", "interpolation_scale", "tokens", "patch_bottleneck", "wide", "internal"
    for name in names:
        if getattr(config, name) != type(config).model_fields[name].default:
            return f"{name}: it has the blocks and labels of DiT alone"
    if config.objective == "flow" and (config.flow.path, config.flow.prediction) != ("linear", "velocity"):
        return "flow: its schedulers take velocities of straight paths, into which the code turns the predictions"
    if config.time_freq != "diffusers":
        return "time_freq: it spaces the frequencies of its timesteps wider than the official network"
    dim = config.get_network_shape()["hidden_size"]
    if int(dim * config.mlp_ratio) != 4 * dim:
        return f"mlp_ratio: it is 4 there and {config.mlp_ratio:g} here"
    return None


def require_expressible_in_diffusers(config: Config) -> None:
    """Raises ConfigError if no pipeline can draw from an export of the model: if it draws clips, if it reads texts with
    other choices than PixArt's, or if it reads labels together with sizes or image embeddings.
    """
    if config.video is not None:
        raise ConfigError("video: the pipeline of an export draws images alone; take --format safetensors")
    if config.reads_texts:
        _require_expressible_by_pixart(config)
        return
    for name in ("embedding_dim", "size_conditions"):
        if getattr(config, name) != type(config).model_fields[name].default:
            raise ConfigError(f"{name}: the pipeline of an export takes labels alone; take --format safetensors")


def _require_expressible_by_pixart(config: Config) -> None:
    """Raises ConfigError for the first field of a model of texts that diffusers' PixArt pipeline or its transformer
    cannot express.
    """
    preset, fields = PRESETS["PixArt-XL/2"], type(config).model_fields
    for name in (*_PIXART_FIELDS, "block"):
        expected = preset.get(name, fields[name].default)
        if name == "block":
            expected = BlockChoices(**expected)
        if getattr(config, name) != expected:
            raise ConfigError(
                f"{name}: diffusers' PixArtTransformer2DModel has PixArt's blocks, texts and chain alone; take "
                "--format safetensors, or train with the choices of size PixArt-XL/2"
            )
    if config.learns_null_text:
        raise ConfigError(
            "null_text: this one is learned, and PixArt's is what its encoder makes of an empty text; train on for a "
            "while with model.null_text=encoder and init_from= this run, or take --format safetensors"
        )
    if config.size_conditions and (config.size_embedding != "pixart" or config.input_size != _TOLD_AT):
        raise ConfigError(
            f"data.size_conditions: diffusers' PixArtAlphaPipeline tells sizes to networks of latents of {_TOLD_AT} "
            "pixels with model.size_embedding=pixart alone; take --format safetensors"
        )
    if config.first_stage is None or config.latents.normalize != "scale" or config.first_stage.shift:
        raise ConfigError(
            "first_stage: diffusers' PixArtAlphaPipeline decodes latents by an autoencoder with one scale and no "
            "shift; name the one of the latents (model.first_stage.path), or take --format safetensors"
        )


def make_diffusers_dit_arguments(config: Config) -> dict[str, Any]:
    """Returns the keyword arguments with which diffusers' DiTTransformer2DModel builds the network of this config, all
    but the size of the label table.
    """
    shape = config.get_network_shape()
    return {
        "num_attention_heads": shape["num_heads"],
        "attention_head_dim": shape["hidden_size"] // shape["num_heads"],
        "in_channels": config.in_channels,
        "out_channels": config.in_channels * (1 + config.learn_sigma),
        "num_layers": shape["depth"],
        "attention_bias": True,
        "sample_size": config.input_size,
        "patch_size": shape["patch_size"],
        "activation_fn": "gelu-approximate",
        "norm_type": "ada_norm_zero",
        "norm_elementwise_affine": False,
        "norm_eps": 1e-6,
    }
