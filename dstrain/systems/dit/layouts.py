"""The names that published transformers give their weights, and ours: one table for each layout.

In a table a pattern of their names stands beside our name. Some networks count time from noise (0) to data (1), ours
from data to noise: `reverse_time_in_weights` puts the difference into the first layer of the timestep's embedder, and
the sign of a velocity into the last layer, so that the network needs no switch. Tables of positions in a file are
compared with ours and left out.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dstrain.nn.layers import compute_timestep_frequencies
from dstrain.nn.positions import make_rotary_embedding, make_sincos_positions
from dstrain.recipe import ConfigError
from dstrain.recipe.patterns import is_adapter_weight

_TIME = "t_embedder.mlp.0"
_HEADS = ("final_layer.linear", "base_layer.linear")
_TABLES = r"(\w*rope)\.freqs_(cos|sin)$"
TOLERANCE = 1e-5  # of tables that are computed in another precision
_NORMS = "queries and keys are normed as in PixArt-sigma's training code, which is not read here; take weights without"


class Layout(NamedTuple):
    """How the weights of a published network are named, and what it was trained for. Patterns are regular expressions
    that match a whole name; their groups are filled into our name.
    """

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
    time_scale: float = 1.0
    """What times in [0, 1] are multiplied by before its network sees them."""
    joint: bool = False
    """Whether its blocks are joint ones."""
    swapped: tuple[str, ...] = ()
    """Our names of layers that give scale and shift there, and shift and scale here; {last} is the last block."""

    def require_config_fits_layout(self, layout_name: str, config: Any) -> None:
        """Raises ConfigError if a field of the model's section `config` differs from what networks of this layout were
        trained with: objective, prediction, chain, scale of times, joint blocks. layout_name: the layout's, for the
        message.
        """
        prediction = "x" if self.predicts_x else "velocity"
        fields = ("objective", "flow"), ("flow.time_scale", self.time_scale), ("flow.prediction", prediction)
        if self.diffuses:
            chain = ("diffusion.num_steps", 1000), ("diffusion.schedule", "linear"), ("diffusion.prediction", "eps")
            fields = ("objective", "diffusion"), *chain
        if self.joint:
            fields = ("block.joint", True), *fields
        for field, needed in fields:
            if (found := attrgetter(field)(config)) != needed:
                raise ConfigError(
                    f"model.{field}={found}: weights of {layout_name} were trained with {needed}; write "
                    f"model.{field}={needed}"
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
    "sd3": Layout(  # diffusers' SD3Transformer2DModel
        marks=("time_text_embed.text_embedder.linear_1.weight",),
        renamed=(
            (r"pos_embed\.proj\.(\w+)", r"x_embedder.proj.\1"),
            (r"pos_embed\.pos_embed", r"pos_embed"),
            (r"time_text_embed\.timestep_embedder\.linear_1\.(\w+)", r"t_embedder.mlp.0.\1"),
            (r"time_text_embed\.timestep_embedder\.linear_2\.(\w+)", r"t_embedder.mlp.2.\1"),
            (r"time_text_embed\.text_embedder\.linear_1\.(\w+)", r"p_embedder.mlp.0.\1"),
            (r"time_text_embed\.text_embedder\.linear_2\.(\w+)", r"p_embedder.mlp.2.\1"),
            (r"context_embedder\.(\w+)", r"text_tokens.proj.\1"),
            (r"transformer_(blocks\.\d+)\.attn\.to_out\.0\.(\w+)", r"\1.image.attn.proj.\2"),
            (r"transformer_(blocks\.\d+)\.attn\.to_add_out\.(\w+)", r"\1.text.attn.proj.\2"),
            (r"transformer_(blocks\.\d+)\.attn\.norm_([qk])\.weight", r"\1.image.attn.\2_norm.weight"),
            (r"transformer_(blocks\.\d+)\.attn\.norm_added_([qk])\.weight", r"\1.text.attn.\2_norm.weight"),
            (r"transformer_(blocks\.\d+)\.attn2\.to_out\.0\.(\w+)", r"\1.attn2.proj.\2"),
            (r"transformer_(blocks\.\d+)\.attn2\.norm_([qk])\.weight", r"\1.attn2.\2_norm.weight"),
            (r"transformer_(blocks\.\d+)\.norm1\.linear\.(\w+)", r"\1.image.adaLN_modulation.1.\2"),
            (r"transformer_(blocks\.\d+)\.norm1_context\.linear\.(\w+)", r"\1.text.adaLN_modulation.1.\2"),
            (r"transformer_(blocks\.\d+)\.ff\.net\.0\.proj\.(\w+)", r"\1.image.mlp.fc1.\2"),
            (r"transformer_(blocks\.\d+)\.ff\.net\.2\.(\w+)", r"\1.image.mlp.fc2.\2"),
            (r"transformer_(blocks\.\d+)\.ff_context\.net\.0\.proj\.(\w+)", r"\1.text.mlp.fc1.\2"),
            (r"transformer_(blocks\.\d+)\.ff_context\.net\.2\.(\w+)", r"\1.text.mlp.fc2.\2"),
            (r"norm_out\.linear\.(\w+)", r"final_layer.adaLN_modulation.1.\1"),
            (r"proj_out\.(\w+)", r"final_layer.linear.\1"),
        ),
        joined=(
            (r"transformer_(.*)\.attn\.to_q\.(\w+)", ("to_q", "to_k", "to_v"), r"\1.image.attn.qkv.\2"),
            (
                r"transformer_(.*)\.attn\.add_q_proj\.(\w+)",
                ("add_q_proj", "add_k_proj", "add_v_proj"),
                r"\1.text.attn.qkv.\2",
            ),
            (r"transformer_(.*)\.attn2\.to_q\.(\w+)", ("to_q", "to_k", "to_v"), r"\1.attn2.qkv.\2"),
        ),
        joint=True,
        time_scale=1000.0,
        swapped=("blocks.{last}.text.adaLN_modulation.1", "final_layer.adaLN_modulation.1"),
    ),
    "sd3_authors": Layout(  # Stability AI's, in one file with what it draws by
        marks=("joint_blocks.0.x_block.attn.qkv.weight",),
        renamed=(
            (r"context_embedder\.(\w+)", r"text_tokens.proj.\1"),
            (r"y_embedder\.mlp\.([02])\.(\w+)", r"p_embedder.mlp.\1.\2"),
            (r"joint_(blocks\.\d+)\.x_block\.attn2\.ln_([qk])\.weight", r"\1.attn2.\2_norm.weight"),
            (r"joint_(blocks\.\d+)\.x_block\.attn2\.(.*)", r"\1.attn2.\2"),
            (r"joint_(blocks\.\d+)\.x_block\.attn\.ln_([qk])\.weight", r"\1.image.attn.\2_norm.weight"),
            (r"joint_(blocks\.\d+)\.context_block\.attn\.ln_([qk])\.weight", r"\1.text.attn.\2_norm.weight"),
            (r"joint_(blocks\.\d+)\.x_block\.(.*)", r"\1.image.\2"),
            (r"joint_(blocks\.\d+)\.context_block\.(.*)", r"\1.text.\2"),
        ),
        prefix="model.diffusion_model.",
        left=(
            (r"first_stage_model\..*", "the autoencoder, which model.first_stage.path names"),
            (r"text_encoders\..*", "the text encoders, which model.text_encoder names"),
        ),
        joint=True,
        time_scale=1000.0,
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


def recognise_layout(state: Mapping[str, Tensor]) -> str | None:
    """Returns the name of the published layout that a file's weights have, found by the weights' names; None if no
    layout is recognised. Never returns "sit": SiT's files have the same names as DiT's.
    """
    for name, layout in LAYOUTS.items():
        for prefix in (layout.prefix, ""):
            if name != "sit" and all(prefix + mark in state for mark in layout.marks):
                return name
    return None


def translate_weights_from_layout(
    state: Mapping[str, Tensor],
    layout_name: str,
    depth: int,
    grid: int,
    head_dims: Sequence[int] = (),
    position_scale: int = 1,
) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the weights of a published network under our names, and notes on what was changed or left out. If the
    network's time is 0 at the noise, changes the weights so that time is 0 at the data.

    layout_name     a key of LAYOUTS.
    depth           number of blocks of the first trunk; in RAE's files those of the wide head follow them.
    grid            patches along a side, for the positions.
    head_dims       widths of an attention head, in the trunk and in a wide head; () without rotary positions.
    position_scale  what positions are divided by before their sines are taken.

    Raises ConfigError if a table of rotations differs from ours, if a part of a joined weight is missing, or for
    weights that the layout refuses.
    """
    layout, notes, left = LAYOUTS[layout_name], [], Counter()
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
            _require_same_rotation_table(key, value, match[2], grid, head_dims)
            notes.append(f"{key}: computed here, and equal to the file's")
            continue
        if reason := _find_exclusion_reason(key, layout.refused):
            raise ConfigError(f"weights: {key}: {reason}")
        if reason := _find_exclusion_reason(key, layout.left):
            left[reason] += 1
            if left[reason] == 1:
                notes.append(f"{key}: left out: {reason}")
            continue
        translated[_translate_weight_name_from_layout(key, layout, depth)] = value
    _swap_scale_and_shift(translated, layout, depth)
    notes += [f"{count} weights are left out: {reason}" for reason, count in left.items() if count > 1]
    if "x_embedder.wide.weight" in translated:
        translated["x_embedder.wide.weight"] = translated["x_embedder.wide.weight"].flatten(1)
    if translated.get("y_tokens.tokens", torch.empty(0)).ndim == 3:
        translated["y_tokens.tokens"] = translated["y_tokens.tokens"][0]
    if layout.computes_sines and "pos_embed" not in translated and "x_embedder.proj.weight" in translated:
        width = len(translated["x_embedder.proj.weight"])
        translated["pos_embed"] = make_sincos_positions(width, grid, grid, grid / position_scale)[None]
        notes.append(f"pos_embed: not in the file, and computed for {grid} x {grid} patches")
    if layout.from_noise:
        reverse_time_in_weights(translated, negate_output=not layout.predicts_x)
        notes.append("time: reversed, by the weights of t_embedder" + ("" if layout.predicts_x else " and of the head"))
    return translated, notes


