"""Exports a trained prior as a folder that diffusers loads and draws from. See dstrain/commands/export.py.

    prior/                    PriorTransformer.from_pretrained(OUT / "prior"); its post_process_latents converts the
                              end of a chain to embeddings by clip_mean and clip_std
    scheduler/                UnCLIPScheduler if betas are cosine and x_start or eps is predicted, else DDPMScheduler
    prior/null_text.safetensors
                              null_text_embed, null_text_encodings: inputs of the unconditional half of guidance,
                              with a text mask that is True everywhere (UnCLIPPipeline would take the encodings of "")
    pipeline.py               PriorPipeline: normalizes texts, draws candidates, clamps and guides

init_from accepts this folder or its prior/, and reads the null text.

Without text tokens the mask is empty, (B, 0): diffusers' attention is causal only if it is given a mask.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from dstrain import rng
from dstrain.diffusion import samplers
from dstrain.diffusion.published import PREDICTIONS
from dstrain.distributed import group
from dstrain.nn.measures import measure_relative_error
from dstrain.systems.base import Example, Request
from dstrain.systems.prior.config import Config
from dstrain.systems.prior.network import EXTRA_TOKENS
from dstrain.systems.prior.system import PriorSystem

_LOAD = """\
import torch
from diffusers import DiffusionPipeline
{null}
pipeline = DiffusionPipeline.from_pretrained("OUT", trust_remote_code=True)    # runs pipeline.py of this folder
noise = torch.Generator().manual_seed(0)
text_embed = torch.randn(2, {width}, generator=noise)    # in place of the embeddings of your texts, (B, {width})
"""
_NULL_TEXT = """\
from safetensors.torch import load_file

