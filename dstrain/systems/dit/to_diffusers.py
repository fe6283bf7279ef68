"""A trained DiT as a folder for diffusers: a DiTPipeline where that can run it, else its parts. See dstrain/export.py.

    transformer/   DiTTransformer2DModel; its label table has 1,001 rows: the pipeline takes row 1000 for "no label"
    scheduler/     DDIMScheduler, or FlowMatchEulerDiscreteScheduler
    vae/           the first stage, with the scale that the run was trained with
    model_index.json   with the names of the classes

The pipeline needs a vae, which a DiT over pixels has not, and it cannot call a scheduler of flow matching. In both
cases the folder holds transformer/ and scheduler/ (and vae/) and no model_index.json: the user writes the loop.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dstrain import rng
from dstrain.diffusion import samplers
from dstrain.diffusion.gaussian import at_boundary
from dstrain.diffusion.published import even_steps, scheduler_arguments
from dstrain.encoders.autoencoder import Autoencoder
from dstrain.nn.layers import sincos_positions
from dstrain.nn.measures import relative_error
from dstrain.recipe import ConfigError
from dstrain.systems.base import Example
from dstrain.systems.dit import weights
from dstrain.systems.dit.config import Config
from dstrain.systems.dit.network import DiT
from dstrain.systems.dit.system import DiTSystem

# Relative. diffusers computes the sinusoids of timesteps by exp in float32, dstrain in float64: 2e-5 of a prediction,
# on CPUs with a poor exp 1e-4. Rounding errors grow along a chain.
TOLERATED = {"with label": 3e-4, "without label": 3e-4, "chain": 5e-3}
_NULL = 1000                                      # the row of "no label" in DiTPipeline
_COUNT, _IN_CHAIN = 4, 2                          # samples compared in one prediction, and along a chain
_SCALE, _FLOW_STEPS = 1.5, 5                      # of a compared chain: guidance scale, and Euler steps


def about(system: DiTSystem) -> tuple[str, str, str]:
    """The class in diffusers, notes for its user, and Python code that loads it from OUT."""
    config, notes = system.config, []
    if not _is_pipeline(system):
        reason = ("diffusers' DiTPipeline knows no scheduler of flow matching" if config.objective == "flow" else
                  "there is no vae, which diffusers' DiTPipeline needs")
        notes.append(f"{reason}: transformer/ and scheduler/ are for a loop of your own; no label is number "
                     f"{config.num_classes}")
        if config.objective == "flow":
            notes.append("call scheduler.set_timesteps(sigmas=[1, 1 - 1/n, ..., 1/n]), else its last step is another")
        elif system.models_pixels():
            notes.append("step with use_clipped_model_output=True, as dstrain's sampler does")
    if config.learn_sigma:
        notes.append(f"of the transformer's output the first {config.in_channels} channels are the prediction; the "
                     "variances behind them are unused by DDIM")
    if config.guidance_channels not in (None, config.in_channels):
        notes.append(f"guidance here is of all {config.in_channels} channels, where the recipe guides "
                     f"{config.guidance_channels} (guidance_channels)")
    if not config.class_dropout_prob:
        notes.append("trained without dropped labels: sample with guidance_scale=1")
    if _is_pipeline(system):
        code = ("from diffusers import DiTPipeline\n"
                'pipeline = DiTPipeline.from_pretrained("OUT")\n'
                f"pipeline([0], guidance_scale={_SCALE if config.class_dropout_prob else 1}).images[0].save('0.png')")
        return "DiTPipeline", "; ".join(notes), code
    kind = "FlowMatchEulerDiscreteScheduler" if config.objective == "flow" else "DDIMScheduler"
    code = (f"from diffusers import DiTTransformer2DModel, {kind}\n"
            'transformer = DiTTransformer2DModel.from_pretrained("OUT/transformer")\n'
            f'scheduler = {kind}.from_pretrained("OUT/scheduler")')
    return "DiTTransformer2DModel", "; ".join(notes), code


def save(system: DiTSystem, nets: Mapping[str, nn.Module], folder: Path,
         statistics: Callable[[], dict[str, Any]] = dict, classes: Callable[[], Sequence[str]] = tuple) -> None:
    """Writes the folder. `classes`: the names of the labels in order, if known; `statistics` is for autoencoders.

    ConfigError: a field of the model that diffusers' classes cannot express.
    """
    from diffusers import DiTPipeline, DiTTransformer2DModel

    config, network = system.config, nets["denoiser"]
    _require_expressible(system, network)
    rows = _NULL if _is_pipeline(system) else config.num_classes
    state = {name: value.float().cpu() for name, value in network.state_dict().items()}
    state = weights.to_diffusers(state, len(network.blocks), rows, bool(config.class_dropout_prob))
    with torch.device("meta"):
        transformer = DiTTransformer2DModel(**weights.arguments(config), num_embeds_ada_norm=rows)
    transformer.load_state_dict(state, assign=True)
    scheduler, vae = _scheduler(system), _first_stage(config)
    folder.mkdir(parents=True, exist_ok=True)
    if not _is_pipeline(system):
        transformer.save_pretrained(folder / "transformer")
        scheduler.save_pretrained(folder / "scheduler")
        if vae is not None:
            vae.save_pretrained(folder / "vae")
        return
    DiTPipeline(transformer, vae, scheduler).save_pretrained(folder)
    if names := classes():
        index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
        index["id2label"] = {str(number): name for number, name in enumerate(names)}
        (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def errors(system: DiTSystem, nets: Mapping[str, nn.Module], folder: Path, example: Example) -> dict[str, float]:
    """Relative errors of diffusers' network: of predictions with and (if trained) without label at timesteps over the
    whole chain, and of a chain from the same noise (DDIM with guidance, or Euler steps).
    """
    from diffusers import DiTTransformer2DModel

    config, key = system.config, example["key"][:_COUNT]
    device = key.device
    exported = DiTTransformer2DModel.from_pretrained(folder / "transformer", low_cpu_mem_usage=False).to(device).eval()
    null = exported.config.num_embeds_ada_norm                     # in the trained network it is num_classes
    last = system.diffusion.num_timesteps - 1 if config.objective == "diffusion" else config.flow.time_scale
    t = torch.linspace(0, last, len(key), device=device)
    t = t.long() if config.objective == "diffusion" else t
    x, y = rng.normal(key, "start", system.shape), rng.integers(key, "label", config.num_classes)
    results = {"with label": relative_error(exported(x, t, y).sample, nets["denoiser"](x, t, y))}
    if config.class_dropout_prob:
        truth = nets["denoiser"](x, t, torch.full_like(y, config.num_classes))
        results["without label"] = relative_error(exported(x, t, torch.full_like(y, null)).sample, truth)
    chain = _pipeline if _is_pipeline(system) else _loop
    pair = chain(system, nets["denoiser"], exported, folder, x[:_IN_CHAIN], y[:_IN_CHAIN])
    return results | {"chain": relative_error(*pair)}


def _pipeline(system: DiTSystem, network: DiT, exported: nn.Module, folder: Path, x: Tensor,
              y: Tensor) -> tuple[Tensor, Tensor]:
    """Pictures in [0, 1]: the pipeline's, called as a user calls it, and the system's from the same noise."""
    from diffusers import DiTPipeline
    from diffusers.utils.torch_utils import randn_tensor

    pipeline = DiTPipeline.from_pretrained(folder, transformer=exported, low_cpu_mem_usage=False).to(x.device)
    pipeline.set_progress_bar_config(disable=True)
    steps, generator = even_steps(system.diffusion.num_timesteps), lambda: torch.Generator().manual_seed(0)
    pictures = pipeline(y.tolist(), guidance_scale=_scale(system), generator=generator(), num_inference_steps=steps,
                        output_type="pt").images
    start = randn_tensor(tuple(x.shape), generator=generator(), device=x.device, dtype=x.dtype)
    latents = samplers.ddim(system.diffusion.respaced(f"ddim{steps}"), _guided(system, network, y), start)
    return pictures, (system.first_stage.decode(latents) / 2 + 0.5).clamp(0, 1)


def _loop(system: DiTSystem, network: DiT, exported: nn.Module, folder: Path, x: Tensor,
          y: Tensor) -> tuple[Tensor, Tensor]:
    """What diffusers' scheduler makes of x over the exported network, and the system's sampler: DDIM, or Euler's."""
    from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

    own, predict = _guided(system, network, y), _guided_exported(exported, y, _scale(system))
    if system.config.objective == "flow":
        scheduler, options = FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"), {}
        scheduler.set_timesteps(sigmas=[1 - step / _FLOW_STEPS for step in range(_FLOW_STEPS)])
        expected = system.flow.euler(own, x, _FLOW_STEPS)
    else:
        scheduler = DDIMScheduler.from_pretrained(folder / "scheduler")
        steps, clip = even_steps(system.diffusion.num_timesteps), scheduler.config.clip_sample
        scheduler.set_timesteps(steps)
        expected = samplers.ddim(system.diffusion.respaced(f"ddim{steps}"), own, x, clip_denoised=clip)
        options = {"use_clipped_model_output": clip}
    for t in scheduler.timesteps:
        x = scheduler.step(predict(x, t), t, x, **options).prev_sample
    return x, expected


