"""A trained KL autoencoder as diffusers' AutoencoderKL. Its weights keep their names.

What every system's to_diffusers.py offers to dstrain/export.py:

    about(system)                              the class in diffusers, notes for its user ("": none), and Python code
                                               that loads it from "OUT"
    save(system, nets, folder, statistics, classes)
                                               writes what diffusers loads; ConfigError: what diffusers cannot express
    errors(system, nets, folder, example)      the largest relative errors, by name, of what diffusers reads from the
                                               folder against the trained networks
    TOLERATED                                  the largest errors, by name, with which the folder is kept; optional,
                                               export.py has a default
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dstrain.encoders.autoencoder import Autoencoder, fingerprint, posterior
from dstrain.nn.measures import relative_error
from dstrain.recipe import ConfigError
from dstrain.systems.base import Example
from dstrain.systems.vae.kl_system import KLSystem
from dstrain.systems.vae.system import AutoencoderSystem

_CODE = """\
from diffusers import AutoencoderKL
vae = AutoencoderKL.from_pretrained("OUT")
latents = vae.encode(images).latent_dist.sample() * vae.config.scaling_factor      # images (B, C, H, W) in [-1, 1]"""


def about(system: AutoencoderSystem) -> tuple[str, str, str]:
    return "AutoencoderKL", "", _CODE


def save(system: AutoencoderSystem, nets: Mapping[str, nn.Module], folder: Path,
         statistics: Callable[[], dict[str, Any]], classes: Callable[[], Sequence[str]] = tuple) -> None:
    """Writes config.json and weights. `statistics` gives scaling_factor, 1 / std of latents; `classes` are unused."""
    from diffusers import AutoencoderKL

    if not isinstance(system, KLSystem):
        raise ConfigError("diffusers has a class for model.kl alone, not for a discrete VAE: take --format safetensors")
    network = nets["autoencoder"]
    config = {name: value for name, value in network.config.items() if name[0] != "_"}
    config |= {"sample_size": system.config.image_size, "scaling_factor": statistics()["scaling_factor"]}
    with torch.device("meta"):
        model = AutoencoderKL(**config)
    model.load_state_dict(network.state_dict(), assign=True)
    model.save_pretrained(folder)


@torch.no_grad()
def errors(system: KLSystem, nets: Mapping[str, nn.Module], folder: Path, example: Example) -> dict[str, float]:
    """Relative errors of the posterior's mean and deviation, and of the decoded mean.

    ConfigError: the weights in the folder are not bit for bit the trained ones.
    """
    read = Autoencoder(str(folder)).to(example["x_start"].device)
    trained, exported = fingerprint(*system.identity(nets)), read.fingerprint()
    if trained != exported:
        raise ConfigError(f"{folder} was read back as the first stage {exported}, the trained one is {trained}")
    codes = system.codes(nets, example)
    mean, std = posterior(read.vae, example["x_start"])
    decoded = read.vae.decode(codes["latent_mean"]).sample
    return {"mean": relative_error(mean, codes["latent_mean"]), "std": relative_error(std, codes["latent_std"]),
            "decoded": relative_error(decoded, nets["autoencoder"].decode(codes["latent_mean"]))}
