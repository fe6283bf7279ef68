"""What the scripts of launch/ share of their command lines: argument types, options that all have, faults as text.

parser = Parser(HELP); parser.add_argument(...); parser.add_weights(); words = parser.words(argv)
"""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dstrain.disk.small import read_text
from dstrain.recipe import WIDEST, ConfigError


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are ConfigErrors, with -h, --help, which prints `text`, and what launchers add."""

    def __init__(self, text: str) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.text = text
        self.add_argument("-h", "--help", action="store_true")
        self.add_argument("--local_rank", "--local-rank", type=int)  # the environment says it, too

    def error(self, message: str) -> None:
        raise ConfigError(f"{message}; --help shows what there is")

    def add_weights(self) -> None:
        """--ema NUMBER | --raw, and --checkpoint STEP: which weights of a run; words `ema`, `raw` and `step`."""
        weights = self.add_mutually_exclusive_group()
        weights.add_argument("--ema", type=float)
        weights.add_argument("--raw", action="store_true")
        self.add_argument("--checkpoint", type=count, dest="step")

    def add_precision(self) -> None:
        """--precision fp32, tf32 or bf16, see encoders/precision.py."""
        self.add_argument("--precision", choices=("fp32", "tf32", "bf16"), default="fp32")

    def add_sampling(self) -> None:
        """--sampler, and the fields of a recipe's `samples` that say how it goes; words of the same names."""
        self.add_argument("--sampler")
        self.add_argument("--guidance-scale", "--guidance_scale", type=scale)
        self.add_argument("--spacing", choices=("leading", "trailing", "linspace", "karras"))
        self.add_argument("--eta", type=scale)
        self.add_argument("--guidance-interval", "--guidance_interval", type=interval)
        self.add_argument("--guidance-rescale", "--guidance_rescale", type=portion)

    def words(self, argv: Sequence[str] | None = None) -> dict[str, Any]:
        """What was typed, by name. --help ends the process."""
        return self.values(self.parse_args(argv))

    def values(self, parsed: argparse.Namespace) -> dict[str, Any]:
        """As `words`, of arguments that are parsed already."""
        words = vars(parsed)
        if words.pop("help"):
            print(self.text, end="")
            raise SystemExit(0)
        del words["local_rank"]
        return words


def positive(text: str) -> int:
    """An argument that counts something: an integer above 0."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def count(text: str) -> int:
    """An integer from 0 on."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def scale(text: str) -> float:
    """A finite number from 0 on."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value


def share(text: str) -> float:
    """A fraction from 0 on and below 1."""
    value = scale(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction below 1")
    return value


def part(text: str) -> tuple[int, int]:
    """The third of 16 parts as 3/16."""
    place, slash, parts = text.partition("/")
    if not (slash and place.isdecimal() and parts.isdecimal() and 1 <= int(place) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part such as 3/16, the third of 16")
    return int(place), int(parts)


def widths(text: str) -> tuple[float, ...]:
    """Relative widths of averages, as 0.05,0.10."""
    values = tuple(dict.fromkeys(scale(word.strip()) for word in text.split(",")))
    if not all(0.001 <= value <= WIDEST for value in values):
        raise argparse.ArgumentTypeError(f"{text!r}: a width lies from 0.001 to {WIDEST}, such as 0.05,0.10,0.15")
    return values


def portion(text: str) -> float:
    """A fraction from 0 to 1."""
    value = scale(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction from 0 to 1")
    return value


def interval(text: str) -> tuple[float, float]:
    """Two numbers from 0 on, the lower first, as 0.2,1.6."""
    values = tuple(map(scale, text.split(",")))
    if len(values) != 2 or values[0] > values[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not LO,HI, such as 0.2,1.6")
    return values


def guide(text: str) -> tuple[Path, float | str | None, int | None]:
    """A run, which of its weights, and its checkpoint: RUN, RUN:0.995 for the average of that decay or width, RUN:raw,
    RUN@400 and RUN@400:raw.
    """
    run, colon, name = (text, "", "") if Path(text).is_dir() else text.rpartition(":")
    run, weights = (run, name if name == "raw" else share(name)) if colon else (text, None)
    folder, at, step = (run, "", "") if Path(run).is_dir() else run.rpartition("@")
    return (Path(folder), weights, count(step)) if at else (Path(run), weights, None)


def window(text: str) -> tuple[int, int, int]:
    """Steps and ranks, as 10:13 or 10:13:8: (A, B, N) with A < B and N above 0, which is 1 where it is left out."""
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


def size(text: str) -> tuple[int, int]:
    """320x192: width and height."""
    sides = text.lower().split("x")
    if len(sides) != 2:
        raise argparse.ArgumentTypeError(f"{text} is not WIDTHxHEIGHT in pixels, such as 320x192")
    return positive(sides[0]), positive(sides[1])


def labels(text: str) -> tuple[int, ...]:
    """Classes, as 3,5,5."""
    return tuple(count(word.strip()) for word in text.split(","))


def one_of(*known: str) -> Callable[[str], tuple[str, ...]]:
    """Some of the known words, as gif,mp4."""

    def words(text: str) -> tuple[str, ...]:
        words = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
        if not set(words) <= set(known):
            raise argparse.ArgumentTypeError(f"{text!r} is not of {', '.join(known)}")
        return words

    return words


def lines(text: str) -> tuple[str, ...]:
    """The lines of a text file that are not empty."""
    try:
        lines = tuple(line.strip() for line in read_text(text).splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise argparse.ArgumentTypeError(f"{text} cannot be read as a text file: {reason}") from None
    if not lines:
        raise argparse.ArgumentTypeError(f"{text} holds no line of text")
    return lines
