"""Options of `dstrain keep`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dstrain.commands.options.arguments import parse_nonnegative_integer, parse_nonnegative_number
from dstrain.commands.options.command import Command, make_option_field, make_words_after_dashes_field, parse_options
from dstrain.commands.options.train import TrainOptions
from dstrain.recipe import ConfigError


@dataclass(frozen=True)
class KeepOptions(Command):
    """Starts a training command, and starts it again where a rank has died or hung, until the run is complete.

    Behind -- stands the command as you would type it, with any launcher: deepspeed [--hostfile FILE], torchrun, srun,
    python. It is not started again after wrong input (2), divergence (3), a stop on purpose (75), a signal to
    `dstrain keep`, which is passed on, and four starts in a row that have saved no step. Restarts are listed in
    RUN/restarts.log.
    """

    usage: ClassVar[str] = "dstrain keep [options] -- deepspeed [...] --module dstrain train [...]"

    words: tuple[str, ...] = make_words_after_dashes_field("-- COMMAND", "the training command, with its launcher")
    max_restarts: int = make_option_field(20, "restarts at most", parse_nonnegative_integer, metavar="N")
    backoff: float = make_option_field(
        5.0,
        "seconds before a restart; doubled with each start that saved no step",
        parse_nonnegative_number,
        metavar="S",
        shown="5",
    )
    min_hosts: int = make_option_field(
        0,
        "start with the hosts of --hostfile that answer ssh, at least N; 0: with all",
        parse_nonnegative_integer,
        metavar="N",
    )
    restart_on_stop: bool = make_option_field(False, "also after exit code 75: stopped and saved")

    @property
    def training_options(self) -> TrainOptions:
        """Returns the options of the training command that is kept running. Raises ConfigError if the command does not
        train, or has --dry-run or --print-config.
        """
        options = parse_options(TrainOptions, find_training_arguments(self.words))
        if options.dry_run or options.print_config:
            raise ConfigError("--dry-run and --print-config end at once: give them without `dstrain keep`")
        return options


def find_training_arguments(command: Sequence[str]) -> list[str]:
    """Returns the words of a command line that are options of training: those after train.py or
    `dstrain train`. Raises ConfigError if the command does not train.
    """
    names = [Path(word).name for word in command]
    for place, name in enumerate(names):
        if name == "train.py" or (name == "train" and "dstrain" in names[:place]):
            return list(command[place + 1 :])
    raise ConfigError(
        "no training is behind --: write the command there, for example: dstrain keep -- deepspeed --module dstrain "
        "train; --help shows more"
    )
