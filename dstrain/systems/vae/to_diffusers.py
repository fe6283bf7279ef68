"""Exports a trained KL autoencoder as diffusers' AutoencoderKL. Its weights keep their names.

dstrain/commands/export.py needs these names of every system's to_diffusers.py:

    describe_export(system)        the class in diffusers, notes for users ("": none), and Python code that draws from
                                   the folder "OUT", into `images` or `image_embeds`
    save_export(system, nets, folder, get_statistics, get_class_names)
                                   writes what diffusers loads; raises ConfigError if diffusers cannot express it
    measure_export_errors(system, nets, folder, example)
                                   the largest relative errors, by name, of what diffusers computes with the folder,
                                   compared with the trained networks
    draw_reference_outputs(system, nets)
                                   what that code should draw, by the trained networks and our samplers from the same
                                   noise: uint8 pictures (B, C, H, W), or float32 (B, ...)
    TOLERATED                      the largest errors, by name, that are accepted: "code" is that of what the code
                                   draws; for names that it lacks export.py has a default
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dstrain.distributed import group
from dstrain.encoders.autoencoder import Autoencoder, encode_posterior, hash_network
from dstrain.nn.measures import measure_relative_error
from dstrain.recipe import ConfigError
from dstrain.systems.base import Example
from dstrain.systems.vae.kl_system import KLSystem
from dstrain.systems.vae.system import AutoencoderSystem

TOLERATED = {"code": 1e-3}  # relative; on a GPU the trained network's convolutions round differently
_CODE = """\
import torch
from diffusers import AutoencoderKL

vae = AutoencoderKL.from_pretrained("OUT")
noise = torch.Generator().manual_seed(0)
images = torch.rand({shape}, generator=noise) * 2 - 1    # in place of yours, (B, C, H, W) in [-1, 1]
with torch.no_grad():
    latents = vae.encode(images).latent_dist.sample(noise) * vae.config.scaling_factor    # what a DiT learns from
    images = vae.decode(latents / vae.config.scaling_factor).sample
"""


def describe_export(system: AutoencoderSystem) -> tuple[str, str, str]:
    """Returns the name of diffusers' class for the model, a note for the user, which is empty here, and Python code
    that encodes and decodes images with the exported folder, which the code calls OUT.
    """
    return "AutoencoderKL", "", _CODE.format(shape=", ".join(map(str, _choose_example_image_shape(system))))


def _choose_example_image_shape(system: AutoencoderSystem) -> tuple[int, ...]:
    """Returns the shape of the two images that the example code makes, (2, C, H, W)."""
    config = system.config
    return 2, config.channels, config.image_size, config.image_size


def save_export(
    system: AutoencoderSystem,
    nets: Mapping[str, nn.Module],
    folder: Path,
    get_statistics: Callable[[], dict[str, Any]],
    get_class_names: Callable[[], Sequence[str]] = tuple,
) -> None:
    """Writes config.json and the weights of diffusers' AutoencoderKL into `folder`. Raises ConfigError for a discrete
    VAE.

    get_statistics   get_statistics() returns a dict with scaling_factor, 1 / the standard deviation of latents, for
                     config.json.
    get_class_names  has no effect.
    """
    from diffusers import AutoencoderKL

    system.require_expressible_in_diffusers()
    network = nets["autoencoder"]
    config = {name: value for name, value in network.config.items() if name[0] != "_"}
    config |= {"sample_size": system.config.image_size, "scaling_factor": get_statistics()["scaling_factor"]}
    with torch.device("meta"):
        model = AutoencoderKL(**config)
    model.load_state_dict(network.state_dict(), assign=True)
    model.save_pretrained(folder)


@torch.no_grad()
def measure_export_errors(
    system: KLSystem, nets: Mapping[str, nn.Module], folder: Path, example: Example
) -> dict[str, float]:
    """Compares the exported model in `folder` with the trained network on the example. Returns {"mean", "std",
    "decoded"}: the largest error of the posterior's mean, of its standard deviation and of the decoded picture, each
    divided by the largest absolute value. Raises ConfigError if the weights in the folder are not exactly the trained
    ones.
    """
    read = Autoencoder(str(folder)).to(example["x_start"].device)
    trained, exported = hash_network(*system.describe_identity(nets)), read.compute_fingerprint()
    if trained != exported:
        raise ConfigError(f"{folder} was read back as the first stage {exported}, the trained one is {trained}")
    codes = system.compute_codes(nets, example)
    mean, std = encode_posterior(read.vae, example["x_start"])
    decoded = read.vae.decode(codes["latent_mean"]).sample
    return {
        "mean": measure_relative_error(mean, codes["latent_mean"]),
        "std": measure_relative_error(std, codes["latent_std"]),
        "decoded": measure_relative_error(decoded, nets["autoencoder"].decode(codes["latent_mean"])),
    }


@torch.no_grad()
def draw_reference_outputs(system: KLSystem, nets: Mapping[str, nn.Module]) -> Tensor:
    """Returns the images that the example in the export's model card (`describe_export`) should make, float32 (B, C, H,
    W), computed by the trained network from the same random numbers.
    """
    generator, device = torch.Generator().manual_seed(0), group.device()
    images = (torch.rand(_choose_example_image_shape(system), generator=generator) * 2 - 1).to(device)
    codes = system.compute_codes(nets, {"x_start": images})
    noise = torch.randn(codes["latent_mean"].shape, generator=generator).to(device)
    latents = codes["latent_mean"] + codes["latent_std"] * noise
    return nets["autoencoder"].decode(latents)
