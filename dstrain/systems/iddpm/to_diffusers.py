"""A trained IDDPM as a folder for diffusers: UNet2DModel and DDPMScheduler. See dstrain/export.py.

    unet/              UNet2DModel; weights.arguments refuses what it cannot express. A super-resolution UNet has twice
                       the input channels: x, and beside it the small picture stretched to x's size
    scheduler/         DDPMScheduler, learned variances included; DDIMScheduler.from_config takes it, too
    model_index.json   of a DDPMPipeline, for a model without conditions: that pipeline gives no labels

With rescale_timesteps the network sees other timesteps than those of the chain. Then UNet2DModel looks up their
sinusoids in a table (time_embedding_type "learned").
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dstrain import rng
from dstrain.diffusion import samplers
from dstrain.diffusion.published import even_steps, scheduler_arguments
from dstrain.nn.measures import relative_error
from dstrain.systems.base import Example
from dstrain.systems.iddpm import weights
from dstrain.systems.iddpm.system import IDDPMSystem

TOLERATED = {"chain": 1e-3, "prediction": 1e-4}   # relative; other shapes of convolutions and attention round otherwise
_COUNT, _IN_CHAIN = 4, 2                          # samples compared in one prediction, and along a chain


def about(system: IDDPMSystem) -> tuple[str, str, str]:
    """The class in diffusers, notes for its user, and Python code that loads it from OUT."""
    config, notes = system.config, []
    if _is_pipeline(system):
        code = ("from diffusers import DDPMPipeline\n"
                'pipeline = DDPMPipeline.from_pretrained("OUT")\n'
                "pipeline(num_inference_steps=250).images[0].save('0.png')")
        return "DDPMPipeline", "", code
    if config.class_cond:
        notes.append("diffusers' DDPMPipeline gives no labels: call unet(x, t, class_labels=y) in a loop of your own")
    if system.starts_from_data:
        notes.append(f"the unet sees {2 * config.in_channels} channels: x, and beside it the {config.small_size} x "
                     f"{config.small_size} picture stretched to {config.image_size} x {config.image_size} "
                     "(torch.nn.functional.interpolate, bilinear, align_corners=False)")
    if config.learn_sigma:
        notes.append(f"the unet's first {config.in_channels} output channels are the prediction, the others the "
                     "variances, which DDPMScheduler takes and DDIMScheduler must not be given")
    code = ("from diffusers import DDPMScheduler, UNet2DModel\n"
            'unet = UNet2DModel.from_pretrained("OUT/unet")\n'
            'scheduler = DDPMScheduler.from_pretrained("OUT/scheduler")')
    return "UNet2DModel", "; ".join(notes), code


def save(system: IDDPMSystem, nets: Mapping[str, nn.Module], folder: Path,
         statistics: Callable[[], dict[str, Any]] = dict, classes: Callable[[], Sequence[str]] = tuple) -> None:
    """Writes the folder; `statistics` and `classes` are for other systems.

    ConfigError: a flag of the model that diffusers' classes cannot express.
    """
    from diffusers import DDPMPipeline, UNet2DModel

    config = system.config
    arguments, scheduler = weights.arguments(config), _scheduler(system)
    state = {name: value.float().cpu() for name, value in nets["denoiser"].state_dict().items()}
    with torch.device("meta"):
        unet = UNet2DModel(**arguments)
    unet.load_state_dict(weights.to_diffusers(state, config), assign=True)
    folder.mkdir(parents=True, exist_ok=True)
    if _is_pipeline(system):
        DDPMPipeline(unet, scheduler).save_pretrained(folder)
    else:
        unet.save_pretrained(folder / "unet")
        scheduler.save_pretrained(folder / "scheduler")


@torch.no_grad()
def errors(system: IDDPMSystem, nets: Mapping[str, nn.Module], folder: Path, example: Example) -> dict[str, float]:
    """Relative errors of predictions at timesteps over the whole chain, and of a DDIM chain from the same noise."""
    from diffusers import DDIMScheduler, UNet2DModel

    config, key = system.config, example["key"][:_COUNT]
    exported = UNet2DModel.from_pretrained(folder / "unet", low_cpu_mem_usage=False).to(key.device).eval()
    x, conditions = rng.normal(key, "start", system.shape), {}
    if config.class_cond:
        conditions["label"] = rng.integers(key, "label", config.num_classes)
    if system.starts_from_data:
        small = (config.in_channels, config.small_size, config.small_size)
        conditions["low_res"] = rng.normal(key, "low_res", small)
    network, predict = system.network(nets, conditions), _conditioned(system, exported, conditions)
    t = torch.linspace(0, config.diffusion_steps - 1, len(key), device=key.device).long()
    prediction = relative_error(predict(x, t), network(x, system.diffusion.times(t)))

    x, conditions = x[:_IN_CHAIN], {name: value[:_IN_CHAIN] for name, value in conditions.items()}
    network, predict = system.network(nets, conditions), _conditioned(system, exported, conditions)
    scheduler = DDIMScheduler.from_pretrained(folder / "scheduler", timestep_spacing="leading")
    steps = even_steps(config.diffusion_steps)
    scheduler.set_timesteps(steps)
    x_t = x
    for t in scheduler.timesteps:
        out = predict(x_t, t.to(x.device).expand(len(x)))[:, :config.in_channels]
        x_t = scheduler.step(out, t, x_t, use_clipped_model_output=True).prev_sample
    expected = samplers.ddim(system.diffusion.respaced(f"ddim{steps}"), network, x, clip_denoised=True)
    return {"prediction": prediction, "chain": relative_error(x_t, expected)}


def _conditioned(system: IDDPMSystem, unet: nn.Module,
                 conditions: Mapping[str, Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """What a user of the UNet2DModel writes by hand: its output at a scheduler's timesteps (B,)."""
    def output(x: Tensor, t: Tensor) -> Tensor:
        if system.starts_from_data:
            stretched = F.interpolate(conditions["low_res"], x.shape[-2:], mode="bilinear", align_corners=False)
            x = torch.cat((x, stretched), dim=1)
        return unet(x, t, class_labels=conditions.get("label")).sample
    return output


def _is_pipeline(system: IDDPMSystem) -> bool:
    return not system.config.class_cond and not system.starts_from_data


def _scheduler(system: IDDPMSystem) -> Any:
    from diffusers import DDPMScheduler

    common = scheduler_arguments(system.diffusion, system.config.noise_schedule, clip=True)
    return DDPMScheduler(**common, variance_type=system.diffusion.variance, timestep_spacing="linspace")
