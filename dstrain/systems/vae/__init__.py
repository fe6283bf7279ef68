"""Autoencoders of images, the first stages of others: discrete (DALL-E's) and with a Gaussian posterior (KL, LDM's)."""

from dstrain.systems.vae.config import Config
from dstrain.systems.vae.discrete_system import DiscreteSystem
from dstrain.systems.vae.kl_system import KLSystem
from dstrain.systems.vae.system import AutoencoderSystem

__all__ = ["AutoencoderSystem", "Config", "DiscreteSystem", "KLSystem", "build"]


def build(config: Config) -> AutoencoderSystem:
    """Builds the system of a config. Raises ConfigError if its perceptual weights are missing."""
    return DiscreteSystem(config) if config.discrete else KLSystem(config)
