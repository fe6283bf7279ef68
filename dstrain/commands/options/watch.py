"""Options of `dstrain watch`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dstrain.commands.options.arguments import parse_nonnegative_number
from dstrain.commands.options.command import Command, make_option_field, make_remaining_words_field


@dataclass(frozen=True)
class WatchOptions(Command):
    """Shows where runs stand: step, loss, rate, time left, newest checkpoint, newest picture.

    beginning  held, and no report yet         stopped   it saved and ended before its last step
    running    a training holds the folder     dead      it ended without a word, or with the error
    complete   the last step is done                     below the table
    imported   published weights
    """

    usage: ClassVar[str] = "dstrain watch FOLDER [FOLDER ...] [options]"

    folders: tuple[Path, ...] = make_remaining_words_field("FOLDER", "a run, or a folder of runs (runs)", Path)
    follow: bool = make_option_field(False, "again every few seconds, until Ctrl-C")
    seconds: float = make_option_field(5.0, "how often", parse_nonnegative_number, metavar="S", shown="5")
    json: bool = make_option_field(False, "a JSON list; with --follow one line each time")
