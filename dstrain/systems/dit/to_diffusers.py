"""A trained DiT as a folder for diffusers: a pipeline that draws. See dstrain/commands/export.py.

    transformer/   DiTTransformer2DModel; a DiTPipeline takes row 1000 of its label table for "no label". A network that
                   this class cannot hold is a ClassTransformer, with its source in one file. Of texts it is a
                   PixArtTransformer2DModel
    tokenizer/, text_encoder/   of texts, for PixArtAlphaPipeline; of SD3 those for StableDiffusion3Pipeline, see sd3.py
    scheduler/     DDIMScheduler, or FlowMatchEulerDiscreteScheduler
    vae/           the first stage, with the scale that the run was trained with
    pipeline.py    ClassPipeline, beside this file: where DiTPipeline cannot draw from the run
    model_index.json   with the names of the classes

DiTPipeline needs a vae, adds no shift to latents, has room for 1,000 labels, and knows no scheduler of flow matching.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dstrain import rng
from dstrain.diffusion import samplers
from dstrain.diffusion.published import add_to_model_index
from dstrain.distributed import group
from dstrain.encoders.autoencoder import Autoencoder
from dstrain.encoders.joined_text import CLIP_TOKENS, has_t5
from dstrain.encoders.text import load_t5_and_tokenizer
from dstrain.nn.measures import measure_relative_error
from dstrain.nn.pixels import convert_to_uint8
from dstrain.nn.positions import make_sincos_positions
from dstrain.recipe import ConfigError
from dstrain.systems.base import Example, Request
from dstrain.systems.dit import sd3, weights
from dstrain.systems.dit.align import add_internal_guidance
from dstrain.systems.dit.config import Config
from dstrain.systems.dit.layouts import translate_adapters_to_layout, translate_weights_to_layout
from dstrain.systems.dit.network import DiT
from dstrain.systems.dit.system import DiTSystem
from dstrain.systems.source import gather_class_source

# Relative. diffusers computes the sinusoids of timesteps by exp in float32, dstrain in float64: 2e-5 of a prediction,
# on CPUs with a poor exp 1e-4. Rounding errors grow along a chain: two of a picture's 255 levels.
TOLERATED = {
    **{f"{case} {what}": 3e-4 for case in ("with", "without") for what in ("label", "text")},
    "code": 2.5 / 255,
}
_NULL = 1000  # the row of "no label" in DiTPipeline
_COUNT = 4  # samples compared in one prediction
_SCALE = 1.5  # guidance of the card's pictures
_PROMPTS = ["a red bicycle", "a bowl of oranges"]  # of the card's pictures, in lower case
_PIXART_TOKENS = 120  # that PixArtAlphaPipeline reads of a text
_STOCK = """\
import torch
from diffusers import DiTPipeline

pipeline = DiTPipeline.from_pretrained("OUT")
"""
_OWN = """\
import torch
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("OUT", trust_remote_code=True)    # runs {code} of this folder
"""
_ALONE = """\
# One process holds all tokens of a sample.
def are_tokens_shared_among_ranks():
    return False


def take_rank_slice(x, *_):
    return x


take_rank_slice_of_both_parts = reorder_like_gathered_slices = gather_rank_slices = take_rank_slice
gather_tokens_and_split_heads = gather_heads_and_split_tokens = take_rank_slice
"""
_PIXART = """\
import torch
from diffusers import PixArtAlphaPipeline

pipeline = PixArtAlphaPipeline.from_pretrained("OUT")
"""
_SD3 = """\
import torch
from diffusers import StableDiffusion3Pipeline

