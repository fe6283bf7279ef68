"""kill -9 at random moments of a run that saves each step beside the next one."""

import subprocess
import sys

import pytest

from tests.support.launch import ROOT, environment

pytestmark = pytest.mark.slow


def test_every_kill_resumes(tmp_path):
    """Oracle: the losses of the steps trained before each kill, which every later life must meet again bit for bit."""
    done = subprocess.run([sys.executable, ROOT / "tests/engine/check_kill.py", tmp_path, "50", "7"], env=environment(),
                          text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:]
    losses: dict[int, set[str]] = {}
    for line in (tmp_path / "losses").read_text().splitlines():
        step, loss = line.split()
        losses.setdefault(int(step), set()).add(loss)
    assert sorted(losses) == list(range(len(losses))) and len(losses) > 55
    assert all(len(found) == 1 for found in losses.values()), "a step was trained differently the second time"
