"""A trained prior as a folder for diffusers: PriorTransformer, scheduler and null text. See dstrain/export.py.

    prior/                    PriorTransformer.from_pretrained(OUT / "prior"); its post_process_latents turns the end of
                              a chain into embeddings by clip_mean and clip_std
    scheduler/                UnCLIPScheduler for cosine and x_start or eps, else DDPMScheduler
    prior/null_text.safetensors
                              null_text_embed, null_text_encodings: the inputs of the unconditional half of guidance,
                              with a text mask that is True everywhere (a pipeline would take the encodings of "")

With normalize_embeds the user must give text_embed at unit length: neither network nor pipeline normalizes it.
init_from takes the folder or its prior/, with the null text.

Without text tokens the mask is empty, (B, 0): diffusers' attention is causal only where it is given one.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from dstrain import rng
from dstrain.diffusion.published import PREDICTIONS
from dstrain.nn.measures import relative_error
from dstrain.recipe import ConfigError
from dstrain.systems.base import Example
from dstrain.systems.prior.config import Config
from dstrain.systems.prior.network import EXTRA_TOKENS
from dstrain.systems.prior.system import PriorSystem

_NOTE = "give text_embed at unit length, as model.normalize_embeds does here: diffusers does not normalize it"
_CODE = """\
import torch
from diffusers import PriorTransformer
prior = PriorTransformer.from_pretrained("OUT/prior")
{mask}with torch.no_grad():    # t is a timestep of scheduler/
    {output} = prior(x_t, t, text_embed, {encodings}, text_mask).predicted_image_embedding"""
_EMPTY = """\
text_mask = torch.ones(len(x_t), 0, dtype=torch.bool, device=x_t.device)    # without a mask attention is not causal
"""
TOLERATED = {"with text": 3e-4, "without text": 3e-4}    # relative; diffusers' sinusoids are of float32's exp
_NULL = Path("prior") / "null_text.safetensors"


def about(system: PriorSystem) -> tuple[str, str, str]:
    with_tokens = system.config.max_text_len > 0
    code = _CODE.format(mask="" if with_tokens else _EMPTY, output=system.config.prediction,
                        encodings="text_encodings" if with_tokens else None)
    return "PriorTransformer", _NOTE if system.config.normalize_embeds else "", code


def save(system: PriorSystem, nets: Mapping[str, nn.Module], folder: Path,
         statistics: Callable[[], dict[str, Any]] = dict, classes: Callable[[], Sequence[str]] = tuple) -> None:
    """Writes the folder; `statistics` and `classes` are for other systems.

    ConfigError: a field of the model that diffusers' network cannot express.
    """
    from diffusers import PriorTransformer

    config = system.config
    _require_expressible(config)
    state = {name: value.detach().float().cpu().contiguous() for name, value in nets["denoiser"].state_dict().items()}
    null = {name: state.pop(name) for name in list(state) if name.startswith("null_text_")}
    state |= {"clip_mean": system.mean[None], "clip_std": system.std[None]}
    network = PriorTransformer(**_arguments(config))
    network.load_state_dict(state)
    folder.mkdir(parents=True, exist_ok=True)
    network.save_pretrained(folder / "prior")
    _scheduler(system).save_pretrained(folder / "scheduler")
    if null:
        save_file(null, folder / _NULL)


@torch.no_grad()
def errors(system: PriorSystem, nets: Mapping[str, nn.Module], folder: Path, example: Example) -> dict[str, float]:
    """Relative errors of predictions with and (if trained) without text, at timesteps over the whole chain."""
    from diffusers import PriorTransformer

    device, count = example["x_start"].device, len(example["x_start"])
    exported = PriorTransformer.from_pretrained(folder / "prior", low_cpu_mem_usage=False).to(device).eval()
    t = torch.linspace(0, system.config.timesteps - 1, count, device=device).long()
    x_t = system.diffusion.q_sample(example["x_start"], t, rng.normal(example["key"], "noise", system.shape))
    inputs = system.network_inputs(example, torch.zeros(count, dtype=torch.bool, device=device))
    texts = (inputs["text_embed"], inputs.get("text_encodings"), inputs["text_mask"])
    results = {"with text": relative_error(exported(x_t, t, *texts)[0], nets["denoiser"](x_t, t, **inputs))}
    if "dropped" in inputs:
        null = {name: value.to(device).expand(count, *[-1] * (value.ndim - 1))
                for name, value in load_file(folder / _NULL).items()}
        texts = (null["null_text_embed"], null.get("null_text_encodings"), torch.ones_like(inputs["text_mask"]))
        truth = nets["denoiser"](x_t, t, **inputs | {"dropped": ~inputs["dropped"]})
        results["without text"] = relative_error(exported(x_t, t, *texts)[0], truth)
    return results


def _require_expressible(config: Config) -> None:
    if config.self_cond:
        raise ConfigError("self_cond: diffusers' PriorTransformer has no input for the previous prediction; only "
                          "models without self_cond are exported there; take --format safetensors")
    if config.max_text_len and config.text_encodings_dim not in (None, config.image_embed_dim):
        raise ConfigError(f"text_encodings_dim: diffusers' PriorTransformer takes text encodings as wide as image "
                          f"embeddings, {config.image_embed_dim}, and these are {config.text_encodings_dim}; take "
                          "--format safetensors")


def _arguments(config: Config) -> dict[str, Any]:
    return {"num_attention_heads": config.heads, "attention_head_dim": config.dim_head, "num_layers": config.depth,
            "embedding_dim": config.image_embed_dim, "num_embeddings": config.max_text_len,
            "additional_embeddings": EXTRA_TOKENS, "dropout": config.dropout,
            "norm_in_type": "layer" if config.norm_in else None,
            "embedding_proj_norm_type": "layer" if config.embedding_proj_norm else None,
            "encoder_hid_proj_type": "linear" if config.max_text_len else None,
            "embedding_proj_dim": config.text_embed_dim}


def _scheduler(system: PriorSystem) -> Any:
    from diffusers import DDPMScheduler, UnCLIPScheduler

    config = system.config
    common = {"num_train_timesteps": config.timesteps, "prediction_type": PREDICTIONS[config.prediction],
              "clip_sample": False}
    if config.beta_schedule in ("cosine", "squaredcos_cap_v2") and config.prediction != "v":
        return UnCLIPScheduler(**common, variance_type="fixed_small_log")
    betas = system.diffusion.tables["betas"].float().tolist()
    return DDPMScheduler(**common, trained_betas=betas, variance_type="fixed_small")
