"""The network of another run, or of another checkpoint or average of the same one, that guides (Karras et al. 2024)."""

from pathlib import Path

import torch
from torch import nn

from dstrain import systems
from dstrain.recipe import ConfigError, reworded
from dstrain.runs import trained
from dstrain.systems.base import System

Guide = tuple[Path, float | str | None, int | None]  # a run; its EMA's decay or width, or raw; its checkpoint


def load(guide: Guide, system: System, scale: float, dtype: torch.dtype) -> nn.Module:
    """What guides the samples of `system`. ConfigError: it cannot, or there is no guidance, since `scale` is 1."""
    folder, weights, step = guide
    if scale == 1:
        raise ConfigError(f"--guide {folder}: guidance of scale 1 is none: give --guidance-scale 2, say")
    with reworded(f"--guide {folder}: "):
        run = trained.read(folder)
        other, raw = systems.build(run.system, run.model), weights == "raw"
        system.require_guide(other)
        ema = None if raw else weights
        checkpoint = trained.checkpoint(folder, step, ema)
        kinds = trained.kinds(other, checkpoint, run.samples.ema if ema is None else ema, raw)
        return trained.networks(other, checkpoint, kinds, dtype)["denoiser"]
