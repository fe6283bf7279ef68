"""Phenaki's tokenizer: C-ViViT, the first stage that turns clips and images to tokens and back."""

from dstrain.systems.phenaki.tokenizer.config import Config
from dstrain.systems.phenaki.tokenizer.network import CViViT
from dstrain.systems.phenaki.tokenizer.system import TokenizerSystem

__all__ = ["CViViT", "Config", "TokenizerSystem", "build"]


def build(config: Config) -> TokenizerSystem:
    """Returns the system that the config describes."""
    return TokenizerSystem(config)
