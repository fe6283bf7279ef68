"""The names that published transformers give their weights, and ours: one table a layout.

In a table a pattern of their names stands beside our name. Some networks count time from noise (0) to data (1), ours
from data to noise: `reverse_time` folds the difference into the first layer of the timestep's embedder, and the sign
of a velocity into the last layer, so that the network needs no switch. Tables of positions in a file are compared with
ours and left out.
"""

import re
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dstrain.nn.layers import timestep_frequencies
from dstrain.nn.positions import rotations, sincos_positions
from dstrain.recipe import ConfigError

_TIME = "t_embedder.mlp.0"
_HEADS = ("final_layer.linear", "base_layer.linear")
_TABLES = r"(\w*rope)\.freqs_(cos|sin)$"
TOLERANCE = 1e-5  # of tables that are computed in another precision
_NORMS = "queries and keys are normed as in PixArt-sigma's training code, which is not read here; take weights without"


class Layout(NamedTuple):
    """A published layout. Patterns match whole names; a group stands for the same text in ours."""

    marks: tuple[str, ...]
    """Names that its files have, by which it is known."""
    renamed: tuple[tuple[str, str], ...] = ()
    joined: tuple[tuple[str, tuple[str, ...], str], ...] = ()
    """Several of their weights that lie in one of ours, in order: pattern of the first's name, letters, our name."""
    prefix: str = ""
    from_noise: bool = False
    """Whether its time is 0 at the noise."""
    predicts_x: bool = False
    """Whether it predicts data, whose sign stays."""
    diffuses: bool = False
    """Whether it was trained by diffusion, to predict noise, and not as a flow."""
    left: tuple[tuple[str, str], ...] = ()
    """Patterns of weights that are left out, each with the reason."""
    refused: tuple[tuple[str, str], ...] = ()
    """Patterns of weights whose files are refused, each with the reason and the remedy."""
    computes_sines: bool = False
    """Whether its network computes the sines of positions, so that its files may leave them out."""

    def require_fields(self, name: str, config: Any) -> None:
        """Raises ConfigError if what a model's section learns is not what this layout's networks were trained for."""
        prediction = "x" if self.predicts_x else "velocity"
        fields = ("objective", "flow"), ("flow.time_scale", 1.0), ("flow.prediction", prediction)
        if self.diffuses:
            chain = ("diffusion.num_steps", 1000), ("diffusion.schedule", "linear"), ("diffusion.prediction", "eps")
            fields = ("objective", "diffusion"), *chain
        for field, needed in fields:
            if (found := attrgetter(field)(config)) != needed:
                raise ConfigError(
                    f"model.{field}={found}: weights of {name} were trained with {needed}; write model.{field}={needed}"
                )


