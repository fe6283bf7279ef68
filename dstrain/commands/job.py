"""Turns a training command into a checked job: makes all checks that need no DeepSpeed engine, before anything
expensive.
"""

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain import recipe, systems
from dstrain.checkpoint.store import Store
from dstrain.commands.options.shipped import find_ds_config, find_recipe
from dstrain.commands.options.train import JobOptions
from dstrain.distributed import group
from dstrain.distributed.progress import get_phases
from dstrain.engine import settings
from dstrain.recipe import ConfigError, Data, Run, choose_write_remedy, format_value
from dstrain.recipe.trust import is_in_run_or_export, trust_system
from dstrain.runs import folders
from dstrain.systems.base import System
from dstrain.tracking.machine import describe_free_memory


@dataclass(frozen=True)
class Job:
    """Holds a checked training job."""

    run: Run
    settings: dict[str, Any]  # for deepspeed.initialize
    remarks: list[str]  # worth printing once
    notes: tuple[str, ...] = ()  # lines that rank 0 prints when training starts, such as its memory


def prepare_job(options: JobOptions, world: int | None = None, device_type: str | None = None) -> Job:
    """Checks a training command, and returns its job. All ranks check the recipe, overrides, paths and DeepSpeed
    settings. If these are right, rank 0 also checks the data and the folder. Raises ConfigError with every problem that
    was found.

    world: the number of ranks; None: that of this process
    device_type: such as "cuda"; None: that of this process
    """
    world, device_type = world or group.read_rank_and_world().world, device_type or group.device().type
    run, problems = complete_and_check_recipe(_read_recipe(options.recipe, options.overrides), options.overrides)
    problems += _list_path_problems(run)
    resolved: dict[str, Any] = {}
    remarks: list[str] = []
    notes: tuple[str, ...] = ()
    with _collect_config_errors(problems):
        before = {} if options.from_scratch else folders.read_earlier_deepspeed_settings(run.directory)
        resolved = settings.resolve_deepspeed_settings(
            find_ds_config(options.ds_config),
            world,
            device_type,
            batch=run.batch,
            optimizer=run.optimizer,
            faults=run.faults,
            sequence=run.parallel.sequence,
            settings_at_start=before,
        )
    if not problems:
        problems += systems.build_config(run.system, run.model).list_conflicts_at_stage(
            settings.read_zero_stage(resolved)
        )
    if not problems and group.read_rank_and_world().rank == 0:
        with _collect_config_errors(problems):
            checked_remarks, notes = _check_data_and_list_remarks(run, options, resolved, world)
            remarks += checked_remarks
    if problems:
        raise ConfigError(*problems)
    return Job(run, resolved, settings.list_settings_remarks(resolved, device_type) + remarks, notes)


def load_and_check_recipe(
    path: Path, overrides: Sequence[str], report_missing: Callable[[str], None] | None = None
) -> Run:
    """Returns the Run of a recipe file with overrides, completed and checked. Does not check the data, which need not
    be on this machine. Raises ConfigError with every problem.

    report_missing: called with a line that names the frozen networks whose files are missing, which the Run then leaves
        out; None: missing files are an error
    """
    run = _read_recipe(path, overrides)
    if report_missing is not None:
        run, left_out = systems.find_config_class(run.system).drop_missing_networks(run)
        if left_out:
            report_missing(left_out)
    run, problems = complete_and_check_recipe(run, overrides)
    if problems:
        raise ConfigError(*problems)
    return run


def _read_recipe(path: Path, overrides: Sequence[str]) -> Run:
    """Returns the Run of a recipe, and allows this process to import its system. Does not allow it if the recipe lies
    in the folder of a run or an export, unless an override sets `system`.
    """
    found = find_recipe(path)
    run = recipe.load_recipe(found, overrides)
    if not is_in_run_or_export(found) or any(override.partition("=")[0].strip() == "system" for override in overrides):
        trust_system(run.system)
    return run


