"""Exports a trained IDDPM as a folder that diffusers loads and draws from. See dstrain/commands/export.py.

    unet/              UNet2DModel; weights.py refuses what it cannot express. A super-resolution UNet has twice
                       the input channels: x, then the small picture stretched to x's size
    scheduler/         DDPMScheduler, learned variances included; DDIMScheduler.from_config accepts it
    model_index.json   names DDPMPipeline; for a model with labels or small pictures, which DDPMPipeline does not
                       take, it names ConditionalUNetPipeline
    pipeline.py        the code of ConditionalUNetPipeline, only for such a model

With rescale_timesteps and other than 1000 diffusion_steps the network sees other timesteps than those of the chain.
Then UNet2DModel looks up their sinusoids in a table (time_embedding_type "learned").
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dstrain import rng
from dstrain.diffusion import samplers
from dstrain.diffusion.published import add_to_model_index, find_largest_divisor
from dstrain.distributed import group
from dstrain.nn.measures import measure_relative_error
from dstrain.nn.pixels import convert_to_uint8
from dstrain.systems.base import Example, Request
from dstrain.systems.iddpm import weights
from dstrain.systems.iddpm.system import IDDPMSystem

# The largest relative errors: convolutions and attention of other shapes round differently. "code" allows two of 255
# levels.
TOLERATED = {"prediction": 1e-4, "without label": 1e-4, "code": 2.5 / 255}
_COUNT, _DRAWN = 4, 2  # samples in `measure_export_errors`; samples that the code of `describe_export` draws
_SCALE = 2.0  # guidance_scale in that code, if the model has a null label
_STOCK = """\
import torch
from diffusers import DDPMPipeline

