"""A finished or running run's folder, read by the verbs that come after training: recipe, checkpoint, networks."""

from pathlib import Path

import torch
from torch import nn

from dstrain.engine.checkpoint import read_weights
from dstrain.engine.store import Store
from dstrain.ranks import group
from dstrain.recipe import ConfigError, Run, load
from dstrain.runs.weights import checkpoint_kind, whole
from dstrain.systems.base import System


def read(folder: Path) -> Run:
    """The recipe that a run was trained with, as resolved. ConfigError: it is no run's folder."""
    if not (folder / "run.yaml").exists():
        raise ConfigError(f"{folder} is not a run's folder: it holds no run.yaml; name one that training has made, for "
                          "example runs/dit-small")
    return load(folder / "run.yaml")


def checkpoint(folder: Path, step: int | None = None) -> Path:
    """The run's checkpoint of a step, None for the newest whole one. ConfigError: absent or damaged."""
    store = Store(folder / "checkpoints")
    if step is not None:
        if step not in store.steps():
            there = ", ".join(map(str, store.steps())) or "none"
            raise ConfigError(f"--checkpoint {step}: {folder} holds no checkpoint of that step; it holds {there}")
        return whole(store.folder / f"step_{step:08d}")
    newest = store.newest()
    if newest is None and (steps := store.steps()):
        raise ConfigError(f"{folder}: none of its checkpoints ({', '.join(map(str, steps))}) is whole; see the reasons "
                          "above, restore one, or train it again")
    if newest is None:
        raise ConfigError(f"{folder} holds no whole checkpoint yet: train first")
    return newest[1]


def kinds(system: System, checkpoint: Path, ema: float | None = None, raw: bool = False,
          every: bool = False) -> dict[str, str]:
    """Which weights to take of each part: master or ema.DECAY; `ema` None takes the first average there is.

    Parts without averages, such as a discriminator, only teach others: they are left out, unless `every` is wanted.
    ConfigError: there is no such average.
    """
    return {part: checkpoint_kind(checkpoint, part, ema) if part in system.averaged and not raw else "master"
            for part in system.parts if every or part in system.averaged}


def networks(system: System, checkpoint: Path, kinds: dict[str, str], dtype: torch.dtype) -> dict[str, nn.Module]:
    """The system's networks that `kinds` names, with those weights, on this rank's device, dropping nothing out."""
    found = {part: network for part, network in system.networks().items() if part in kinds}
    for part, network in found.items():
        network.load_state_dict(read_weights(checkpoint, part, kinds[part]))
        buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
        network.to(group.device(), dtype).eval()
        for name, buffer in network.named_buffers():                      # tables keep their own precision
            buffer.data = buffers[name].to(group.device())
    for network in system.frozen():
        network.to(group.device())
    return found
