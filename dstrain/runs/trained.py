"""Reads the folder of a finished or running run for the verbs that come after training: its recipe, a checkpoint, and
networks with that checkpoint's weights.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from dstrain import systems
from dstrain.checkpoint.layout import find_reconstructed_average
from dstrain.checkpoint.store import Store
from dstrain.checkpoint.validate import require_loadable_checkpoint
from dstrain.distributed import group
from dstrain.engine.checkpoint import read_weights
from dstrain.recipe import ConfigError, Run, explain_write_errors, reword_errors
from dstrain.runs import folders
from dstrain.runs.weights import choose_raw_or_ema_weights, protect_checkpoints_while_choosing, require_whole_checkpoint
from dstrain.systems.base import System

Guide = tuple[Path, float | str | None, int | None]  # a run; a decay or width of its EMA, or raw; a step


def read_recipe(folder: Path) -> Run:
    """Reads the recipe that a run was trained with, with all defaults filled in. Raises ConfigError if `folder` is no
    run's, or if its recipe cannot be read.
    """
    if not (folder / "run.yaml").exists():
        raise ConfigError(
            f"{folder} is not a run's folder: it holds no run.yaml; name one that training has made, for "
            "example runs/dit-small"
        )
    return folders.read_recipe(folder)


def find_checkpoint(folder: Path, step: int | None = None, ema: float | None = None) -> Path:
    """Returns the folder of a run's checkpoint at `step`, or of the newest whole checkpoint if `step` is None. Call it
    on all ranks. Keeps training from removing the folder until this process ends or calls `owner.release_all_holds`.

    If `ema` is given and that checkpoint lacks this average, returns the folder in which `dstrain reconstruct` has made
    the average, if there is one. With `step` None this may be of an earlier step; rank 0 then prints a note. Raises
    ConfigError if there is no such checkpoint, or if it is damaged.
    """
    steps = [folder / "checkpoints" / f"step_{step:08d}"] if step is not None else []
    with protect_checkpoints_while_choosing(steps or (folder / "checkpoints").glob("step_*[0-9]")) as keep:
        return keep(_choose_checkpoint(folder, step, ema))


def _choose_checkpoint(folder: Path, step: int | None, ema: float | None) -> Path:
    """Returns what `find_checkpoint` returns, without protecting the folder from removal."""
    store = Store(folder / "checkpoints", check=require_loadable_checkpoint)
    if step is not None:
        own = store.folder / f"step_{step:08d}" if step in store.list_steps() else None
        if ema is not None and (made := find_reconstructed_average(folder, ema, step, own)):
            return require_whole_checkpoint(made)
        if own is None:
            steps = ", ".join(map(str, store.list_steps())) or "none"
            raise ConfigError(f"--checkpoint {step}: {folder} holds no checkpoint of that step; it holds {steps}")
        return require_whole_checkpoint(own)
    newest = store.find_newest_checkpoint()
    if ema is not None and (made := find_reconstructed_average(folder, ema, None, newest and newest[1])):
        if newest and newest[1].name != made.name and group.rank() == 0:
            print(
                f"note: --ema {ema} is of {made.name}; dstrain reconstruct has made none of {newest[1].name}",
                file=sys.stderr,
            )
        return require_whole_checkpoint(made)
    if newest is None and (steps := store.list_steps()):
        raise ConfigError(
            f"{folder}: none of its checkpoints ({', '.join(map(str, steps))}) is whole; see the reasons "
            "above, restore one, or train it again"
        )
    if newest is None:
        raise ConfigError(f"{folder} holds no whole checkpoint yet: train first")
    return newest[1]


def make_writable_folder(folder: Path, option: str = "--out") -> None:
    """Makes a folder if it is missing. Raises ConfigError, which names the `option`, if the folder cannot be made or
    written.
    """
    with explain_write_errors(f"{option} {folder}", "name a folder that can be written"):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {folder} cannot be written: name another folder")


def choose_raw_or_ema_by_part(
    system: System, checkpoint: Path, ema: float | None = None, raw: bool = False, include_unaveraged: bool = False
) -> dict[str, str]:
    """Returns {part: kind of weights to take}. The kind is "ema.DECAY", of the average `ema` or, if None, of the part's
    first average. It is "master", the training weights, if `raw`.

    Leaves out parts without averages, such as a discriminator. With `include_unaveraged` includes them as "master", if
    the checkpoint holds files of them. Raises ConfigError if there is no such average.
    """
    return {
        part: choose_raw_or_ema_weights(checkpoint, part, ema) if part in system.averaged and not raw else "master"
        for part in system.parts
        if part in system.averaged or (include_unaveraged and any(checkpoint.glob(f"{part}-*-of-*")))
    }


def load_networks(
    system: System, checkpoint: Path, kinds: dict[str, str], dtype: torch.dtype, device: torch.device | None = None
) -> dict[str, nn.Module]:
    """Builds the networks of the parts in `kinds`, {part: kind of weights}, and loads these weights from a checkpoint.
    Returns the networks by part, in eval mode on `device` (None: the rank's). Also moves the system's frozen networks
    there. Raises ConfigError if weights are absent or damaged.
    """
    states = ((part, read_weights(checkpoint, part, kind)) for part, kind in kinds.items())
    return build_networks_from_states(system, states, dtype, device or group.device())


def build_networks_from_states(
    system: System, states: Iterable[tuple[str, dict[str, Tensor]]], dtype: torch.dtype, device: torch.device
) -> dict[str, nn.Module]:
    """Builds the system's networks, and loads `states`, pairs of (part, state dict), into them. Returns the networks of
    these parts, by part, in eval mode on `device`. Converts weights to `dtype`; buffers keep their dtype. Also moves
    the system's frozen networks to the device.
    """
    fresh, loaded = system.networks(), {}
    for part, state in states:
        loaded[part] = network = fresh[part]
        network.load_state_dict(state)
        buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
        network.to(device, dtype).eval()
        for name, buffer in network.named_buffers():  # tables keep their own precision
            buffer.data = buffers[name].to(device)
    for network in system.frozen():
        network.to(device)
    return loaded


def load_guiding_network(guide: Guide, system: System, scale: float, dtype: torch.dtype) -> nn.Module:
    """Loads the network that guides samples of `system` (autoguidance, Karras et al. 2024), and returns it in eval mode
    on the rank's device. `guide` is (the folder of the guiding run; the decay or width of an average, or "raw"; a
    step). None stands for the recipe's average and for the newest step.

    Raises ConfigError if the network cannot be loaded, if it cannot guide samples of `system`, or if `scale` is 1, at
    which guidance has no effect.
    """
    folder, weights, step = guide
    if scale == 1:
        raise ConfigError(f"--guide {folder}: guidance of scale 1 is none: give --guidance-scale 2, say")
    with reword_errors(f"--guide {folder}: "):
        run = read_recipe(folder)
        other, raw = systems.build(run.system, run.model), weights == "raw"
        system.require_guide(other)
        ema = None if raw else weights
        checkpoint = find_checkpoint(folder, step, ema)
        kinds = choose_raw_or_ema_by_part(other, checkpoint, run.samples.ema if ema is None else ema, raw)
        return load_networks(other, checkpoint, kinds, dtype)["denoiser"]


def require_outside_run_folders(out: Path) -> None:
    """Raises ConfigError if `out` is, or lies in, a folder that a run writes itself, such as its samples/."""
    path = out.resolve()
    for inner in (path, *path.parents):
        if inner.name in folders.OF_RUN and (inner.parent / "run.yaml").is_file() and not inner.is_file():
            raise ConfigError(
                f"--out {out} lies in {inner}, which belongs to the run: name another folder, such as "
                f"{inner.parent / 'drawn'}"
            )
