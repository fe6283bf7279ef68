"""The files of checkpoints on one rank: DeepSpeed's own, room, modes, values that change or are not finite."""

import json
import math
import os
import re
import shutil
import stat
import threading
import time

import pytest
import torch
from safetensors import safe_open
from torch import nn

from dstrain.engine.checkpoint import read_weights
from dstrain.recipe import ConfigError, NotSaved, Save
from tests.engine.test_checkpoint import Trial
from tests.engine.test_masters import same
from tests.support.tiny import Tiny

pytestmark = pytest.mark.usefixtures("alone")


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_deepspeeds_own_files(tmp_path, stage):
    """Oracle: the live run; at another stage they are refused, untrusted as well; an added average starts anew."""
    native = Save(keep=9, format="deepspeed")
    trial = Trial(tmp_path, stage, save=native, decays=(0.5,))
    trial.steps(0, 2)
    trial.saves.save(2, last=True)
    path, state = tmp_path / "step_00000002", trial.state()
    assert not list(path.rglob("latest"))  # a pointer of DeepSpeed's, which knows no whole and half
    assert {file.parent.name for file in path.glob("deepspeed/*/*.pt")} == {"a", "b"}
    for save in (native, Save(keep=9)):  # in which format this run saves does not matter
        again = Trial(tmp_path, stage, save=save, decays=(0.5,), trust=True)
        again.steps(5, 6)
        assert again.saves.resume() == 2 and same(again.state(), state)
    added = Trial(tmp_path, stage, save=native, decays=(0.5, 0.75), trust=True)
    assert added.saves.resume() == 2
    flats = added.engines.masters["a"].flats
    assert all(torch.equal(x, y) for x, y in zip(added.ema.flats["a"][0.75], flats, strict=True))
    assert all(torch.equal(flat, state[f"a/master/{number}"]) for number, flat in enumerate(flats))
    assert added.lines == ["step_00000002 holds no ema.0.75 of a: it starts from the weights"]
    with pytest.raises(ConfigError, match="give --trust-pickle"):
        Trial(tmp_path, stage).saves.resume()
    other = stage % 3 + 1
    with pytest.raises(
        ConfigError, match=f"at stage {stage} on 1 ranks, and resumes only so; this run has stage {other} and 1 ranks"
    ):
        Trial(tmp_path, other, trust=True, decays=(0.5,)).saves.resume()
    with pytest.raises(ConfigError, match="holds the weights of b in DeepSpeed's own files"):
        read_weights(path, "b")
    assert read_weights(path, "a", "ema.0.5").keys() == trial.engines.modules["a"].state_dict().keys()
    with pytest.raises(FloatingPointError, match="which only --trust-pickle reads"):
        trial.saves.roll_back(3, "bad")
    assert again.saves.roll_back(3, "bad") == 2
    shutil.rmtree(path / "deepspeed" / "a")
    with pytest.raises(ConfigError, match="deepspeed/a holds no files of DeepSpeed"):
        again.saves.load(path)


class Large(Tiny):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(600, 600)


@pytest.mark.parametrize("stage, form", [(0, "fragments"), (2, "fragments"), (2, "deepspeed")])
def test_the_room_that_is_asked_for(tmp_path, monkeypatch, stage, form):
    """Oracle: the size of what is written: it is asked for, with no more than a third and two megabytes beside it."""
    trial = Trial(tmp_path, stage, save=Save(format=form, asynchronous=False), network=Large, parts=("a",))
    trial.saves.save(1, last=True)
    size = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size - 1))
    with pytest.raises(NotSaved, match="step 2 could not be saved"):
        trial.saves.save(2, last=True)
    asked = float(re.search(r"([\d.]+) MB are needed", trial.lines[-1])[1]) * 1e6
    assert asked < 4 / 3 * size + 2e6 and size > 5e6
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=asked + 1e5))
    trial.saves.save(2, last=True)


