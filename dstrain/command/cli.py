"""The command line that launch scripts share: parsing, every check that needs no DeepSpeed engine, and faults as text.

A script is `options = job_arguments(...)`, `job = prepare(options)` and one verb of dstrain, under `run_main`.
"""

import argparse
import difflib
import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain import recipe, systems
from dstrain.command.arguments import Parser
from dstrain.command.ending import run_main as run_main  # with which every script begins
from dstrain.engine import settings
from dstrain.ranks import group
from dstrain.recipe import ConfigError, Data, Run
from dstrain.runs.folders import last_saved

_DEFAULT_RECIPE = Path("launch/recipes/dit-small.yaml")
_DEFAULT_DS_CONFIG = Path("ds_configs/zero2.json")

_HELP = """\
{summary}

usage:  [deepspeed [--hostfile FILE]] {script} [options] [key=value ...]

  --recipe FILE        what is learned, and how: YAML ({recipe})
  --ds_config FILE     how it is sharded: DeepSpeed JSON ({ds_config});
                       also spelled --deepspeed_config
  --dry-run            check everything, start nothing
  --print-config       print the whole recipe and the DeepSpeed settings, start nothing
  --from-scratch       begin anew; what the folder holds is moved aside, into earlier_N/
  --allow-change       resume although the recipe changes what the run is
  --deepspeed, --local_rank N     accepted from launchers
  -h, --help           this text

overrides, for every recipe:
  name= folder= steps= seed= init_from= data.path= batch.global= batch.micro= optimizer.lr=
  every.report= every.sample= every.evaluate= every.save= save.format= samples.num=
  model.KEY=           any key of the system; --print-config shows all of them

examples:
  deepspeed {script}
  deepspeed {script} steps=200 every.sample=50 folder=/tmp/try
  deepspeed {script} --recipe launch/recipes/dit-b4-imagenet256.yaml \\
      --ds_config ds_configs/zero3.json data.path=/data/imagenet/train batch.global=256
  python {script} --print-config model.depth=8            # one process

The same command again goes on where the run stopped.
"""


@dataclass(frozen=True)
class Options:
    """What was typed."""

    recipe: Path
    ds_config: Path
    overrides: tuple[str, ...] = ()
    dry_run: bool = False
    print_config: bool = False
    from_scratch: bool = False
    allow_change: bool = False


@dataclass(frozen=True)
class Job:
    """What is to be done, checked."""

    run: Run
    settings: dict[str, Any]                 # for deepspeed.initialize
    remarks: list[str]                       # worth printing once


def train_arguments(root: Path, argv: Sequence[str] | None = None) -> Options:
    """Options of launch/train.py; `root` is the repository, where default files lie."""
    return job_arguments("Trains a visual generative model with DeepSpeed.", "launch/train.py", root, argv)


