"""Runs that are killed, stopped and started again, through the real launcher and without it."""

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dstrain import __version__
from dstrain.checkpoint.manifest import read_manifest
from dstrain.engine.checkpoint import read_weights
from tests.support import clips, pictures
from tests.support.launch import ROOT, command, launch
from tests.support.launch import wait_for as appears
from tests.support.runs import (
    STEPS,
    assert_equal_runs,
    begin,
    files,
    finish,
    kill_in_the_middle,
    metrics,
    ranks_of,
    train,
    wait_for,
    wait_for_end,
)

pytestmark = pytest.mark.slow
TOKENIZER = ROOT / "tests" / "launch" / "tiny-phenaki-tokenizer.yaml"
AVERAGES = {3: ("ema.profiles=[0.05,0.1]", "ema.snapshots=15")}  # by stage; saved every 20 steps


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """stage -> the folder of a run on 2 ranks that nothing has disturbed; made once."""
    made = {}

    def of(stage: int) -> Path:
        if stage not in made:
            made[stage] = tmp_path_factory.mktemp(f"zero{stage}") / "whole"
            assert "complete: 60 steps" in finish(train(made[stage], stage, *AVERAGES.get(stage, ())))
        return made[stage]

    return of


@pytest.mark.parametrize("stage", [3])  # the others: test_iddpm.py
def test_kill_minus_nine(undisturbed, stage):
    """Oracle: the undisturbed run: after kill -9, its workers' too, the same command ends with the same bits of
    everything, snapshots of averages included.
    """
    folder = undisturbed(stage)
    killed, averages = folder.parent / "killed", AVERAGES[stage]
    kill_in_the_middle(train(killed, stage, *averages, "data.workers=1"), killed, 20)
    assert not (killed / "checkpoints" / f"step_{STEPS:08d}").exists(), "killed too late to show anything"
    finish(train(killed, stage, *averages))
    assert_equal_runs(folder, killed)
    for step in (15, 30, 45, 60):
        one, other = (read_manifest(run / "averages" / f"step_{step:08d}")["files"] for run in (folder, killed))
        assert one == other and len(one) == 3


def test_sigterm_to_the_launcher(undisturbed):
    """Oracle: the undisturbed run: ranks that lose their launcher save, end, and the same command
    goes on to equal bits.
    """
    folder = undisturbed(2)
    stopped = folder.parent / "stopped"
    process = begin(train(stopped, 2, "data.workers=1", launcher=True), folder.parent / "stopped.log")
    wait_for(stopped / "checkpoints" / "step_00000020", process, folder.parent / "stopped.log")
    process.send_signal(signal.SIGTERM)
    wait_for_end(process.pid)
    process.wait()
    log = (stopped / "log.txt").read_text()
    assert "stopped at step" in log and "the same command goes on" in log
    at = int((stopped / "saved").read_text())
    assert 20 <= at < STEPS and f"stopped at step {at} " in log
    finish(train(stopped, 2))  # by the launcher again: test_iddpm.py
    assert files(folder, STEPS) == files(stopped, STEPS)


def test_a_folder_moved_in_mid_run(undisturbed):
    """Oracle: the undisturbed run: both ranks end at the next save, in one line, and make no folder; moved back, the
    same command ends with the same bits.
    """
    folder = undisturbed(2)
    moved, away, log = (folder.parent / name for name in ("moved", "away", "moved.log"))
    process = begin(train(moved, 2, "data.workers=1", "every.report_page=5"), log)
    wait_for(moved / "checkpoints" / "step_00000020", process, log)
    moved.rename(away)
    assert process.wait(120) == 1
    text = log.read_text()
    assert not moved.exists() and "Traceback" not in text and "complete" not in text
    assert text.count(f"train.py: error:\n  {moved} was moved or removed while training wrote into it") == 1
    away.rename(moved)
    finish(train(moved, 2))
    assert files(folder, STEPS) == files(moved, STEPS)


