"""Stable Diffusion 3 (Esser et al. 2024) as choices of a DiT: reads its files, and exports a pipeline of diffusers."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dstrain.encoders.joined_text import JoinedTextEncoder
from dstrain.nn import fitting
from dstrain.recipe import ConfigError
from dstrain.systems.dit.config import Config
from dstrain.systems.dit.layouts import LAYOUTS, translate_weights_from_layout, translate_weights_to_layout
from dstrain.systems.dit.network import DiT
from dstrain.systems.dit.presets import PRESETS

CLASS = "SD3Transformer2DModel"
_POSITIONS = "pos_embed"
_TOLERANCE = 1e-4  # of positions that are computed in float32; other spacings differ by 1e-2
# Fields of config.json -> the recipe's that decide them.
_FIELDS = {
    "patch_size": "patch_size",
    "num_layers": "depth",
    "num_attention_heads": "num_heads",
    "attention_head_dim": "hidden_size / num_heads",
    "caption_projection_dim": "hidden_size",
    "in_channels": "in_channels",
    "out_channels": "in_channels",
    "joint_attention_dim": "text_encodings_dim",
    "pooled_projection_dim": "text_pooled_dim",
    "pos_embed_max_size": "sines_within",
    "sample_size": "sines_within, whose second number is sample_size / patch_size",
    "dual_attention_layers": "block.dual",
    "qk_norm": "block.qk_norm",
}
_CHOICES = (  # of a model that the class can hold
    "objective",
    "learn_sigma",
    "text_projection",
    "mlp_ratio",
    "time_freq",
    "tokens",
    "internal",
    "embedding_dim",
    "size_conditions",
)


def make_diffusers_sd3_arguments(config: Config) -> dict[str, Any]:
    """Returns the keyword arguments with which diffusers' SD3Transformer2DModel builds the network of this config."""
    shape, (most, base) = config.get_network_shape(), config.sines_within or (0, 0)
    return {
        "sample_size": base * shape["patch_size"],
        "patch_size": shape["patch_size"],
        "in_channels": config.in_channels,
        "num_layers": shape["depth"],
        "attention_head_dim": shape["hidden_size"] // shape["num_heads"],
        "num_attention_heads": shape["num_heads"],
        "joint_attention_dim": config.text_encodings_dim,
        "caption_projection_dim": shape["hidden_size"],
        "pooled_projection_dim": config.text_pooled_dim,
        "out_channels": config.in_channels,
        "pos_embed_max_size": most,
        "dual_attention_layers": tuple(range(config.block.dual)),
        "qk_norm": "rms_norm" if config.block.qk_norm == "rms" else None,
    }


def rename_from_diffusers(
    state: Mapping[str, Tensor], diffusers_config: Mapping[str, Any], config: Config, network: DiT
) -> fitting.Fitted:
    """Returns the weights of an SD3Transformer2DModel under our names, for `adapt_weights`, and notes.
    diffusers_config: the content of its config.json. Raises ConfigError for a field that differs from the recipe's, or
    that is unknown here.
    """
    LAYOUTS["sd3"].require_config_fits_layout("sd3", config)
    expected = make_diffusers_sd3_arguments(config)
    if unknown := sorted(name for name in diffusers_config if name not in expected and not name.startswith("_")):
        raise ConfigError(
            f"weights: config.json has {unknown[0]}={diffusers_config[unknown[0]]}, which is not read here: the "
            "network may compute otherwise; take weights without it"
        )
    # diffusers leaves out what older files do not have.
    found = {"qk_norm": None, "dual_attention_layers": (), **diffusers_config}
    fitting.require_matching_diffusers_config(found, (CLASS,), "dit", expected, _FIELDS)
    return crop_positions_to_grid(
        *translate_weights_from_layout(state, "sd3", len(network.blocks), network.grid), network
    )


def crop_positions_to_grid(state: dict[str, Tensor], notes: list[str], network: DiT) -> fitting.Fitted:
    """Returns the state dict with positions for the network's own patches, cut from the middle of the file's larger
    square, and `notes` with one more note. Returns both arguments unchanged if sines_within is not set, or if the file
    has no positions.

    Raises ConfigError if the side of the file's square is not the one that sines_within gives.
    """
    table, grid = state.get(_POSITIONS), network.grid
    if network.sines_within is None or table is None:
        return state, notes
    most = math.isqrt(table.shape[1])
    if most != network.sines_within[0]:
        raise ConfigError(
            f"weights: positions in the file are those of {most} x {most} patches, and of {network.sines_within[0]} by "
            f"model.sines_within; set its first number to {most}"
        )
    top = (most - grid) // 2
    cut = table.view(most, most, -1)[top : top + grid, top : top + grid].reshape(1, grid * grid, -1)
    computed = network.compute_sincos_position_embeddings(grid, grid)[None]
    note = f"{_POSITIONS}: {grid} x {grid} patches in the middle of the file's {most} x {most}"
    if torch.allclose(cut.float(), computed, rtol=0, atol=_TOLERANCE):
        return state | {_POSITIONS: computed}, [*notes, f"{note}, equal to those computed here"]
    note += "; they are not those computed here, which pictures of other sizes would see (data.buckets)"
    return state | {_POSITIONS: cut.clone()}, [*notes, note]


