"""Argument types of the command lines."""

import argparse
import importlib
import pkgutil

import pytest

from dstrain.commands import options
from dstrain.commands.options import arguments
from dstrain.commands.options.command import Command, list_option_specs, parse_options
from dstrain.commands.options.index import IndexOptions
from dstrain.recipe import ConfigError

VERBS = {
    value
    for module in pkgutil.iter_modules(options.__path__)
    for value in vars(importlib.import_module(f"{options.__name__}.{module.name}")).values()
    if isinstance(value, type) and issubclass(value, Command) and value.usage
}


@pytest.mark.parametrize("verb", sorted(VERBS, key=str), ids=lambda verb: verb.__name__)
def test_a_variable_of_the_shell_that_is_not_set(verb):
    """Oracle: every option and word of every verb: Path("") would be the current folder."""
    assert len(VERBS) > 12
    for field, spec in list_option_specs(verb):
        name = spec.name or field.name.replace("_", "-")
        if spec.positional == "--" or isinstance(field.default, bool):
            continue
        for word in ("", " "):
            with pytest.raises(ConfigError, match="gives nothing, as where a variable of the shell is not set"):
                parse_options(verb, [word] if spec.positional else [f"--{name}={word}"])


@pytest.mark.parametrize("word", ["data.path=other", "steps=5", "model.depth=1"])
def test_entries_that_an_index_does_not_read(word):
    """Oracle: docs/guides/data.md: DATA is what is listed, and a section of data says how."""
    with pytest.raises(ConfigError, match=f"{word.partition('=')[0]} changes nothing: DATA says what is listed"):
        parse_options(IndexOptions, ["pictures", word])
    parse_options(IndexOptions, ["pictures", "data.num_frames=5"])


def test_runs_that_guide(tmp_path):
    """Oracle: the parts written out; a folder whose name holds a colon or an @ is a folder."""
    folder = type(tmp_path)
    assert arguments.parse_guiding_run("runs/a") == (folder("runs/a"), None, None)
    assert arguments.parse_guiding_run("runs/a:0.99") == (folder("runs/a"), 0.99, None)
    assert arguments.parse_guiding_run("runs/a@400") == (folder("runs/a"), None, 400)
    assert arguments.parse_guiding_run("runs/a@400:raw") == (folder("runs/a"), "raw", 400)
    for name in ("a:0.9", "b@3"):
        (tmp_path / name).mkdir()
        assert arguments.parse_guiding_run(str(tmp_path / name)) == (tmp_path / name, None, None)
        assert arguments.parse_guiding_run(f"{tmp_path / name}@7:raw") == (tmp_path / name, "raw", 7)


@pytest.mark.parametrize(
    "kind, text",
    [
        ("parse_guiding_run", "a:1.5"),
        ("parse_guiding_run", "a:best"),
        ("parse_guiding_run", "a@-1"),
        ("parse_interval", "1"),
        ("parse_fraction", "1.1"),
        ("parse_interval", "2,1"),
        ("parse_interval", "0,inf"),
        ("parse_fraction", "-1"),
        ("parse_width_and_height", "320"),
        ("parse_width_and_height", "0x8"),
        ("parse_width_and_height", "8x8x8"),
    ],
)
def test_what_is_refused(kind, text):
    """Oracle: argparse's error, which becomes one line."""
    with pytest.raises(argparse.ArgumentTypeError, match="is not"):
        getattr(arguments, kind)(text)


def test_numbers():
    """Oracle: the ends of what is allowed."""
    assert arguments.parse_interval("0,0") == (0, 0) and arguments.parse_interval("0.2,1e3") == (0.2, 1000)
    assert arguments.parse_width_and_height("320x192") == arguments.parse_width_and_height("320X192") == (320, 192)
    assert arguments.parse_fraction("0") == 0 and arguments.parse_fraction("1") == 1