def complete_and_check_recipe(run: Run, overrides: Sequence[str] = ()) -> tuple[Run, list[str]]:
    """Completes the data and model sections of a Run, and checks them and the overrides. Returns the completed Run, and
    a list of problems.
    """
    from dstrain.data.open import fill_in_codes_entry, find_content_kind, require_learnable_contents

    problems: list[str] = []
    with _collect_config_errors(problems):
        schema = systems.find_config_class(run.system)
        given = run.data.model_dump(include={"codes", "captioned"})
        run = run.model_copy(update={"data": fill_in_codes_entry(_copy_upright_from_earlier_run(run))})
        require_learnable_contents(run.data, run.system, schema.learns_from, systems.list_systems_learning_from)
        if run.data.durations and not schema.learns_durations:
            raise ConfigError(
                f"data.buckets: {run.system} takes clips of one length: leave it out, or choose "
                "system=phenaki.tokenizer"
            )
        run = recipe.complete_model_section(run, schema, overrides)
        config = systems.build_config(run.system, run.model)
        captioned = config.reads_texts and find_content_kind(run.data) == "images"
        run = run.model_copy(update={"data": run.data.model_copy(update={"captioned": captioned})})
        problems += recipe.describe_replaced_entries("data", given, run.data.model_dump(include={*given}), overrides)
        fields = {"size_conditions": "size_conditions", "embeddings": "embedding_dim"}
        if not run.data.durations:
            fields["buckets"] = "sizes"
        problems += [
            f"data.{entry}: {run.system} has no use for it: leave it out, or choose system=dit"
            for entry, field in fields.items()
            if getattr(run.data, entry) and field not in schema.model_fields
        ]
        labels, classes = run.samples.labels or (), config.num_labels
        if unknown := [label for label in labels if classes is not None and label >= classes]:
            problems.append(
                f"samples.labels={list(labels)}: {unknown} are not below model.{config.num_labels_field}="
                f"{classes}; labels are 0 to {(classes or 0) - 1}"
            )
        problems += config.list_conflicts(run)
        if run.parallel.sequence > 1:
            problems += config.list_conflicts_among_ranks(run.parallel.sequence)
    return run, problems


def _copy_upright_from_earlier_run(run: Run) -> Data:
    """Returns the data section of a recipe. If it does not set `upright` (pictures are turned as EXIF says), and there
    is a run in the recipe's folder, takes the value of that run.
    """
    if "upright" not in run.data.model_fields_set and (run.directory / "run.yaml").is_file():
        with suppress(ConfigError):  # a damaged one is reported later
            upright = folders.read_recipe(run.directory).data.upright
            return run.data.model_copy(update={"upright": upright})
    return run.data