def _guided(system: DiTSystem, network: DiT, y: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    return samplers.guided(network, {"y": y}, {"y": torch.full_like(y, system.config.num_classes)}, _scale(system))


def _guided_exported(exported: nn.Module, y: Tensor, scale: float) -> Callable[[Tensor, Tensor], Tensor]:
    """What a user of the transformer writes by hand: the guided prediction (B, C, H, W) at a scheduler's timestep."""
    null = torch.full_like(y, exported.config.num_embeds_ada_norm)
    guided = samplers.guided(lambda x, t, y: exported(x, t, y).sample, {"y": y}, {"y": null}, scale)
    return lambda x, t: at_boundary(guided(x, t.to(x.device).expand(len(x))))[:, :x.shape[1]]


def _scale(system: DiTSystem) -> float:
    return _SCALE if system.config.class_dropout_prob else 1.0


def _is_pipeline(system: DiTSystem) -> bool:
    return system.config.objective == "diffusion" and system.config.first_stage is not None


def _require_expressible(system: DiTSystem, network: DiT) -> None:
    config, dim = system.config, network.pos_embed.shape[-1]
    if config.time_freq != "diffusers":
        raise ConfigError("time_freq: diffusers' DiTTransformer2DModel spaces the frequencies of its timesteps wider "
                          "than the official network and has no setting for it; train on for a while with "
                          "model.time_freq=diffusers and init_from= this run, or take --format safetensors")
    if int(dim * config.mlp_ratio) != 4 * dim:
        raise ConfigError(f"mlp_ratio: it is 4 in diffusers' DiTTransformer2DModel and {config.mlp_ratio:g} here; take "
                          "--format safetensors")
    if not torch.allclose(network.pos_embed.float().cpu(), sincos_positions(dim, network.grid, network.grid)[None],
                          rtol=0, atol=1e-6):
        raise ConfigError("pos_embed: these positions were interpolated from another resolution, and diffusers' "
                          "DiTTransformer2DModel computes its own; take --format safetensors")
    if _is_pipeline(system) and config.num_classes > _NULL:
        raise ConfigError(f"num_classes: {config.num_classes} labels leave no room for no label, which is number "
                          f"{_NULL} to diffusers' DiTPipeline; take --format safetensors")
    if system.first_stage is not None and system.first_stage.shift:
        raise ConfigError(f"first_stage.shift: {system.first_stage.shift:g} is added to latents here, and diffusers' "
                          "DiTPipeline adds nothing; take --format safetensors")
    scale = config.flow.time_scale
    if config.objective == "flow" and (scale != int(scale) or scale < 1):
        raise ConfigError(f"flow.time_scale: {scale:g} is no whole number, which FlowMatchEulerDiscreteScheduler takes "
                          "as num_train_timesteps; take --format safetensors")


def _scheduler(system: DiTSystem) -> Any:
    from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

    config = system.config
    if config.objective == "flow":
        return FlowMatchEulerDiscreteScheduler(num_train_timesteps=int(config.flow.time_scale), shift=config.flow.shift)
    return DDIMScheduler(**scheduler_arguments(system.diffusion, config.diffusion.schedule, system.models_pixels()))


def _first_stage(config: Config) -> nn.Module | None:
    """The first stage with the scale of the run, read again, since the system may have dropped its encoder."""
    if config.first_stage is None:
        return None
    stage = Autoencoder(config.first_stage.path, config.first_stage.scaling_factor, config.first_stage.shift)
    trained_with = config.first_stage.fingerprint or (config.codes.first_stage if config.codes else None)
    if trained_with not in (None, stage.fingerprint()):
        raise ConfigError(f"first_stage.path: {config.first_stage.path} is the autoencoder {stage.fingerprint()} now, "
                          f"this model was trained with {trained_with}; put that one back there")
    stage.vae.register_to_config(scaling_factor=stage.scaling_factor)
    return stage.vae