def job_arguments(summary: str, script: str, root: Path, argv: Sequence[str] | None = None) -> Options:
    """Options of a script that takes a recipe, a DeepSpeed JSON and overrides. --help ends the process."""
    parser = Parser(_HELP.format(summary=summary, script=script, recipe=_DEFAULT_RECIPE, ds_config=_DEFAULT_DS_CONFIG))
    parser.add_argument("--recipe", type=Path)
    parser.add_argument("--ds_config", "--ds-config", "--deepspeed_config", type=Path)
    for flag in ("--dry-run", "--print-config", "--from-scratch", "--allow-change", "--deepspeed"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("overrides", nargs="*")
    parsed, unknown = parser.parse_known_intermixed_args(argv)
    parser.told(parsed)
    if unknown:
        raise ConfigError(*(_unknown_option(option, parser) for option in unknown))
    for override in parsed.overrides:
        for ending, option in ((".json", "--ds_config"), (".yaml", "--recipe"), (".yml", "--recipe")):
            if "=" not in override and override.endswith(ending):
                raise ConfigError(f"{override} stands alone: write {option} {override}")
    return Options(_find("--recipe", parsed.recipe, _DEFAULT_RECIPE, root),
                   _find("--ds_config", parsed.ds_config, _DEFAULT_DS_CONFIG, root), tuple(parsed.overrides),
                   parsed.dry_run, parsed.print_config, parsed.from_scratch, parsed.allow_change)


def prepare(options: Options, world: int | None = None, device_type: str | None = None) -> Job:
    """The checked job: recipe, overrides, model section, paths and DeepSpeed settings, before anything is built.

    Raises one ConfigError with every fault that can be seen at this point.
    """
    world, device_type = world or group.place().world, device_type or group.device().type
    run = recipe.load(options.recipe, options.overrides)
    problems: list[str] = []
    resolved: dict[str, Any] = {}
    try:
        run = run.model_copy(update={"data": _data(run)})
        run = recipe.check(run, systems.config_class(run.system))
        problems += _conflicts(run)
    except ConfigError as error:
        problems += error.problems
    except ConfigError as error:
        problems.append(str(error))                                          # an unknown system
    problems += _paths(run)
    try:
        resolved = settings.resolve(options.ds_config, run, world, device_type)
    except ConfigError as error:
        problems += error.problems
    problems += _sharding(run, resolved) if not problems else []
    remarks: list[str] = []
    if not problems and group.place().rank == 0:
        problems += _data_and_folder(run, options, remarks)
    if problems:
        raise ConfigError(*problems)
    return Job(run, resolved, settings.remarks(resolved, device_type) + remarks)


def described(path: Path, root: Path, overrides: Sequence[str]) -> Run:
    """The Run of a recipe, checked but for its data, which need not be here. ConfigError: every fault."""
    run = recipe.load(_find("--recipe", path, _DEFAULT_RECIPE, root), overrides)
    run = recipe.check(run.model_copy(update={"data": _data(run)}), systems.config_class(run.system))
    if problems := _conflicts(run):
        raise ConfigError(*problems)
    return run


def describe(job: Job) -> str:
    """The whole recipe and the DeepSpeed settings, each in its own language."""
    return f"# recipe\n{recipe.dump(job.run)}\n# DeepSpeed settings\n{json.dumps(job.settings, indent=2)}\n"


def _unknown_option(option: str, parser: argparse.ArgumentParser) -> str:
    name, equals, value = option.lstrip("-").partition("=")
    if equals and f"--{name}" not in parser._option_string_actions:
        return f"{option}: overrides are written without dashes: {name}={value}"
    close = difflib.get_close_matches(option.partition("=")[0], parser._option_string_actions, 1)
    meant = f" (did you mean {close[0]}?)" if close else ""
    return f"{option}: there is no such option{meant}; --help shows what there is"


def _find(option: str, given: Path | None, default: Path, root: Path) -> Path:
    """The file as given, or below the repository where only that exists."""
    path = given or default
    for candidate in (path, root / path):
        if candidate.exists():
            return candidate
    # A mistyped name is looked for where the repository keeps such files, unless its own folder has some.
    beside = path if list(path.parent.glob(f"*{default.suffix}")) else root / default.parent / path.name
    raise ConfigError(f"{option} {path}: there is no such file{recipe.nearby(beside, f'*{default.suffix}')}")


def _data(run: Run) -> Data:
    from dstrain.data.sources import completed, require_kind

    found = completed(run.data)
    require_kind(found, run.system, systems.config_class(run.system).model_fields)
    return found


def _conflicts(run: Run) -> list[str]:
    """What the model section and the others say differently, as far as every system's names tell."""
    model, problems = run.model, []
    size, classes = model.get("image_size"), model.get("num_classes")
    if isinstance(size, int) and size != run.data.image_size:             # a pair is its own system's to compare
        problems.append(f"data.image_size={run.data.image_size} and model.image_size={size} differ: make both equal")
    out = [label for label in run.samples.labels or () if classes is not None and label >= classes]
    if out:
        problems.append(f"samples.labels={list(run.samples.labels)}: {out} are not below model.num_classes={classes}; "
                        f"labels are 0 to {classes - 1}")
    if run.samples.guidance_scale != 1 and model.get("class_dropout_prob") == 0:
        problems.append(f"samples.guidance_scale={run.samples.guidance_scale} needs a model that was trained without "
                        "labels at times: write samples.guidance_scale=1, or model.class_dropout_prob=0.1")
    config = systems.config_class(run.system).model_validate(model)
    return problems + list(getattr(config, "conflicts", lambda _: ())(run))


def _sharding(run: Run, resolved: dict[str, Any]) -> list[str]:
    """What in the model section does not go with the ZeRO stage."""
    config = systems.config_class(run.system).model_validate(run.model)
    return list(getattr(config, "conflicts_at", lambda _: ())(settings.stage(resolved)))


def _data_and_folder(run: Run, options: Options, remarks: list[str]) -> list[str]:
    """What only shows when the data are listed and the folder's earlier run is read; on rank 0, since it takes time."""
    from dstrain.runs import folders
    from dstrain.runs.weights import fitted
    from dstrain.data.sources import is_embeddings, open_sources

    try:
        source, unseen = open_sources(run.data, verify=True)
        if run.save.best and unseen is None:
            remedy = "splits=[0.8,0.1,0.1]" if is_embeddings(run.data.path) else "held_out=0.02, or data.held_out_path"
            return [f"save.best=true needs held-out data, and {run.data.path} has none: set data.{remedy}"]
        system = systems.build(run.system, run.model)
        if run.data.flip and system.takes_texts and source.captioned:
            return [f"data.flip=true: {run.system} reads the captions of {run.data.path}, and a mirrored sample would "
                    "belie those that say left or right: write data.flip=false"]
        system.accepts(source)
        if problem := _prompts(run, system):
            return [problem]
        there, known = len(source.classes), run.model.get("num_classes")
        if known is not None and there > known and "label" in system.conditions(1):
            return [f"data.path={run.data.path} has {there} classes, model.num_classes={known}: labels would be out of "
                    f"range; write model.num_classes={there}"]
        if run.init_from is not None and not folders.last_saved(run.directory) and not options.from_scratch:
            for _, changed in fitted(run.init_from, system).values():
                remarks += [f"init_from: {change}" for change in changed if options.dry_run]
        found = system.fingerprint(source)
        folders.check(run, found, from_scratch=options.from_scratch, allow_change=options.allow_change)
    except ConfigError as error:
        return error.problems
    except ConfigError as error:
        return [str(error)]
    return []


def _prompts(run: Run, system: Any) -> str | None:
    """What keeps the grids of training from being drawn as the recipe says; a text encoder is tried here."""
    wanted, draws = run.samples, system.generates or not run.every.sample
    if wanted.prompts and not (system.takes_texts and draws):
        return f"samples.prompts: {run.system} draws nothing for texts while it trains; leave it out"
    if wanted.num_frames is not None and not (system.num_frames and draws):
        return f"samples.num_frames={wanted.num_frames}: {run.system} draws no videos; leave it out"
    unit = system.temporal_patch_size
    if wanted.num_frames is not None and (wanted.num_frames - 1) % unit:
        return f"samples.num_frames={wanted.num_frames}: clips of this model have 1 + k * {unit} frames"
    if wanted.num_frames is not None and wanted.num_frames > system.num_frames:
        return f"samples.num_frames={wanted.num_frames}: this model's clips have {system.num_frames} at most"
    if wanted.prompts and run.every.sample:
        system.conditions_from_texts([wanted.prompts[0]])
    return None


def _paths(run: Run) -> list[str]:
    from dstrain.data.sources import BUILTINS

    problems = []
    for key, path in (("data.path", run.data.path), ("data.held_out_path", run.data.held_out_path)):
        if path is None:
            continue
        if path.startswith("builtin:"):
            if path not in BUILTINS:
                problems.append(f"{key}={path}: the built-in data sets are {', '.join(BUILTINS)}")
        elif not os.path.exists(path):
            problems.append(f"{key}={path} does not exist: give a folder of data, or builtin:fashion")
        elif os.path.isdir(path) and not any(os.scandir(path)):
            problems.append(f"{key}={path} is an empty folder: give one with data, such as a folder of images a class")
    if run.data.held_out and run.data.path.startswith("builtin:"):
        problems.append(f"data.held_out={run.data.held_out}: {run.data.path} holds out images itself: leave it out")
    if run.track.tensorboard and importlib.util.find_spec("tensorboard") is None:
        problems.append("track.tensorboard=true needs a package: `pip install tensorboard`, or leave it out")
    if run.init_from is not None and not run.init_from.exists() and not last_saved(run.directory):
        problems.append(f"init_from={run.init_from} does not exist: give a weights file or the folder of a run")
    folder = run.directory.absolute()
    try:
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    except OSError as error:
        return [*problems, f"folder={str(run.directory)[:60]}...: {error.strerror}; name another folder"]
    if not existing.is_dir():
        problems.append(f"folder={run.directory}: {existing} is a file; name another folder")
    elif not os.access(existing, os.W_OK | os.X_OK):
        problems.append(f"folder={run.directory} cannot be written below {existing}: name a writable folder")
    return problems
