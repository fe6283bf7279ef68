"""A trained KL autoencoder as diffusers' AutoencoderKL: the weights keep their names, so that nothing is converted.

What every system's to_diffusers.py offers to dstrain/export.py:

    about(system)                              what it becomes, what whoever loads it has to know ("": nothing), and
                                               lines of Python that load it from "OUT"
    save(system, nets, folder, statistics, classes)
                                               writes what diffusers loads; ConfigError: it cannot be expressed, and why
    errors(system, nets, folder, example)      what diffusers makes of it, read again, against the trained networks: the
                                               largest relative difference by name
    TOLERATED                                  the largest difference that is kept, by name, where it is another than
                                               export.py's
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dstrain.encoders.autoencoder import Autoencoder, fingerprint, posterior
from dstrain.nn.measures import apart
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
    """A folder with config.json and weights; `statistics` gives scaling_factor, 1 / std of the latents. It has no place
    for the names of `classes`.
    """
    from diffusers import AutoencoderKL

    if not isinstance(system, KLSystem):
        raise ConfigError("diffusers has no class for a discrete VAE: only model.kl is expressible, as AutoencoderKL; "
                          "take --format safetensors")
    network = nets["autoencoder"]
    config = {name: value for name, value in network.config.items() if name[0] != "_"}
    config |= {"sample_size": system.config.image_size, "scaling_factor": statistics()["scaling_factor"]}
    with torch.device("meta"):
        model = AutoencoderKL(**config)
    model.load_state_dict(network.state_dict(), assign=True)
    model.save_pretrained(folder)


@torch.no_grad()
def errors(system: KLSystem, nets: Mapping[str, nn.Module], folder: Path, example: Example) -> dict[str, float]:
    """Of the posterior's mean and deviation, and of the decoded mean. ConfigError: the weights have other bits."""
    read = Autoencoder(str(folder)).to(example["x_start"].device)
    ours, theirs = fingerprint(*system.identity(nets)), read.fingerprint()
    if ours != theirs:
        raise ConfigError(f"{folder} was read back as the first stage {theirs}, the trained one is {ours}")
    codes = system.codes(nets, example)
    mean, std = posterior(read.vae, example["x_start"])
    decoded = read.vae.decode(codes["latent_mean"]).sample
    return {"mean": apart(mean, codes["latent_mean"]), "std": apart(std, codes["latent_std"]),
            "decoded": apart(decoded, nets["autoencoder"].decode(codes["latent_mean"]))}
