"""Argument types of the command lines."""

import argparse

import pytest

from dstrain.commands.options import arguments


def test_runs_that_guide(tmp_path):
    """Oracle: the parts written out; a folder whose name holds a colon or an @ is a folder."""
    folder = type(tmp_path)
    assert arguments.parse_guide("runs/a") == (folder("runs/a"), None, None)
    assert arguments.parse_guide("runs/a:0.99") == (folder("runs/a"), 0.99, None)
    assert arguments.parse_guide("runs/a@400") == (folder("runs/a"), None, 400)
    assert arguments.parse_guide("runs/a@400:raw") == (folder("runs/a"), "raw", 400)
    for name in ("a:0.9", "b@3"):
        (tmp_path / name).mkdir()
        assert arguments.parse_guide(str(tmp_path / name)) == (tmp_path / name, None, None)
        assert arguments.parse_guide(f"{tmp_path / name}@7:raw") == (tmp_path / name, "raw", 7)


@pytest.mark.parametrize(
    "kind, text",
    [
        ("parse_guide", "a:1.5"),
        ("parse_guide", "a:best"),
        ("parse_guide", "a@-1"),
        ("parse_interval", "1"),
        ("parse_portion", "1.1"),
        ("parse_interval", "2,1"),
        ("parse_interval", "0,inf"),
        ("parse_portion", "-1"),
        ("parse_size", "320"),
        ("parse_size", "0x8"),
        ("parse_size", "8x8x8"),
    ],
)
def test_what_is_refused(kind, text):
    """Oracle: argparse's error, which becomes one line."""
    with pytest.raises(argparse.ArgumentTypeError, match="is not"):
        getattr(arguments, kind)(text)


def test_numbers():
    """Oracle: the ends of what is allowed."""
    assert arguments.parse_interval("0,0") == (0, 0) and arguments.parse_interval("0.2,1e3") == (0.2, 1000)
    assert arguments.parse_size("320x192") == arguments.parse_size("320X192") == (320, 192)
    assert arguments.parse_portion("0") == 0 and arguments.parse_portion("1") == 1
