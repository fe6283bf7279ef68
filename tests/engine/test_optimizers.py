"""Lion, Muon and 8-bit AdamW, sharded: against plain torch, resumed, and moved to other stages and ranks."""

import json

import pytest
import torch

from dstrain.engine import optimizers
from dstrain.recipe import ConfigError, Run
from tests.engine import check_optimizers
from tests.engine.check_optimizers import CASES, HALF, MOVES, NAMES, STEPS

CASE_NAMES = ["-".join(map(str, case)) for case in CASES]


@pytest.fixture(scope="module")
def trained(on_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("optimizers")
    on_ranks(2, check_optimizers.main, "train", folder, folder / "two.json")
    return folder


@pytest.fixture(scope="module")
def figures(trained):
    return json.loads((trained / "two.json").read_text())


class TestTwoRanks:
    @pytest.mark.parametrize("case", CASE_NAMES)
    def test_weights(self, figures, case):
        """Oracle: ten steps on whole weights in fp32 by the formula of Lion, by torch.optim.Muon with AdamW, and by
        bitsandbytes. Its blocks are other ones at stages 1 to 3, and bf16 rounds: then within a twentieth of the way.
        """
        found = figures[case]
        if "bf16" not in case and ("8bit" not in case or "-0-" in case):
            assert found["furthest"] < 1e-6
        assert found["mean"] < 0.05 * found["moved"]
        assert found["updates"] == STEPS

    @pytest.mark.parametrize("case", CASE_NAMES)
    def test_resumed(self, figures, case):
        """Oracle: the run without a break, bit for bit: weights, moments and count."""
        assert figures[case]["resumed"] == HALF and figures[case]["differ"] == []

    @pytest.mark.parametrize("case", CASE_NAMES)
    def test_not_finite(self, figures, case):
        """Oracle: the bits before a gradient that was infinite on one rank only."""
        assert figures[case]["skips"]

    def test_another_optimizer(self, figures):
        """Oracle: a fresh optimizer: no count, moments of zero, and a line that says so."""
        found = figures["other"]
        assert found["resumed"] == HALF and found["updates"] == 0 and found["moments"] == 0
        assert "begins without moments" in found["notes"][0]


def test_moved(on_ranks, trained):
    """Oracle: ten steps of plain torch; then the run on two ranks at the stage before: what it saved, bit for bit but
    for moments of 8 bits, and its weights five steps later. Muon makes the rounding of a gradient's sum large.
    """
    on_ranks(1, check_optimizers.main, "move", trained, trained / "one.json")
    found = json.loads((trained / "one.json").read_text())
    assert all(found.pop(f"{name} alone") < 1e-6 for name in NAMES)
    assert len(found) == len(MOVES)
    for case, figures in found.items():
        assert figures["resumed"] == HALF
        if "8bit" in case:
            assert not any(key.startswith(("master", "n")) for key in figures["differ"]), case
            assert figures["moments"] < 0.05, case
        else:
            assert figures["differ"] == [], case
        assert figures["mean"] < (1e-5 if "lion" in case else 0.02) * figures["moved"], case


def test_muon_needs_matrices():
    """Oracle: the system's list of repeated blocks, which is empty."""
    run = Run.model_validate({"optimizer": {"name": "muon"}})
    with pytest.raises(ConfigError, match="Linear has no matrices that learn in repeated blocks"):
        list(
            optimizers.make_parameter_groups(
                torch.nn.Linear(3, 3), run.optimizer, lambda name, weight: weight.ndim >= 2, ()
            )
        )


def test_own_files_of_deepspeed_are_refused():
    """Oracle: the reason, by the recipe's keys."""
    with pytest.raises(ValueError, match="save.format=fragments"):
        Run.model_validate({"optimizer": {"name": "muon"}, "save": {"format": "deepspeed"}})


@pytest.mark.parametrize("count", range(9))
def test_bytes_as_floats(count):
    """Oracle: the bytes themselves, and the least number of floats that holds them."""
    octets = torch.arange(1, count + 1, dtype=torch.uint8)
    floats, back = optimizers.reinterpret_bytes_as_floats(octets), torch.zeros_like(octets)
    assert floats.dtype == torch.float32 and floats.numel() == -(-count // 4)
    optimizers.set_bytes_from_reinterpreted_floats(back, floats)
    assert torch.equal(back, octets)
