"""Autoencoders of images, which are first stages for other systems: a discrete VAE (DALL-E's) and one with a Gaussian
posterior (KL, LDM's).
"""

from dstrain.systems.vae.config import Config
from dstrain.systems.vae.discrete_system import DiscreteSystem
from dstrain.systems.vae.kl_system import KLSystem
from dstrain.systems.vae.system import AutoencoderSystem

__all__ = ["AutoencoderSystem", "Config", "DiscreteSystem", "KLSystem", "build"]


def build(config: Config) -> AutoencoderSystem:
    """Returns a DiscreteSystem if the config has the section `discrete`, else a KLSystem."""
    return DiscreteSystem(config) if config.discrete else KLSystem(config)
