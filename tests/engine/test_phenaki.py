"""MaskGit and its critics under ZeRO 0 to 3 on 2 ranks."""

import json

import pytest

from tests.engine import check_phenaki
from tests.engine.check_phenaki import EVERY, SAMPLE, STEPS
from tests.support.sample import sampled, wants_all

CASES = sampled(*(["-".join(map(str, case)) for case in cases] for cases in (EVERY, SAMPLE)))
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def figures(on_ranks, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("phenaki")
    on_ranks(2, check_phenaki.main, folder, EVERY if wants_all(request) else SAMPLE)
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


@pytest.mark.parametrize("case", CASES)
def test_resume(figures, case):
    """Oracle: the run without a break, bit for bit: weights, moments and averages of all parts."""
    assert figures[case]["resumed"] == []