def translate_weights_to_layout(
    state: Mapping[str, Tensor], layout_name: str, published_names: Sequence[str], depth: int = 0
) -> dict[str, Tensor]:
    """Returns our weights under the names of a published layout, the reverse of `translate_weights_from_layout`.
    published_names: the names of all weights of the published network. depth: number of blocks, needed only if the
    layout has `swapped` layers.
    """
    layout, found, state = LAYOUTS[layout_name], {}, dict(state)
    _swap_scale_and_shift(state, layout, depth)
    for pattern, letters, ours in layout.joined:
        for key in [key for key in published_names if re.fullmatch(pattern, key)]:
            parts = state[re.sub(pattern, ours, key)].chunk(len(letters))
            for letter, part in zip(letters, parts, strict=True):
                found[key.replace(f".{letters[0]}.", f".{letter}.")] = part.clone()
    return {
        key: found[key] if key in found else state[_translate_weight_name_from_layout(key, layout, 0)].clone()
        for key in published_names
    }


def translate_adapters_to_layout(
    state: Mapping[str, Tensor], layout_name: str, published_names: Sequence[str], depth: int = 0
) -> dict[str, Tensor]:
    """Returns the LoRA adapters in a state dict under the names of a published layout. The arguments are those of
    `translate_weights_to_layout`. If the published network splits one of our layers into several, each of the several
    gets the whole lora_A and only its own rows of lora_B.

    Raises ConfigError for an adapter of a layer that the published network does not have.
    """
    layers = [key.removesuffix(".lora_A.weight") for key in state if key.endswith(".lora_A.weight")]
    numbers = {f"{layer}.weight": number for number, layer in enumerate(layers)}
    # In the place of each weight stands for every row the number of its layer, or -1 without an adapter, and its own.
    rows = {
        key: torch.stack((torch.full((len(value),), numbers.get(key, -1)), torch.arange(len(value))), dim=1)
        for key, value in state.items()
        if not is_adapter_weight(key)
    }
    found, left = {}, set(range(len(layers)))
    for key, moved in translate_weights_to_layout(rows, layout_name, published_names, depth).items():
        if (number := int(moved[0, 0])) >= 0:
            left.discard(number)
            layer = key.removesuffix(".weight")
            found[f"{layer}.lora_A.weight"] = state[f"{layers[number]}.lora_A.weight"].clone()
            found[f"{layer}.lora_B.weight"] = state[f"{layers[number]}.lora_B.weight"][moved[:, 1]]
    if left:
        raise ConfigError(
            f"model.lora: the adapter of {layers[min(left)]} has no place in the layout {layout_name}; take --format "
            "peft, whose names are our network's, or --format diffusers, which merges the adapters"
        )
    return found


