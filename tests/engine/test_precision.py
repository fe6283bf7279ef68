"""Sums of gradients over micro-batches, and the loss scale of fp16, at every stage on 1 and 2 ranks."""

import itertools
import json

import pytest

from tests.engine import check_precision
from tests.engine.check_precision import EVERY, INFINITE, SAMPLE, SAVED, STEPS
from tests.support.launch import launch
from tests.support.sample import sampled, wants_all


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def figures(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("precision")
    if request.param == 1:
        request.getfixturevalue("alone")
        from deepspeed.accelerator import get_accelerator

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
            check_precision.main(folder, EVERY if wants_all(request) else SAMPLE)
    else:
        cases = "every" if wants_all(request) else "sample"
        launch("tests/engine/check_precision.py", folder, cases, num=2, timeout=900)
    return json.loads((folder / f"figures-{request.param}.json").read_text())


def test_sums_of_gradients(figures):
    """Oracle: the gradient of 256 samples in float64. One sample a micro-batch loses no more than all in one, at any
    stage, where the same sum in bf16 loses three times as much.
    """
    for stage in (0, 1, 2, 3):
        together, apart = figures[f"sums {stage}"]
        assert 1e-3 < together < 5e-3 and apart < 1.2 * together < 3 * together < figures["narrow"]


@pytest.mark.parametrize("case", sampled(*([f"{kind} {stage}" for kind, stage in cases] for cases in (EVERY, SAMPLE))))
class TestFp16:
    def test_scale_and_skips(self, figures, case):
        """Oracle: plain torch in fp16 with DeepSpeed's documented rules by hand: overflows of its own and an infinite
        loss on one rank, in one of two networks or both; halving after patience, growth, and the norm.
        """
        found = figures[case]
        seen = {"grown": 0, "lowered": 0, "skipped": 0}
        for part in ("a", "b"):
            scales = [report[part]["scale"] for report in found["reports"]]
            seen["grown"] += sum(b > a for a, b in itertools.pairwise(scales))
            seen["lowered"] += sum(b < a for a, b in itertools.pairwise(scales))
            for step, (report, expected) in enumerate(zip(found["reports"], found["expected"], strict=True)):
                assert report[part]["applied"] == expected[part]["applied"] and not (
                    report[part]["applied"] and step in INFINITE[part]
                )
                assert report[part]["scale"] == expected[part]["scale"], (part, step)
                seen["skipped"] += not report[part]["applied"]
                if report[part]["applied"]:
                    assert report[part]["norm"] == pytest.approx(expected[part]["norm"], rel=2e-3)
        injected = sum(map(len, INFINITE.values()))
        assert (
            seen == {"grown": 0, "lowered": 0, "skipped": injected}
            if case.startswith("fixed")
            else min(seen["grown"], seen["lowered"]) >= 4 and seen["skipped"] > injected
        )

    def test_weights_and_averages(self, figures, case):
        """Oracle: the same plain torch: a step that is skipped moves neither, and one whose scale
        grows is no shorter.
        """
        for part in ("a", "b"):
            for what in ("master", "ema"):
                found = figures[case]
                assert found[f"{part} {what}"] < 5e-3 * found[f"{part} {what} moved"]

    def test_goes_on(self, figures, case):
        """Oracle: the run that was not interrupted: scale, counters, reports and weights to the bit; saved between an
        overflow and the growth that follows. A fixed scale is a setting and no state.
        """
        found = figures[case]
        assert found["kept"] == found["restored"] and found["resumed"] and found["same"]
        for state in found["kept"].values():
            assert (
                state == {} if case.startswith("fixed") else state["cur_iter"] == SAVED and state["cur_hysteresis"] == 1
            )
        assert len(found["reports"]) == STEPS
