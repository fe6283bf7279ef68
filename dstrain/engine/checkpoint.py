"""Checkpoints of a run: named fragments from every rank, and what is equal on all ranks once.

    PART-RRRRR-of-WWWWW.safetensors    fragments that rank R owned: master, moments, ema.DECAY or ema.WIDTH; of a frozen
                                       weight master alone, which is read in the place of its averages
    index-PART.safetensors             where every fragment lies (fragment_index.py)
    common.safetensors                 buffers as buffer/PART/NAME, the system's state as system/NAME; counters as JSON
    deepspeed/PART/                    with save.format deepspeed: DeepSpeed's own files instead of master and moments,
                                       for its tools; they resume at the same stage and number of ranks only, and are
                                       unpickled, so never without --trust-pickle
    manifest.json                      extra: score, metric, kind (store.py) and the run's course (recovery.py)

Loading copies the overlaps into whatever partition the present stage and world size own, so a change of stage or of the
number of ranks is the ordinary case. Nothing else is pickled. No random states are kept: every random number is a
function of the seed, the step and the sample (dstrain/rng.py).
"""

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dstrain.checkpoint import validate
from dstrain.checkpoint.fragment_index import make_shard_index_rows, write_index_files
from dstrain.checkpoint.fragments import make_lazily_read_weights, open_shards, write_shard
from dstrain.checkpoint.layout import COMMON, make_shard_file_name
from dstrain.checkpoint.manifest import read_manifest
from dstrain.checkpoint.saver import Entries, Saver
from dstrain.checkpoint.store import ROUTINE, STOP, TROUBLE, Hashes, Store
from dstrain.distributed import group
from dstrain.distributed.progress import get_phases
from dstrain.engine.ema import snapshots
from dstrain.engine.ema.shadow import EmaShadow
from dstrain.engine.engines import Engines
from dstrain.engine.optimizers import CODES, set_bytes_from_reinterpreted_floats
from dstrain.engine.patches import defer_write_errors, make_universal_checkpoint_entry
from dstrain.engine.recovery import Divergence, State, make_divergence_advice, require_finite_weights
from dstrain.recipe import ConfigError, NotRead, Save


class Stateful(Protocol):
    """The methods by which a checkpoint saves and loads the small state that a System has beside its weights."""

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


