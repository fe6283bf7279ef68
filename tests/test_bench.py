"""The benchmark's two sides do the same work, and its script prints their ratio."""

import subprocess
import sys

import pytest
import torch

from dstrain import recipe, systems
from dstrain.bench import Repeated, our_side, plain_side
from dstrain.engine.engines import start
from dstrain.engine.settings import resolve
from tests.support.launch import ROOT, environment

pytestmark = pytest.mark.slow


def test_both_sides_train_alike():
    """Oracle: each other: five steps of the loop and of the plain rival from the same weights, to fp32 rounding."""
    start()
    run = recipe.load(ROOT / "tests/launch/tiny.yaml", ["batch.micro=4", "optimizer.weight_decay=0.1"])
    run = recipe.check(run, systems.config_class(run.system))
    system = systems.build(run.system, run.model)
    batch = system.synthetic(4)
    engines, ours = our_side(run, resolve({"zero_optimization": {"stage": 1}}, run, 1, "cpu"), system,
                             Repeated(batch, 2))
    weights, plain, flops = plain_side(run, system, batch, 2, torch.float32)
    for step in range(5):
        ours(step)
        plain(step)
    found = dict(engines.modules["denoiser"].named_parameters())
    assert max((a - b).abs().max() for a, b in zip(found.values(), weights)) < 1e-6
    size = sum(weight.numel() for name, weight in found.items() if name.startswith("blocks") and "adaLN" not in name
               and weight.ndim == 2)
    assert flops > 6 * size * 16 * 8                          # 16 tokens a sample; attention and the rest come on top


def test_the_script():
    """Oracle: the names that the README and the docstring give to what is printed."""
    done = subprocess.run([sys.executable, ROOT / "launch/bench.py", "--recipe", ROOT / "tests/launch/tiny.yaml",
                           "--ds_config", ROOT / "ds_configs/zero2_fp32.json"], env=environment(), text=True,
                          capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("dstrain / plain", "plain samples/s", "dstrain share of matmul"):
        assert name in done.stdout