LAYOUTS = {
    "jit": Layout(
        marks=("in_context_posemb", "x_embedder.proj1.weight"),
        renamed=(
            (r"x_embedder\.proj1\.(\w+)", r"x_embedder.proj.\1"),
            (r"x_embedder\.proj2\.(\w+)", r"x_embedder.wide.\1"),
            (r"in_context_posemb", r"y_tokens.tokens"),
        ),
        prefix="net.",
        from_noise=True,
        predicts_x=True,
    ),
    "raev2": Layout(
        marks=("t_embedder.learnable_tokens",),
        renamed=(
            (r"t_embedder\.learnable_tokens", r"t_tokens.tokens"),
            (r"ctx_embedder\.learnable_tokens", r"y_tokens.tokens"),
            (r"ctx_embedder\.(embedding_table\.weight)", r"y_embedder.\1"),
            (r"ctx_embedder\.(norm|proj)\.(\w+)", r"text_tokens.\1.\2"),
            (r"base_final_layer\.(.*)", r"base_layer.\1"),
            (r"repa_projector\.(\w+)", r"projectors.0.0.\1"),
        ),
        joined=(
            (r"(.*)\.attn\.q\.(\w+)", ("q", "k", "v"), r"\1.attn.qkv.\2"),
            (r"(.*)\.mlp\.w1\.(\w+)", ("w1", "w2"), r"\1.mlp.w12.\2"),
        ),
        predicts_x=True,
    ),
    "pixart": Layout(  # diffusers' PixArtTransformer2DModel
        marks=("adaln_single.linear.weight",),
        renamed=(
            (r"pos_embed\.proj\.(\w+)", r"x_embedder.proj.\1"),
            (r"adaln_single\.emb\.timestep_embedder\.linear_1\.(\w+)", r"t_embedder.mlp.0.\1"),
            (r"adaln_single\.emb\.timestep_embedder\.linear_2\.(\w+)", r"t_embedder.mlp.2.\1"),
            (r"adaln_single\.linear\.(\w+)", r"t_block.1.\1"),
            (r"adaln_single\.emb\.resolution_embedder\.linear_1\.(\w+)", r"s_embedder.sides.0.\1"),
            (r"adaln_single\.emb\.resolution_embedder\.linear_2\.(\w+)", r"s_embedder.sides.2.\1"),
            (r"adaln_single\.emb\.aspect_ratio_embedder\.linear_1\.(\w+)", r"s_embedder.ratio.0.\1"),
            (r"adaln_single\.emb\.aspect_ratio_embedder\.linear_2\.(\w+)", r"s_embedder.ratio.2.\1"),
            (r"caption_projection\.linear_([12])\.(\w+)", r"text_tokens.fc\1.\2"),
            (r"transformer_(blocks\.\d+)\.scale_shift_table", r"\1.adaLN_modulation.table"),
            (r"transformer_(blocks\.\d+)\.attn1\.to_out\.0\.(\w+)", r"\1.attn.proj.\2"),
            (r"transformer_(blocks\.\d+)\.attn2\.to_q\.(\w+)", r"\1.cross.q.\2"),
            (r"transformer_(blocks\.\d+)\.attn2\.to_out\.0\.(\w+)", r"\1.cross.proj.\2"),
            (r"transformer_(blocks\.\d+)\.ff\.net\.0\.proj\.(\w+)", r"\1.mlp.fc1.\2"),
            (r"transformer_(blocks\.\d+)\.ff\.net\.2\.(\w+)", r"\1.mlp.fc2.\2"),
            (r"scale_shift_table", r"final_layer.adaLN_modulation.table"),
            (r"proj_out\.(\w+)", r"final_layer.linear.\1"),
        ),
        joined=(
            (r"transformer_(.*)\.attn1\.to_q\.(\w+)", ("to_q", "to_k", "to_v"), r"\1.attn.qkv.\2"),
            (r"transformer_(.*)\.attn2\.to_k\.(\w+)", ("to_k", "to_v"), r"\1.cross.kv.\2"),
        ),
        refused=((r"transformer_blocks\.\d+\.attn[12]\.norm_[qk]\..*", _NORMS),),
        diffuses=True,
        computes_sines=True,
    ),
    "pixart_alpha": Layout(  # the names of its authors
        marks=("y_embedder.y_proj.fc1.weight",),
        renamed=(
            (r"y_embedder\.y_proj\.fc([12])\.(\w+)", r"text_tokens.fc\1.\2"),
            (r"csize_embedder\.mlp\.(.*)", r"s_embedder.sides.\1"),
            (r"ar_embedder\.mlp\.(.*)", r"s_embedder.ratio.\1"),
            (r"(blocks\.\d+|final_layer)\.scale_shift_table", r"\1.adaLN_modulation.table"),
            (r"(blocks\.\d+)\.cross_attn\.(q|kv)_linear\.(\w+)", r"\1.cross.\2.\3"),
            (r"(blocks\.\d+)\.cross_attn\.proj\.(\w+)", r"\1.cross.proj.\2"),
        ),
        left=((r"y_embedder\.y_embedding", "states of an empty text, which the text encoder computes"),),
        refused=((r"blocks\.\d+\.attn\.[qk]_norm\..*", _NORMS),),
        diffuses=True,
        computes_sines=True,
    ),
    "rae": Layout(
        marks=("s_embedder.proj.weight",),
        renamed=(
            (r"x_embedder\.(.*)", r"final_layer.x_embedder.\1"),
            (r"s_embedder\.(.*)", r"x_embedder.\1"),
            (r"s_projector\.(\w+)", r"final_layer.projector.\1"),
            (r"final_layer\.(.*)", r"final_layer.final_layer.\1"),
        ),
    ),
    "repa": Layout(marks=("projectors.0.0.weight",)),
    "lightningdit": Layout(marks=("feat_rope.freqs_cos",), from_noise=True),
    "sit": Layout(marks=("blocks.0.attn.qkv.weight",), from_noise=True),
}


def recognise_layout(names: Mapping[str, Tensor]) -> str | None:
    """Returns the layout whose marks are among the names of a file's weights; None: no layout's are."""
    for name, layout in LAYOUTS.items():
        if name != "sit" and all(layout.prefix + mark in names for mark in layout.marks):
            return name
    return None


