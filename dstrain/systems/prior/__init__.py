"""The diffusion prior of DALL-E 2, from text to image embeddings: Ramesh et al. 2022."""

from dstrain.systems.prior.config import Config
from dstrain.systems.prior.system import PriorSystem

build = PriorSystem
__all__ = ["Config", "PriorSystem", "build"]
