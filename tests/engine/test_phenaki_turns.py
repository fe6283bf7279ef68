"""Phenaki's tokenizer and its adversary as two engines, ZeRO 0 to 3 on 2 ranks."""

import json
import math

import pytest

from tests.engine import check_phenaki_turns
from tests.engine.check_phenaki_turns import ALL, ALL_BF16, SAMPLE, SAMPLE_BF16, START, STEPS
from tests.support.sample import sampled, wants_all

CASES = sampled(*(["-".join(map(str, case)) for case in cases] for cases in (ALL, SAMPLE)))
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def figures(on_ranks, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("phenaki_turns")
    cases = (ALL, ALL_BF16) if wants_all(request) else (SAMPLE, SAMPLE_BF16)
    on_ranks(2, check_phenaki_turns.main, folder, *cases)
    return json.loads((folder / "figures.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_weights(figures, case):
    """Oracle: plain torch, one graph through both networks and two AdamW, with clips, images and the penalty."""
    found = figures[case]
    for part, difference in found["weights"].items():
        assert difference < 1e-6 < 1e-3 < found["moved"][part], part
    assert found["usage"] < 1e-6 < 1e-3 < found["learned"] and found["skipped"] == 0


@pytest.mark.parametrize("stage", sampled(ALL_BF16, SAMPLE_BF16))
def test_bf16(figures, stage):
    """Oracle: finite losses of every turn, none passed over."""
    found = figures["bf16"][str(stage)]
    assert len(found["losses"]) == STEPS + STEPS - START and all(math.isfinite(value) for _, value in found["losses"])
    assert found["skipped"] == 0


def test_an_exact_slope_of_scattered_weights(figures):
    """Oracle: the refusal, with the remedy."""
    assert "penalty.form" in figures["refused"] and "approximate" in figures["refused"]