def translate(
    state: Mapping[str, Tensor], name: str, depth: int, grid: int, head_dims: Sequence[int] = (), scale: int = 1
) -> tuple[dict[str, Tensor], list[str]]:
    """Returns a published state dict under our names, in our time and direction, and notes on what was left out.

    depth       number of blocks of the first trunk; a wide head's blocks follow them in RAE's files.
    grid        patches along a side, whose tables of positions the file's are compared with.
    head_dims   values of a head, of the trunk and of a wide head; none where nothing is rotated.
    scale       what places are divided by before their sines are taken.

    Raises ConfigError if a table of rotations is another one, or for weights that have no place here.
    """
    layout, notes = LAYOUTS[name], []
    unread = {key.removeprefix(layout.prefix).removeprefix("module."): value for key, value in state.items()}
    translated: dict[str, Tensor] = {}
    for pattern, letters, ours in layout.joined:
        for key in [key for key in unread if re.fullmatch(pattern, key)]:
            names = [key.replace(f".{letters[0]}.", f".{letter}.") for letter in letters]
            if missing := [part for part in names if part not in unread]:
                raise ConfigError(f"weights: {missing[0]} is missing beside {key}; fetch the file again")
            parts = [unread.pop(part) for part in names]
            translated[re.sub(pattern, ours, key)] = torch.cat(parts)
    for key, value in unread.items():
        if match := re.fullmatch(_TABLES, key):
            _require_table(key, value, match[2], grid, head_dims)
            notes.append(f"{key}: computed here, and equal to the file's")
            continue
        if reason := _find_reason(key, layout.refused):
            raise ConfigError(f"weights: {key}: {reason}")
        if reason := _find_reason(key, layout.left):
            notes.append(f"{key}: left out: {reason}")
            continue
        translated[_our_name(key, layout, depth)] = value
    if "x_embedder.wide.weight" in translated:
        translated["x_embedder.wide.weight"] = translated["x_embedder.wide.weight"].flatten(1)
    if translated.get("y_tokens.tokens", torch.empty(0)).ndim == 3:
        translated["y_tokens.tokens"] = translated["y_tokens.tokens"][0]
    if layout.computes_sines and "pos_embed" not in translated and "x_embedder.proj.weight" in translated:
        width = len(translated["x_embedder.proj.weight"])
        translated["pos_embed"] = sincos_positions(width, grid, grid, grid / scale)[None]
        notes.append(f"pos_embed: not in the file, and computed for {grid} x {grid} patches")
    if layout.from_noise:
        reverse_time(translated, negate=not layout.predicts_x)
        notes.append("time: reversed, by the weights of t_embedder" + ("" if layout.predicts_x else " and of the head"))
    return translated, notes


def translate_back(state: Mapping[str, Tensor], name: str, theirs: Sequence[str]) -> dict[str, Tensor]:
    """Returns our weights under a published layout's names, of which `theirs` are all that its network has."""
    layout, found = LAYOUTS[name], {}
    for pattern, letters, ours in layout.joined:
        for key in [key for key in theirs if re.fullmatch(pattern, key)]:
            parts = state[re.sub(pattern, ours, key)].chunk(len(letters))
            for letter, part in zip(letters, parts, strict=True):
                found[key.replace(f".{letters[0]}.", f".{letter}.")] = part.clone()
    return {key: found[key] if key in found else state[_our_name(key, layout, 0)].clone() for key in theirs}


def reverse_time(state: dict[str, Tensor], negate: bool) -> None:
    """Changes the weights of a network of time t into those of the same network of 1 - t. Twice, it changes nothing.

    The sinusoids of 1 - t are those of t reflected, a linear map, which goes into the layer that reads them. negate:
    the head's sign changes, too, as that of a velocity does.
    """
    weight = state[f"{_TIME}.weight"]
    frequencies = timestep_frequencies(weight.shape[1]).to(weight.device)
    cosines, sines = frequencies.cos(), frequencies.sin()
    of_cosines, of_sines = weight.double().chunk(2, dim=1)
    turned = of_cosines * cosines + of_sines * sines, of_cosines * sines - of_sines * cosines
    state[f"{_TIME}.weight"] = torch.cat(turned, dim=1).to(weight.dtype)
    for name in (f"{head}.{kind}" for head in _HEADS for kind in ("weight", "bias")):
        if negate and name in state:
            state[name] = -state[name]


def _find_reason(key: str, reasons: Sequence[tuple[str, str]]) -> str | None:
    """Returns the reason of the first pattern that the name of a weight matches."""
    return next((reason for pattern, reason in reasons if re.fullmatch(pattern, key)), None)


def _our_name(key: str, layout: Layout, depth: int) -> str:
    if layout is LAYOUTS["rae"] and (match := re.fullmatch(r"blocks\.(\d+)\.(.*)", key)) and int(match[1]) >= depth:
        return f"final_layer.blocks.{int(match[1]) - depth}.{match[2]}"
    for pattern, ours in layout.renamed:
        if re.fullmatch(pattern, key):
            return re.sub(pattern, ours, key)
    return key


def _require_table(key: str, table: Tensor, kind: str, grid: int, head_dims: Sequence[int]) -> None:
    """Raises ConfigError if a file's table of rotations is not the one that is computed here."""
    if table.shape[-1] not in head_dims:
        raise ConfigError(
            f"weights: {key} turns heads of {table.shape[-1]} values, and this network's have "
            f"{' and '.join(map(str, head_dims)) or 'no rotation'}; set block.rope and num_heads to those the file was "
            "made with"
        )
    ours = rotations((grid, grid), table.shape[-1], after=max(len(table) - grid * grid, 0))[0, int(kind == "sin")]
    if ours.shape != table.shape or not torch.allclose(ours, table.float(), atol=TOLERANCE):
        raise ConfigError(
            f"weights: {key} {tuple(table.shape)} is not the table of {grid} x {grid} patches; set image_size and "
            "patch_size to those the file was made with"
        )