def test_a_command_with_profile_goes_on(tmp_path):
    """Oracle: the first command's trace: typed again beyond the window, the command goes on, says so and leaves it."""
    folder = tmp_path / "run"
    words = [
        "launch/train.py",
        "--recipe",
        "tests/launch/tiny.yaml",
        f"folder={folder}",
        "--profile",
        "1:2",
        "every.sample=0",
    ]
    launch(*words, "steps=3", num=1)
    [trace] = (folder / "profile").iterdir()
    before = trace.read_bytes()
    launch(*words, "steps=5", num=1)
    log = (folder / "log.txt").read_text()
    assert "--profile: steps 2 to 2 are not recorded: the run goes on from step 3" in log and "complete: 5 steps" in log
    assert [trace] == list((folder / "profile").iterdir()) and trace.read_bytes() == before


def test_one_rank_trains_the_same_curve(undisturbed, tmp_path):
    """Oracle: the same run on 2 ranks: loss and gradient norm within 1e-5; weights as far as Adam
    lets rounding grow.
    """
    one, two = tmp_path / "one", undisturbed(2)
    finish(train(one, 2, num=1))
    assert len(metrics(one)) == STEPS // 5
    for a, b in zip(metrics(one), metrics(two)):
        assert a == pytest.approx(b, rel=1e-5)
    for kind in ("master", "ema.0.9", "ema.0.99"):
        a, b = (read_weights(folder / "checkpoints" / f"step_{STEPS:08d}", "denoiser", kind) for folder in (one, two))
        # Sixty updates of 1e-3 each: where a gradient is near zero, its rounding decides a part of a step.
        assert max((a[name] - b[name]).abs().max() for name in a) < 1e-4
        assert torch.cat([(a[name] - b[name]).abs().flatten() for name in a]).mean() < 1e-6


def test_pictures_belong_to_their_seeds(undisturbed, tmp_path):
    """Oracle: one process: 2 ranks, other orders and other numbers draw the same picture for the same seed."""

    def pictures(out: Path, *words: str, num: int) -> dict[str, bytes]:
        finish(
            command("launch/generate.py", undisturbed(2), "--out", out, "--steps", "4", "--batch", "2", *words, num=num)
        )
        return {path.name: path.read_bytes() for path in (out / "samples").iterdir()}

    one = pictures(tmp_path / "one", "--num-samples", "6", "--labels", "3", num=1)
    two = pictures(tmp_path / "two", "--num-samples", "6", "--labels", "3", num=2)
    assert len(one) == 6 and one == two
    assert (
        pictures(tmp_path / "later", "--num-samples", "3", "--labels", "3", "--seed", "2", num=1).items() <= one.items()
    )
    array = np.load(tmp_path / "two" / "samples_6x32x32x3.npz")["arr_0"]
    assert array.dtype == np.uint8 and array.shape == (6, 32, 32, 3)
    assert (array[5, :, :, 0] == np.asarray(Image.open(tmp_path / "two" / "samples" / "000005.png").convert("L"))).all()
    assert Image.open(tmp_path / "two" / "grid.png").size[0] > 32


def test_complete_run_and_more_steps(undisturbed):
    """Oracle: the run's own files: a complete run is left as it is; with more steps it goes on from where it stood."""
    folder = undisturbed(2)
    before = files(folder, STEPS)
    assert "is complete" in finish(train(folder, 2))
    assert files(folder, STEPS) == before and len(metrics(folder)) == STEPS // 5
    output = finish(train(folder, 2, "steps=65"))
    assert "complete: 65 steps" in output and [line["step"] for line in metrics(folder)][-2:] == [60, 65]