def require_expressible_in_diffusers(config: Config) -> None:
    """Raises ConfigError for the first field of a model with joint blocks that diffusers' StableDiffusion3Pipeline
    cannot express.
    """
    preset, fields = PRESETS["SD3-medium"], type(config).model_fields
    for name in _CHOICES:
        if getattr(config, name) != preset.get(name, fields[name].default):
            raise ConfigError(
                f"{name}: diffusers' {CLASS} has SD3's blocks, texts and flow alone; take --format safetensors, or "
                "train with the choices of size SD3-medium"
            )
    if config.block.qk_norm == "layer":
        raise ConfigError(f"block.qk_norm: diffusers' {CLASS} has norms by rms or none; take --format safetensors")
    if config.learns_null_text or config.text_encoder is None:
        raise ConfigError(
            "null_text: diffusers' StableDiffusion3Pipeline takes the encoders' empty text; name them "
            "(model.text_encoder), train on for a while with model.null_text=encoder and init_from= this run, or take "
            "--format safetensors"
        )
    if config.sines_within is None or not config.text_pooled_dim:
        raise ConfigError(
            f"{'sines_within' if config.text_pooled_dim else 'text_pooled_dim'}: diffusers' {CLASS} has one; take "
            "--format safetensors"
        )
    if config.first_stage is None or config.latents.normalize != "scale":
        raise ConfigError(
            "first_stage: diffusers' StableDiffusion3Pipeline decodes latents by an autoencoder with one scale and "
            "shift; name the one of the latents (model.first_stage.path), or take --format safetensors"
        )


def save_pipeline(config: Config, network: DiT, vae: Any, scheduler: Any, folder: Path) -> None:
    """Writes a StableDiffusion3Pipeline into `folder`: the network, the autoencoder `vae`, the scheduler, and the text
    encoders that model.text_encoder names.
    """
    from diffusers import StableDiffusion3Pipeline

    texts = JoinedTextEncoder(config.text_encoder, config.max_text_len)
    (first, second), (tokenizer, tokenizer_2, *more) = texts.clips, texts.tokenizers
    vae.register_to_config(shift_factor=vae.config.shift_factor or 0.0)
    transformer = _convert_to_diffusers_transformer(config, network)
    folder.mkdir(parents=True, exist_ok=True)
    StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=scheduler,
        vae=vae,
        text_encoder=first,
        tokenizer=tokenizer,
        text_encoder_2=second,
        tokenizer_2=tokenizer_2,
        text_encoder_3=texts.t5,
        tokenizer_3=more[0] if more else None,
    ).save_pretrained(folder)


def build_transformer_on_meta(config: Config) -> nn.Module:
    """Returns an SD3Transformer2DModel for `config` on torch's meta device: its weights have shapes but no values."""
    from diffusers import SD3Transformer2DModel

    with torch.device("meta"):
        return SD3Transformer2DModel(**make_diffusers_sd3_arguments(config))


def _convert_to_diffusers_transformer(config: Config, network: DiT) -> nn.Module:
    """Converts the trained network to an SD3Transformer2DModel. Its table has the sines of a square of
    sines_within[0] x sines_within[0] patches, in whose middle are the network's own positions.
    """
    transformer = build_transformer_on_meta(config)
    state = {name: value.float().cpu() for name, value in network.state_dict().items()}
    most, grid = config.sines_within[0], network.grid
    table, top = network.compute_sincos_position_embeddings(most, most).view(most, most, -1), (most - grid) // 2
    table[top : top + grid, top : top + grid] = state[_POSITIONS].view(grid, grid, -1)
    state[_POSITIONS] = table.flatten(0, 1)[None]
    state = translate_weights_to_layout(state, "sd3", list(transformer.state_dict()), len(network.blocks))
    transformer.load_state_dict(state, assign=True)
    return transformer


def predict_with_exported_transformer(
    exported: nn.Module, x: Tensor, t: Tensor, text: Tensor, pooled_dim: int
) -> Tensor:
    """Returns the prediction (B, C, H, W) of an SD3Transformer2DModel for inputs x at times t. text: as our network
    reads it, (B, L, E), with `pooled_dim` values of the pooled vector at the start of its first row.
    """
    states, pooled = text[:, 1:].float(), text[:, 0, :pooled_dim].float()
    return exported(x, encoder_hidden_states=states, pooled_projections=pooled, timestep=t).sample
