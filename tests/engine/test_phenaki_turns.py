"""Phenaki's tokenizer and its adversary as two engines, ZeRO 0 to 3 on 2 ranks."""

import json
import math

import pytest

from tests.engine.check_phenaki_turns import START, STEPS
from tests.support.launch import launch

CASES = [
    f"{form}-{stage}-{micro}"
    for form, stages in (("approximate", (0, 1, 2, 3)), ("exact", (0, 1, 2)))
    for stage in stages
    for micro in (4, 2)
]  # micro-batch 2: two micro-steps
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phenaki_turns")
    launch("tests/engine/check_phenaki_turns.py", folder, num=2, timeout=600)
    return json.loads((folder / "figures.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_weights(figures, case):
    """Oracle: plain torch, one graph through both networks and two AdamW, with clips, images and the penalty."""
    found = figures[case]
    for part, difference in found["weights"].items():
        assert difference < 1e-6 < 1e-3 < found["moved"][part], part
    assert found["usage"] < 1e-6 < 1e-3 < found["learned"] and found["skipped"] == 0


@pytest.mark.parametrize("stage", ("1", "3"))
def test_bf16(figures, stage):
    """Oracle: finite losses of every turn, none passed over."""
    losses = figures["bf16"][stage]["losses"]
    assert len(losses) == STEPS + STEPS - START and all(math.isfinite(value) for _, value in losses)
    assert figures["bf16"][stage]["skipped"] == 0


def test_an_exact_slope_of_scattered_weights(figures):
    """Oracle: the refusal, with the remedy."""
    assert "penalty.form" in figures["refused"] and "approximate" in figures["refused"]