class Checkpoints:
    """Saves and loads the checkpoints of a run in `folder`: engines, averages and the system's small state. All ranks
    call each method together.

    report         is called with each line for the user
    saved          is called on rank 0 with each step whose checkpoint is complete
    course         the record of skipped steps and rollbacks, which checkpoints contain; None: a new one
    trust_pickle   whether DeepSpeed's own files, which are pickled, may be loaded
    """

    def __init__(
        self,
        folder: Path,
        engines: Engines,
        ema: EmaShadow,
        system: Stateful,
        save: Save = Save(),
        report: Callable[[str], None] = print,
        saved: Callable[[int], None] = lambda step: None,
        course: Divergence | None = None,
        trust_pickle: bool = False,
    ):
        metric = save.best if isinstance(save.best, str) else "loss"
        self.store = Store(
            folder, save.keep, save.keep_every, validate.require_loadable_checkpoint, metric, self._write_index_files
        )
        self.course = course or Divergence()
        self._native = save.format == "deepspeed"  # master and moments stand in DeepSpeed's own files
        # DeepSpeed writes its own files from the live weights, and its ranks communicate meanwhile: not in a thread.
        self.saver = Saver(self.store, save.asynchronous and not self._native, report, saved)
        self._engines, self._ema, self._system, self._trust_pickle = engines, ema, system, trust_pickle
        self.averages = snapshots.Averages(
            folder.with_name(snapshots.FOLDER),
            engines.masters,
            ema,
            save.asynchronous,
            lambda: self._collect_common_tensors_and_counters(ema.flats),
            lambda line: self.saver.report(line),
        )

    def report_finished_save(self) -> None:
        """Reports, on rank 0, the saves of checkpoints and snapshots that have ended since the last call. Does not wait
        for saves that still run, so that it can be called at each step.
        """
        self.saver.report_finished_save()
        self.averages.saver.report_finished_save()

    def wait_for_saves(self) -> None:
        """Waits until the saves of checkpoints and snapshots that still run have ended on all ranks, and reports their
        results. Call it on all ranks, before they leave the process group: the saves exchange over it.
        """
        self.saver.wait_for_save()
        self.averages.saver.wait_for_save()

    def save_unless_saved(self, step: int, routine: bool) -> None:
        """Waits for running saves, and then saves a checkpoint of `step`, unless the newest is of this step: it was not
        due, or its save has failed. See `save`.
        """
        self.wait_for_saves()
        if self.saver.newest != step:
            self.save(step, last=True, routine=routine)

    def close(self) -> None:
        """Waits for saves of checkpoints and snapshots that still run, and reports their results. Does neither while a
        KeyboardInterrupt is being handled.
        """
        self.saver.close()
        self.averages.saver.close()

    def resume(self, step: int | None = None) -> int:
        """Loads the newest checkpoint whose files match their hashes. With `step`, loads the checkpoint of this step
        instead, even if a rollback has renamed it. Renames snapshots of later steps, so that they no longer count.
        Returns the step of the checkpoint; 0 if `step` is None and the folder holds no checkpoint.

        Raises ConfigError if no checkpoint is intact, if there is none of `step`, if it does not fit these networks, or
        if it holds DeepSpeed's own files and trust_pickle is False. Raises NotRead if its files can no longer be read
        after they were verified.
        """
        get_phases().enter_phase("reading the newest checkpoint")
        if step is not None:
            return self._resume_from_step(step)
        steps = group.broadcast_from_first(self.store.list_steps())
        if not steps:
            self.averages.set_newer_steps_aside(0)
            return 0
        newest = self.store.find_newest_checkpoint(self.saver.report)
        if newest is None:
            raise ConfigError(
                f"none of the {len(steps)} checkpoints in {self.store.folder} is whole; see the reasons "
                "above, restore one, or begin anew with --from-scratch"
            )
        self._resume_from_checkpoint(*newest)
        return self.saver.newest

    def _resume_from_step(self, step: int) -> int:
        steps, aside = group.broadcast_from_first((self.store.list_steps(), self.store.list_steps_put_aside()))
        if step not in steps:
            if step not in aside:
                listed = ", ".join(map(str, sorted({*steps, *aside}))) or "none"
                raise ConfigError(f"--step {step}: {self.store.folder} holds no such checkpoint; it holds {listed}")
            self.store.restore_step_put_aside(step)
        newest = self.store.find_newest_checkpoint(self.saver.report, among=[step])
        if newest is None:
            raise ConfigError(f"--step {step}: that checkpoint is not whole; see the reason above")
        self._resume_from_checkpoint(*newest)
        return step

    def _load_verified_checkpoint(self, path: Path) -> State:
        """Loads a checkpoint whose files have just been verified. Returns the record of skipped steps and rollbacks
        that the checkpoint contains. Raises NotRead if the files cannot be read any more.
        """
        try:
            self.load(path)
            return validate.read_recovery_state(path)
        except (OSError, SafetensorError) as error:
            raise NotRead(
                f"{path} cannot be read, though it verified just now ({error}): its storage fails. All saved "
                "is whole; the same command goes on when the storage is back"
            ) from error

    def _resume_from_checkpoint(self, step: int, path: Path) -> None:
        self.course.state = self._load_verified_checkpoint(path)
        self.saver.newest = step
        self.averages.set_newer_steps_aside(step)

    def roll_back(self, steps_done: int, trouble: str) -> int:
        """Loads the newest good checkpoint from before the trouble that was found after `steps_done` steps. Renames
        checkpoints and snapshots of later steps, so that they no longer count. Returns the step of the loaded
        checkpoint.

        Raises FloatingPointError, whose message begins with the text `trouble`, if there is no such checkpoint, if it
        holds DeepSpeed's own files and trust_pickle is False, or if the run has gone back faults.max_rollbacks times
        since a user last changed the run.
        """
        course = self.course
        self.saver.wait_for_save()
        steps = self.store.list_possible_rollback_steps(
            course.find_step_before_trouble(steps_done),
            course.state.rollbacks[-1][1] if course.num_rollbacks else None,
        )
        if course.num_rollbacks - course.state.forgiven >= course.faults.max_rollbacks:
            reason = (
                f"The run has gone back {course.num_rollbacks} times (faults.max_rollbacks="
                f"{course.faults.max_rollbacks}: a higher number lets it go back again)"
            )
        elif (newest := self.store.find_newest_checkpoint(self.saver.report, among=steps)) is None:
            reason = "No checkpoint from before that is left to go back to"
        elif (newest[1] / "deepspeed").is_dir() and not self._trust_pickle:
            reason = "The checkpoints are DeepSpeed's own files, which only --trust-pickle reads"
        else:
            step, path = newest
            course.record_rollback(steps_done, step, self._load_verified_checkpoint(path).model_dump())
            self.store.set_newer_steps_aside(step)
            self.averages.set_newer_steps_aside(step)
            self.saver.newest = step
            return step
        raise FloatingPointError(f"{trouble}. {reason}. {make_divergence_advice(self.store)}")

    def save(self, step: int, last: bool = False, score: float | None = None, routine: bool = True) -> None:
        """Saves a checkpoint of `step`. With save.asynchronous a thread writes the files while training goes on;
        without it, and for the `last` save of the run, waits until they are written. If a save fails, reports it; older
        checkpoints stay intact, and training goes on.

        score     measured at this step, lower is better; the checkpoint with the lowest is kept longest; None: not
                  measured
        routine   True if the recipe asks for a checkpoint at this step, False if the run only saves because it is
                  stopped

        Raises FloatingPointError if weights are not finite, NotSaved after three failures in a row or if the `last`
        save fails.
        """
        require_finite_weights(self._engines.masters, step, self.store)
        self.averages.saver.wait_for_save()
        common, course = self._collect_common_tensors_and_counters(), self.course.state
        # What the run went back to stays: weights that are finite and destroyed can follow it, and look as good.
        extra = {
            "kind": (ROUTINE if routine else STOP) if course.has_no_trouble else TROUBLE,
            "course": course.model_dump(),
            "stays": sorted({target for _, target in course.rollbacks}),
        }
        if score is not None:
            extra["metric"] = self.store.metric
        entries = self._collect_fragments_to_save()
        # 40 bytes of each stand in the index.
        need = (1 << 20) + sum(40 + 4 * values.numel() for own in entries.values() for *_, values in own)
        if self._native:  # DeepSpeed's own files hold masters, two moments and the network's weights
            need += 16 * sum(flat.numel() for masters in self._engines.masters.values() for flat in masters.flats)
        self.saver.save(
            step,
            entries,
            lambda folder, entries: self._write_rank_files(folder, entries, common),
            need_bytes=need,
            score=score,
            last=last,
            extra=extra,
        )

    def add_rollbacks_to_checkpoint(self, step: int) -> None:
        """Writes the run's record of skipped steps and rollbacks into the manifest of the checkpoint of `step`. Does
        nothing if there were no rollbacks. Call it if the run stops at the checkpoint to which it has just gone back.
        """
        if self.course.num_rollbacks:
            self.store.add_manifest_entries(step, course=self.course.state.model_dump())

    def _iterate_flat_tensors_by_kind(self, part: str, averages_only: bool) -> Iterator[tuple[str, list[Tensor]]]:
        """Yields (kind, this rank's flat fp32 tensors) for each kind of a part's values that a checkpoint stores:
        "master" for its weights, the optimizer's moments by their names, and "ema.NUMBER" for each average. If
        `averages_only` is True, yields the averages alone, since DeepSpeed's own files hold the others.
        """
        masters = self._engines.masters[part]
        if not averages_only:
            yield "master", masters.flats
            for moment in masters.moment_kinds:
                yield moment, masters.get_moments_in_fp32(moment)
        for decay, flats in self._ema.flats.get(part, {}).items():
            yield f"ema.{decay!r}", flats

    def _collect_fragments_to_save(self) -> Entries:
        """Returns {part: [(kind, fragment, values), ...]}: the values that this rank writes into a checkpoint. `kind`
        says what they are: a weight itself (master), a moment of the optimizer, or an average. `fragment` says to which
        elements of which weight they belong. Most values are views of live memory, which change as training goes on.
        """
        return {
            part: [
                (kind, fragment, view)
                for kind, flats in self._iterate_flat_tensors_by_kind(part, self._native)
                for fragment, view in masters.iterate_fragment_views_to_save(flats)
            ]
            + list(masters.iterate_8bit_moments_to_save())
            + [("master", fragment, values) for fragment, values in masters.iterate_frozen_weights_to_save()]
            for part, masters in self._engines.masters.items()
        }

    def _write_rank_files(self, folder: Path, entries: Entries, common: validate.Common) -> Hashes:
        """Writes this rank's files of a checkpoint into `folder`: its shards, on rank 0 also common.safetensors, and
        with save.format=deepspeed DeepSpeed's own files. Returns {name: {size, hash}} of the shards alone. Remembers
        where each fragment of a weight lies in the shards, for `_write_index_files`.
        """
        if self._native:
            with defer_write_errors(self._engines.values()):
                for part, engine in self._engines.items():
                    engine.save_checkpoint(
                        str(folder / "deepspeed"),
                        tag=part,
                        client_state=make_universal_checkpoint_entry(),
                        save_latest=False,
                    )
        names = {part: make_shard_file_name(part, group.rank(), group.world()) for part in entries}
        hashes = {name: write_shard(folder / name, entries[part], {"part": part}) for part, name in names.items()}
        self._rows = {part: make_shard_index_rows(entries[part], hashes[name]) for part, name in names.items()}
        if group.rank() == 0:
            validate.write_common_tensors_and_counters(folder, common)
        return hashes

    def _write_index_files(self, folder: Path) -> Hashes:
        return write_index_files(folder, self._rows, self._engines.collect_weight_shapes)

    def _collect_common_tensors_and_counters(self, parts: Collection[str] | None = None) -> validate.Common:
        """Returns what common.safetensors holds: (tensors, counters), for `parts` or, if it is None, for all parts.

        tensors    {name: copy on the CPU} of the system's state and of the parts' buffers
        counters   {part: {name: value}}, such as the number of updates
        """
        tensors = {f"system/{name}": tensor for name, tensor in self._system.state_dict().items()}
        counters: dict[str, Any] = {}
        for part in (part for part in self._engines if parts is None or part in parts):
            tensors |= {
                f"buffer/{part}/{name}": buffer
                for name, buffer in _iterate_persistent_buffers(self._engines[part].module)
            }
            masters = self._engines.masters[part]
            counters[part] = {
                "updates": masters.num_updates,
                "skipped": masters.num_skipped,
                "stage": masters.stage,
                "scaler": masters.loss_scaler_state,
                **self._ema.collect_counters(part),
            }
        return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, counters

    def load(self, path: Path) -> None:
        """Loads a checkpoint into the engines, averages and system; all their present values are replaced. A checkpoint
        that was written at another world size or ZeRO stage can be loaded, too, unless it holds DeepSpeed's own files.

        Raises ConfigError if it does not fit, or if it holds DeepSpeed's own files and trust_pickle is False.
        """
        if (path / "deepspeed").is_dir() and not self._trust_pickle:
            raise ConfigError(
                f"{path} holds DeepSpeed's own files, and reading them runs what is pickled in them: if "
                "you know where they come from, give --trust-pickle"
            )
        common, counters = load_file(path / COMMON), validate.read_part_counters(path)
        if counters.keys() != self._engines.keys():
            raise ConfigError(
                f"{path} holds the networks {', '.join(counters)}; this run trains "
                f"{', '.join(self._engines)}: set the model section as it was, or give --from-scratch"
            )
        for part in self._engines:
            self._load_part_from_checkpoint(part, path, common, counters[part])
        try:
            self._system.load_state_dict(validate.select_and_strip_prefix(common, "system/"))
        except ConfigError as error:  # only after --allow-change: the recipe is compared before
            if group.rank() == 0:
                self.saver.report(f"the system's own state begins anew: {error}")

    def _load_part_from_checkpoint(
        self, part: str, path: Path, common: dict[str, Tensor], counters: dict[str, Any]
    ) -> None:
        masters, engine = self._engines.masters[part], self._engines[part]
        anew = False
        with open_shards(path, part) as shards:
            if native := (path / "deepspeed").is_dir():  # this run may save in the other format
                self._load_deepspeed_files(part, path, counters["stage"])
            else:
                saved = {name: shards.find_tensor_shape(name) for name in shards.list_tensor_names("master")}
                expected = {name: tuple(shape) for name, shape in self._engines.collect_weight_shapes(part).items()}
                validate.require_same_shapes(path, part, saved, expected)
                held = {kind for kind in shards.list_value_kinds() if not kind.startswith("ema.")} - {"master", *CODES}
                # They differ only after --allow-change: the recipe is compared before.
                if anew := held != set(masters.moment_kinds):
                    masters.reset_optimizer_state()
                    if group.rank() == 0:
                        self.saver.report(
                            f"{path.name} holds {', '.join(sorted(held))} of {part}, and this optimizer "
                            f"keeps {', '.join(masters.moment_kinds)}: it begins without moments"
                        )
            for kind, flats in self._iterate_flat_tensors_by_kind(part, native):
                if anew and kind in masters.moment_kinds:
                    continue
                # An average that the checkpoint does not hold (a decay added since) starts from the weights.
                source = kind if kind in shards.list_value_kinds() else "master"
                if source != kind and group.rank() == 0:
                    self.saver.report(f"{path.name} holds no {kind} of {part}: it starts from the weights")
                if source in shards.list_value_kinds():
                    for fragment, view in masters.iterate_fragment_views(flats):
                        view.copy_(shards.read(source, fragment.name, fragment.start, fragment.numel, fragment.shape))
                    if kind in masters.moment_kinds:
                        masters.write_back_8bit_moments(kind, flats)
                elif kind.startswith("ema."):
                    torch._foreach_copy_(flats, [flat.detach() for flat in masters.flats])
            for fragment, values in masters.frozen:
                values.copy_(shards.read("master", fragment.name, fragment.start, fragment.numel, fragment.shape))
            for kind, name, codes in masters.iterate_8bit_moments():
                if not anew and shards.has_tensor(kind, name):
                    set_bytes_from_reinterpreted_floats(codes, shards.read(kind, name))
        buffers = validate.select_and_strip_prefix(common, f"buffer/{part}/")
        for name, buffer in _iterate_persistent_buffers(engine.module):
            if name in buffers:
                saved = {name: tuple(buffers[name].shape)}
                validate.require_same_shapes(path, part, saved, {name: tuple(buffer.shape)})
                buffer.copy_(buffers[name])
        if (
            not self._ema.resume_or_restart_averages(
                part, counters.get("averages"), step := read_manifest(path)["step"]
            )
            and group.rank() == 0
        ):
            self.saver.report(
                f"averages by width (ema.profiles) of {part} begin at step {step}: widths are shares of "
                "the updates since then"
            )
        masters.num_updates, masters.num_skipped = 0 if anew else counters["updates"], counters["skipped"]
        masters.loss_scaler_state = counters["scaler"]
        masters.copy_masters_to_network()

    def _load_deepspeed_files(self, part: str, path: Path, stage: int) -> None:
        """Loads masters and moments of a part from DeepSpeed's own files. These are unpickled; their hashes have been
        verified before. Raises ConfigError if they were written at another stage or world size, or are missing.
        """
        world, own_stage = read_manifest(path)["world"], self._engines.masters[part].stage
        if (stage, world) != (own_stage, group.world()):
            raise ConfigError(
                f"{path} was written with save.format=deepspeed at stage {stage} on {world} ranks, and "
                f"resumes only so; this run has stage {own_stage} and {group.world()} ranks. Go on at "
                f"stage {stage} on {world} ranks with save.format=fragments: the next resumes anywhere"
            )
        if not list((path / "deepspeed" / part).glob("*.pt")):
            raise ConfigError(f"{path / 'deepspeed' / part} holds no files of DeepSpeed: take another step with --step")
        self._engines[part].load_checkpoint(str(path / "deepspeed"), tag=part, load_lr_scheduler_states=False)


