"""Diffusion transformers over pixels or latents, conditioned on a class: Peebles & Xie 2022."""

from dstrain.systems.dit.config import Config
from dstrain.systems.dit.system import DiTSystem

build = DiTSystem
__all__ = ["Config", "DiTSystem", "build"]
