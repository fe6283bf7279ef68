"""Makes averages of any width from a trained run's snapshots: the width is chosen when training is over.

    RUN/reconstructed/WIDTH/step_N/    as a checkpoint: one kind, ema.WIDTH, of each averaged part, float32; buffers

docs/guides/reconstruct.md explains widths. ema/combine.py solves and streams. Every verb finds what is written here by
--ema WIDTH (runs/trained.py).
"""

import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dstrain.checkpoint import validate
from dstrain.checkpoint.layout import COMMON, RECONSTRUCTED, make_shard_file_name
from dstrain.checkpoint.manifest import read_manifest
from dstrain.checkpoint.store import Store
from dstrain.commands.evaluating import sweep
from dstrain.commands.options.evaluate import EvaluateOptions
from dstrain.commands.options.reconstruct import ReconstructOptions
from dstrain.disk.owner import is_held_by_reader
from dstrain.distributed import group
from dstrain.distributed.progress import get_phases
from dstrain.engine.ema import snapshots
from dstrain.engine.ema.combine import Snapshot, SnapshotCombiner, hash_snapshots, select_combinable_snapshots
from dstrain.recipe import ConfigError, explain_write_errors
from dstrain.runs import trained
from dstrain.runs.folders import claim_output_folder

USUAL = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1, 0.125, 0.15, 0.2, 0.25)


@dataclass(frozen=True)
class Made:
    """Describes one average that was written, now or by an earlier command."""

    width: float
    path: Path
    misfit: float  # the largest of its parts: profiles.Solution


def run_verb(options: ReconstructOptions) -> None:
    """Makes the averages, and prints where they are; with --sweep measures each of them."""
    quality = None
    if options.sweep:
        if options.metric:
            quality = EvaluateOptions(
                metrics=(options.metric,),
                features=options.features,
                folder=options.folder,
                reference=options.reference,
                num=options.num,
                batch=options.batch,
            )
        sweep.require_measurable_averages(options.folder, quality)
    made = make_weight_averages(options)
    if group.rank() == 0:
        print(describe_made_averages(made))
    if not options.sweep:
        return
    step, widths = int(made[0].path.name.removeprefix("step_")), [one.width for one in made]
    if quality is None:
        sweep.measure_loss_by_ema_width(options.folder, step, widths, options.num, options.batch)
    else:
        sweep.measure_metric_by_ema_width(replace(quality, step=step), widths)


def make_weight_averages(options: ReconstructOptions) -> list[Made]:
    """Writes an average of each width that the options ask for, whole or not at all, and returns all of them. Keeps
    averages that exist already. Call it on all ranks; each rank makes its share of the elements.

    Raises ConfigError if the run has no snapshots, or if a width cannot be made of its snapshots.
    """
    snapshots = list_usable_snapshots(options.folder, options.step)
    step, origin = snapshots[-1].step, {"snapshots": [s.step for s in snapshots], "identity": hash_snapshots(snapshots)}
    parts = [SnapshotCombiner(snapshots, part) for part in snapshots[-1].parts]
    usual = sorted(
        {*USUAL, *(width for part in parts for width in snapshots[-1].get_average_counters(part.part)["widths"])}
    )
    widths = options.widths or [width for width in usual if all(part.can_make_average(width) for part in parts)]
    misfits = {
        width: {part.part: part.solve_coefficients_for_width(width).misfit for part in parts} for width in widths
    }
    folder = options.folder / RECONSTRUCTED
    with explain_write_errors(f"folder={options.folder}", "make room there"):
        stores = {
            width: Store(folder / repr(width), sys.maxsize, check=validate.require_loadable_checkpoint)
            for width in widths
        }
        if any(not _has_average_from_snapshots(store, step, origin) for store in stores.values()):
            with claim_output_folder(folder, str(folder), "reconstruct"):
                missing = {
                    width: store
                    for width, store in stores.items()
                    if not _has_average_from_snapshots(store, step, origin)
                }
                _remove_outdated_averages(missing.values(), step)
                _write_averages(
                    snapshots[-1], parts, missing, {width: {**origin, "misfit": misfits[width]} for width in missing}
                )
    return [Made(width, _make_step_path(stores[width], step), max(misfits[width].values())) for width in widths]


