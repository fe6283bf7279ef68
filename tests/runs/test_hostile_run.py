"""A run's folder that one was sent: whatever lies in it, no verb writes beside it, runs code of it, or waits for it."""

import os
import signal
import threading
from contextlib import contextmanager

import pytest
import torch

from dstrain import recipe, systems
from dstrain.checkpoint.manifest import NAME
from dstrain.disk.sealed import parse_json_if_hash_matches, render_json_with_hash
from dstrain.recipe import ConfigError
from dstrain.runs import folders
from tests.support import checkpoints
from tests.support.audit import watched
from tests.support.launch import ROOT, here

STEP = "checkpoints/step_00000007"
VERBS = {
    "generate": ("generate.py", ["RUN", "--num-samples", "2", "--steps", "1"]),
    "generate --out": ("generate.py", ["RUN", "--num-samples", "2", "--steps", "1", "--out", "OUT"]),
    "evaluate": ("evaluate.py", ["RUN", "--num-samples", "2", "--steps", "1"]),
    "export": ("export.py", ["RUN", "--format", "safetensors", "--out", "OUT"]),
    "consolidate": ("consolidate.py", ["RUN", "--out", "OUT"]),
    "report": ("report.py", ["RUN"]),
    "reconstruct": ("reconstruct.py", ["RUN", "--ema", "0.1"]),
    "train": None,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of a run of random weights."""
    run = recipe.load_recipe(ROOT / "tests/launch/tiny.yaml", ["samples.num_steps=1", "data.workers=0"])
    run = recipe.complete_model_section(run, systems.find_config_class("dit"))
    torch.manual_seed(0)
    return checkpoints.write(tmp_path_factory.mktemp("made") / "run", run, systems.build("dit", run.model).networks())


def link(name, target="mine"):
    """Puts a link where a verb writes: to a file, to a folder, or to another run's."""

    def plant(run, outside):
        if (run / name).is_dir():
            (run / name).rename(run / f"{name}.before")
        (run / name).unlink(missing_ok=True)
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).symlink_to(outside / target)

    return plant


def pipe(name):
    """Puts a pipe without a writer where a verb reads."""

    def plant(run, outside):
        (run / name).unlink(missing_ok=True)
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(run / name)

    return plant


def manifest(name):
    """Lists a file that lies elsewhere, with its right size, in a manifest that is sealed anew."""

    def plant(run, outside):
        path = run / STEP / NAME
        body = parse_json_if_hash_matches(path.read_bytes())
        body["files"][name.format(outside=outside)] = next(iter(body["files"].values()))
        path.write_bytes(render_json_with_hash(body))

    return plant


def recipe_says(**changes):
    """Names places of the user in run.yaml."""

    def plant(run, outside):
        text = recipe.load_recipe(
            run / "run.yaml", [f"{key}={value.format(outside=outside)}" for key, value in changes.items()]
        )
        (run / "run.yaml").write_text(recipe.dump_run(text))

    return plant


ATTACKS = {
    "report.html is a link": link("report.html"),
    "log.txt is a link": link("log.txt"),
    "events.jsonl is a link": link("events.jsonl"),
    "metrics.jsonl is a link": link("metrics.jsonl"),
    ".lock is a link": link(".lock"),
    ".lock names what is not there": link(".lock", "new"),
    "a lease is a link": link(".lease-1"),
    "the identity is a link": link(".run"),
    "samples is a link": link("samples", "folder"),
    "evaluation is a link": link("evaluation", "folder"),
    "generated is a link": link("generated", "folder"),
    "reconstructed is a link": link("reconstructed", "folder"),
    "stacks is a link": link("stacks", "folder"),
    "checkpoints are another run's": link("checkpoints", "other/checkpoints"),
    "run.yaml is a link": link("run.yaml"),
    "run.yaml is a pipe": pipe("run.yaml"),
    "data.txt is a pipe": pipe("data.txt"),
    "saved is a pipe": pipe("saved"),
    "metrics.jsonl is a pipe": pipe("metrics.jsonl"),
    "events.jsonl is a pipe": pipe("events.jsonl"),
    "log.txt is a pipe": pipe("log.txt"),
    "a lease is a pipe": pipe(".lease-1"),
    "the manifest is a pipe": pipe(f"{STEP}/{NAME}"),
    "absolute path in the manifest": manifest("{outside}/mine"),
    "path above in the manifest": manifest("../../../outside/mine"),
    "folder= elsewhere": recipe_says(folder="{outside}/folder"),
}


@contextmanager
def at_most(seconds: int):
    """Fails where the block waits: for the writer of a pipe, say."""

    def late(*_: object) -> None:
        raise AssertionError(f"it waits for more than {seconds} s")

    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def start_training(run) -> int:
    """Takes the steps of a start that touch the folder before anything is trained."""
    try:
        wanted = folders.read_recipe(run)
        with folders.lock_folder(run, patience=0):
            folders.check_and_prepare_run_folder(wanted, "made of nothing", folders.Resume(allow_change=True))
            folders.write_run_files(wanted, {}, "made of nothing")
    except ConfigError as error:
        assert str(error)
        return 2
    return 0


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_leaves_the_folder(made, tmp_path, monkeypatch, capsys, verb, attack):
    """Oracle: all files of the user beside the run, to the byte and by name; audit events of Python; a clock."""
    run, outside, out = tmp_path / "run", tmp_path / "outside", tmp_path / "outs" / "out"
    checkpoints_of(made, run)
    for name in ("mine", "folder/mine", "other/run.yaml", "other/checkpoints/step_00000001/mine"):
        (outside / name).parent.mkdir(parents=True, exist_ok=True)
        (outside / name).write_text("mine")
    ATTACKS[attack](run, outside)
    before = {path: path.is_file() and path.read_bytes() for path in outside.rglob("*")}
    monkeypatch.chdir(made.parent)
    with at_most(100), watched(tmp_path, out.parent) as found:
        if VERBS[verb] is None:
            code = start_training(run)
        else:
            script, words = VERBS[verb]
            words = [word.replace("RUN", str(run)).replace("OUT", str(out)) for word in words]
            code, _, stderr = here(script, words, monkeypatch, capsys)
            assert "Traceback" not in stderr, stderr
    assert code in (0, 2)
    assert before == {path: path.is_file() and path.read_bytes() for path in outside.rglob("*")}
    assert not [line for line in found if not line.startswith(f"open {run}")], found


def checkpoints_of(made, run) -> None:
    """Copies the run."""
    for path in sorted(made.rglob("*")):
        target = run / path.relative_to(made)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            target.write_bytes(path.read_bytes())
