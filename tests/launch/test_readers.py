"""Verbs that read a run, two of each at once, while it trains and removes its checkpoints: each is whole or refused."""

import json
import subprocess
import sys
import time

import pytest

from tests.support.launch import ROOT, environment

pytestmark = pytest.mark.slow

STEPS = 400
READERS = {
    "bits": ["evaluate", "run", "--num-samples", "4", "--steps", "2"],
    "pictures": ["evaluate", "run", "--metrics", "fd,accuracy", "--num-samples", "6", "--steps", "2"],
    "report": ["report", "run"],
}


def test_two_of_each_beside_training(tmp_path):
    """Oracle: exit codes 0 of all; files that parse to their end, of a step that was saved; nothing is left behind."""

    def start(*words: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "dstrain", *words],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    entries = [f"steps={STEPS}", "folder=run", "every.save=1", "save.keep=2", "every.report=1", "every.sample=0"]
    training = start("train", "--recipe", str(ROOT / "tests/launch/tiny.yaml"), *entries)
    end = time.monotonic() + 300
    while not list(tmp_path.glob("run/checkpoints/step_*[0-9]")) and time.monotonic() < end:
        assert training.poll() is None, training.communicate()[0]
        time.sleep(0.2)
    readers = {(name, place): start(*words) for name, words in READERS.items() for place in range(2)}
    for key, process in readers.items():
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0 and "Traceback" not in out, (key, out)
    out, _ = training.communicate(timeout=500)
    assert training.returncode == 0 and f"complete: {STEPS} steps" in out, out
    found = sorted((tmp_path / "run" / "evaluation").glob("*.json"))
    assert 2 <= len(found) <= 4
    for path in found:
        result = json.loads(path.read_text())
        assert 0 < result["step"] <= STEPS and all(value is not None for value in result["figures"].values())
    assert (tmp_path / "run" / "report.html").read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert not [path for path in (tmp_path / "run").rglob(".*") if path.suffix in (".tmp", ".hold")]
