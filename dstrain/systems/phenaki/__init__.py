"""Phenaki, videos from text: MaskGit and its critic over the tokens of `phenaki.tokenizer`; Villegas et al. 2022."""

from dstrain.systems.phenaki.config import Config
from dstrain.systems.phenaki.system import PhenakiSystem, build

__all__ = ["Config", "PhenakiSystem", "build"]
