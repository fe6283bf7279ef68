"""Runs through the real launcher: started, stopped, killed, and compared by their files."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

from dstrain.checkpoint.store import read_manifest
from tests.support.forks import Forked
from tests.support.launch import ROOT, command, run, start

RECIPE = ROOT / "tests" / "launch" / "tiny.yaml"
STEPS = 60  # of tiny.yaml


def ds_config(folder: Path, stage: int | Path) -> Path:
    """The settings of a stage, written into `folder`; a file of settings is itself."""
    if isinstance(stage, Path):
        return stage
    path = folder / f"zero{stage}.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": stage, "sub_group_size": 5000}}))
    return path


def train(
    folder: Path, stage: int | Path, *overrides: str, num: int = 2, recipe: Path = RECIPE, launcher: bool = False
) -> list[str]:
    """The command that trains into `folder`."""
    return command(
        "launch/train.py",
        "--recipe",
        recipe,
        "--ds_config",
        ds_config(folder.parent, stage),
        f"folder={folder}",
        *overrides,
        num=num,
        launcher=launcher,
    )


def finish(words: list[str], code: int = 0) -> str:
    done = run(words)
    assert done.returncode == code, done.stdout[-6000:]
    return done.stdout


def begin(words: list[str], log: Path) -> subprocess.Popen | Forked:
    with open(log, "w") as file:
        return start(words, file)


def wait_for(path: Path, process: subprocess.Popen | Forked, log: Path, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, f"the run ended before {path.name} was there:\n{log.read_text()[-6000:]}"
        assert time.monotonic() < end, f"no {path.name} after {seconds} s"
        time.sleep(0.005)


def members(group: int) -> list[int]:
    """Living processes of a session."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == group and fields[0] != "Z":
                pids.append(int(entry.name))
    return pids


def ranks_of(group: int) -> list[int]:
    return [
        pid
        for pid in members(group)
        if b"--local_rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
        and b"deepspeed.launcher" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        and b"launch/train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def wait_for_end(group: int, seconds: float = 40) -> None:
    end = time.monotonic() + seconds
    while members(group):
        assert time.monotonic() < end, f"{members(group)} live on"
        time.sleep(0.02)


def metrics(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "timing"} for line in lines]


def files(folder: Path, step: int) -> dict:
    """Sizes and hashes of a checkpoint: weights, moments, averages, counters."""
    return read_manifest(folder / "checkpoints" / f"step_{step:08d}")["files"]


def read_world(folder: Path) -> int:
    """The number of ranks that have written a run's last checkpoint; 0 if there is none."""
    for path in sorted((folder / "checkpoints").glob("step_*[0-9]"), reverse=True):
        with contextlib.suppress(OSError, ValueError):  # one that is just removed, or not yet whole
            return read_manifest(path)["world"]
    return 0


def assert_equal_runs(a: Path, b: Path, step: int = STEPS) -> None:
    assert files(a, step) == files(b, step)
    assert metrics(a) == metrics(b)
    for picture in sorted((a / "samples").iterdir()):
        assert picture.read_bytes() == (b / "samples" / picture.name).read_bytes()


def kill_in_the_middle(words: list[str], folder: Path, saved: int) -> None:
    """Runs a training command until `saved` steps are saved and kills every process of it."""
    process = begin(words, folder.parent / f"{folder.name}.log")
    wait_for(folder / "checkpoints" / f"step_{saved:08d}", process, folder.parent / f"{folder.name}.log")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_for_end(process.pid)  # also what the launcher put elsewhere: loader processes