def list_usable_snapshots(folder: Path, step: int | None) -> list[Snapshot]:
    """Lists the run's whole snapshots up to `step` (None: the newest) that can be combined with the last of them.
    Prints on stderr which damaged snapshots are left out.

    Raises ConfigError if there are no snapshots, or if the one at `step` is missing or damaged.
    """
    run, store = (
        trained.read_recipe(folder),
        Store(folder / snapshots.FOLDER, check=validate.require_loadable_checkpoint),
    )
    steps = group.broadcast_from_first(store.list_steps())
    if not steps:
        raise ConfigError(
            f"{folder} holds no snapshots of averages"
            + (
                f": the first is written at step {run.ema.snapshots}"
                if run.ema.snapshots
                else ", of which others are made: train with ema.profiles=[0.05,0.10] and ema.snapshots=N"
            )
        )
    step = steps[-1] if step is None else step
    if step not in steps:
        listed = ", ".join(map(str, steps[:3] + ["..."] * (len(steps) > 6) + steps[-3:] if len(steps) > 6 else steps))
        before = " lies before the first snapshot" if step < steps[0] else " is of no snapshot"
        raise ConfigError(f"--step {step}{before} of {folder}; there are {listed}")
    whole = []
    for number in steps[: steps.index(step) + 1]:
        if fault := store.find_checkpoint_fault(number):
            if number == step:
                raise ConfigError(
                    f"the snapshot of step {step} in {store.folder} is damaged ({fault}): take another --step"
                )
            if group.rank() == 0:
                print(
                    f"the snapshot of step {number} in {store.folder} is damaged and left out: {fault}", file=sys.stderr
                )
        else:
            whole.append(_make_step_path(store, number))
    return select_combinable_snapshots(whole)


def _has_average_from_snapshots(store: Store, step: int, origin: dict[str, Any]) -> bool:
    """Returns whether the store holds a whole average at `step` that was made from the snapshots that `origin`
    describes. Call it on all ranks.
    """
    made = step in group.broadcast_from_first(store.list_steps()) and store.find_checkpoint_fault(step) is None
    return made and origin.items() <= read_manifest(_make_step_path(store, step))["extra"].items()


def _remove_outdated_averages(stores: Iterable[Store], step: int) -> None:
    """Removes the averages at `step` from the stores: these were made from other snapshots, or are damaged. Call it on
    all ranks. Raises ConfigError if another process reads one of them.
    """
    paths = [path for path in (_make_step_path(store, step) for store in stores) if path.is_dir()]
    if read := group.broadcast_from_first([path for path in paths if is_held_by_reader(path)]):
        raise ConfigError(f"{read[0]} is being read, and is of other snapshots: give the same command later")
    group.barrier()  # all have looked
    for path in paths if group.rank() == 0 else ():
        shutil.rmtree(path)
    group.barrier()


def _write_averages(
    last_snapshot: Snapshot,
    parts: Sequence[SnapshotCombiner],
    stores: dict[float, Store],
    manifest_extras: dict[float, Any],
) -> None:
    """Writes an average into each store at the step of the snapshot `last_snapshot`; each rank writes its share. Raises
    ConfigError if an average cannot be written.

    parts: the combined snapshots of each part
    stores: {width of an average: its store}
    manifest_extras: {width of an average: further entries of its manifest}
    """
    need = (last_snapshot.path / COMMON).stat().st_size + sum(part.bytes_per_average for part in parts) + (1 << 20)
    folders = {}
    get_phases().enter_phase(f"writing averages of step {last_snapshot.step}")
    for width, store in stores.items():
        folder = store.begin_save(last_snapshot.step, need * len(stores) if group.rank() == 0 else 0)
        if folder is None:
            raise ConfigError(f"--ema {width}: {store.error}")
        folders[width] = folder
    hashed: dict[float, Any] = {width: {} for width in stores}
    failed, share = None, (group.rank(), group.world())
    try:
        for part in parts:
            name = make_shard_file_name(part.part, *share)
            entries = part.write_averages([folder / name for folder in folders.values()], list(folders), *share)
            for width, entry in zip(folders, entries):
                hashed[width][name] = entry
        for folder in folders.values() if group.rank() == 0 else ():
            shutil.copyfile(last_snapshot.path / COMMON, folder / COMMON)
    except (OSError, ConfigError) as error:  # the other ranks wait in commit
        failed = str(error)
    for width, store in stores.items():
        if not store.commit_save(last_snapshot.step, manifest_extras[width], failed, hashed[width]):
            raise ConfigError(f"--ema {width}: {store.error}")


def _make_step_path(store: Store, step: int) -> Path:
    """Returns the path of the folder of a step in a store."""
    return store.folder / f"step_{step:08d}"


def describe_made_averages(made: Sequence[Made]) -> str:
    """Returns a line for each average: its folder, and how far its profile is from the wanted one, if that is above
    0.05 %.
    """
    return "\n".join(
        f"--ema {one.width}: {one.path}" + (f"; its profile is met to {one.misfit:.1%}" if one.misfit > 5e-4 else "")
        for one in made
    )
