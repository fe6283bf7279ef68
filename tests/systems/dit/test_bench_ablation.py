"""The benchmark of the choices of a DiT: what it calls a difference, and that it goes on where it was stopped."""

import json
import statistics
import subprocess
import sys

import pytest

from launch.bench import ablation
from tests.support.launch import ROOT, environment

STARTS = {
    "baseline": [9.0, 10.0, 11.0],
    "better": [5.0, 6.0, 7.0],
    "like it": [8.0, 9.0, 10.0],
    "worse": [20.0, 21.0, 22.0],
}


def test_what_is_called_a_difference():
    """Oracle: a mean has an error of sqrt(1/3), so 1.63 is two deviations of a difference: 4 is more, 1 is less."""
    verdicts = {row: ablation.judge(values, STARTS["baseline"]) for row, values in STARTS.items()}
    assert verdicts == {"baseline": "no difference", "better": "better", "like it": "no difference", "worse": "worse"}
    assert ablation.judge([5.0], STARTS["baseline"]) == "one training"


def test_the_table():
    """Oracle: mean and deviation by the statistics module, and the lowest class of all trainings."""
    results = [
        {
            "row": "baseline",
            "equal": "images",
            "images": 320,
            "weights": 1000,
            "cpu_seconds": 10 + i,
            "fd": value,
            "accuracy": 0.9,
        }
        | {"accuracy/bag": 0.8 - i / 10, "accuracy/coat": 0.9}
        for i, value in enumerate(STARTS["baseline"])
    ]
    row = ablation.format_table(results, "baseline").splitlines()[-1]
    assert row == "| baseline | images | 320 | 1,000 | 11 | 10.0 +- 1.0 | 90.0 +- 0.0 % | 60% | no difference |"
    assert statistics.stdev(STARTS["baseline"]) == 1


@pytest.mark.faults  # half a minute of trainings for one benchmark
def test_the_script(tmp_path, monkeypatch, capsys):
    """Oracle: a training writes a line beside the one that is there; the same command again writes none, with equal CPU
    seconds one more.
    """
    words = ["--out", str(tmp_path), "--rows", "modern block", "--seeds", "0", "--steps", "3", "--num-samples", "20"]
    words += ["samples.num_steps=2", "optimizer.warmup=1"]
    there = {"row": "baseline", "seed": 0, "equal": "images", "steps": 3, "images": 384, "weights": 9, "fd": 9.0}
    there |= {"cpu_seconds": 30.0, "accuracy": 0.9, "accuracy/bag": 0.8}
    (tmp_path / "results.jsonl").write_text(json.dumps(there) + "\n")
    command = [sys.executable, str(ROOT / "launch/bench/ablation.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=400)
    assert done.returncode == 0, done.stderr
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    for more, expected in ([], 2), (["--equal", "cpu", "--margin", "0"], 3):  # in this process, without its imports
        monkeypatch.setattr(sys, "argv", [command[1], *words, *more])
        ablation.main()
        lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
        assert len(lines) == expected
    assert [line["row"] for line in lines] == ["baseline", "modern block", "modern block"] and lines[0] == there
    assert lines[2]["steps"] == round(3 * 30.0 / lines[1]["cpu_seconds"])
    told = capsys.readouterr().out
    assert "| modern block | cpu |" in told and (tmp_path / "ablation.png").stat().st_size > 5000
