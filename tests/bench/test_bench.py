"""The benchmark's two sides do the same work, and its script prints their ratio."""

import json
import subprocess
import sys

import pytest

from kit.rivals import available
from tests.support.launch import KIT_PATH, ROOT, environment

pytestmark = pytest.mark.slow


def printed(*words: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env=environment(PYTHONPATH=KIT_PATH),
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_all_sides_train_alike():
    """Oracle: each other: five steps of dstrain, the plain loop and each rival from the same
    weights, to fp32 rounding.
    """
    names = [name for name in ("stock", "accelerate", "fast-DiT") if available(name) is None]
    found = json.loads(printed(ROOT / "tests/bench/check_bench.py", *names).splitlines()[-1])
    assert found["apart"].keys() == {"plain", "losses", *names}
    assert max(found["apart"].values()) < 1e-6
    assert found["flops"] > 6 * found["size"] * 16 * 8  # 16 tokens a sample; attention and the rest come on top


# Runs a script of launch/bench with few repetitions: what they are called is looked at, and no time.
BRIEFLY = """
import functools, runpy, sys
from kit import compare
compare.ROUNDS = compare.STEPS = compare.WARM_UP = 1
compare.ema_beside_copy = functools.partial(compare.ema_beside_copy, elements=1, rounds=1)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_script():
    """Oracle: the names that docs/results.md and the docstrings give to what is printed, in four comparisons."""
    text = printed(
        "-c",
        BRIEFLY,
        ROOT / "launch/bench/step.py",
        "--recipe",
        ROOT / "tests/launch/tiny.yaml",
        "--ds_config",
        ROOT / "ds_configs/zero2_fp32.json",
    )
    for name in ("dstrain / plain", "stock / plain", "plain least s", "dstrain share of matmul", "EMA / copy"):
        assert text.count(f"  {name} ") == 4
    for words in (
        "batch 8 in 1 micro-batches, clip 0,",
        "batch 8 in 1 micro-batches, clip 1,",
        "batch 32 in 4 micro-batches, clip 0,",
        "batch 32 in 4 micro-batches, clip 1,",
    ):
        assert words in text
    assert text.count("wall time: ") + text.count("CPU time of all threads: ") == 5
    assert text.count("EMA / copy of 130M weights: ") == 1
    assert text.count("pip install -e '.[bench]'" if available("accelerate") else "accelerate / plain ") == 4


def test_the_script_for_saves(tmp_path):
    """Oracle: the names of its docstring, a GB figure of four values of four bytes for each weight; nothing is left."""
    said = printed(
        ROOT / "launch/bench/save.py",
        "--recipe",
        ROOT / "tests/launch/tiny.yaml",
        "--ds_config",
        ROOT / "ds_configs/zero2_fp32.json",
        f"folder={tmp_path / 'run'}",
    )
    for name in ("stall / copy", "stall / torch.save", "save / raw write", "step beside / step"):
        assert name in said
    assert list(tmp_path.iterdir()) == []
