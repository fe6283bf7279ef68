"""Options of `dstrain train`, and of every command that takes a recipe, a DeepSpeed JSON and overrides."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dstrain.commands.options.arguments import parse_positive_integer, parse_profile_steps_and_ranks
from dstrain.commands.options.command import make_option_field, make_remaining_words_field
from dstrain.commands.options.shared import Trusting
from dstrain.commands.options.shipped import DS_CONFIG, RECIPE
from dstrain.recipe import ConfigError
from dstrain.runs.resume import Resume

_FILES = ((".json", "--ds_config"), (".yaml", "--recipe"), (".yml", "--recipe"))


@dataclass(frozen=True)
class RecipeOptions(Trusting):
    """Holds the recipe, the DeepSpeed JSON and the overrides of a command."""

    recipe: Path = make_option_field(
        Path(RECIPE),
        "what is learned, and how: YAML, or the name of a recipe that is shipped",
        Path,
        metavar="FILE",
    )
    ds_config: Path = make_option_field(
        Path(DS_CONFIG),
        "how it is sharded: DeepSpeed JSON, or the name of one that is shipped; also spelled --deepspeed_config",
        Path,
        name="ds_config",
        metavar="FILE",
        aliases=("--ds-config", "--deepspeed_config"),
    )
    overrides: tuple[str, ...] = make_remaining_words_field("key=value", "entries of the recipe")

    def check_options(self) -> None:
        """Raises ConfigError for a file name without --recipe or --ds_config before it, or behind recipe= and such."""
        for override in self.overrides:
            key, equals, value = override.partition("=")
            if equals and key in ("recipe", "ds_config", "deepspeed_config"):
                raise ConfigError(f"{override}: options are written with dashes: --{key} {value}")
            for ending, name in _FILES:
                if "=" not in override and override.endswith(ending):
                    raise ConfigError(f"{override} stands alone: write {name} {override}")


@dataclass(frozen=True)
class JobOptions(RecipeOptions, Resume):
    """Holds the options of a training job."""

    dry_run: bool = make_option_field(False, "check everything, start nothing")
    print_config: bool = make_option_field(False, "print the whole recipe and the DeepSpeed settings, start nothing")
    deepspeed: bool = make_option_field(False, "accepted from launchers, as --local_rank N is")


@dataclass(frozen=True, kw_only=True)
class TrainOptions(JobOptions):
    """Trains a visual generative model with DeepSpeed. The same command again goes on where the run stopped.

    overrides, for every recipe:
      name= folder= steps= seed= init_from= data.path= batch.global= batch.micro= optimizer.lr=
      every.report= every.sample= every.evaluate= every.save= save.format= samples.num=
      model.KEY=              any key of the system; --print-config shows all of them
    """

    usage: ClassVar[str] = """
        dstrain train [options] [key=value ...]                            # one process
        deepspeed [--hostfile FILE] --module dstrain train [options] [key=value ...]
    """
    examples: ClassVar[str] = r"""
        deepspeed --module dstrain train
        deepspeed --module dstrain train steps=200 every.sample=50 folder=/tmp/try
        deepspeed --module dstrain train --recipe dit-b4-imagenet256 --ds_config zero3.json \
            data.path=latents/imagenet256 batch.global=256
        dstrain train --print-config model.depth=8
    """

    from_scratch: bool = make_option_field(False, "begin anew; what the folder holds is moved aside, into earlier_N/")
    allow_change: bool = make_option_field(False, "resume although the recipe changes what the run is")
    step: int | None = make_option_field(
        None,
        "go on from checkpoint N; newer ones are moved aside, into earlier_N/. For one command: typed again it does "
        "so again",
        parse_positive_integer,
        metavar="N",
    )
    profile: tuple[int, int, int] | None = make_option_field(
        None,
        "record the steps after A up to B in RUN/profile/, of every N-th rank (each)",
        parse_profile_steps_and_ranks,
        metavar="A:B[:N]",
    )
    trust_pickle: bool = make_option_field(False, "resume from DeepSpeed's own files, and run what they hold")