def _swap_scale_and_shift(state: dict[str, Tensor], layout: Layout, depth: int) -> None:
    """Swaps, in place, scale and shift in the layers that the layout lists as `swapped`. A second call undoes the
    first. depth: number of blocks.
    """
    for layer in layout.swapped:
        for name in (f"{layer.format(last=depth - 1)}.{kind}" for kind in ("weight", "bias")):
            if name in state:
                first, second = state[name].chunk(2)
                state[name] = torch.cat((second, first))


def reverse_time_in_weights(state: dict[str, Tensor], negate_output: bool) -> None:
    """Changes, in place, the weights of a network that takes time t, so that it computes the same from time 1 - t. A
    second call undoes the first. negate_output: whether to change the sign of the output, too, as velocities need.
    """
    weight = state[f"{_TIME}.weight"]
    frequencies = compute_timestep_frequencies(weight.shape[1]).to(weight.device)
    cosines, sines = frequencies.cos(), frequencies.sin()
    of_cosines, of_sines = weight.double().chunk(2, dim=1)
    turned = of_cosines * cosines + of_sines * sines, of_cosines * sines - of_sines * cosines
    state[f"{_TIME}.weight"] = torch.cat(turned, dim=1).to(weight.dtype)
    for name in (f"{head}.{kind}" for head in _HEADS for kind in ("weight", "bias")):
        if negate_output and name in state:
            state[name] = -state[name]


