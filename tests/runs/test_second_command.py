"""A second command that waits for a folder finds another run there when its turn comes: two real processes."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from dstrain.commands.job import prepare_job
from dstrain.commands.options.command import parse_options
from dstrain.commands.options.train import TrainOptions
from dstrain.runs import folders
from tests.support.launch import ROOT, command
from tests.support.runs import begin

RECIPE = ROOT / "tests" / "launch" / "tiny.yaml"
SECONDS = 300  # on a loaded machine


def holds(pid: int, path: Path) -> bool:
    """Whether a process has the file open."""
    try:
        return any(os.path.realpath(link) == str(path) for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def contents(folder: Path) -> dict[Path, bytes]:
    """What lies in a folder, without the leases of those who wrote it."""
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".lease-"))
    return {path: path.read_bytes() for path in paths}


@pytest.mark.slow
def test_a_waiting_command_checks_again(tmp_path):
    """Oracle: the run that was written while the second command waited: its seed, its rate, and not a byte changed."""
    folder, log = tmp_path / "run", tmp_path / "log"
    arguments = [
        "--recipe",
        str(RECIPE),
        "--ds_config",
        str(ROOT / "ds_configs" / "zero2_fp32.json"),
        f"folder={folder}",
    ]
    job = prepare_job(parse_options(TrainOptions, arguments))
    with folders.lock_folder(folder):
        second = begin(command("launch/train.py", *arguments, "seed=7", "optimizer.lr=0.5", num=1), log)
        try:
            end = time.monotonic() + SECONDS
            while not holds(second.pid, folder / ".lock"):
                assert second.poll() is None and time.monotonic() < end, log.read_text()
                time.sleep(0.05)
            folders.write_run_files(job.run, job.settings, "data")
            (folder / "checkpoints" / "step_00000002").mkdir(parents=True)
            folders.write_saved_step(folder, 2)
            (folder / "metrics.jsonl").write_text('{"step": 2, "loss": 1.0}\n')
            before = contents(folder)
        except BaseException:
            second.kill()
            raise
    assert second.wait(SECONDS) == 2, log.read_text()
    text = log.read_text()
    assert "seed was 0 in" in text and "optimizer.lr was 0.001 in" in text and "--allow-change" in text, text
    assert "Traceback" not in text
    assert before == contents(folder)


TINY = ("--recipe", str(RECIPE), "--ds_config", str(ROOT / "ds_configs" / "zero2_fp32.json"), "data.workers=0")


def start(script: str, *words: object, log: Path):
    return begin(command(f"launch/{script}", *words, num=1), log)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["removed", "moved"])
def test_an_old_process_writes_nothing_into_a_new_run(tmp_path, how):
    """Oracle: an undisturbed run of the same recipe: its losses and steps; the old process says what has happened."""
    folder, words = tmp_path / "run", [*TINY, "every.save=2", "every.report=1", "every.sample=0", "every.evaluate=0"]
    old = start("train.py", *words, f"folder={folder}", "steps=100000", "seed=5", log=tmp_path / "old")
    try:
        end = time.monotonic() + SECONDS
        while not (folder / "checkpoints" / "step_00000004").exists():
            assert old.poll() is None and time.monotonic() < end, (tmp_path / "old").read_text()
            time.sleep(0.05)
        if how == "moved":
            folder.rename(tmp_path / "moved")
        while folder.exists():  # the old process may just be writing
            shutil.rmtree(folder, ignore_errors=True)
        for name in ("run", "expected"):
            new = start("train.py", *words, f"folder={tmp_path / name}", "steps=12", log=tmp_path / f"{name}.log")
            assert new.wait(SECONDS) == 0, (tmp_path / f"{name}.log").read_text()
        assert old.wait(SECONDS) == 1
    finally:
        old.kill()
    text = (tmp_path / "old").read_text()
    assert "nothing more is saved" in text and "Traceback" not in text, text
    losses = [
        [(line["step"], line["loss"]) for line in map(json.loads, (tmp_path / name / "metrics.jsonl").open())]
        for name in ("run", "expected")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 12
    names = [
        sorted(str(path.relative_to(tmp_path / name)) for path in contents(tmp_path / name))
        for name in ("run", "expected")
    ]
    assert names[0] == names[1] and len((folder / "events.jsonl").read_text().splitlines()) == 1


@pytest.mark.slow
def test_two_commands_draw_into_one_folder(tmp_path):
    """Oracle: one of two that begin at once draws all pictures of its seed, and the other is refused with 2."""
    log = tmp_path / "log"
    done = start("train.py", *TINY, f"folder={tmp_path / 'run'}", "steps=1", "every.sample=0", log=log).wait(SECONDS)
    assert done == 0, log.read_text()
    words = [tmp_path / "run", "--num-samples", 40, "--batch", 2, "--steps", 20, "--out", tmp_path / "out", "--seed"]
    both = [start("generate.py", *words, seed, log=tmp_path / f"{seed}.log") for seed in (0, 1000)]
    codes = [process.wait(SECONDS) for process in both]
    assert sorted(codes) == [0, 2], [(tmp_path / f"{seed}.log").read_text() for seed in (0, 1000)]
    first = 1000 * codes.index(0)
    names = sorted(path.name for path in (tmp_path / "out" / "samples").iterdir())
    assert names == [f"{first + number:06d}.png" for number in range(40)]
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"samples", "grid.png"}
    text = (tmp_path / f"{1000 - first}.log").read_text()
    assert "another command writes there" in text or "holds samples already" in text, text
