"""A full disk at every moment of a run: on a small tmpfs, which only root may mount."""

import os
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image

from dstrain.checkpoint.store import Store
from tests.support.faulty import SHORT, Life, complete, crashes, newest_whole, torn_lines, zero
from tests.support.runs import files, metrics

MB = 1 << 20
FULL = ("No space left", "MB free")  # how a full disk is named


@contextmanager
def small_disk(path: Path, nbytes: int):
    """A file system of its own at `path`."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", path], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all the room that is left."""
    path, block = disk / "filler", bytes(1 << 16)
    with open(path, "ab", buffering=0) as file:
        try:
            while True:
                file.write(block)
        except OSError:
            pass
    return path


def fill_at(life: Life, disk: Path, ready, what: str) -> Path:
    """Fills the disk while every process of the run stands still."""
    assert life.wait(ready, what), life.text()[-4000:]
    life.signal(signal.SIGSTOP)
    filler = fill(disk)
    life.signal(signal.SIGCONT)
    return filler


def assert_sound(folder: Path, text: str) -> None:
    """No traceback, the full disk is named, no torn file, every checkpoint verifies."""
    assert not crashes(text), text[-6000:]
    assert any(words in text for words in FULL), text[-3000:]
    assert not torn_lines(folder / "metrics.jsonl"), torn_lines(folder / "metrics.jsonl")
    steps = [line["step"] for line in metrics(folder)] if (folder / "metrics.jsonl").exists() else []
    assert steps == sorted(set(steps)), steps
    for picture in (folder / "samples").glob("*"):
        assert picture.suffix == ".png", f"left over: {picture.name}"
        Image.open(picture).load()
    store = Store(folder / "checkpoints")
    assert [fault for step in store.list_steps() if (fault := store.find_checkpoint_fault(step))] == []


def assert_goes_on(whole: Path, folder: Path, log: Path) -> None:
    """With room again the same command ends with the bits of a run that had room all the time."""
    complete(folder, log, zero(2), *SHORT)
    assert files(whole, 40) == files(folder, 40)
    assert not torn_lines(folder / "metrics.jsonl")
    reference = {line["step"]: line for line in metrics(whole)}
    assert all(line == reference[line["step"]] for line in metrics(folder))
    assert not any((folder / "checkpoints").glob("*.tmp"))


@pytest.mark.faults
def test_full_at_the_start(tmp_path, whole, table):
    """Oracle: the undisturbed run: one clear line on a full disk; with room the same command has the same bits."""
    began = time.monotonic()
    with small_disk(tmp_path / "disk", 16 * MB) as disk:
        filler, folder = fill(disk), disk / "run"
        life = Life(folder, tmp_path / "log", zero(2), *SHORT)
        assert life.end() in (1, 2), life.text()
        assert_sound(folder, life.text())
        assert len([line for line in life.text().splitlines() if any(words in line for words in FULL)]) <= 3
        filler.unlink()
        assert_goes_on(whole, folder, tmp_path / "again")
    table(
        f"disk full at the start: named, exit code {life.process.returncode}, then complete; "
        f"{time.monotonic() - began:.0f} s"
    )


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("between saves", marks=pytest.mark.slow),
        pytest.param("while a save is written", marks=pytest.mark.faults),
    ],
)
def test_full_at_a_save(tmp_path, whole, table, moment):
    """Oracle: the undisturbed run: a save that fails is reported and training goes on, to the same bits. The third
    failure in a row ends it; with room the same command goes on from what is whole.
    """
    began = time.monotonic()
    with small_disk(tmp_path / "disk", 32 * MB) as disk:
        folder = disk / "run"
        life = Life(folder, tmp_path / "log", zero(2), *SHORT, "every.save=8")  # time until the third fails
        ready = {
            "between saves": lambda: max(life.saved(), default=0) >= 8,
            "while a save is written": lambda: life.saved() and any((folder / "checkpoints").glob("step_*.tmp")),
        }
        filler = fill_at(life, disk, ready[moment], "save")
        life.wait(lambda: "saving step" in life.text(), "failed save")
        filler.unlink()
        assert life.end() == 0, life.text()[-4000:]
        assert_sound(folder, life.text())
        failed = life.text().count("saving step")
        assert_goes_on(whole, folder, tmp_path / "complete")

        again = disk / "again"
        life = Life(again, tmp_path / "log2", zero(2), *SHORT)
        filler = fill_at(
            life,
            disk,
            ready["between saves"]
            if moment == "between saves"
            else lambda: any((again / "checkpoints").glob("step_*.tmp")),
            "save",
        )
        assert life.end() == 1, life.text()[-4000:]
        assert "could not be saved" in life.text() and "same command again" in life.text()
        assert_sound(again, life.text())
        before = newest_whole(again)[0]
        filler.unlink()
        assert_goes_on(whole, again, tmp_path / "more")
    table(
        f"disk full {moment}: {failed} saves failed and training went on; three ended it with step {before} whole; "
        f"then complete, bits equal; {time.monotonic() - began:.0f} s"
    )


@pytest.mark.slow
def test_full_for_metrics_samples_and_log(tmp_path, whole, table):
    """Oracle: the undisturbed run: lines and pictures may be missing, which is reported, but none is torn or wrong, and
    the weights are the same.
    """
    began = time.monotonic()
    with small_disk(tmp_path / "disk", 16 * MB) as disk:
        folder = disk / "run"
        life = Life(folder, tmp_path / "log", zero(2), *SHORT, "every.save=0")
        filler = fill_at(life, disk, lambda: max(life.steps(), default=0) >= 8, "step 8")
        life.wait(lambda: max(life.steps(), default=0) >= 22, "step 22")
        filler.unlink()
        assert life.end() == 0, life.text()[-4000:]
        assert_sound(folder, life.text())
        assert "can not be written" in life.text()
        assert files(whole, 40) == files(folder, 40)
        reference = {line["step"]: line for line in metrics(whole)}
        lines = metrics(folder)
        assert all(line == reference[line["step"]] for line in lines) and lines[-1]["step"] == 40
        pictures = sorted(path.name for path in (folder / "samples").iterdir())
        for name in pictures:
            assert (folder / "samples" / name).read_bytes() == (whole / "samples" / name).read_bytes()
        assert "step_00000040.png" in pictures and len(pictures) < 4, "the disk was not full when pictures were drawn"
        printed = set(life.text().splitlines())
        assert all(line in printed for line in (folder / "log.txt").read_text().splitlines()), "a torn line in log.txt"
    table(
        f"disk full for metrics, samples and log: {40 - len(lines)} lines and {4 - len(pictures)} pictures missing, "
        f"reported, none torn, weights equal; {time.monotonic() - began:.0f} s"
    )


def test_nobody_but_root(tmp_path):
    """Oracle: the reason that a user without the right to mount reads."""
    if os.geteuid() == 0:
        with small_disk(tmp_path / "disk", MB) as disk:
            filler = fill(disk)
            assert MB // 2 < filler.stat().st_size <= MB and os.statvfs(disk).f_bavail == 0
    else:
        with pytest.raises(pytest.skip.Exception), small_disk(tmp_path / "disk", MB):
            pass