def test_modes_and_metadata(tmp_path):
    """Oracle: the mode of a file that Python makes under this umask; the network's name in the header of its shard."""
    before = os.umask(0o027)
    try:
        Trial(tmp_path / "run").saves.save(1, last=True)
    finally:
        os.umask(before)
    for path in (tmp_path / "run" / "step_00000001").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o640, path
    with safe_open(tmp_path / "run" / "step_00000001" / "b-00000-of-00001.safetensors", "pt") as file:
        assert file.metadata()["part"] == "b"
    with safe_open(tmp_path / "run" / "step_00000001" / "common.safetensors", "pt") as file:
        assert set(file.keys()) == {
            "system/values",
            *(f"buffer/{part}/{name}" for part in "ab" for name in ("scale.table", "count")),
        }
        counters = json.loads(file.metadata()["counters"])
    assert counters == {part: {"updates": 0, "skipped": 0, "stage": 0, "scaler": {}} for part in "ab"}


def test_a_save_beside_training(tmp_path):
    """Oracle: the values at the call, although training goes on: buffers and the system's state as well as weights."""
    trial = Trial(tmp_path, save=Save(keep=9))
    trial.steps(0, 1)
    trial.saves.save(1)
    state = trial.state()
    trial.steps(1, 3)
    trial.saves.saver.wait_for_save()
    again = Trial(tmp_path)
    assert again.saves.resume() == 1 and same(again.state(), state)
    assert trial.saved == [1] and any(line.startswith("saved step 1") for line in trial.lines)


@pytest.mark.parametrize("end", ["look", "close"])
def test_lines_on_what_is_written_beside_training(tmp_path, end):
    """Oracle: by hand: a line on a checkpoint and one on a snapshot, once, at the first look after their ends, or when
    the run is closed, which waits for them.
    """
    trial = Trial(tmp_path / "checkpoints", save=Save(keep=9), profiles=(0.1,))
    slow = threading.Event()
    for store in (trial.saves.store, trial.saves.averages.saver.store):
        store.save = lambda *words, save=store.save, **more: slow.wait(60) and save(*words, **more)
    trial.steps(0, 1)
    trial.saves.averages.saver.store.list_steps = lambda: []
    trial.saves.save(1)
    trial.saves.averages.write_snapshot_if_due(1)
    trial.saves.report_finished_save()
    assert trial.lines == [] and trial.saves.saver.is_writing and trial.saves.averages.saver.is_writing
    if end == "close":
        threading.Timer(0.2, slow.set).start()
        trial.saves.close()
    else:
        slow.set()
        deadline = time.monotonic() + 60
        while (trial.saves.saver.is_writing or trial.saves.averages.saver.is_writing) and time.monotonic() < deadline:
            time.sleep(0.01)
        for _ in range(2):
            trial.saves.report_finished_save()
    assert [line.split(" in ")[0] for line in trial.lines] == ["saved step 1", "averages: saved step 1"]


def test_averages_by_width_that_were_added(tmp_path):
    """Oracle: the line, and the step in the counters from which their updates count; where they stay, there is none."""
    trial = Trial(tmp_path / "run" / "checkpoints", save=Save(keep=9, asynchronous=False))
    trial.saves.save(7)
    for profiles, lines in (((0.1,), 1), ((0.1,), 0), ((0.1, 0.2), 1), ((), 0)):
        again = Trial(tmp_path / "run" / "checkpoints", save=Save(keep=9, asynchronous=False), profiles=profiles)
        step = again.saves.resume()
        begin = f"averages by width (ema.profiles) of a begin at step {step}: widths are shares of the updates since"
        assert [line.removesuffix(" then") for line in again.lines if "begin" in line] == [begin] * lines
        again.saves.save(step + 1)


@pytest.mark.parametrize("stage", (0, 2))
def test_weights_that_are_not_finite(tmp_path, stage):
    """Oracle: by hand: nothing is saved, and the steps that are there are named, also those put aside."""
    trial = Trial(tmp_path, stage)
    flat = list(trial.engines.masters["b"].iterate_fragment_views_to_save(trial.engines.masters["b"].flats))[-1][1]
    kept = flat[-1].item()
    flat[-1] = math.nan
    with pytest.raises(
        FloatingPointError, match="the weights of step 5 are not finite and are not saved. .* holds no checkpoint"
    ):
        trial.saves.save(5)
    flat[-1] = kept
    trial.saves.save(5)
    trial.saves.save(6)
    trial.saves.store.set_newer_steps_aside(5)
    flat[0] = math.inf
    with pytest.raises(FloatingPointError, match=r"the steps 5 \(put aside: 6\)"):
        trial.saves.save(7)
    assert trial.saves.store.list_steps() == [5]
