"""Two networks that learn in turns: started on 2 ranks, resumed on 1 and on 4."""

import shutil

import pytest
import torch

from dstrain.engine.checkpoint import read_weights
from tests.support.launch import ROOT
from tests.support.runs import finish, metrics, train
from tests.support.sample import sampled

pytestmark = pytest.mark.slow
RECIPE = ROOT / "tests" / "launch" / "tiny-vae.yaml"
WORDS = [
    "model.kl.discriminator={start: 12, n_layers: 1, base_channels: 8}",
    "steps=16",
    "every.report=1",
    "every.save=10",
]


# In CI one rank is engine/test_systems.py's.
@pytest.mark.parametrize("num", sampled((1, 4), (4,)))
def test_two_networks_move(tmp_path, num):
    """Oracle: losses and final average of an uninterrupted run on 2 ranks at ZeRO-2. The same command resumes from step
    10 at ZeRO-3 on another number of ranks.
    """
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    assert "complete: 16 steps" in finish(train(whole, 2, *WORDS, recipe=RECIPE))
    expected = metrics(whole)
    average = read_weights(whole / "checkpoints" / "step_00000016", "autoencoder", "ema.0.9")
    shutil.copytree(whole, moved)
    shutil.rmtree(moved / "checkpoints" / "step_00000016")
    assert "complete: 16 steps" in finish(train(moved, 3, *WORDS, recipe=RECIPE, num=num))
    resumed = metrics(moved)
    assert [line["step"] for line in resumed] == [line["step"] for line in expected] == list(range(1, 17))
    assert resumed[:10] == expected[:10]
    for a, b in zip(resumed[10:], expected[10:]):
        losses = {name for name in b if name.endswith("/loss")}
        assert losses == {"autoencoder/loss", *["discriminator/loss"] * (b["step"] > 12)}
        assert {name: a[name] for name in losses} == pytest.approx({name: b[name] for name in losses}, rel=1e-5)
    again = read_weights(moved / "checkpoints" / "step_00000016", "autoencoder", "ema.0.9")
    # Their root mean square: a few weights whose gradient is rounding alone take whole steps of Adam.
    apart = torch.cat([(again[name] - average[name]).flatten() for name in average])
    assert apart.square().mean().sqrt() < 1e-6
