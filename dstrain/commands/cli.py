"""The command line of scripts that take a recipe, a DeepSpeed JSON and overrides.

A script is `options = job_arguments(...)`, `job = prepare(options)` and one verb of dstrain, under `run_main`.
"""

import argparse
import difflib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from dstrain.commands.arguments import Parser, positive, window
from dstrain.commands.exits import run_main
from dstrain.commands.job import Job, JobOptions, checked, prepare
from dstrain.engine import settings
from dstrain.recipe import ConfigError, Run, as_text, dump, load, nearby

__all__ = [
    "ConfigError",
    "Job",
    "JobOptions",
    "describe",
    "headline",
    "job_arguments",
    "load_case",
    "load_recipe",
    "prepare",
    "run_main",
    "train_arguments",
]

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
{training}  --deepspeed, --local_rank N     accepted from launchers
  -h, --help           this text

overrides, for every recipe:
  name= folder= steps= seed= init_from= data.path= batch.global= batch.micro= optimizer.lr=
  every.report= every.sample= every.evaluate= every.save= save.format= samples.num=
  model.KEY=           any key of the system; --print-config shows all of them

examples:
  deepspeed {script}
  deepspeed {script} steps=200 every.sample=50 folder=/tmp/try
  deepspeed {script} --recipe launch/recipes/dit-b4-imagenet256.yaml \\
      --ds_config ds_configs/zero3.json data.path=latents/imagenet256 batch.global=256
  python {script} --print-config model.depth=8            # one process
"""

_TRAINING = """\
  --from-scratch       begin anew; what the folder holds is moved aside, into earlier_N/
  --allow-change       resume although the recipe changes what the run is
  --step N             go on from checkpoint N; newer ones are moved aside, into
                       earlier_N/. For one command: typed again it does so again
  --profile A:B[:N]    record the steps after A up to B in RUN/profile/, of every N-th rank (each)
  --trust-pickle       resume from DeepSpeed's own files, and run what they hold
"""


def train_arguments(root: Path, argv: Sequence[str] | None = None) -> JobOptions:
    """Options of launch/train.py; `root` is the repository, where default files lie."""
    summary = "Trains a visual generative model with DeepSpeed.\nThe same command again goes on where the run stopped."
    return job_arguments(summary, "launch/train.py", root, argv, trains=True)


def job_arguments(
    summary: str, script: str, root: Path, argv: Sequence[str] | None = None, trains: bool = False
) -> JobOptions:
    """Options of a script that takes a recipe, a DeepSpeed JSON and overrides, and with `trains` those of a run that
    resumes. --help ends the process.
    """
    parser = Parser(
        _HELP.format(
            summary=summary,
            script=script,
            recipe=_DEFAULT_RECIPE,
            ds_config=_DEFAULT_DS_CONFIG,
            training=_TRAINING if trains else "",
        )
    )
    parser.add_argument("--recipe", type=Path)
    parser.add_argument("--ds_config", "--ds-config", "--deepspeed_config", type=Path)
    training = []
    for flag in ("--dry-run", "--print-config", "--deepspeed"):
        parser.add_argument(flag, action="store_true")
    if trains:
        training = [
            parser.add_argument("--step", type=positive),
            parser.add_argument("--profile", type=window),
            *(
                parser.add_argument(flag, action="store_true")
                for flag in ("--from-scratch", "--allow-change", "--trust-pickle")
            ),
        ]
    parser.add_argument("overrides", nargs="*")
    parsed, unknown = parser.parse_known_intermixed_args(argv)
    parser.values(parsed)
    if unknown:
        raise ConfigError(*(_unknown_option(option, parser) for option in unknown))
    for override in parsed.overrides:
        for ending, option in ((".json", "--ds_config"), (".yaml", "--recipe"), (".yml", "--recipe")):
            if "=" not in override and override.endswith(ending):
                raise ConfigError(f"{override} stands alone: write {option} {override}")
    return JobOptions(
        _find("--recipe", parsed.recipe, _DEFAULT_RECIPE, root),
        _find("--ds_config", parsed.ds_config, _DEFAULT_DS_CONFIG, root),
        tuple(parsed.overrides),
        parsed.dry_run,
        parsed.print_config,
        **{option.dest: getattr(parsed, option.dest) for option in training},
    )


def load_recipe(path: Path, root: Path, overrides: Sequence[str]) -> Run:
    """The Run of a recipe, checked but for its data, which need not be here. ConfigError: every problem."""
    run, problems = checked(load(_find("--recipe", path, _DEFAULT_RECIPE, root), overrides))
    if problems:
        raise ConfigError(*problems)
    return run


def load_case(recipe: Path | None, ds_config: Path | None, root: Path, overrides: Sequence[str]) -> tuple[Run, Path]:
    """As load_recipe, and the DeepSpeed JSON's path; None stands for the default of either."""
    return (
        load_recipe(recipe or _DEFAULT_RECIPE, root, overrides),
        _find("--ds_config", ds_config, _DEFAULT_DS_CONFIG, root),
    )


def describe(job: Job) -> str:
    """The whole recipe and the DeepSpeed settings, each in its own language."""
    return f"# recipe\n{dump(job.run)}\n# DeepSpeed settings\n{json.dumps(job.settings, indent=2)}\n"


def headline(job: Job) -> str:
    """What is about to be trained, in a line."""
    run, micro = job.run, job.settings["train_micro_batch_size_per_gpu"]
    sharding = f"ZeRO stage {settings.read_stage(job.settings)}, {settings.read_precision(job.settings)}"
    return (
        f"{run.name}: {run.system}, {run.steps:,} steps of {run.batch.global_:,} samples, {micro} on a rank at a "
        f"time; {sharding}; folder {run.directory}"
    )


def _unknown_option(option: str, parser: argparse.ArgumentParser) -> str:
    name, equals, value = option.lstrip("-").partition("=")
    if equals and f"--{name}" not in parser._option_string_actions:
        return f"{option}: overrides are written without dashes: {name}={value}"
    close = difflib.get_close_matches(option.partition("=")[0], parser._option_string_actions, 1)
    meant = f" (did you mean {close[0]}?)" if close else ""
    return f"{option}: there is no such option{meant}; --help shows what there is"


def _find(option: str, path: Path | None, default: Path, root: Path) -> Path:
    """The file at `path`, None for the default; below the repository where it exists only there."""
    path = path or default
    for candidate in (path, root / path):
        if os.path.exists(candidate):  # False, too, for what is no path
            return candidate
    # A mistyped name is looked for where the repository keeps such files, unless its own folder has some.
    beside = path if list(path.parent.glob(f"*{default.suffix}")) else root / default.parent / path.name
    raise ConfigError(f"{option} {as_text(str(path))}: there is no such file{nearby(beside, f'*{default.suffix}')}")
