"""Argument types of the command lines."""

import argparse

import pytest

from dstrain.command import arguments


def test_runs_and_their_weights(tmp_path):
    """Oracle: the parts written out; a folder whose name holds a colon is a folder."""
    assert arguments.weights("runs/a") == (type(tmp_path)("runs/a"), None)
    assert arguments.weights("runs/a:0.99") == (type(tmp_path)("runs/a"), 0.99)
    assert arguments.weights("runs/a:raw") == (type(tmp_path)("runs/a"), "raw")
    (tmp_path / "a:0.9").mkdir()
    assert arguments.weights(str(tmp_path / "a:0.9")) == (tmp_path / "a:0.9", None)


@pytest.mark.parametrize("kind, text", [("weights", "a:1.5"), ("weights", "a:best"), ("interval", "1"), ("portion", "1.1"),
                                        ("interval", "2,1"), ("interval", "0,inf"), ("portion", "-1"), ("size", "320"),
                                        ("size", "0x8"), ("size", "8x8x8")])
def test_what_is_refused(kind, text):
    """Oracle: argparse's error, which becomes one line."""
    with pytest.raises(argparse.ArgumentTypeError, match="is not"):
        getattr(arguments, kind)(text)


def test_numbers():
    """Oracle: the ends of what is allowed."""
    assert arguments.interval("0,0") == (0, 0) and arguments.interval("0.2,1e3") == (0.2, 1000)
    assert arguments.size("320x192") == arguments.size("320X192") == (320, 192)
    assert arguments.portion("0") == 0 and arguments.portion("1") == 1