def _find_exclusion_reason(weight_name: str, patterns_and_reasons: Sequence[tuple[str, str]]) -> str | None:
    """Returns the reason from the first (pattern, reason) pair whose pattern matches `weight_name`; None if none
    matches.
    """
    return next((reason for pattern, reason in patterns_and_reasons if re.fullmatch(pattern, weight_name)), None)


def _translate_weight_name_from_layout(key: str, layout: Layout, depth: int) -> str:
    """Returns our name for the weight that a layout calls `key`; `key` itself if both names are the same. depth: number
    of blocks of the first trunk.
    """
    if layout is LAYOUTS["rae"] and (match := re.fullmatch(r"blocks\.(\d+)\.(.*)", key)) and int(match[1]) >= depth:
        return f"final_layer.blocks.{int(match[1]) - depth}.{match[2]}"
    for pattern, ours in layout.renamed:
        if re.fullmatch(pattern, key):
            return re.sub(pattern, ours, key)
    return key


def _require_same_rotation_table(key: str, table: Tensor, cos_or_sin: str, grid: int, head_dims: Sequence[int]) -> None:
    """Raises ConfigError if a file's table of rotations differs from the one that our network computes, or is for heads
    of another width. cos_or_sin: "cos" or "sin", what the table holds.
    """
    if table.shape[-1] not in head_dims:
        raise ConfigError(
            f"weights: {key} turns heads of {table.shape[-1]} values, and this network's have "
            f"{' and '.join(map(str, head_dims)) or 'no rotation'}; set block.rope and num_heads to those the file was "
            "made with"
        )
    ours = make_rotary_embedding((grid, grid), table.shape[-1], after=max(len(table) - grid * grid, 0))[
        0, int(cos_or_sin == "sin")
    ]
    if ours.shape != table.shape or not torch.allclose(ours, table.float(), atol=TOLERANCE):
        raise ConfigError(
            f"weights: {key} {tuple(table.shape)} is not the table of {grid} x {grid} patches; set image_size and "
            "patch_size to those the file was made with"
        )