pipeline = DDPMPipeline.from_pretrained("OUT")
noise = torch.Generator().manual_seed(0)
"""
_OWN = """\
import torch
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("OUT", trust_remote_code=True)    # runs pipeline.py of this folder
noise = torch.Generator().manual_seed(0)
"""
_LOW_RES = """\
low_res = torch.rand({shape}, generator=noise) * 2 - 1    # in place of your small pictures, (B, C, h, w) in [-1, 1]
"""
_DRAW = """\
images = pipeline({inputs}, num_inference_steps={steps}, generator=noise).images
images[0].save("0.png")
"""


def describe_export(system: IDDPMSystem) -> tuple[str, str, str]:
    """Returns three texts for users of the export: the name of diffusers' class that loads it, notes ("" if there are
    none), and Python code that draws samples from it. In the code OUT stands for the export's folder.
    """
    config, inputs, notes = system.config, [], []
    if system.starts_from_data:
        inputs.append("low_res=low_res")
        notes.append(
            f"the unet sees {2 * config.in_channels} channels: x, and beside it the {config.small_size} x "
            f"{config.small_size} picture stretched to {config.image_size} x {config.image_size}"
        )
    if config.class_cond:
        inputs.insert(0, f"class_labels={_choose_example_labels(system)}")
        inputs += [f"guidance_scale={_SCALE:g}"] if config.has_null_label else []
    if config.learn_sigma:
        notes.append(
            f"the unet's first {config.in_channels} output channels are the prediction, the others the "
            "variances, which DDPMScheduler takes and DDIMScheduler must not be given"
        )
    code = _OWN if inputs else _STOCK
    if system.starts_from_data:
        code += _LOW_RES.format(shape=", ".join(map(str, _choose_example_low_res_shape(system))))
    arguments = ", ".join(inputs or [f"batch_size={_DRAWN}"])
    code += _DRAW.format(inputs=arguments, steps=find_largest_divisor(config.diffusion_steps))
    return "UNet2DModel" if inputs else "DDPMPipeline", "; ".join(notes), code


def save_export(
    system: IDDPMSystem,
    nets: Mapping[str, nn.Module],
    folder: Path,
    get_statistics: Callable[[], dict[str, Any]] = dict,
    get_class_names: Callable[[], Sequence[str]] = tuple,
) -> None:
    """Writes the model into `folder`, from which diffusers' from_pretrained loads it. Raises ConfigError if diffusers'
    classes cannot express the model.

    get_class_names  returns the names of the classes by label; () if they are unknown.
    get_statistics   is not used here; exports of other systems need it.
    """
    from diffusers import DDPMPipeline, UNet2DModel

    from dstrain.systems.iddpm.pipeline import ConditionalUNetPipeline

    config = system.config
    system.require_expressible_in_diffusers()
    arguments, scheduler = weights.make_diffusers_arguments(config), _build_scheduler(system)
    state = {name: value.float().cpu() for name, value in nets["denoiser"].state_dict().items()}
    with torch.device("meta"):
        unet = UNet2DModel(**arguments)
    unet.load_state_dict(weights.rename_to_diffusers(state, config), assign=True)
    folder.mkdir(parents=True, exist_ok=True)
    if not config.class_cond and not system.starts_from_data:
        DDPMPipeline(unet, scheduler).save_pretrained(folder)
        return
    pipeline = ConditionalUNetPipeline(
        unet, scheduler, enlarges=system.starts_from_data, has_null=config.has_null_label
    )
    pipeline.save_pretrained(folder)
    if config.class_cond and (names := get_class_names()):
        add_to_model_index(folder, id2label={str(number): name for number, name in enumerate(names)})


@torch.no_grad()
def measure_export_errors(
    system: IDDPMSystem, nets: Mapping[str, nn.Module], folder: Path, example: Example
) -> dict[str, float]:
    """Returns how far predictions of the exported UNet are from the trained network's: largest difference / largest
    value. Compares at most four samples, at timesteps spread over the whole chain. Keys: "prediction", and "without
    label" if the model has a null label.
    """
    from diffusers import UNet2DModel

    config, key = system.config, example["key"][:_COUNT]
    exported = UNet2DModel.from_pretrained(folder / "unet", low_cpu_mem_usage=False).to(key.device).eval()
    x, conditions = rng.normal(key, "start", system.shape), {}
    seen = x
    if config.class_cond:
        conditions["label"] = rng.integers(key, "label", config.num_classes)
    if system.starts_from_data:
        conditions["low_res"] = rng.normal(key, "low_res", _choose_example_low_res_shape(system)[1:])
        stretched = F.interpolate(conditions["low_res"], x.shape[-2:], mode="bilinear", align_corners=False)
        seen = torch.cat((x, stretched), dim=1)
    t = torch.linspace(0, config.diffusion_steps - 1, len(key), device=key.device).long()
    given = {"prediction": conditions.get("label")}
    if config.has_null_label:
        given["without label"] = torch.full_like(conditions["label"], config.num_classes)
    return {
        name: measure_relative_error(
            exported(seen, t, class_labels=label).sample,
            system.make_conditional_network(nets, conditions | {"label": label})(
                x, system.diffusion.convert_timesteps_for_network(t)
            ),
        )
        for name, label in given.items()
    }


@torch.no_grad()
def draw_reference_outputs(system: IDDPMSystem, nets: Mapping[str, nn.Module]) -> Tensor:
    """Draws, with the trained network and our ancestral sampler, the images that the code of `describe_export` should
    draw from the same noise. Returns them as uint8 (B, C, H, W).
    """
    generator, device, conditions = torch.Generator().manual_seed(0), group.device(), {}
    labels, steps = _choose_example_labels(system), find_largest_divisor(system.config.diffusion_steps)
    if system.starts_from_data:
        conditions["low_res"] = (torch.rand(_choose_example_low_res_shape(system), generator=generator) * 2 - 1).to(
            device
        )
    if system.config.class_cond:
        conditions["label"] = torch.tensor(labels, device=device)

    def draw_normal_noise(*_):
        return torch.randn(len(labels), *system.shape, generator=generator).to(device)

    scale = _SCALE if system.config.has_null_label else 1.0
    network = system.make_guided_network(nets, conditions, Request(torch.arange(_DRAWN), guidance_scale=scale))
    return convert_to_uint8(
        samplers.sample_ancestral(
            system.diffusion.respace(str(steps)), network, draw_normal_noise(), draw_normal_noise, clip_denoised=True
        )
    )


def _choose_example_labels(system: IDDPMSystem) -> list[int]:
    """Returns the labels of the images that the code of `describe_export` draws; 0 for each if the model takes none."""
    return [number % (system.config.num_classes if system.config.class_cond else 1) for number in range(_DRAWN)]


def _choose_example_low_res_shape(system: IDDPMSystem) -> tuple[int, ...]:
    """Returns the shape (N, C, h, w) of the small pictures in the code of `describe_export`."""
    return _DRAWN, system.config.in_channels, system.config.small_size, system.config.small_size


def _build_scheduler(system: IDDPMSystem) -> Any:
    """Returns the DDPMScheduler of diffusers with the betas and choices of the model's chain."""
    from diffusers import DDPMScheduler

    return DDPMScheduler(
        **system.process.make_diffusers_scheduler_arguments(),
        variance_type=system.diffusion.variance,
        timestep_spacing="linspace",
    )
