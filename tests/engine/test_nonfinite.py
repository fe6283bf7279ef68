"""What is done about values that are not finite, part by part; check_engines.py shows steps that are skipped."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dstrain import recipe
from dstrain.engine.nonfinite import SkippedSteps, all_finite


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5), st.integers(0, 9))
def test_skipped_steps_are_counted_and_bounded(steps, most, before):
    """Oracle: the number of Falses; the first of more than `most` Falses in a row raises."""
    skipped = SkippedSteps(recipe.load(None, [f"faults.max_skipped={most}", "folder=runs/here"]), before)
    in_a_row, total = 0, before
    for applied in steps:
        in_a_row, total = (0, total) if applied else (in_a_row + 1, total + 1)
        if in_a_row > most:
            with pytest.raises(FloatingPointError) as caught:
                skipped.count(applied)
            text = str(caught.value)
            assert text.startswith(f"{most + 1} steps in a row") and "runs/here" in text
            assert "optimizer.lr" in text and "optimizer.clip" in text and "--allow-change" in text
            return
        skipped.count(applied)
        assert skipped.total == total


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("values", [[], [[]], [[1, -2], [0]], [[3e38, 3e38], [1]], [[0, 1], [2, NAN]], [[INF, -INF]],
                                    [[INF], [1]], [[3e38, 3e38, NAN]]])
def test_all_finite(values):
    """Oracle: math.isfinite of each value, also where only their sum is infinite; check_elastic.py refuses to save."""
    tensors = [torch.tensor(some, dtype=torch.float32) for some in values]
    assert all_finite(tensors) == all(math.isfinite(value) for some in values for value in some)
