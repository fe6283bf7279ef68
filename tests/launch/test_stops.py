"""A stop in every phase of a run that lasts longer than a second: heard within 25 s, with the step saved."""

import os
import signal
import time
from pathlib import Path

import pytest

from dstrain.checkpoint.store import Store
from tests.support.launch import command, start
from tests.support.runs import RECIPE, begin, finish, read_world, wait_for, wait_for_end

SECONDS = 25  # deepspeed and Slurm kill after 30
DATA = ("every.sample=0", "samples.num_steps=50", "samples.metrics_samples=3000", "batch.micro=4")
METRICS, LOSS = ("every.metrics=20", *DATA), ("every.evaluate=20", *DATA)
GRID = ("every.sample=20", "samples.num=2000", "samples.num_steps=50")
STEP = "dstrain.train:take_step"
# Name: where it begins to be slow (MODULE:NAME:CALL:SECONDS), what the recipe has else, the step that is saved then.
PHASES = {
    "recipe": ("dstrain.commands.job:complete_and_check_recipe:1:60", (), 0),
    "data": ("dstrain.metrics.table:collect_statistics:1:60", METRICS, 0),
    "engines": ("dstrain.train:build_engines:1:60", (), 0),
    "a long first step": (f"{STEP}:1:60", (), 0),
    "first step": (f"{STEP}:1:3", (), 1),
    "step": (f"{STEP}:8:3", (), 8),
    "micro-batch": ("dstrain.rng:seed_torch:14:5", ("batch.micro=1", "every.sample=0"), 1),
    "save": ("dstrain.checkpoint.store:Store.commit_save:1:3", ("every.sample=0",), None),
    "grid": ("dstrain.train:draw_and_save_samples:1:0", GRID, 20),
    "loss": ("dstrain.sampling.draw:Means.add_terms:1:0.2", ("data.path=builtin:fashion", *LOSS), 20),
    "metrics": ("dstrain.train:measure_sample_quality:1:0", METRICS, 20),
    "save.best": ("dstrain.train:measure_sample_quality:1:0", ("save.best=fd", "every.save=1000", *METRICS), 20),
    "last": ("dstrain.train:draw_and_save_samples:1:0", ("steps=20", *GRID), 20),
}
SHORT = ("data", "a long first step", "micro-batch", "grid", "save.best")  # the others: pytest -m faults


def begin_slowly(folder: Path, place: str, *words: str, num: int = 1, verb: str = "train", launcher: bool = False):
    """Starts a verb, and waits until it has come to a phase."""
    reached, log = folder.parent / f"reached{time.monotonic()}", folder.parent / "log"
    script = ("tests/launch/slow_phase.py", verb, str(reached), place)
    process = begin(command(*script, *words, num=num, launcher=launcher), log)
    wait_for(reached, process, log)
    time.sleep(0.5)
    return process, log


def training(folder: Path, *words: str) -> list[str]:
    return ["--recipe", str(RECIPE), f"folder={folder}", *words]


def assert_stopped(process, log: Path, folder: Path, step: int | None) -> None:
    began = time.monotonic()
    code = process.wait(120)
    took = time.monotonic() - began
    assert (code, took < SECONDS) == (75, True), f"{code} after {took:.0f} s\n{log.read_text()[-3000:]}"
    saved = int((folder / "saved").read_text()) if (folder / "saved").exists() else 0
    assert step is None or saved == step, log.read_text()[-3000:]
    if saved:
        assert (folder / "checkpoints" / f"step_{saved:08d}" / "manifest.json").exists()
        assert f"stopped at step {saved} " in (folder / "log.txt").read_text()


@pytest.mark.parametrize(
    "phase", [pytest.param(name, marks=pytest.mark.slow if name in SHORT else pytest.mark.faults) for name in PHASES]
)
def test_a_stop_in_a_phase(tmp_path, phase):
    """Oracle: the documented exit code, and the last step done, for SIGTERM to plain python, which kills nothing."""
    (place, words, step), folder = PHASES[phase], tmp_path / "run"
    process, log = begin_slowly(folder, place, *training(folder, *words))
    process.send_signal(signal.SIGTERM)
    assert_stopped(process, log, folder, step)
    assert not list((folder / "samples").glob("*"))