def test_signal_to_a_rank(tmp_path):
    """Oracle: the documented exit code 75, a checkpoint of the step that the log names, and a page that says so, though
    no page was due; the lines of a beginning, in the order of what is done, and no warning of what is in order.
    """
    folder, words = tmp_path / "run", ("steps=100000", "every.save=10", "every.report_page=1000000", "data.workers=1")
    process = begin(train(folder, 2, *words, launcher=True), tmp_path / "log")
    wait_for(folder / "checkpoints" / "step_00000010", process, tmp_path / "log")
    os.kill(ranks_of(process.pid)[-1], signal.SIGUSR1)
    assert process.wait(60) == 75
    wait_for_end(process.pid)
    at = int((folder / "saved").read_text())
    log = (folder / "log.txt").read_text()
    assert f"stopped at step {at} " in log
    appears(folder / "report.html")  # it may be written beside the end
    assert f"step {at} is saved" in (folder / "report.html").read_text()
    output = (tmp_path / "log").read_text()
    beginning = (
        f"dstrain {__version__}: rank 0 of 2",
        "tiny: dit, 100,000 steps of 8 samples",
        "data: builtin:fashion",
        "weights: denoiser ",
        "begins at step 1 of 100000",
        "memory: rank 0 holds",
        "first step: ",
        "step 5/",
    )
    places = [output.find(f"\n{line}") for line in beginning]
    assert -1 not in places and places == sorted(places), output[:3000]
    assert all(output.count(f"\n{line}") == 1 for line in beginning[:-1])  # by rank 0 alone
    assert [line for line in beginning[:-1] if line not in log] == [] and "untested" not in output
    assert (folder / "checkpoints" / f"step_{at:08d}" / "manifest.json").exists()
    assert torch.isfinite(read_weights(folder / "checkpoints" / f"step_{at:08d}", "denoiser")["pos_embed"]).all()


def test_buckets(tmp_path):
    """Oracle: the run that nothing has disturbed: from its step 6 on, the same command ends with the same bits, in
    three shapes, with random crops and conditions on sizes; the grids have the size that is asked for.
    """
    for number in range(24):
        path = tmp_path / "data" / "ab"[number % 2] / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pictures.picture(number, *((40, 40), (90, 30), (30, 90))[number % 3]).save(path)
    entries = [
        "data.buckets=[[32,32],[48,16],[16,48]]",
        "data.crop=random",
        "data.size_conditions=true",
        "steps=12",
        "data.channels=3",
        "model.in_channels=3",
        "model.num_classes=2",
        f"data.path={tmp_path / 'data'}",
        "every.save=6",
        "every.sample=12",
        "every.report=1",
        "samples.size=[48,16]",
    ]
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert "in 3 of 3 buckets of 8" in finish(train(whole, 3, *entries))
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "step_00000012")
    assert "goes on from step 6 of 12" in finish(train(again, 3, *entries))
    assert files(whole, 12) == files(again, 12)
    one, other = ({line["step"]: line["loss"] for line in metrics(run) if "loss" in line} for run in (whole, again))
    assert one == other and len(one) == 12
    with Image.open(whole / "samples" / "step_00000012.png") as image:  # 2 x 3 of 48 x 16, 4 times as large
        assert image.size == (2 * 192 + 6, 3 * 64 + 8)


def test_durations(tmp_path):
    """Oracle: the run that nothing has disturbed: from its step 3 on, the same command ends with the same bits, in
    clips of three lengths and images.
    """
    for number in range(24):
        path = tmp_path / "data" / f"{number:02d}.webp"
        path.parent.mkdir(exist_ok=True)
        clips.write_pictures(path, clips.moving((1, 3, 6, 9, 4, 5)[number % 6], 16, 16, seed=number))
    (tmp_path / "images").mkdir()
    for number in range(4):
        pictures.picture(number, 16, 16).save(tmp_path / "images" / f"{number}.png")
    entries = [
        "data.buckets=[3,5,9]",
        "data.num_frames=9",
        f"data.path={tmp_path / 'data'}",
        "data.held_out=0.3",
        f"data.images={tmp_path / 'images'}",
        "steps=6",
        "every.save=3",
        "every.evaluate=6",
        "every.sample=6",
        "every.report=1",
        "model.discriminator.start=2",
    ]
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert "of 3 buckets of" in finish(train(whole, 2, *entries, recipe=TOKENIZER))
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "step_00000006")
    assert "goes on from step 3 of 6" in finish(train(again, 2, *entries, recipe=TOKENIZER))
    assert files(whole, 6) == files(again, 6)
    assert metrics(whole) == metrics(again)
    with Image.open(whole / "samples" / "step_00000006_reconstruction.gif") as shown:
        assert shown.n_frames == 9  # the first bucket is the longest