pipeline = StableDiffusion3Pipeline.from_pretrained("OUT"{absent})
"""
_DRAW = """\
noise = torch.Generator().manual_seed(0)
images = pipeline({labels}, guidance_scale={scale}, num_inference_steps={steps}, generator=noise{more}).images
"""
_SAVE = """\
images[0].save("0.png")
"""


def describe_export(system: DiTSystem) -> tuple[str, str, str]:
    """Returns three texts for users of the export: the name of diffusers' class that loads it, notes ("" if there are
    none), and Python code that draws samples from it. In the code OUT stands for the export's folder.
    """
    config, notes = system.config, []
    if config.learn_sigma:
        notes.append(
            f"of the transformer's output the first {config.in_channels} channels are the prediction; the "
            "variances behind them are unused by DDIM"
        )
    if config.reads_texts and not config.block.joint:
        notes.append(
            "PixArtAlphaPipeline writes prompts in lower case; draw in 20 steps by pipeline.scheduler = "
            "DPMSolverMultistepScheduler.from_config(pipeline.scheduler.config)"
        )
    if _uses_stock_pipeline(system) and config.guidance_channels not in (None, config.in_channels):
        notes.append(
            f"guidance here is of all {config.in_channels} channels, where the recipe guides "
            f"{config.guidance_channels} (guidance_channels)"
        )
    if not config.class_dropout_prob:
        dropped = "texts" if config.reads_texts else "labels"
        notes.append(f"trained without dropped {dropped}: sample with guidance_scale=1")
    if config.align is not None and config.align.kind == "repa":
        notes.append("the projectors of the alignment are left out: training alone reads them")
    reason = None if config.reads_texts else weights.describe_field_inexpressible_in_diffusers(config)
    if reason:
        notes.append(
            f"the network's code is in transformer/: diffusers' DiTTransformer2DModel cannot hold it ({reason})"
        )
    latents = config.codes is not None and system.first_stage is None
    if latents:
        notes.append(
            f"images are latents {_describe_latent_scale(config)}, of the autoencoder "
            f"{config.codes.first_stage}, which decodes them"
        )
    of_folder = "pipeline.py" if reason is None else "pipeline.py and transformer/*.py"
    kind, code, more = "DiTTransformer2DModel", _OWN.format(code=of_folder), ', output_type="latent"' * latents
    if config.block.joint:
        kind, steps = "StableDiffusion3Pipeline", system.process.card_steps
        absent = "" if has_t5(config.text_encoder) else ", text_encoder_3=None, tokenizer_3=None"
        code = _SD3.format(absent=absent)
        more = f", height={config.image_size}, width={config.image_size}"
        more += f", max_sequence_length={config.max_text_len - 1 - CLIP_TOKENS}"
        more += f", sigmas=[1 - step / {steps} for step in range({steps})]"
    elif config.reads_texts:
        kind, code = "PixArtAlphaPipeline", _PIXART
        more = ", clean_caption=False, use_resolution_binning=False"
        if config.max_text_len != _PIXART_TOKENS:
            more += f", max_sequence_length={config.max_text_len}"
            notes.append(f"texts are of {config.max_text_len} tokens: give max_sequence_length to the pipeline")
    elif reason:
        kind = "ClassTransformer"
    elif _uses_stock_pipeline(system):
        kind, code = "DiTPipeline", _STOCK
    code += _DRAW.format(
        labels=_PROMPTS if config.reads_texts else _choose_example_labels(system),
        scale=_choose_example_guidance_scale(system),
        steps=system.process.card_steps,
        more=more,
    )
    return kind, "; ".join(notes), code if latents else code + _SAVE


def save_export(
    system: DiTSystem,
    nets: Mapping[str, nn.Module],
    folder: Path,
    get_statistics: Callable[[], dict[str, Any]] = dict,
    get_class_names: Callable[[], Sequence[str]] = tuple,
) -> None:
    """Writes the model into `folder`, from which diffusers' from_pretrained loads it. Raises ConfigError if diffusers'
    classes cannot express the model.

    get_class_names  returns the names of the classes by label; () if they are unknown.
    get_statistics   is not used here; exports of autoencoders need it.
    """
    from diffusers import DiTPipeline

    from dstrain.systems.dit.pipeline import ClassPipeline

    config, network = system.config, nets["denoiser"]
    system.require_expressible_in_diffusers()
    if config.block.joint:
        sd3.save_pipeline(config, network, _load_diffusers_autoencoder(config), _build_scheduler(system), folder)
        return
    if config.reads_texts:
        _save_pixart_pipeline(system, network, folder)
        return
    scheduler, vae = _build_scheduler(system), _load_diffusers_autoencoder(config)
    folder.mkdir(parents=True, exist_ok=True)
    if weights.describe_field_inexpressible_in_diffusers(config) is None:
        transformer = _build_diffusers_transformer(system, network)
    else:
        transformer = _write_and_build_class_transformer(system, network, folder / "transformer")
    if _uses_stock_pipeline(system):
        DiTPipeline(transformer, vae, scheduler).save_pretrained(folder)
    else:
        ClassPipeline(transformer, scheduler, vae, guidance_channels=config.guidance_channels).save_pretrained(folder)
    if names := get_class_names():
        add_to_model_index(folder, id2label={str(number): name for number, name in enumerate(names)})


def rename_adapters_to_diffusers(system: DiTSystem, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], bool]:
    """Returns the LoRA adapters in a state dict under the names of diffusers' transformer, and whether diffusers can
    load such files itself (load_lora_weights).

    Raises ConfigError if the model reads no texts, if an adapter has no place in diffusers' transformer, or if the
    positions are not those that PixArt's transformer computes.
    """
    config = system.config
    if not config.reads_texts:
        raise ConfigError(
            "--format diffusers-lora: of models with texts alone; take --format diffusers, which merges the adapters"
        )
    if config.block.joint:
        name, transformer = "sd3", sd3.build_transformer_on_meta(config)
    else:
        name, transformer = "pixart", _build_pixart_on_meta(config)
        _require_sincos_positions(state["pos_embed"], system.build_part_on_meta("denoiser"))
    theirs = list(transformer.state_dict())
    adapters = translate_adapters_to_layout(state, name, theirs, config.get_network_shape()["depth"])
    return adapters, hasattr(transformer, "load_lora_adapter")


def _build_pixart_on_meta(config: Config) -> nn.Module:
    """Returns a PixArtTransformer2DModel for `config` on torch's meta device: its weights have shapes but no values."""
    from diffusers import PixArtTransformer2DModel

    with torch.device("meta"):
        return PixArtTransformer2DModel(
            **weights.make_diffusers_pixart_arguments(config),
            interpolation_scale=config.interpolation_scale,
            use_additional_conditions=config.size_conditions,
        )


