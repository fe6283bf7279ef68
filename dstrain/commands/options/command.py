"""An option is declared once: as a field of its verb's dataclass. Parser, --help and documentation come from the field.

    @dataclass(frozen=True)
    class DrawOptions(Command):
        '''Draws samples from a trained run.'''                                 # the head of --help

        usage: ClassVar[str] = "dstrain draw RUN [options]"
        folder: Path = make_argument_field("RUN", "a run's folder", Path, missing="name the folder of a run")
        num: int = make_option_field(16, "samples", positive, name="num-samples", metavar="N")

    options = parse_options(DrawOptions, argv)

The first paragraph of the docstring begins --help, the others end it, before `examples`.
"""

import argparse
import difflib
import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from dstrain.commands.options.arguments import Parser
from dstrain.recipe import ConfigError, Run
from dstrain.recipe.section import find_section_class

_WIDTH = 100  # columns of --help
_LEFT = 26  # columns of an option's name in it
C = TypeVar("C", bound="Command")
_SPEC = "option"
_BEHIND = "--"  # the command behind it is a verb's argument


@dataclass(frozen=True)
class Spec:
    """Holds what a dataclass field says of its option."""

    text: str
    kind: Callable[[str], Any] = str  # makes a value of a word; argparse.ArgumentTypeError refuses it
    name: str = ""  # without dashes; "": made of the field's name
    metavar: str = ""
    choices: tuple[str, ...] = ()
    heading: str = ""  # the heading in --help below which it stands
    again: bool = False  # the option may be repeated; its field is a tuple
    shown: str | None = None  # the default in --help, if another than the field's own
    rivals: str = ""  # options with the same name here exclude each other
    aliases: tuple[str, ...] = ()  # other spellings, with dashes
    elsewhere: tuple[str, ...] = ()  # its names in other programs and verbs, with dashes: refused, with its own name
    missing: str = ""  # the error message if it is left out
    positional: str = ""  # "?", "*", or "--" for a command behind it


def make_option_field(default: Any, help_text: str, parse: Callable[[str], Any] = str, **more: Any) -> Any:
    """Returns a dataclass field for the option --NAME.

    default: the value if the option is left out. A bool makes a flag, which takes no value: False for a flag that sets
        True, True for a flag named no-SOMETHING that sets False
    help_text: the help
    parse: converts the typed word to the value
    more: other fields of Spec
    """
    return field(default=default, metadata={_SPEC: Spec(help_text, parse, **more)})


def make_argument_field(metavar: str, help_text: str, parse: Callable[[str], Any] = str, **more: Any) -> Any:
    """Returns a dataclass field for a word without dashes. `metavar` is its name in the help, `help_text` the help,
    `parse` converts the word, and `more` are other fields of Spec. If the word is left out, the field is None; but if
    `missing` has a message, `parse_options` raises ConfigError with it.
    """
    return field(default=None, metadata={_SPEC: Spec(help_text, parse, metavar=metavar, positional="?", **more)})


def make_remaining_words_field(metavar: str, help_text: str, parse: Callable[[str], Any] = str, **more: Any) -> Any:
    """Returns a dataclass field for all remaining words without dashes. Its value is a tuple."""
    return field(default=(), metadata={_SPEC: Spec(help_text, parse, metavar=metavar, positional="*", **more)})


def make_words_after_dashes_field(metavar: str, help_text: str) -> Any:
    """Returns a dataclass field for the words after -- on the command line. Its value is a tuple."""
    return field(default=(), metadata={_SPEC: Spec(help_text, metavar=metavar, positional=_BEHIND)})


@dataclass(frozen=True)
class Command:
    """Serves as the base of a verb's options."""

    usage: ClassVar[str] = ""
    examples: ClassVar[str] = ""

    def check_options(self) -> None:
        """Checks options against each other. Raises ConfigError if they do not go together."""