@pytest.mark.faults
@pytest.mark.parametrize("phase", ["data", "metrics"])
def test_a_killed_launcher_in_a_phase(tmp_path, phase):
    """Oracle: the step that is saved, and no process that lives on, after kill -9 of the real launcher."""
    (place, words, step), folder = PHASES[phase], tmp_path / "run"
    process, log = begin_slowly(folder, place, *training(folder, *words), num=2, launcher=True)
    process.kill()
    process.wait()
    wait_for_end(process.pid, SECONDS)
    assert not step or int((folder / "saved").read_text()) == step, log.read_text()[-3000:]


@pytest.mark.slow
def test_a_stop_while_it_catches_up(tmp_path):
    """Oracle: an undisturbed run's files and figures, after a run that was stopped in its grid, by the file `stop`, and
    again while it drew that grid anew, by a signal to one rank of two.
    """
    words = ("steps=20", "every.sample=20", "samples.num=200", "samples.num_steps=50", "every.evaluate=20")
    folder, whole = tmp_path / "run", tmp_path / "whole"
    for stop in ("file", "signal"):
        process, log = begin_slowly(folder, "dstrain.train:draw_and_save_samples:1:0", *training(folder, *words), num=2)
        if stop == "file":
            (folder / "stop").touch()
        else:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[-1]), signal.SIGUSR1)
        assert_stopped(process, log, folder, 20)
        assert not (folder / "stop").exists() and not list((folder / "samples").glob("*"))
    for path in (folder, whole):
        finish(command("launch/train.py", *training(path, *words), num=2))
    figures = [(path / "metrics.jsonl").read_text().splitlines()[-1] for path in (folder, whole)]
    assert figures[0] == figures[1] and "held_out" in figures[0]
    pictures = [sorted(path.read_bytes() for path in (run / "samples").iterdir()) for run in (folder, whole)]
    assert pictures[0] == pictures[1] and pictures[0]


@pytest.mark.slow
def test_a_stop_while_a_save_is_written(tmp_path):
    """Oracle: the shards of both ranks, which the checkpoint's own checks find: the threads that write step 20 outlast
    the stop of the grid, whose ranks would else part before.
    """
    folder, place = tmp_path / "run", "dstrain.engine.checkpoint:Checkpoints._write_rank_files:1:5"
    process, log = begin_slowly(folder, place, *training(folder, "every.save=20", *GRID), num=2)
    os.kill(int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[-1]), signal.SIGUSR1)
    assert_stopped(process, log, folder, 20)
    assert read_world(folder) == 2 and Store(folder / "checkpoints").find_newest_checkpoint(pytest.fail)[0] == 20


# Name: where it takes longer than the limit, pieces or the whole (as in PHASES); the recipe; whether that is a hang.
SLOW = ("faults.timeout_minutes=0.05", "steps=1", "save.asynchronous=false")  # 3 s, and 10 s more
HANGS = {
    "engines": ("dstrain.train:build_engines:1:60", (), True),
    "grid": ("dstrain.train:draw_and_save_samples:1:60", (), True),
    "metrics": ("dstrain.metrics.table:compute_metrics:1:60", ("every.metrics=1",), True),
    "save": ("dstrain.checkpoint.store:Store.commit_save:1:60", (), True),
    "pieces of the data": ("dstrain.metrics.images:Batch:1:1", ("every.metrics=1",), False),
    "pieces of a grid": (
        "dstrain.sampling.draw:record_piece_of_work:1:1",
        ("samples.num=40", "samples.num_steps=4"),
        False,
    ),
    "pieces of a loss": (
        "dstrain.sampling.draw:record_piece_of_work:1:0.2",
        ("every.sample=0", "every.evaluate=1"),
        False,
    ),
    "pieces of a save": ("dstrain.checkpoint.manifest:Digest.update:1:0.2", ("every.sample=0", "ema.decays=[]"), False),
}
BRIEF = ("grid", "pieces of a grid")