def _save_pixart_pipeline(system: DiTSystem, network: DiT, folder: Path) -> None:
    from diffusers import PixArtAlphaPipeline

    _require_sincos_positions(network.pos_embed, network)
    transformer = _build_pixart_on_meta(system.config)
    state = _get_weights_in_float32(network)
    transformer.load_state_dict(
        translate_weights_to_layout(state, "pixart", list(transformer.state_dict())), assign=True
    )
    text_encoder, tokenizer = load_t5_and_tokenizer(system.config.text_encoder)
    vae, scheduler = _load_diffusers_autoencoder(system.config), _build_scheduler(system)
    folder.mkdir(parents=True, exist_ok=True)
    PixArtAlphaPipeline(tokenizer, text_encoder, vae, transformer, scheduler).save_pretrained(folder)


@torch.no_grad()
def measure_export_errors(
    system: DiTSystem, nets: Mapping[str, nn.Module], folder: Path, example: Example
) -> dict[str, float]:
    """Returns how far predictions of the exported network are from the trained network's, at timesteps spread over the
    whole chain: largest difference / largest value. Keys: "with label" or "with text", and, if the model was trained
    with dropped conditions, "without label" or "without text".
    """
    from diffusers import DiTTransformer2DModel

    config, key = system.config, example["key"][:_COUNT]
    device = key.device
    if config.reads_texts:
        return _measure_text_model_export_errors(system, nets, folder, example)
    own = list((folder / "transformer").glob("network_*.py"))
    kind = _import_class_transformer(own[0]) if own else DiTTransformer2DModel
    exported = kind.from_pretrained(folder / "transformer", low_cpu_mem_usage=False).to(device).eval()
    null = exported.config.num_embeds_ada_norm  # in the trained network it is num_classes
    t = system.process.make_evenly_spaced_times(len(key), device)
    x, y = rng.normal(key, "start", system.shape), rng.integers(key, "label", config.num_classes)
    network = _make_predictor_like_export(system, nets)
    results = {"with label": measure_relative_error(exported(x, t, y).sample, network(x, t, y=y))}
    if config.class_dropout_prob:
        truth = network(x, t, y=torch.full_like(y, config.num_classes))
        results["without label"] = measure_relative_error(exported(x, t, torch.full_like(y, null)).sample, truth)
    return results


def _measure_text_model_export_errors(
    system: DiTSystem, nets: Mapping[str, nn.Module], folder: Path, example: Example
) -> dict[str, float]:
    import diffusers

    key, pooled_dim = example["key"][:_COUNT], system.config.text_pooled_dim
    kind = sd3.CLASS if pooled_dim else "PixArtTransformer2DModel"
    exported = getattr(diffusers, kind).from_pretrained(folder / "transformer", low_cpu_mem_usage=False)
    exported = exported.to(key.device).eval()
    t, x = system.process.make_evenly_spaced_times(len(key), key.device), rng.normal(key, "start", system.shape)
    cases = {"with text": {"text": example["text"][:_COUNT], "mask": example["text_mask"][:_COUNT]}}
    if pooled_dim:  # whose pipeline reads all tokens
        cases["with text"]["mask"] = torch.ones_like(cases["with text"]["mask"])
    if system.config.class_dropout_prob:
        cases["without text"] = system.network_conditions[0].make_null_arguments(cases["with text"])
    sizes, added = {}, None
    if system.config.size_conditions:
        size = example["size"][:_COUNT]
        sizes, added = {"size": size}, {"resolution": size[:, :2].float(), "aspect_ratio": size[:, 4:5] / size[:, 5:6]}
    results = {}
    for name, arguments in cases.items():
        if pooled_dim:
            found = sd3.predict_with_exported_transformer(exported, x, t, arguments["text"], pooled_dim)
        else:
            found = exported(
                x,
                arguments["text"].float(),
                timestep=t,
                encoder_attention_mask=arguments["mask"],
                added_cond_kwargs=added,
            ).sample
        results[name] = measure_relative_error(found, nets["denoiser"](x, t, **arguments, **sizes))
    return results


