"""MaskGit and its critics under ZeRO 0 to 3 on 2 ranks."""

import json

import pytest

from tests.engine.check_phenaki import CRITICS, STEPS
from tests.support.launch import launch

CASES = [f"{critic}-{stage}-{micro}" for critic in CRITICS for stage in (0, 1, 2, 3) for micro in (4, 2)]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phenaki")
    launch("tests/engine/check_phenaki.py", folder, num=2, timeout=600)
    return json.loads((folder / "figures.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_weights(figures, case):
    """Oracle: plain torch with all logits at once and an AdamW for each part: six steps, padded clips, dropped texts.

    Micro-batches of 2 are two a step; micro-batches of 4 are one.
    """
    found = figures[case]
    for part, difference in found["weights"].items():
        assert difference < 1e-6 < 1e-3 < found["moved"][part], part
        assert found["ema"][part] < 1e-6
    assert found["updates"] == dict.fromkeys(found["weights"], STEPS)
    assert set(found["weights"]) == ({"maskgit", "critic"} if case.startswith("token") else {"maskgit"})


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
@pytest.mark.parametrize("critic", CRITICS)
def test_resume(figures, critic, stage):
    """Oracle: the run without a break, bit for bit: weights, moments and averages of all parts."""
    assert figures[f"{critic}-{stage}-resumed"] == []
