"""Runs that are killed, stopped and started again, through the real launcher and in fresh processes."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dstrain.engine.checkpoint import read_weights
from dstrain.engine.store import manifest
from tests.support.launch import ROOT, command, environment

pytestmark = pytest.mark.slow
RECIPE = ROOT / "tests" / "launch" / "tiny.yaml"
STEPS = 60


def ds_config(folder: Path, stage: int) -> Path:
    path = folder / f"zero{stage}.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": stage, "sub_group_size": 5000}}))
    return path


def train(folder: Path, stage: int, *overrides: str, num: int = 2) -> list[str]:
    return command("launch/train.py", "--recipe", RECIPE, "--ds_config", ds_config(folder.parent, stage),
                   f"folder={folder}", *overrides, num=num)


def finish(words: list[str], code: int = 0) -> str:
    done = subprocess.run(words, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          stdin=subprocess.DEVNULL, timeout=300)
    assert done.returncode == code, done.stdout[-6000:]
    return done.stdout


def begin(words: list[str], log: Path) -> subprocess.Popen:
    return subprocess.Popen(words, env=environment(), stdout=open(log, "w"), stderr=subprocess.STDOUT,
                            stdin=subprocess.DEVNULL, start_new_session=True)


def wait_for(path: Path, process: subprocess.Popen, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, f"the run ended before {path.name} was there"
        assert time.monotonic() < end, f"no {path.name} after {seconds} s"
        time.sleep(0.005)


def members(group: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def ranks_of(group: int) -> list[int]:
    return [pid for pid in members(group) if b"--local_rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
            and b"deepspeed.launcher" not in Path(f"/proc/{pid}/cmdline").read_bytes()
            and b"launch/train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def wait_for_end(group: int, seconds: float = 40) -> None:
    end = time.monotonic() + seconds
    while members(group):
        assert time.monotonic() < end, f"{members(group)} live on"
        time.sleep(0.1)


def metrics(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "timing"} for line in lines]


def files(folder: Path, step: int) -> dict:
    """Sizes and hashes of a checkpoint: weights, moments, averages, counters."""
    return manifest(folder / "checkpoints" / f"step_{step:08d}")["files"]


def assert_equal_runs(a: Path, b: Path, step: int = STEPS) -> None:
    assert files(a, step) == files(b, step)
    assert metrics(a) == metrics(b)
    for picture in sorted((a / "samples").iterdir()):
        assert picture.read_bytes() == (b / "samples" / picture.name).read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """stage -> the folder of a run on 2 ranks that nothing has disturbed; made once."""
    made = {}

    def of(stage: int) -> Path:
        if stage not in made:
            made[stage] = tmp_path_factory.mktemp(f"zero{stage}") / "whole"
            assert "complete: 60 steps" in finish(train(made[stage], stage))
        return made[stage]

    return of


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_kill_minus_nine(undisturbed, stage):
    """Oracle: the undisturbed run: after kill -9 the same command ends with the same bits of everything."""
    folder = undisturbed(stage)
    killed = folder.parent / "killed"
    process = begin(train(killed, stage), folder.parent / "killed.log")
    wait_for(killed / "checkpoints" / "step_00000020", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_for_end(process.pid)                    # also what the launcher put elsewhere: loader processes
    assert not (killed / "checkpoints" / f"step_{STEPS:08d}").exists(), "killed too late to show anything"
    finish(train(killed, stage))
    assert_equal_runs(folder, killed)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sigterm_to_the_launcher(undisturbed, stage):
    """Oracle: the undisturbed run: ranks that lose their launcher save, end, and the same command goes on to equal bits."""
    folder = undisturbed(stage)
    stopped = folder.parent / "stopped"
    process = begin(train(stopped, stage), folder.parent / "stopped.log")
    wait_for(stopped / "checkpoints" / "step_00000020", process)
    process.send_signal(signal.SIGTERM)
    wait_for_end(process.pid)
    process.wait()
    said = (stopped / "log.txt").read_text()
    assert "stopped at step" in said and "the same command goes on" in said
    at = int((stopped / "saved").read_text())
    assert 20 <= at < STEPS and f"stopped at step {at} " in said
    finish(train(stopped, stage))
    assert files(folder, STEPS) == files(stopped, STEPS)


def test_one_rank_trains_the_same_curve(undisturbed, tmp_path):
    """Oracle: the same run on 2 ranks: loss and gradient norm within 1e-5; weights as far as Adam lets rounding grow."""
    one, two = tmp_path / "one", undisturbed(2)
    finish(train(one, 2, num=1))
    assert len(metrics(one)) == STEPS // 5
    for a, b in zip(metrics(one), metrics(two)):
        assert a == pytest.approx(b, rel=1e-5)
    for kind in ("master", "ema.0.9", "ema.0.99"):
        a, b = (read_weights(of / "checkpoints" / f"step_{STEPS:08d}", "denoiser", kind) for of in (one, two))
        # Sixty updates of 1e-3 each: where a gradient is near zero, its rounding decides a part of a step.
        assert max((a[name] - b[name]).abs().max() for name in a) < 1e-4
        assert torch.cat([(a[name] - b[name]).abs().flatten() for name in a]).mean() < 1e-6


def test_pictures_belong_to_their_seeds(undisturbed, tmp_path):
    """Oracle: one process: 2 ranks, other orders and other numbers draw the same picture for the same seed."""
    def pictures(out: Path, *words: str, num: int) -> dict[str, bytes]:
        finish(command("launch/generate.py", undisturbed(2), "--out", out, "--steps", "4", "--batch", "2", *words, num=num))
        return {path.name: path.read_bytes() for path in out.glob("0*.png")}

    one = pictures(tmp_path / "one", "--num-samples", "6", "--labels", "3", num=1)
    two = pictures(tmp_path / "two", "--num-samples", "6", "--labels", "3", num=2)
    assert len(one) == 6 and one == two
    assert pictures(tmp_path / "later", "--num-samples", "3", "--labels", "3", "--seed", "2", num=1).items() <= one.items()
    array = np.load(tmp_path / "two" / "samples_6x32x32x3.npz")["arr_0"]
    assert array.dtype == np.uint8 and array.shape == (6, 32, 32, 3)
    assert (array[5, :, :, 0] == np.asarray(Image.open(tmp_path / "two" / "000005.png").convert("L"))).all()
    assert Image.open(tmp_path / "two" / "grid.png").size[0] > 32


def test_complete_run_and_more_steps(undisturbed):
    """Oracle: the run's own files: a complete run is left as it is; with more steps it goes on from where it stood."""
    folder = undisturbed(2)
    before = files(folder, STEPS)
    assert "is complete" in finish(train(folder, 2))
    assert files(folder, STEPS) == before and len(metrics(folder)) == STEPS // 5
    said = finish(train(folder, 2, "steps=65"))
    assert "complete: 65 steps" in said and [line["step"] for line in metrics(folder)][-2:] == [60, 65]


def test_signal_to_a_rank(tmp_path):
    """Oracle: the documented exit code 75 and a checkpoint of the step that the log names."""
    folder = tmp_path / "run"
    process = begin(train(folder, 2, "steps=100000", "every.save=50"), tmp_path / "log")
    wait_for(folder / "checkpoints" / "step_00000050", process)
    os.kill(ranks_of(process.pid)[-1], signal.SIGUSR1)
    assert process.wait(60) == 75
    wait_for_end(process.pid)
    at = int((folder / "saved").read_text())
    said = (folder / "log.txt").read_text()
    assert f"stopped at step {at} " in said
    assert (folder / "checkpoints" / f"step_{at:08d}" / "manifest.json").exists()
    assert torch.isfinite(read_weights(folder / "checkpoints" / f"step_{at:08d}", "denoiser")["pos_embed"]).all()