def list_option_specs(command: type[Command]) -> list[tuple[Field, Spec]]:
    """Returns (field, spec) of each option, in the order of --help: options with the same heading stand together, and
    keyword-only fields come last among them.
    """
    found = [(entry, entry.metadata[_SPEC]) for entry in fields(command) if _SPEC in entry.metadata]
    found.sort(key=lambda pair: bool(pair[0].kw_only))
    headings = list(dict.fromkeys(spec.heading for _, spec in found))
    return sorted(found, key=lambda pair: headings.index(pair[1].heading))


def parse_options(command: type[C], argv: Sequence[str]) -> C:
    """Parses a command line into an instance of `command`, and checks it by `check_options`. If --help was typed,
    prints the help and ends the process.

    Raises ConfigError if an option does not exist or is missing, if a value is wrong, or if options do not go together.
    """
    parser = Parser(format_help(command))
    found, values, words = list_option_specs(command), {}, list(argv)
    for entry, spec in found:
        if spec.positional == _BEHIND:
            place = words.index(_BEHIND) if _BEHIND in words else len(words)
            words, values[entry.name] = words[:place], tuple(words[place + 1 :])
    _add_options(parser, [(entry, spec) for entry, spec in found if spec.positional != _BEHIND])
    values |= _parse_words(parser, words, any(spec.positional == "*" for _, spec in found))
    for entry, spec in found:
        if spec.missing and not values[entry.name]:
            raise ConfigError(spec.missing)
        if spec.again or spec.positional == "*":
            values[entry.name] = tuple(values[entry.name])
    options = command(**values)
    options.check_options()
    return options