@contextmanager
def _collect_config_errors(problems: list[str]) -> Iterator[None]:
    """Catches a ConfigError that the block raises, and adds its lines to `problems`."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


def _list_path_problems(run: Run) -> list[str]:
    """Returns a line for each wrong path in a recipe (data, init_from, folder), and one if the recipe asks for
    tensorboard and that package is missing. Returns [] if nothing is wrong.
    """
    from dstrain.data.paths import find_path_problems

    problems = find_path_problems(run.data)
    if run.track.tensorboard and importlib.util.find_spec("tensorboard") is None:
        problems.append("track.tensorboard=true needs a package: `pip install tensorboard`, or leave it out")
    if run.init_from is not None and not run.init_from.exists() and not folders.read_last_saved_step(run.directory):
        problems.append(f"init_from={run.init_from} does not exist: give a weights file or the folder of a run")
    problem = _explain_why_unwritable(run.directory)
    return problems + ([f"folder={format_value(run.directory)}: {problem}"] if problem else [])


def _explain_why_unwritable(folder: Path) -> str | None:
    """Returns why nothing can be written in `folder`, or None. Rank 0 makes a temporary folder in the nearest folder
    above that exists, and removes it again. Other ranks look only for a file or a dead link in the way.
    """
    above = (folder.absolute(), *folder.absolute().parents)
    if link := next((path for path in above if path.is_symlink() and not os.path.exists(path)), None):
        return f"{link} is a link that leads nowhere; make what it names, or name another folder"
    existing = next(path for path in above if os.path.exists(path))
    if not existing.is_dir():
        return f"{existing} is a file; name another folder"
    if group.read_rank_and_world().rank == 0:
        try:
            os.rmdir(tempfile.mkdtemp(prefix=".dstrain-", dir=existing))
        except OSError as error:
            remedy = choose_write_remedy(error, "make room there, or name another folder")
            return f"it cannot be written below {existing} ({error.strerror}): {remedy}"
    return None


def _check_data_and_list_remarks(
    run: Run, options: JobOptions, resolved: dict[str, Any], world: int
) -> tuple[list[str], tuple[str, ...]]:
    """Checks a run against its data, its built system and what its folder holds. Returns remarks to print now, and
    lines to print when training starts; the latter are () with --dry-run or --print-config. Raises ConfigError for the
    first problem.
    """
    from dstrain.commands.probe import require_feasible_network_sizes, try_system_on_samples
    from dstrain.data.formats.labels import require_classes_fit_model
    from dstrain.data.open import describe_data, find_content_kind, open_sources
    from dstrain.data.source import describe_truncated_captions
    from dstrain.metrics.in_training import build_training_metrics
    from dstrain.planning.states import describe_memory_of_states

    source, held_out = open_sources(run.data, verify=True, run=run.directory)
    if run.save.best is True and held_out is None:
        remedy = (
            "splits=[0.8,0.1,0.1]" if find_content_kind(run.data) == "pairs" else "held_out=0.02, or data.held_out_path"
        )
        raise ConfigError(f"save.best=true needs held-out data, and {run.data.path} has none: set data.{remedy}")
    system = systems.build(run.system, run.model)
    if run.data.flip and system.takes_texts and source.captioned:
        raise ConfigError(
            f"data.flip=true: {run.system} reads the captions of {run.data.path}, and a mirrored sample "
            "would belie those that say left or right: write data.flip=false"
        )
    system.require_usable_source(source)
    _require_drawable_samples(run, system)
    cut = system.describe_cut([*run.samples.prompts], "samples.prompts") if run.samples.prompts else ""
    config = systems.build_config(run.system, run.model)
    require_classes_fit_model(
        run.data.path,
        source,
        held_out,
        config.num_labels,
        config.num_labels_field,
        config.without_labels,
        same_data=not (run.data.mixture or run.data.held_out_path),
    )
    require_feasible_network_sizes(run.system, system)
    build_training_metrics(run, system, source, held_out)  # raises ConfigError if its metrics cannot be measured
    remarks = describe_data(run.data, source, held_out, run.directory) + _check_and_describe_initial_weights(
        run, system, options
    )
    remarks += [cut] if cut else []
    if held_out is not None and run.every.evaluate and run.every.evaluate_samples > len(held_out):
        taken = f"{len(held_out):,} are held out, and all of them are taken"
        remarks.append(f"every.evaluate_samples={run.every.evaluate_samples}: {taken}")
    if (
        system.takes_texts
        and source.captioned
        and not {"text_encodings", "text_embed"} & set(source.read_first_readable())
    ):
        remarks += describe_truncated_captions(source, system)
    problems: list[str] = []
    with _collect_config_errors(problems):
        system.require_expressible_in_diffusers()
    lost = tuple(f"`dstrain export` will not write this run for diffusers: {problem}" for problem in problems)
    if options.dry_run:
        remarks += lost
    _require_possible_start_step(run, options)
    _require_profiled_steps_within_run(run, options)
    folders.require_start_allowed_in_folder(run, system.fingerprint(source), options)
    if options.print_config:
        return remarks, ()
    get_phases().enter_phase("trying two samples")
    remarks += try_system_on_samples(run, system, source, settings.read_precision(resolved))
    if options.dry_run:
        from dstrain.planning.estimate import describe_costs

        return [*remarks, describe_costs(run, system, resolved, world)], ()
    begins = options.from_scratch or not folders.read_last_saved_step(run.directory)
    can_lose = (
        type(system).require_expressible_in_diffusers is not System.require_expressible_in_diffusers
    )  # others have no form in diffusers
    notes = tuple(f"note: {line}" for line in lost if begins and can_lose)
    try:
        return remarks, (f"{describe_memory_of_states(run, system, resolved, world)}; {describe_free_memory()}", *notes)
    except (RuntimeError, TypeError, ValueError):  # as probe.py meets them on the meta device
        return remarks, notes


def _require_possible_start_step(run: Run, options: JobOptions) -> None:
    """Raises ConfigError if the run would begin beyond its last step, if the run's folder holds no checkpoint of
    --step, or if --step is given with --from-scratch.
    """
    if not options.from_scratch:
        folders.require_step_within_run(
            run, folders.read_last_saved_step(run.directory) if options.step is None else options.step
        )
    if options.step is None:
        return
    if options.from_scratch:
        raise ConfigError(f"--step {options.step} and --from-scratch: give one of the two")
    store = Store(run.directory / "checkpoints")
    steps = sorted({*store.list_steps(), *store.list_steps_put_aside()})
    if options.step not in steps:
        raise ConfigError(
            f"--step {options.step}: {run.directory} holds no checkpoint of that step; it holds "
            f"{', '.join(map(str, steps)) or 'none'}"
        )


def _require_profiled_steps_within_run(run: Run, options: JobOptions) -> None:
    """Raises ConfigError if the steps of --profile lie beyond the end of the run."""
    if options.profile is not None and options.profile[1] > run.steps:
        raise ConfigError(f"--profile: step {options.profile[1]} lies beyond steps={run.steps}: name steps up to that")


def _require_drawable_samples(run: Run, system: System) -> None:
    """Raises ConfigError if training cannot draw its grids of samples as the recipe says. Encodes one of the recipe's
    prompts, if there are any, to try the text encoder.
    """
    samples, draws = run.samples, system.generates or not run.every.sample
    problems: list[str] = []
    with _collect_config_errors(problems):
        system.choose_sampler(samples.sampler, "samples.sampler")
    with _collect_config_errors(problems):
        system.check_sampling(samples)
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    if run.every.sample and system.generates and (problem := system.find_drawing_problem()):
        raise ConfigError(
            f"every.sample={run.every.sample}: {problem}; write every.sample=0, or set `generates` to "
            "False in the system"
        )
    if samples.prompts and not (system.takes_texts and draws):
        raise ConfigError(f"samples.prompts: {run.system} draws nothing for texts while it trains; leave it out")
    if samples.num_frames is not None:
        if not (system.num_frames and draws):
            raise ConfigError(f"samples.num_frames={samples.num_frames}: {run.system} draws no videos; leave it out")
        if (samples.num_frames - 1) % system.temporal_patch_size:
            raise ConfigError(
                f"samples.num_frames={samples.num_frames}: clips of this model have 1 + k * "
                f"{system.temporal_patch_size} frames"
            )
        if samples.num_frames > system.num_frames:
            raise ConfigError(f"samples.num_frames={samples.num_frames}: this model has {system.num_frames} at most")
    if samples.prompts and run.every.sample:
        system.conditions_from_texts([samples.prompts[0]])


def _check_and_describe_initial_weights(run: Run, system: System, options: JobOptions) -> list[str]:
    """Checks that the weights of `init_from` fit, unless the run resumes or has no init_from. With --dry-run returns
    lines that say what is loaded; otherwise []. Raises ConfigError if the weights do not fit.
    """
    from dstrain.runs.weights import read_weights_adapted_to_system

    if run.init_from is None or options.from_scratch or folders.read_last_saved_step(run.directory):
        return []
    changes = [
        change for _, changed in read_weights_adapted_to_system(run.init_from, system).values() for change in changed
    ]
    return [f"init_from: {change}" for change in changes] if options.dry_run else []
