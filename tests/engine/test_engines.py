"""ZeRO 0 to 3 against plain torch: on one rank in this process, and on 2 forked ranks."""

import json

import pytest

from tests.engine import check_engines

STAGES, MICROS = (0, 1, 2, 3), (4, 2)  # micro-batch 2 means two micro-steps on 2 ranks, four on one


@pytest.fixture(scope="module", params=[2, 1])
def figures(request, tmp_path_factory, on_ranks):
    out = tmp_path_factory.mktemp("engines") / "figures.json"
    if request.param == 1:
        request.getfixturevalue("alone")
        check_engines.main(str(out))
    else:
        on_ranks(2, check_engines.main, str(out))
    return json.loads(out.read_text())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("micro", MICROS)
def test_fp32_weights(figures, stage, micro):
    """Oracle: single-process torch AdamW on the whole batch, six clipped steps with decay: within 1e-6."""
    assert figures[f"{stage}-fp32-{micro}"]["weights"] < 1e-6


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("micro", MICROS)
def test_bf16_weights(figures, stage, micro):
    """Oracle: the same in fp32; bf16 keeps 8 bits, and Adam's steps of six times 0.01 carry that into the weights."""
    found = figures[f"{stage}-bf16-{micro}"]
    assert 0 < found["weights_mean"] < 0.02 * found["moved_mean"]


@pytest.mark.parametrize(
    "case", [f"{stage}-{precision}-{micro}" for stage in STAGES for precision in ("fp32", "bf16") for micro in MICROS]
)
class TestEveryCase:
    def test_masters_start_in_full(self, figures, case):
        """Oracle: the keyed fp32 initialization of a plain network, to the last bit, in bf16 too."""
        assert figures[case]["initial"] == 0 and figures[case]["buffer"] == 0

    def test_ema(self, figures, case):
        """Oracle: a naive full-weight average of the gathered masters, two decays, not inside an accumulation."""
        assert max(figures[case]["ema"]) < 1e-6
        assert figures[case]["applied"] and figures[case]["updates"] == 6

    def test_swapped(self, figures, case):
        """Oracle: a plain network with the naive average inside; the training weights' own bits afterwards."""
        for found in figures[case]["swapped"]:
            assert found["restored"]
            assert found["inside"] < (1e-6 if "fp32" in case else 1e-2)
            assert found["changed"] > 1e-3

    def test_not_finite(self, figures, case):
        """Oracle: the bits before a gradient that was infinite on one rank only: weights, average and count stay."""
        assert figures[case]["skipped"] == {"said": True, "updates": 6, "weights": True, "ema": True}

    def test_parameter_norm(self, figures, case):
        """Oracle: torch's norm of all gathered fp32 weights, each counted once."""
        assert figures[case]["param_norm"] == pytest.approx(figures[case]["true_param_norm"], rel=1e-6)

    def test_gradient_norm(self, figures, case):
        """Oracle: torch's norm of the whole batch's gradient at the same step, before clipping."""
        assert figures[case]["norm"] == pytest.approx(figures[case]["true_norm"], rel=1e-5 if "fp32" in case else 0.02)