def _make_nonempty_parser(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns a function that passes a word to `parse` and returns the result, but raises ArgumentTypeError for an
    empty word.
    """

    def parse_nonempty_word(text: str) -> Any:
        """Returns what `kind` makes of a word. Raises ArgumentTypeError if the word is empty."""
        if not text.strip():
            raise argparse.ArgumentTypeError(
                "gives nothing, as where a variable of the shell is not set: write a value, or leave it out"
            )
        return parse(text)

    return parse_nonempty_word


def _add_options(parser: Parser, option_specs: list[tuple[Field, Spec]]) -> None:
    """Adds each option of a verb to the parser. In names of options dashes and underscores mean the same."""
    rivals: dict[str, Any] = {}
    for entry, spec in option_specs:
        kinds: dict[str, Any] = {"default": None if entry.default is MISSING else entry.default}
        if spec.positional:
            parser.add_argument(entry.name, nargs=spec.positional, type=_make_nonempty_parser(spec.kind), **kinds)
            continue
        if isinstance(entry.default, bool):
            kinds["action"] = "store_false" if entry.default else "store_true"
        else:
            kinds |= {"type": _make_nonempty_parser(spec.kind), "choices": spec.choices or None}
        if spec.again:
            kinds |= {"action": "append", "default": []}
        name = _make_option_name(entry, spec)
        names = dict.fromkeys([f"--{name}", f"--{name.replace('-', '_')}", *spec.aliases])
        parser.elsewhere |= dict.fromkeys(spec.elsewhere, f"--{name}")
        place = parser
        if spec.rivals:
            if spec.rivals not in rivals:
                rivals[spec.rivals] = parser.add_mutually_exclusive_group()
            place = rivals[spec.rivals]
        place.add_argument(*names, dest=entry.name, **kinds)


def _parse_words(parser: Parser, words: list[str], accept_overrides: bool) -> dict[str, Any]:
    """Returns {name: value} of all options: the value that was typed, or the default. Raises ConfigError with a line
    for each unknown option. `accept_overrides`: whether words such as KEY=VALUE may stand between the options.
    """
    parsed, unknown = (parser.parse_known_intermixed_args if accept_overrides else parser.parse_known_args)(words)
    values = parser.extract_values(parsed)
    if not unknown:
        return values
    dashed = [word for word in unknown if word.startswith("-")]
    if not dashed:
        name, equals, value = unknown[0].partition("=")
        option = f"--{name.replace('_', '-')}"
        meant = f" (did you mean {option} {value}?)" if equals and option in parser._option_string_actions else ""
        raise ConfigError(f"unrecognized arguments: {' '.join(unknown)}{meant}; --help shows what there is")
    raise ConfigError(*(_explain_unknown_word(word, parser, accept_overrides) for word in dashed))


def _explain_unknown_word(word: str, parser: Parser, accept_overrides: bool) -> str:
    """Returns the error message for an unknown option; it suggests the most similar known option, if there is one."""
    known = parser._option_string_actions
    name, equals, value = word.lstrip("-").partition("=")
    if accept_overrides and equals and f"--{name}" not in known:
        return f"{word}: overrides are written without dashes: {name}={value}"
    if accept_overrides and name in Run.model_fields:
        key = f"{name}.KEY" if name == "model" or find_section_class(Run.model_fields[name]) else name
        return f"{word}: overrides are written without dashes: {key}=VALUE"
    typed = word.partition("=")[0]
    # Each option is known by both spellings; the one with dashes is the documented one.
    spelled = known if "_" in typed else [name for name in known if "_" not in name]
    close = [parser.elsewhere[typed]] if typed in parser.elsewhere else difflib.get_close_matches(typed, spelled, 1)
    meant = f" (did you mean {close[0]}?)" if close else ""
    return f"{word}: there is no such option{meant}; --help shows what there is"


def format_help(command: type[Command]) -> str:
    """Returns the text of --help for a verb, made of its options class."""
    summary, _, notes = inspect.cleandoc(command.__doc__ or "").partition("\n\n")
    first, *other = inspect.cleandoc(command.usage).splitlines()
    lines = [*textwrap.wrap(summary, _WIDTH), "", f"usage:  {first}", *(f"        {line}" for line in other)]
    heading = None
    for entry, spec in list_option_specs(command):
        if spec.heading != heading:
            lines += ["", f"{spec.heading}:"] if spec.heading else [""]
            heading = spec.heading
        lines += _format_option_rows(_format_option_name(entry, spec), spec.text, _format_option_default(entry, spec))
    lines += _format_option_rows("-h, --help", "this text", "")
    for paragraph in notes.split("\n\n") if notes else ():
        table = "  " in paragraph
        lines += ["", *(paragraph.splitlines() if table else textwrap.wrap(paragraph, _WIDTH))]
    if command.examples:
        lines += ["", "examples:", *(f"  {line}" for line in inspect.cleandoc(command.examples).splitlines())]
    return "\n".join(lines) + "\n"


def _format_option_rows(name: str, help_text: str, default: str) -> list[str]:
    """Returns the lines of --help for one option: its name, and its text with the default in brackets, wrapped."""
    if default:
        help_text = f"{help_text} ({default})"
    first = f"  {name}".ljust(_LEFT - 2)
    return textwrap.wrap(
        help_text, _WIDTH, initial_indent=f"{first}  ", subsequent_indent=" " * _LEFT, break_on_hyphens=False
    )


def _make_option_name(entry: Field, spec: Spec) -> str:
    """Returns the name of an option without the leading dashes, such as "num-samples"."""
    return spec.name or entry.name.replace("_", "-")


def _format_option_name(entry: Field, spec: Spec) -> str:
    """Returns an option as --help shows it, such as "--num-samples N", or "RUN" for a word without dashes."""
    if spec.positional:
        return spec.metavar
    return f"--{_make_option_name(entry, spec)} {spec.metavar}".rstrip()


def _format_option_default(entry: Field, spec: Spec) -> str:
    """Returns the default of an option as --help shows it, "" if none is shown."""
    if spec.shown is not None:
        return spec.shown
    if isinstance(entry.default, bool) or entry.default in (None, (), MISSING):
        return ""
    return str(entry.default)
