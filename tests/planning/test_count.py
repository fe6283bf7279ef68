"""The process that counts: it ends with the command that started it."""

import re
import signal
import subprocess
import sys

import psutil
import pytest

from dstrain import systems
from dstrain.commands.job import load_and_check_recipe
from dstrain.recipe import ConfigError
from tests.support.launch import ROOT, environment

RECIPES = sorted((ROOT / "launch" / "recipes").glob("*.yaml"))
PROGRAM = """
import os, signal
from dstrain.planning.count import run_in_worker
if __name__ == "__main__":
    print(run_in_worker(os.getpid), flush=True)
    run_in_worker(signal.pause)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_behind(number, tmp_path):
    """Oracle: the process table, after a signal to the command alone in the middle of a count."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, path],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as command:
        worker = psutil.Process(int(command.stdout.readline()))
        command.send_signal(number)
        command.wait(60)
        assert psutil.wait_procs([worker], timeout=60)[1] == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_published_recipe_is_planned_without_files(path, tmp_path, monkeypatch):
    """Oracle: an empty folder without an autoencoder, a tokenizer or data: what learns is built from the recipe alone;
    only the weights of LPIPS, which are part of the loss, are asked for.
    """
    monkeypatch.chdir(tmp_path)
    notes = []
    try:
        run = load_and_check_recipe(path, (), notes.append)
        system = systems.build(run.system, run.model)
    except ConfigError as error:
        assert "perceptual.path" in str(error)
        return
    assert all(system.build_part_on_meta(part) for part in system.parts)
    named = re.findall(r"^  (?:first_stage|tokenizer|text_encoder):", path.read_text(), re.MULTILINE)
    assert bool(notes) == bool(named) and all("not here" in note and "not counted" in note for note in notes)
