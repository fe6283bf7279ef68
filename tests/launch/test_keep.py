"""Ranks die and hang under real launchers, and the run still ends as if nothing had happened."""

import os
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT, environment, free_port
from tests.support.runs import begin, ds_config, files, finish, metrics, ranks_of, train, wait_for

pytestmark = pytest.mark.slow

STEPS = 80
WORDS = (f"steps={STEPS}", "every.sample=0", "every.save=10", "every.report=10", "faults.hang_seconds=15")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(train(folder, 2, *WORDS))
    return folder


def keep(words: list[str]) -> list[str]:
    return [sys.executable, str(ROOT / "launch" / "keep.py"), "--backoff", "0.5", "--", *words]


def torchrun(folder: Path, *words: str) -> list[str]:
    launcher = shutil.which("torchrun", path=environment()["PATH"])
    options = [word for word in words if word.startswith("--")]
    overrides = [word for word in words if not word.startswith("--")]
    return [
        sys.executable,
        launcher,
        "--nproc_per_node",
        "2",
        "--master_port",
        str(free_port()),
        *options,
        str(ROOT / "launch" / "train.py"),
        "--recipe",
        str(ROOT / "tests/launch/tiny.yaml"),
        "--ds_config",
        str(ds_config(folder.parent, 2)),
        f"folder={folder}",
        *WORDS,
        *overrides,
    ]


def rank(launcher: int, number: int) -> int:
    """The process of a rank that the `deepspeed` launcher has started."""
    return next(
        pid
        for pid in ranks_of(launcher)
        if f"--local_rank={number}" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    )


def child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def next_save(folder: Path) -> Path:
    """The checkpoint that comes after the newest one."""
    steps = [int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_*[0-9]")]
    return folder / "checkpoints" / f"step_{max(steps, default=0) + 10:08d}"


def equal(folder: Path, undisturbed: Path) -> bool:
    return metrics(folder) == metrics(undisturbed) and files(folder, STEPS) == files(undisturbed, STEPS)


@pytest.mark.faults  # in CI: distributed/test_watchdog.py, and test_machines.py where the supervisor starts again
def test_a_suspended_rank(undisturbed, tmp_path):
    """Oracle: the undisturbed run, bit for bit; the suspended pid, which is named and killed, and its peer's stacks.

    To the launcher a suspended rank is one that kill -9 has ended, since its peer's watchdog does that.
    """
    folder, log = tmp_path / "run", tmp_path / "log"
    process = begin(keep(train(folder, 2, *WORDS, launcher=True)), log)
    wait_for(next_save(folder), process, log)
    suspended = rank(child(process.pid), 1)
    os.kill(suspended, signal.SIGSTOP)
    assert process.wait(400) == 0, log.read_text()[-6000:]
    (line,) = (folder / "restarts.log").read_text().splitlines()
    assert "restart " in line and "step " in line, line
    name = f"rank 1 on {socket.gethostname()} (process {suspended}) is stopped"
    assert name in (folder / "log.txt").read_text()
    (stacks,) = (folder / "stacks").iterdir()
    assert stacks.name.endswith("_rank_0.txt") and "torch/distributed" in stacks.read_text()
    assert equal(folder, undisturbed)


def test_torchrun_restarts_a_killed_rank(undisturbed, tmp_path):
    """Oracle: the undisturbed run, bit for bit: torchrun's own --max-restarts needs no supervisor."""
    folder, log = tmp_path / "run", tmp_path / "log"
    process = begin(torchrun(folder, "--max-restarts=2"), log)
    wait_for(next_save(folder), process, log)
    workers = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    os.kill(workers[-1], signal.SIGKILL)
    assert process.wait(400) == 0, log.read_text()[-6000:]
    assert equal(folder, undisturbed)


def test_wrong_input_is_told_under_torchrun(tmp_path):
    """Oracle: exit code 2 and one start, though torchrun ends with 1."""
    folder, log = tmp_path / "run", tmp_path / "log"
    process = begin(keep(torchrun(folder, "--nproc_per_node=1", "model.patch_size=7")), log)
    assert process.wait(400) == 2, log.read_text()[-6000:]
    assert "image_size 32 is no multiple of 7" in log.read_text() and "; restart" not in log.read_text()
