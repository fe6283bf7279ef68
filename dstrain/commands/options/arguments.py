"""Parses kinds of values on a command line; its Parser has --help and reports faults as text.

parser = Parser(HELP); parser.add_argument(...); words = parser.parse_words(argv)
"""

import argparse
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dstrain.disk.texts import read_text_file, split_nonblank_lines
from dstrain.recipe import WIDEST, ConfigError


class Parser(argparse.ArgumentParser):
    """Parses as argparse does, but raises ConfigError for faults, prints `text` for -h and --help, and accepts
    --local_rank, which launchers add.
    """

    def __init__(self, text: str) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.text = text
        self.elsewhere: dict[str, str] = {}  # names of options in other programs, and of these here
        self.add_argument("-h", "--help", action="store_true")
        self.add_argument("--local_rank", "--local-rank", type=int)  # the environment says it, too

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError with argparse's message, instead of ending the process."""
        raise ConfigError(f"{message}; --help shows what there is")

    def parse_words(self, argv: Sequence[str] | None = None) -> dict[str, Any]:
        """Returns {name: value} of all arguments: the value that was typed, or the default. If --help was typed, prints
        the help and ends the process.
        """
        return self.extract_values(self.parse_args(argv))

    def extract_values(self, parsed: argparse.Namespace) -> dict[str, Any]:
        """Returns {name: value} of the parsed arguments, without help and local_rank. If --help was typed, prints the
        help and ends the process with exit code 0.
        """
        words = vars(parsed)
        if words.pop("help"):
            print(self.text, end="")
            raise SystemExit(0)
        del words["local_rank"]
        return words