null = load_file("OUT/prior/null_text.safetensors")
"""
_TOKENS = """\
text_encodings = torch.randn(2, {tokens}, {width}, generator=noise)    # and of the states of their tokens
text_mask = torch.arange({tokens}) < torch.tensor([[{tokens}], [1]])    # True: a token, False: padding
"""
_DRAW = """\
image_embeds = pipeline({texts}num_inference_steps={steps}, generator=noise)    # (B, {width})
"""
# The largest relative errors: diffusers computes sinusoids by float32's exp, and its schedulers' tables are float32.
TOLERATED = {"with text": 3e-4, "without text": 3e-4, "code": 5e-3}
_SCALE, _STEPS = 2.0, 64  # guidance_scale and number of steps in the code of `describe_export`
_OPTIONS = (
    "normalize_embeds",
    "num_candidates",
    "init_image_embed_l2norm",
    "sampling_clamp_l2norm",
    "sampling_final_clamp_l2norm",
)  # options of PriorPipeline that are fields of the model section
_NULL = Path("prior") / "null_text.safetensors"


def describe_export(system: PriorSystem) -> tuple[str, str, str]:
    """Returns three texts for users of the export: the name of diffusers' class that loads it, notes ("" if there are
    none), and Python code that draws samples from it. In the code OUT stands for the export's folder.
    """
    config, texts = system.config, ["text_embed"]
    width, has_null = config.image_embed_dim, bool(config.text_cond_drop_prob)
    code = _LOAD.format(null=_NULL_TEXT if has_null else "", width=config.text_embed_dim or width)
    if config.max_text_len:
        code += _TOKENS.format(tokens=config.max_text_len, width=width)
        texts += ["text_encodings", "text_mask"]
    texts += ["**null", f"guidance_scale={_SCALE}"] * has_null
    code += _DRAW.format(
        texts="".join(f"{text}, " for text in texts), steps=_choose_example_num_steps(system), width=width
    )
    return "PriorTransformer", "" if has_null else "trained without dropped texts: draw with guidance_scale=1", code


def _choose_example_num_steps(system: PriorSystem) -> int:
    """Returns the number of sampling steps in the example code of a model card: 64, or all timesteps if there are
    fewer.
    """
    return min(_STEPS, system.config.timesteps)


def save_export(
    system: PriorSystem,
    nets: Mapping[str, nn.Module],
    folder: Path,
    get_statistics: Callable[[], dict[str, Any]] = dict,
    get_class_names: Callable[[], Sequence[str]] = tuple,
) -> None:
    """Writes the model into `folder`, from which diffusers' from_pretrained loads it. Raises ConfigError if diffusers'
    network cannot express a field of the model. `get_statistics` and `get_class_names` are not used here; exports of
    other systems need them.
    """
    from diffusers import PriorTransformer

    from dstrain.systems.prior.pipeline import PriorPipeline

    config = system.config
    system.require_expressible_in_diffusers()
    state = {name: value.detach().float().cpu().contiguous() for name, value in nets["denoiser"].state_dict().items()}
    null = {name: state.pop(name) for name in list(state) if name.startswith("null_text_")}
    state |= {"clip_mean": system.mean[None], "clip_std": system.std[None]}
    network = PriorTransformer(**_make_diffusers_prior_arguments(config))
    network.load_state_dict(state)
    options = {name: getattr(config, name) for name in _OPTIONS}
    pipeline = PriorPipeline(network, _build_scheduler(system), **options)
    pipeline.null_text = null
    pipeline.save_pretrained(folder)


@torch.no_grad()
def measure_export_errors(
    system: PriorSystem, nets: Mapping[str, nn.Module], folder: Path, example: Example
) -> dict[str, float]:
    """Returns how far predictions of the exported network are from the trained network's: largest difference / largest
    value. Compares all samples of the example, at timesteps spread over the whole chain. Keys: "with text", and
    "without text" if the model has a null text.
    """
    from diffusers import PriorTransformer

    device, count = example["x_start"].device, len(example["x_start"])
    exported = PriorTransformer.from_pretrained(folder / "prior", low_cpu_mem_usage=False).to(device).eval()
    t = torch.linspace(0, system.config.timesteps - 1, count, device=device).long()
    x_t = system.diffusion.q_sample(example["x_start"], t, rng.normal(example["key"], "noise", system.shape))
    inputs = system.make_network_inputs(example, torch.zeros(count, dtype=torch.bool, device=device))
    texts = (inputs["text_embed"], inputs.get("text_encodings"), inputs["text_mask"])
    results = {"with text": measure_relative_error(exported(x_t, t, *texts)[0], nets["denoiser"](x_t, t, **inputs))}
    if "dropped" in inputs:
        null = {
            name: value.to(device).expand(count, *[-1] * (value.ndim - 1))
            for name, value in load_file(folder / _NULL).items()
        }
        texts = (null["null_text_embed"], null.get("null_text_encodings"), torch.ones_like(inputs["text_mask"]))
        truth = nets["denoiser"](x_t, t, **inputs | {"dropped": ~inputs["dropped"]})
        results["without text"] = measure_relative_error(exported(x_t, t, *texts)[0], truth)
    return results


@torch.no_grad()
def draw_reference_outputs(system: PriorSystem, nets: Mapping[str, nn.Module]) -> Tensor:
    """Draws, with the trained network and our sampler, the two embeddings that the code of `describe_export` should
    draw from the same noise. Returns them as float32 (2, D).
    """
    config, device, generator = system.config, group.device(), torch.Generator().manual_seed(0)

    def draw_normal(*shape):
        return torch.randn(shape, generator=generator).to(device)

    texts = {"text_embed": draw_normal(2, config.text_embed_dim or config.image_embed_dim)}
    if tokens := config.max_text_len:
        texts["text_encodings"] = draw_normal(2, tokens, config.image_embed_dim)
        texts["text_mask"] = torch.arange(tokens, device=device) < torch.tensor([[tokens], [1]], device=device)
    conditions, count = system._prepare_text_inputs(texts), config.num_candidates
    repeated = {name: value.repeat(count, *[1] * (value.ndim - 1)) for name, value in conditions.items()}
    scale = _SCALE if config.text_cond_drop_prob else 1.0
    network = system._make_guided_network(nets, repeated, Request(torch.arange(2), guidance_scale=scale))

    def draw_noise(*_):
        return draw_normal(2 * count, *system.shape)

    x = system._rescale_to_data_norm(draw_noise()) if config.init_image_embed_l2norm else draw_noise()
    x = samplers.sample_ancestral(
        system.diffusion.respace(str(_choose_example_num_steps(system))), network, x, draw_noise
    )
    x = system._rescale_to_data_norm(x) if config.sampling_final_clamp_l2norm else x
    candidates = system._convert_to_image_embedding(x).view(count, 2, -1)
    nearest = F.cosine_similarity(candidates, conditions["text_embed"][None], dim=2).argmax(dim=0) if count > 1 else 0
    return candidates[nearest, torch.arange(2, device=device)]


def _make_diffusers_prior_arguments(config: Config) -> dict[str, Any]:
    """Returns the keyword arguments with which diffusers' PriorTransformer builds the network of this config."""
    return {
        "num_attention_heads": config.heads,
        "attention_head_dim": config.dim_head,
        "num_layers": config.depth,
        "embedding_dim": config.image_embed_dim,
        "num_embeddings": config.max_text_len,
        "additional_embeddings": EXTRA_TOKENS,
        "dropout": config.dropout,
        "norm_in_type": "layer" if config.norm_in else None,
        "embedding_proj_norm_type": "layer" if config.embedding_proj_norm else None,
        "encoder_hid_proj_type": "linear" if config.max_text_len else None,
        "embedding_proj_dim": config.text_embed_dim,
    }


def _build_scheduler(system: PriorSystem) -> Any:
    """Returns the scheduler of diffusers for the model's chain: UnCLIPScheduler for cosine betas if the model does not
    predict v, else DDPMScheduler.
    """
    from diffusers import DDPMScheduler, UnCLIPScheduler

    config = system.config
    common = {
        "num_train_timesteps": config.timesteps,
        "prediction_type": PREDICTIONS[config.prediction],
        "clip_sample": False,
    }
    if config.beta_schedule in ("cosine", "squaredcos_cap_v2") and config.prediction != "v":
        return UnCLIPScheduler(**common, variance_type="fixed_small_log")
    betas = system.diffusion.tables["betas"].float().tolist()
    return DDPMScheduler(**common, trained_betas=betas, variance_type="fixed_small", timestep_spacing="linspace")
