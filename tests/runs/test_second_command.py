"""A second command that waits for a folder finds another run there when its turn comes: two real processes."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from dstrain.commands.job import prepare_job
from dstrain.commands.options.command import parse_options
from dstrain.commands.options.train import TrainOptions
from dstrain.runs import folders
from tests.support.launch import ROOT, command, environment

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
        with open(log, "wb") as output:
            second = subprocess.Popen(
                command("launch/train.py", *arguments, "seed=7", "optimizer.lr=0.5", num=1),
                env=environment(),
                stdout=output,
                stderr=output,
                cwd=tmp_path,
            )
        try:
            end = time.monotonic() + SECONDS
            while not holds(second.pid, folder / ".lock"):
                assert second.poll() is None and time.monotonic() < end, log.read_text()
                time.sleep(0.05)
            folders.write_run(job.run, job.settings, "data")
            (folder / "checkpoints" / "step_00000002").mkdir(parents=True)
            folders.note_saved(folder, 2)
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
