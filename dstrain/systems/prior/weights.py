"""Reads the statistics of image embeddings, and fits published weights to the network of a prior."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dstrain.diffusion import schedule
from dstrain.nn import fitting
from dstrain.recipe import ConfigError
from dstrain.systems.prior.config import Config

# Pattern of a weight's name -> fields of the recipe that decide its shape or presence; the first match counts.
_REMEDIES = (
    (r"^null_text", "text_cond_drop_prob (0 leaves the null text out), max_text_len and text_embed_dim"),
    (r"^self_cond", "self_cond"),
    (r"^norm_in", "norm_in"),
    (r"^embedding_proj_norm", "embedding_proj_norm"),
    (r"^encoder_hidden_states_proj|^positional", "max_text_len, text_encodings_dim, heads and dim_head"),
    (r"^embedding_proj", "text_embed_dim, heads and dim_head"),
    (r"^proj_", "image_embed_dim, heads and dim_head"),
    (r"^prd", "heads and dim_head (a file without it has no learned query, and is of another kind)"),
    (r"", "depth, heads and dim_head"),
)
_LUCIDRAINS_REMEDIES = (
    (r"^null_|^to_time", "image_embed_dim, text_cond_drop_prob, max_text_len, timesteps and lucidrains.timestep_table"),
    (r"init_norm", "image_embed_dim and norm_in"),
    (r"transformer\.norm", "image_embed_dim and lucidrains.norm_out"),
    (r"project_out", "image_embed_dim and lucidrains.final_proj"),
    (r"layers\.\d+\.1", "depth, lucidrains.normformer and lucidrains.ff_mult"),
    (r"", "image_embed_dim, depth, heads and dim_head"),
)


def read_embedding_statistics(config: Config) -> tuple[Tensor, Tensor]:
    """Returns the mean and standard deviation, float32 (D,) each, by which image embeddings are normalized. Reads them
    from the file that image_embed_stats names. If it names none, the mean is 0 and the deviation 1 / image_embed_scale.

    Raises ConfigError if the file cannot be read, lacks one of the two, has another width, or has a standard deviation
    that is not above 0.
    """
    dim = config.image_embed_dim
    if config.image_embed_stats is None:
        return torch.zeros(dim), torch.full((dim,), 1 / (config.image_embed_scale or dim**0.5))
    path = Path(config.image_embed_stats)
    names, values = ("clip_mean", "clip_std"), {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        try:
            with safe_open(file, "pt") as content:
                values |= {name: content.get_tensor(name).float().flatten() for name in names if name in content.keys()}
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"model.image_embed_stats: {file} is no readable safetensors file ({error})") from None
    for name in names:
        if name not in values:
            raise ConfigError(
                f"model.image_embed_stats: {path} holds no {name}; name a safetensors file with clip_mean and "
                "clip_std, such as that of a diffusers prior"
            )
        if len(values[name]) != dim:
            raise ConfigError(
                f"model.image_embed_stats: {name} in {path} is {len(values[name])} wide, image_embed_dim is {dim}"
            )
    if not bool((values["clip_std"] > 0).all()):
        raise ConfigError(f"model.image_embed_stats: clip_std in {path} is not above 0 everywhere; leave it out")
    return values["clip_mean"], values["clip_std"]


def adapt_weights(
    state: dict[str, Tensor], network: nn.Module, config: Config, mean: Tensor, std: Tensor
) -> fitting.Fitted:
    """Returns a state dict that fits `network`, and notes on what was changed. Reads only names and shapes of the
    network. state: the weights in a file of diffusers or DALLE2-pytorch. mean, std: (D,) each, by which the recipe
    normalizes image embeddings.

    Of a prior of diffusers: leaves out clip_mean and clip_std, which must equal `mean` and `std`, except where clip_std
    is all zeros. Null texts, and the layer that reads the previous prediction, begin at 0 if the file lacks them.

    Raises ConfigError if the file is a prior of DALLE2-pytorch and the recipe has no model.lucidrains, or the reverse,
    and for the first other difference, with both sides and the remedy.
    """
    is_lucidrains = any("causal_transformer." in name for name in state)
    if config.lucidrains is not None:
        if not is_lucidrains:
            raise ConfigError(
                "weights: the file is no prior of DALLE2-pytorch: give one, or leave model.lucidrains "
                "out where it is one of diffusers"
            )
        return _adapt_lucidrains_weights(state, network, config)
    if is_lucidrains:
        raise ConfigError(
            "weights: the file is a prior of DALLE2-pytorch: write model.lucidrains={} and the sizes of "
            "its config, with what differs from the original's defaults (docs/systems/prior.md)"
        )
    shapes = fitting.collect_weight_shapes(network)
    state, notes = dict(state), []
    of_file = [state.pop(name, None) for name in ("clip_mean", "clip_std")]
    if of_file[1] is not None and bool(of_file[1].any()):
        if not all(
            a.numel() == len(b) and torch.allclose(a.float().flatten(), b, rtol=1e-3, atol=1e-5)
            for a, b in zip(of_file, (mean, std))
        ):
            raise ConfigError(
                "weights: the file's clip_mean and clip_std are not the recipe's scale of image "
                "embeddings; set model.image_embed_stats to the file, and model.normalize_embeds to what "
                "it was made with"
            )
        notes.append("clip_mean, clip_std: as in the recipe")
    elif of_file[1] is not None:
        notes.append("clip_mean, clip_std: not set in the file; image embeddings are scaled by the recipe")
    for name in shapes.keys() - state.keys():
        if name.startswith(("null_text_", "self_cond_proj")):
            state[name] = torch.zeros(shapes[name])
            notes.append(
                f"{name}: absent in the file, begins at 0"
                + ("; guide samples only after training with dropped texts" if name.startswith("null") else "")
            )
    fitting.require_matching_shapes(
        state, shapes, sorted(shapes.keys() | state.keys(), key=fitting.make_natural_sort_key), _REMEDIES
    )
    return state, sorted(notes)


def _adapt_lucidrains_weights(state: dict[str, Tensor], network: nn.Module, config: Config) -> fitting.Fitted:
    """Returns a state dict that fits `network`, a LucidrainsPrior, and notes on what was left out or added. state: the
    weights of DALLE2-pytorch's DiffusionPrior, or of the network within it.

    Null inputs begin at 0 if the file lacks them. Raises ConfigError if the file's betas are not the recipe's, and for
    the first other difference, with both sides and the remedy.
    """
    shapes, notes = fitting.collect_weight_shapes(network), []
    if is_original := any(name.startswith("net.") for name in state):
        _require_same_betas(state.get("noise_scheduler.betas"), config)
        notes = fitting.describe_unused_weights(
            name for name in state if not name.startswith(("net.", "noise_scheduler."))
        )
        state = {name.removeprefix("net."): values for name, values in state.items() if name.startswith("net.")}
    rotary = [name for name in state if name.endswith("rotary_emb.freqs")]
    if bool(rotary) != config.lucidrains.rotary_emb and (rotary or is_original):
        raise ConfigError(
            f"weights: the file has {'' if rotary else 'no '}rotary positions; set "
            f"model.lucidrains.rotary_emb={str(bool(rotary)).lower()}"
        )
    state = {name: values for name, values in state.items() if name not in rotary}
    if "null_text_embed" in state:
        state["null_text_encodings"] = state.pop("null_text_embed")
        notes.append(
            "null_text_embed: the encodings of empty places. The file is of version 1.8 or before, and does "
            "not tell its attention: model.lucidrains.cosine_similarity is true from version 1.4 on, false "
            "before"
        )
    elif "null_text_embeds" in state and not config.lucidrains.cosine_similarity:
        raise ConfigError(
            "model.lucidrains.cosine_similarity=false: the file is of version 1.9 or later, whose "
            "attention is by cosines; leave it out"
        )
    if "null_text_encodings" in state and not state["null_text_encodings"].shape.numel():
        del state["null_text_encodings"]  # the original has an empty one with max_text_len=0
    for name in ("null_text_embeds", "null_image_embed"):
        if name in state and name not in shapes:
            del state[name]
            notes.append(f"{name}: of no use without dropped inputs, and left")
        elif name in shapes and name not in state:
            state[name] = torch.zeros(shapes[name])
            notes.append(
                f"{name}: absent in the file, begins at 0; guide samples only after training with dropped texts"
            )
    fitting.require_matching_shapes(
        state, shapes, sorted(shapes.keys() | state.keys(), key=fitting.make_natural_sort_key), _LUCIDRAINS_REMEDIES
    )
    return state, sorted(notes)


def _require_same_betas(betas: Tensor | None, config: Config) -> None:
    """Raises ConfigError if `betas`, read from a file, are not those of the recipe's chain. Accepts None: a file
    without betas.
    """
    expected = torch.as_tensor(schedule.make_betas(config.beta_schedule, config.timesteps)).float()
    if betas is not None and (betas.shape != expected.shape or not torch.allclose(betas.float(), expected, rtol=1e-3)):
        ends = f", from {float(betas.flatten()[0]):.3g} to {float(betas.flatten()[-1]):.3g}," if betas.numel() else ""
        raise ConfigError(
            f"weights: the file's {betas.numel()} betas{ends} are not those of "
            f"model.beta_schedule={config.beta_schedule} and model.timesteps={config.timesteps}: set "
            "both to what the file was made with"
        )


def require_same_config(diffusers_config: Mapping[str, Any], config: Config) -> None:
    """Raises ConfigError if the content of diffusers' config.json is of another class than PriorTransformer, or has
    another number or width of attention heads than the recipe. Always raises it with model.lucidrains, which is another
    network.
    """
    if config.lucidrains is not None:
        raise ConfigError("weights: the folder is of diffusers' PriorTransformer; leave model.lucidrains out")
    loaded = {"num_attention_heads": 32, "attention_head_dim": 64} | {**diffusers_config}
    expected = {"num_attention_heads": config.heads, "attention_head_dim": config.dim_head}
    fields = {"num_attention_heads": "heads", "attention_head_dim": "dim_head"}
    fitting.require_matching_diffusers_config(loaded, ("PriorTransformer",), "prior", expected, fields)


def require_expressible_in_diffusers(config: Config) -> None:
    """Raises ConfigError if diffusers' PriorTransformer cannot hold the model, because of one of its fields."""
    if config.lucidrains is not None:
        raise ConfigError("lucidrains: diffusers' PriorTransformer is another network; take --format safetensors")
    if config.self_cond:
        raise ConfigError(
            "self_cond: diffusers' PriorTransformer has no input for the previous prediction; only "
            "models without self_cond are exported there; take --format safetensors"
        )
    if config.max_text_len and config.text_encodings_dim not in (None, config.image_embed_dim):
        raise ConfigError(
            f"text_encodings_dim: diffusers' PriorTransformer takes text encodings as wide as image "
            f"embeddings, {config.image_embed_dim}, and these are {config.text_encodings_dim}; take "
            "--format safetensors"
        )
