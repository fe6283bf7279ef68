"""Makes a run's folder of weights from elsewhere, which generate, evaluate, encode and export then read. Trains
nothing.

run.yaml                      the recipe, with the file as init_from and without averages
checkpoints/step_00000000/    the weights that training would begin with. It has no moments, and cannot be resumed
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dstrain import recipe, systems
from dstrain.checkpoint.fragments import write_shard
from dstrain.checkpoint.layout import COMMON, Fragment, make_shard_file_name
from dstrain.checkpoint.store import Store
from dstrain.commands.job import load_and_check_recipe
from dstrain.commands.options.import_weights import ImportOptions
from dstrain.distributed import group
from dstrain.distributed.progress import get_phases
from dstrain.engine.initial import build_networks
from dstrain.recipe import ConfigError, Ema, Run
from dstrain.runs.folders import create_output_folder_atomically
from dstrain.runs.weights import read_weights_adapted_to_system
from dstrain.systems.base import System


def run_verb(options: ImportOptions) -> None:
    """Imports the weights, and prints which were loaded, replaced and left out."""
    run = load_and_check_recipe(options.recipe, options.overrides)
    for note in import_weights(Path(os.path.expanduser(options.weights)), run, options.out):
        print(note)
    print(f"{run.name} of these weights in {options.out}")


def import_weights(weights: Path, recipe_run: Run, out: Path) -> list[str]:
    """Writes the weights as a new run's folder `out`, whole or not at all. Returns lines that say what was loaded,
    replaced and left out.

    weights: a path that init_from takes
    recipe_run: the checked recipe that describes the weights; its data need not be on this machine

    Raises ConfigError if the weights do not fit the recipe, or are damaged, or if the folder cannot be written.
    """
    if group.read_rank_and_world().world > 1:
        raise ConfigError("an import takes one process: dstrain import ...")
    if not weights.exists():
        raise ConfigError(f"{weights} does not exist: give a weights file, a folder of diffusers or of a run")
    samples = recipe_run.samples.model_copy(update={"ema": None})
    run = recipe_run.model_copy(update={"folder": out, "init_from": weights, "ema": Ema(decays=()), "samples": samples})
    system = systems.build(run.system, run.model)
    get_phases().enter_phase(f"reading {weights}")
    loaded = read_weights_adapted_to_system(weights, system)
    values: dict[str, Mapping[str, Tensor]] = {part: state for part, (state, _) in loaded.items()}
    if system.parts.keys() - loaded.keys():  # training would begin the others so
        initial = build_networks(system.networks, run.seed)
        values |= {part: dict(state()) for part, (_, state) in initial.items() if part not in loaded}
    get_phases().enter_phase(f"writing {out}")
    with create_output_folder_atomically(out) as folder:
        store = Store(folder / "checkpoints")
        size = sum(4 * value.numel() for state in values.values() for value in state.values())
        if not store.save(0, lambda path: _write_checkpoint(path, system, values), {"imported": weights.name}, size):
            raise ConfigError(f"--out {out} was not written: {store.error}")
        (folder / "run.yaml").write_text(recipe.dump_run(run), encoding="utf-8")
    return [note for _, notes in loaded.values() for note in notes]


def _write_checkpoint(folder: Path, system: System, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Writes `weights`, the weights and buffers of every part, into `folder` as the files of a checkpoint of one rank.
    Raises ConfigError if some values are not finite.
    """
    networks = system.build_networks_on_meta()
    buffers: dict[str, Tensor] = {}
    for part, network in networks.items():
        for name, value in weights[part].items():
            if value.is_floating_point() and not torch.isfinite(value).all():
                raise ConfigError(f"{name} of the {part} holds values that are not finite: fetch the file again")
        trained = {name: weights[part][name] for name, _ in network.named_parameters()}
        write_shard(
            folder / make_shard_file_name(part, 0, 1),
            (
                ("master", Fragment(name, tuple(value.shape), 0, value.numel()), value.float().flatten())
                for name, value in trained.items()
            ),
            {"part": part},
        )
        state = network.state_dict()
        buffers |= {
            f"buffer/{part}/{name}": weights[part][name].to(state[name].dtype).contiguous().clone()
            for name in state
            if name not in trained
        }
    save_file(buffers, folder / COMMON, metadata={"counters": "{}"})