def parse_positive_integer(text: str) -> int:
    """Parses an integer above 0. Raises ArgumentTypeError for any other text."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def parse_nonnegative_integer(text: str) -> int:
    """Parses an integer from 0 on. Raises ArgumentTypeError for any other text."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def parse_nonnegative_number(text: str) -> float:
    """Parses a finite number from 0 on. Raises ArgumentTypeError for any other text."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value


def parse_fraction_below_1(text: str) -> float:
    """Parses a fraction from 0 on and below 1. Raises ArgumentTypeError for any other text."""
    value = parse_nonnegative_number(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction below 1")
    return value


def parse_part_number_and_count(text: str) -> tuple[int, int]:
    """Parses K/N, such as 3/16, into K, the number of a part from 1 on, and N, the number of all parts. Raises
    ArgumentTypeError for any other text, and if K is above N.
    """
    place, slash, parts = text.partition("/")
    if not (slash and place.isdecimal() and parts.isdecimal() and 1 <= int(place) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part such as 3/16, the third of 16")
    return int(place), int(parts)


def parse_ema_widths(text: str) -> tuple[float, ...]:
    """Parses relative widths of averages, such as 0.05,0.10, and drops repeated ones. Raises ArgumentTypeError unless
    all are numbers from 0.001 to 0.288.
    """
    values = tuple(dict.fromkeys(parse_nonnegative_number(word.strip()) for word in text.split(",")))
    if not all(0.001 <= value <= WIDEST for value in values):
        raise argparse.ArgumentTypeError(f"{text!r}: a width lies from 0.001 to {WIDEST}, such as 0.05,0.10,0.15")
    return values


def parse_fraction(text: str) -> float:
    """Parses a fraction from 0 to 1. Raises ArgumentTypeError for any other text."""
    value = parse_nonnegative_number(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction from 0 to 1")
    return value


def parse_interval(text: str) -> tuple[float, float]:
    """Parses two numbers from 0 on, such as 0.2,1.6. Raises ArgumentTypeError for any other text, and if the first is
    above the second.
    """
    values = tuple(map(parse_nonnegative_number, text.split(",")))
    if len(values) != 2 or values[0] > values[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not LO,HI, such as 0.2,1.6")
    return values


def parse_guiding_run(text: str) -> tuple[Path, float | str | None, int | None]:
    """Parses the run that guides another (autoguidance) into (its folder, its weights, its step).

    The forms are RUN, RUN:0.995 (the average of that decay or width), RUN:raw (the training weights), RUN@400 (step
    400) and RUN@400:raw. Weights and step are None if they are left out. A text that is an existing folder is taken
    whole. Raises ArgumentTypeError if weights or step are wrong.
    """
    run, colon, name = (text, "", "") if Path(text).is_dir() else text.rpartition(":")
    run, weights = (run, name if name == "raw" else parse_fraction_below_1(name)) if colon else (text, None)
    folder, at, step = (run, "", "") if Path(run).is_dir() else run.rpartition("@")
    return (Path(folder), weights, parse_nonnegative_integer(step)) if at else (Path(run), weights, None)


def parse_profile_steps_and_ranks(text: str) -> tuple[int, int, int]:
    """Parses A:B or A:B:N into (A, B, N); N is 1 if it is left out. It means the steps after A up to B, on every Nth
    rank. Raises ArgumentTypeError for any other text, if A is not below B, or if N is 0.
    """
    words = text.split(":")
    if len(words) not in (2, 3) or not all(word.isdigit() for word in words):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not A:B or A:B:N, such as 10:13 for the three steps after step "
            "10, or 10:13:8 for those of every eighth rank"
        )
    first, last, ranks = (*map(int, words), 1)[:3]
    if first >= last or ranks < 1:
        raise argparse.ArgumentTypeError(f"{text!r} holds no step: write A:B with A below B, and N above 0")
    return first, last, ranks


def parse_width_and_height(text: str) -> tuple[int, int]:
    """Parses WIDTHxHEIGHT in pixels, such as 320x192, into (width, height). Raises ArgumentTypeError for any other
    text.
    """
    sides = text.lower().split("x")
    if len(sides) != 2:
        raise argparse.ArgumentTypeError(f"{text} is not WIDTHxHEIGHT in pixels, such as 320x192")
    return parse_positive_integer(sides[0]), parse_positive_integer(sides[1])


def parse_labels(text: str) -> tuple[int, ...]:
    """Parses class numbers, such as 3,5,5. Raises ArgumentTypeError if one is no integer from 0 on."""
    return tuple(parse_nonnegative_integer(word.strip()) for word in text.split(","))


def make_known_words_parser(*known: str) -> Callable[[str], tuple[str, ...]]:
    """Returns a function that parses a list such as gif,mp4 into a tuple of its words, without repeated ones and
    without spaces around them. That function raises ArgumentTypeError for a word that is not in `known`.
    """

    def parse_words(text: str) -> tuple[str, ...]:
        """Splits a text at commas, and drops repeated words. Raises ArgumentTypeError for an unknown word."""
        words = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
        if not set(words) <= set(known):
            raise argparse.ArgumentTypeError(f"{text!r} is not of {', '.join(known)}")
        return words

    return parse_words


def read_nonempty_lines(path: str) -> tuple[str, ...]:
    """Returns the nonempty lines of a text file. Raises ArgumentTypeError if there are none, or if the file cannot be
    read.
    """
    try:
        lines = split_nonblank_lines(read_text_file(Path(path)))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise argparse.ArgumentTypeError(f"{path} cannot be read as a text file: {reason}") from None
    if not lines:
        raise argparse.ArgumentTypeError(f"{path} holds no line of text")
    return lines


def split_at_commas(text: str) -> tuple[str, ...]:
    """Splits a text such as fid,kid at commas, and drops repeated words."""
    return tuple(dict.fromkeys(text.split(",")))


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_file_size(text: str) -> int:
    """Parses a size such as 5GB (5 x 10^9) or 2GiB (2 x 2^30) into bytes, rounded down, at least 1. Raises
    ArgumentTypeError for any other text, and for 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if not match or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 5GB, 500MB or 2GiB")
    return max(1, int(float(match[1]) * _UNITS[match[2].upper()]))


def parse_size_in_binary_units(text: str) -> int:
    """Parses a size in bytes such as 256M, which is 256 x 2^20; K, M and G are powers of 1024. Raises ArgumentTypeError
    for any other text, and for 0.
    """
    factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper())
    return parse_positive_integer(text[:-1] if factor else text) * (factor or 1)
