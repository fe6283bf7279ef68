"""Verbs that read a run, two of each at once, while it trains and removes its checkpoints: each is whole or refused."""

import json
import time
from pathlib import Path

import pytest

from tests.support.launch import ROOT, command
from tests.support.runs import begin

pytestmark = pytest.mark.slow

STEPS = 200
READERS = {
    "bits": ["evaluate", "run", "--num-samples", "4", "--steps", "2"],
    "pictures": ["evaluate", "run", "--metrics", "fd,accuracy", "--num-samples", "6", "--steps", "2"],
    "report": ["report", "run"],
}


def test_two_of_each_beside_training(tmp_path, monkeypatch):
    """Oracle: exit codes 0 of all; files that parse to their end, of a step that was saved; nothing is left behind."""

    monkeypatch.chdir(tmp_path)

    def start(log: str, verb: str, *words: str):
        return begin(command(f"launch/{verb}.py", *words, num=1), Path(log))

    entries = [f"steps={STEPS}", "folder=run", "every.save=1", "save.keep=2", "every.report=1", "every.sample=0"]
    training = start("training", "train", "--recipe", str(ROOT / "tests/launch/tiny.yaml"), *entries)
    end = time.monotonic() + 300
    while not list(tmp_path.glob("run/checkpoints/step_*[0-9]")) and time.monotonic() < end:
        assert training.poll() is None, Path("training").read_text()
        time.sleep(0.2)
    readers = {f"{name}{place}": start(f"{name}{place}", *READERS[name]) for name in READERS for place in range(2)}
    for log, process in readers.items():
        code, out = process.wait(300), Path(log).read_text()
        assert code == 0 and "Traceback" not in out, (log, out)
    code, out = training.wait(500), Path("training").read_text()
    assert code == 0 and f"complete: {STEPS} steps" in out, out
    found = sorted((tmp_path / "run" / "evaluation").glob("*.json"))
    assert 2 <= len(found) <= 4
    for path in found:
        result = json.loads(path.read_text())
        assert 0 < result["step"] <= STEPS and all(value is not None for value in result["figures"].values())
    assert (tmp_path / "run" / "report.html").read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert not [path for path in (tmp_path / "run").rglob(".*") if path.suffix in (".tmp", ".hold")]
