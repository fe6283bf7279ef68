"""What is done about values that are not finite, part by part; check_engines.py shows steps that are skipped."""

import math

import pytest
import torch

from dstrain.checkpoint.store import Store
from dstrain.engine.checkpoint import read_weights
from dstrain.engine.recovery import are_all_finite, make_divergence_advice
from tests.support.runs import finish, metrics, train

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "values",
    [
        [],
        [[]],
        [[1, -2], [0]],
        [[3e38, 3e38], [1]],
        [[0, 1], [2, NAN]],
        [[INF, -INF]],
        [[INF], [1]],
        [[3e38, 3e38, NAN]],
    ],
)
def test_all_finite(values):
    """Oracle: math.isfinite of each value, also where only their sum is infinite; check_elastic.py refuses to save."""
    tensors = [torch.tensor(some, dtype=torch.float32) for some in values]
    assert are_all_finite(tensors) == all(math.isfinite(value) for some in values for value in some)


@pytest.mark.parametrize(
    "steps, aside, words",
    [
        ((), (), "holds no checkpoint"),
        ((5,), (), "holds the steps 5. "),
        ((5, 7), (9,), "holds the steps 5, 7 (put aside: 9)"),
        ((), (9,), "(put aside: 9)"),
    ],
)
def test_advice(tmp_path, steps, aside, words):
    """Oracle: the folders that there are; only without any there is nothing to go on from."""
    for step in steps:
        (tmp_path / f"step_{step:08d}").mkdir()
    for step in aside:
        (tmp_path / f"step_{step:08d}.aside").mkdir()
    text = make_divergence_advice(Store(tmp_path))
    assert words in text and ("--step N" in text) == bool(steps or aside) and "--from-scratch" in text


@pytest.mark.slow
@pytest.mark.parametrize("stage", (0, 2))
def test_a_run_that_diverges(tmp_path, stage):
    """Oracle: the policy of recovery.py: back to the only save from before, then exit code 3 and a finite save."""
    folder = tmp_path / "run"
    words = train(
        folder,
        stage,
        "optimizer.lr=1e9",
        "optimizer.warmup=0",
        "every.save=1",
        "every.report=1",
        "faults.max_skipped=3",
    )
    output = finish(words, code=3)
    assert "4 steps in a row had gradients that are not finite, and were skipped" in output
    assert "No checkpoint from before that is left" in output and output.count("back from step 5 to step 1") == 1
    assert Store(folder / "checkpoints").list_steps() == [1]
    assert all(
        bool(weight.isfinite().all())
        for weight in read_weights(folder / "checkpoints" / "step_00000001", "denoiser").values()
    )
    reports = [line for line in metrics(folder) if "skipped" in line]
    assert [line["skipped"] for line in reports] == [0, 1, 2, 3] and reports[-1]["nonfinite"] > 0
    assert [line["rollbacks"] for line in reports] == [0, 1, 1, 1]