@pytest.mark.parametrize(
    "phase", [pytest.param(name, marks=pytest.mark.slow if name in BRIEF else pytest.mark.faults) for name in HANGS]
)
def test_a_long_phase(tmp_path, phase):
    """Oracle: exit code 4 of a phase in which nothing ends for 13 s, and 0 of one that lasts longer by its pieces."""
    (place, words, hangs), began = HANGS[phase], time.monotonic()
    process, log = begin_slowly(tmp_path / "run", place, *training(tmp_path / "run", *SLOW, *words))
    assert process.wait(180) == (4 if hangs else 0), log.read_text()[-3000:]
    assert time.monotonic() - began > 13 and ("hangs at" in log.read_text()) == hangs


@pytest.mark.faults
@pytest.mark.parametrize(
    "place, code",
    [
        ("dstrain.commands.job:_check_data_and_list_remarks:1:-40", 0),
        ("dstrain.runs.folders:check_and_prepare_run_folder:1:-40", 0),
        ("dstrain.commands.job:_check_data_and_list_remarks:1:300", 1),
        ("dstrain.runs.folders:check_and_prepare_run_folder:1:300", 4),
    ],
)
def test_a_long_start_of_rank_0(tmp_path, place, code):
    """Oracle: exit codes: the others wait for rank 0 alone as long as pieces of its work end, and no longer."""
    words = training(tmp_path / "run", "faults.timeout_minutes=0.3", "steps=1", "every.sample=0")
    process, log = begin_slowly(tmp_path / "run", place, *words, num=2)
    assert process.wait(120) == code, log.read_text()[-3000:]


@pytest.mark.faults
@pytest.mark.parametrize(
    "verb, words, place, num",
    [
        ("generate", ("--num", "4000"), "dstrain.sampling.draw:draw_samples_of_rank:1:0", 1),
        ("generate", ("--num", "4000"), "dstrain.sampling.draw:draw_samples_of_rank:1:0", 2),
        ("evaluate", (), "dstrain.runs.trained:load_networks:1:0", 1),
        ("evaluate", ("--metrics", "fd"), "dstrain.metrics.table:collect_statistics:1:0", 1),
    ],
)
def test_a_stop_of_a_verb(tmp_path, verb, words, place, num):
    """Oracle: the documented exit code within seconds, and the one line that says so."""
    folder = tmp_path / "run"
    finish(command("launch/train.py", *training(folder, "steps=2", "every.sample=0"), num=1))
    process, log = begin_slowly(folder, place, str(folder), *words, verb=verb, num=num)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int([process.pid, *children][-1] if num > 1 else process.pid), signal.SIGTERM)
    assert process.wait(SECONDS) == 75, log.read_text()
    assert "stopped (SIGTERM)" in log.read_text() and "Traceback" not in log.read_text()


def read_cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds of a process; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_a_stop_while_ranks_meet(tmp_path):
    """Oracle: the exit code within 25 s of a rank that waits for its peers in C, where no handler runs; /proc: it takes
    no core meanwhile.
    """
    words, log = command("launch/train.py", *training(tmp_path / "run"), num=1), tmp_path / "log"
    with open(log, "w") as file:
        process = start(words, file, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29876")
    try:
        while "weights" not in log.read_text() and "memory" not in log.read_text():
            time.sleep(0.1)
        time.sleep(1)
        before = seconds = read_cpu_seconds(process.pid)
        process.send_signal(signal.SIGTERM)
        while process.poll() is None:
            time.sleep(0.1)
            seconds = read_cpu_seconds(process.pid) or seconds
        assert process.wait(SECONDS) == 75, log.read_text()
        assert seconds - before < 2  # of some 8 s in which it waits
    finally:
        process.kill()
