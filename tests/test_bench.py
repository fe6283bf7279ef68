"""The benchmark's two sides do the same work, and its script prints their ratio."""

import json
import subprocess
import sys

import pytest

from tests.support.launch import ROOT, environment

pytestmark = pytest.mark.slow


def printed(*words: object) -> str:
    done = subprocess.run([sys.executable, *map(str, words)], env=environment(), text=True, capture_output=True,
                          timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_both_sides_train_alike():
    """Oracle: each other: five steps of the loop and of the plain rival from the same weights, to fp32 rounding."""
    found = json.loads(printed(ROOT / "tests/check_bench.py").splitlines()[-1])
    assert found["apart"] < 1e-6
    assert found["flops"] > 6 * found["size"] * 16 * 8       # 16 tokens a sample; attention and the rest come on top


def test_the_script():
    """Oracle: the names that the README and the docstring give to what is printed."""
    said = printed(ROOT / "launch/bench.py", "--recipe", ROOT / "tests/launch/tiny.yaml",
                   "--ds_config", ROOT / "ds_configs/zero2_fp32.json")
    for name in ("dstrain / plain", "plain samples/s", "dstrain share of matmul"):
        assert name in said


def test_the_script_for_saves(tmp_path):
    """Oracle: the names of its docstring, a GB figure of four values of four bytes for each weight; nothing is left."""
    said = printed(ROOT / "launch/bench_save.py", "--recipe", ROOT / "tests/launch/tiny.yaml",
                   "--ds_config", ROOT / "ds_configs/zero2_fp32.json", f"folder={tmp_path / 'run'}")
    for name in ("stall / copy", "stall / torch.save", "save / raw write", "step beside / step"):
        assert name in said
    assert list(tmp_path.iterdir()) == []