@torch.no_grad()
def draw_reference_outputs(system: DiTSystem, nets: Mapping[str, nn.Module]) -> Tensor:
    """Draws, with the trained network and our sampler, what the code of `describe_export` should draw from the same
    noise: images uint8 (B, C, H, W), or latents if no autoencoder decodes them.
    """
    config, seeds = system.config, torch.arange(len(_choose_example_labels(system)), device=group.device())
    noise = torch.randn(len(seeds), *system.shape, generator=torch.Generator().manual_seed(0)).to(seeds.device)
    channels = None if _uses_stock_pipeline(system) else config.guidance_channels
    prompts = system.conditions_from_texts(_PROMPTS) if config.reads_texts else {}
    arguments, null = system.make_conditional_and_negative_arguments(Request(seeds, prompts))
    network = samplers.make_guided_network(
        _make_trained_predictor(system, nets), arguments, null, _choose_example_guidance_scale(system), channels
    )
    x = system.process.sample_like_diffusers(network, noise)
    if system.find_drawing_problem():  # latents that no autoencoder decodes
        return x
    return convert_to_uint8(system.first_stage.decode(x) if system.first_stage else x)


def _make_trained_predictor(system: DiTSystem, nets: Mapping[str, nn.Module]) -> Callable[..., Tensor]:
    """Returns the trained network as a function of x, t and conditions; with internal guidance if it has a
    second head.
    """
    internal = system.config.internal
    return add_internal_guidance(nets["denoiser"], internal.scale) if internal else nets["denoiser"]


def _make_predictor_like_export(system: DiTSystem, nets: Mapping[str, nn.Module]) -> Callable[..., Tensor]:
    """Returns a function of x, t and conditions that predicts, with the trained network, what the exported network
    should: with internal guidance if there is a second head, and converted to velocities for a flow.
    """
    network, process = _make_trained_predictor(system, nets), system.process
    if system.config.objective != "flow":
        return network

    def predict_velocities(x: Tensor, t: Tensor, **conditions: Tensor) -> Tensor:
        out, channels = network(x, t, **conditions), x.shape[1]
        velocity = process.interpolant.convert_prediction(out[:, :channels], x, t / process.time_scale, "velocity")
        return torch.cat((velocity, out[:, channels:]), dim=1)

    return predict_velocities


def _choose_example_labels(system: DiTSystem) -> list[int]:
    return list(range(len(_PROMPTS) if system.config.reads_texts else min(2, system.config.num_classes)))


def _choose_example_guidance_scale(system: DiTSystem) -> float:
    return _SCALE if system.config.class_dropout_prob else 1.0


def _describe_latent_scale(config: Config) -> str:
    """Returns words for how latents are scaled: "times 0.18", or "minus [means], over [deviations] by channel"."""
    if config.latents.normalize == "channels":
        means, deviations = (
            [float(f"{value:g}") for value in values] for values in (config.latents.mean, config.latents.std)
        )
        return f"minus {means}, over {deviations} by channel"
    return f"times {config.codes.scaling_factor:g}"


def _uses_stock_pipeline(system: DiTSystem) -> bool:
    """Returns whether a pipeline class of diffusers can draw from the export; if not, it needs our ClassPipeline."""
    config = system.config
    if config.reads_texts:
        return True
    return (
        weights.describe_field_inexpressible_in_diffusers(config) is None
        and system.process.scheduler == "DDIMScheduler"
        and config.first_stage is not None
        and config.num_classes <= _NULL
        and config.latents.normalize == "scale"
        and not (system.first_stage and system.first_stage.shift)
    )


def _require_sincos_positions(positions: Tensor, network: DiT) -> None:
    """Raises ConfigError unless `positions` (1, N, D) are the sines of the network's grid, since diffusers'
    transformers compute these themselves.
    """
    computed = make_sincos_positions(positions.shape[-1], network.grid, network.grid, network.range)[None]
    if not torch.allclose(positions.float().cpu(), computed, rtol=0, atol=1e-6):
        raise ConfigError(
            "pos_embed: these positions were interpolated from another resolution, and diffusers' "
            "transformers compute their own; take --format safetensors"
        )


