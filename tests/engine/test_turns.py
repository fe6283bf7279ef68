"""A generator and a discriminator as two engines, ZeRO 0 to 3 on 2 ranks."""

import json

import pytest

from tests.engine import check_turns
from tests.engine.check_turns import EVERY, SAMPLE, START, STEPS
from tests.support.sample import sampled, wants_all

CASES = sampled(*(["{}-{}".format(*case) for case in cases] for cases in (EVERY, SAMPLE)))
SAVES = sampled(
    *(["{}-{}-{}".format(*case, step) for case, saved in cases.items() for step in saved] for cases in (EVERY, SAMPLE))
)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def figures(on_ranks, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("turns")
    on_ranks(2, check_turns.main, folder, EVERY if wants_all(request) else SAMPLE)
    return json.loads((folder / "figures.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_weights(figures, case):
    """Oracle: plain torch, one graph through both networks and two AdamW: eight steps, an adversary from step 3 on."""
    for part, difference in figures[case]["weights"].items():
        assert difference < 1e-6 < 1e-3 < figures[case]["moved"][part], part
    assert figures[case]["ema"] < 1e-6


@pytest.mark.parametrize("case", CASES)
def test_a_part_that_waits(figures, case):
    """Oracle: its initial weights, no update, and no step that would count as skipped."""
    found = figures[case]
    assert found["waited"] == 0
    assert found["updates_at_start"] == {"autoencoder": START, "discriminator": 0}
    assert found["updates"] == {"autoencoder": STEPS, "discriminator": STEPS - START}
    assert found["applied"] == [["autoencoder"]] * START + [["autoencoder", "discriminator"]] * (STEPS - START)
    assert found["all_applied"] and found["skipped"] == 0
    assert {"autoencoder/grad_norm", "discriminator/param_norm"} <= set(found["figures"])


@pytest.mark.parametrize("save", SAVES)
def test_resume(figures, save):
    """Oracle: the run without a break, bit for bit: weights, moments, average and counts of both parts."""
    case, _, step = save.rpartition("-")
    assert figures[case]["resumed"][step] == []