def read_weights(path: Path, part: str, kind: str = "master", load_values: bool = True) -> dict[str, Tensor]:
    """Returns {state-dict name: tensor} of the whole float32 weights and the buffers of one part, from a checkpoint's
    folder.

    kind          master, or ema.NUMBER with the decay or width of an average
    load_values   False: each weight is a StoredWeight (fragments.py), whose values are read only when they are used

    Raises ConfigError if there is no such part or kind, or if DeepSpeed's own files hold the masters.
    """
    with open_shards(path, part) as shards:
        if kind == "master" and (path / "deepspeed").is_dir():
            raise ConfigError(
                f"{path} holds the weights of {part} in DeepSpeed's own files: merge them with "
                f"`dstrain consolidate {path} --weights raw --trust-pickle --out DIR`, or take an EMA"
            )
        if kind not in shards.list_value_kinds():
            raise ConfigError(f"{path} holds no {kind} of {part}; it holds {', '.join(shards.list_value_kinds())}")
        weights = (
            make_lazily_read_weights(shards, kind)
            if not load_values
            else {
                name: shards.read(k, name).reshape(shards.find_tensor_shape(name))
                for name, k in shards.choose_kind_of_each_tensor(kind).items()
            }
        )
    return weights | validate.select_and_strip_prefix(load_file(path / COMMON), f"buffer/{part}/")


def read_ema_decays(path: Path, part: str) -> list[float]:
    """Returns the decays and widths by which the averages of a part are named in a checkpoint, in the order of the
    recipe.
    """
    return open_shards(path, part).list_average_decays()


def _iterate_persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Returns an iterator of (name, buffer) over the persistent buffers of a module, which its state dict holds."""
    transient = {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules()
        for name in child._non_persistent_buffers_set
    }
    return ((name, buffer) for name, buffer in module.named_buffers() if name not in transient)