def _build_diffusers_transformer(system: DiTSystem, network: DiT) -> nn.Module:
    """Returns the trained network as a DiTTransformer2DModel of diffusers. Raises ConfigError if its positions are not
    those that this class computes.
    """
    from diffusers import DiTTransformer2DModel

    config = system.config
    _require_sincos_positions(network.pos_embed, network)
    rows = _NULL if _uses_stock_pipeline(system) else config.num_classes
    state = weights.rename_to_diffusers(
        _get_weights_in_float32(network), len(network.blocks), rows, bool(config.class_dropout_prob)
    )
    with torch.device("meta"):
        transformer = DiTTransformer2DModel(**weights.make_diffusers_dit_arguments(config), num_embeds_ada_norm=rows)
    transformer.load_state_dict(state, assign=True)
    return transformer


def _write_and_build_class_transformer(system: DiTSystem, network: DiT, folder: Path) -> nn.Module:
    """Writes the source code of ClassTransformer into `folder`, which must not exist, and returns the trained network
    as that class. The file's name has a hash of its content, so that one process can import the code of several
    releases.
    """
    from dstrain.systems.dit.transformer import ClassTransformer

    source = gather_class_source(ClassTransformer, {"dstrain.nn.sequence": _ALONE})
    path = folder / f"network_{hashlib.sha256(source.encode()).hexdigest()[:8]}.py"
    folder.mkdir(parents=True)
    path.write_text(source, encoding="utf-8")
    config, flow = system.config, None
    arguments = config.make_network_arguments() | {"align": None, "routed": (0, 0)}  # which training alone reads
    if config.objective == "flow":
        flow = config.flow.model_dump(include={"path", "prediction", "t_min", "time_scale"})
    transformer = _import_class_transformer(path)(
        arguments,
        num_embeds_ada_norm=config.num_classes,
        in_channels=config.in_channels,
        sample_size=config.input_size,
        internal_scale=config.internal.scale if config.internal else 1.0,
        flow=flow,
    )
    state = {
        name: value for name, value in _get_weights_in_float32(network).items() if not name.startswith("projectors.")
    }
    transformer.load_state_dict(state)
    return transformer


def _get_weights_in_float32(network: DiT) -> dict[str, Tensor]:
    return {name: value.float().cpu() for name, value in network.state_dict().items()}


def _import_class_transformer(path: Path) -> type[Any]:
    """Imports a file written by `_write_and_build_class_transformer`, and returns the class ClassTransformer in it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where the class looks for its file
    spec.loader.exec_module(module)
    return module.ClassTransformer


def _build_scheduler(system: DiTSystem) -> Any:
    import diffusers

    return getattr(diffusers, system.process.scheduler)(
        **system.process.make_diffusers_scheduler_arguments(velocities=True)
    )


def _load_diffusers_autoencoder(config: Config) -> nn.Module | None:
    """Returns the first stage as diffusers' autoencoder, with the scale of the run in its config; None if the model has
    no first stage. Reads it from its folder anew, since the system may have dropped its encoder.

    Raises ConfigError if the folder now holds another autoencoder, or an AutoencoderRAE, for which diffusers has no
    pipeline.
    """
    if config.first_stage is None:
        return None
    stage = Autoencoder(config.first_stage.path, *config.get_latent_scale_and_shift())
    if stage.of_representations:
        raise ConfigError(
            "first_stage: diffusers has no pipeline that decodes by an AutoencoderRAE; take --format safetensors"
        )
    trained_with = config.first_stage.fingerprint or (config.codes.first_stage if config.codes else None)
    if trained_with not in (None, stage.compute_fingerprint()):
        raise ConfigError(
            f"model.first_stage.path: {config.first_stage.path} is the autoencoder {stage.compute_fingerprint()} now, "
            f"this model was trained with {trained_with}; put that one back there"
        )
    scale: dict[str, Any] = {"scaling_factor": stage.scaling_factor, "shift_factor": stage.shift or None}
    moments: dict[str, Any] = {"latents_mean": None, "latents_std": None}
    if config.latents.normalize == "channels":
        scale = {"scaling_factor": 1.0, "shift_factor": None}
        moments = {"latents_mean": config.latents.mean, "latents_std": config.latents.std}
    stage.vae.register_to_config(**scale, **moments)
    return stage.vae
