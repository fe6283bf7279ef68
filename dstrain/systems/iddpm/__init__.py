"""Improved diffusion on pixels with a UNet, and its super-resolution: Nichol & Dhariwal 2021."""

from dstrain.systems.iddpm.config import Config
from dstrain.systems.iddpm.system import IDDPMSystem

build = IDDPMSystem
__all__ = ["Config", "IDDPMSystem", "build"]
