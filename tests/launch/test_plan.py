"""launch/plan.py: what it says, and what it refuses."""

import json
import subprocess
import sys

import pytest

from tests.support.launch import ROOT, environment, here

TINY = "--recipe", ROOT / "tests/launch/tiny.yaml"


@pytest.mark.parametrize("words, names", [
    (["--gpu", "h300"], ["--gpu h300", "h200, h100, a100, 4090"]),
    (["--world", "3"], ["batch.global=8", "3 ranks"]),
    (["--world", "0"], ["--world"]),
    (["--ds_config", "{file}"], ["wrong.json", "stage"]),
    (["model.depth=none"], ["model.depth"]),
    (["--search", "--calibrate"], ["--search", "--calibrate"]),
    (["model.first_stage={{path: nowhere}}", "data.image_size=128", "model.image_size=128"],
     ["nowhere", "without it: model.first_stage=null model.image_size=16 data.image_size=16"]),
    (["launch/recipes/dit-small.yaml"], ["or --recipe before the name of a recipe"]),
])
def test_wrong_input(words, names, tmp_path, monkeypatch, capsys):
    """Oracle: exit code 2 and one message that names the entry, before anything is counted."""
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"zero_optimization": {"stage": 7}}')
    code, out, err = here("plan.py", [*TINY, *(word.format(file=wrong) for word in words)], monkeypatch, capsys)
    assert code == 2 and out == "" and all(name in err for name in names), err


def test_calibration():
    """Oracle: the two steps that were timed are what the fit gives for them; more samples and blocks take longer."""
    # In a process of its own: what DeepSpeed begins would stand in those of later tests.
    done = subprocess.run([sys.executable, ROOT / "launch" / "plan.py", *TINY, "--calibrate", "--json"], cwd=ROOT,
                          env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout[done.stdout.index("{"):])
    rows = {(row["depth"], row["micro"]): row["seconds"] for row in values["predicted"]}
    assert rows[2, 8] == pytest.approx(values["measured"]["8"]) and set(values["measured"]) == {"8", "2"}
    assert rows[2, 8] < rows[2, 16] < rows[4, 16] and rows[1, 8] < rows[2, 8]
