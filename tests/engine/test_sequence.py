"""Ranks that share the tokens of a sample, in whole runs: parallel.sequence, on other numbers of ranks and stages."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from dstrain.engine.checkpoint import read_weights
from tests.engine import check_sequence
from tests.engine.check_sequence import GLOBAL, MODELS
from tests.engine.check_systems import CASES
from tests.support.runs import finish, metrics, train
from tests.support.sample import wants_all

STEPS, SOME = 20, 8
# What a DiT of today has of tokens: condition tokens that join late, rotations, a second head.
MODERN = (
    "model.num_heads=4",
    *CASES["modern"][1],
    "every.report=1",
    f"every.sample={STEPS}",
)
# Stage, model.recompute, and whether blocks are compiled.
WAYS = ((1, "none", False), (2, "all", False), (3, "attention", False), (3, "none", True))
ALL = [(name, *way) for name in MODELS for way in WAYS]


@pytest.fixture(scope="module")
def of_one_rank(on_ranks, tmp_path_factory, request):
    """name -> losses and norms of one rank at stage 1."""
    out = tmp_path_factory.mktemp("one") / "figures.json"
    steps = check_sequence.STEPS if wants_all(request) else SOME
    on_ranks(1, check_sequence.work, [(name, 1, 1, "none", False, steps) for name in MODELS], out)
    return dict(zip(MODELS, json.loads(out.read_text()), strict=True))


@pytest.mark.parametrize(
    "world, sequence, cases, steps",
    [
        (
            2,
            2,
            [("dit", 3, "none", False), ("phenaki.tokenizer", 2, "all", False), ("phenaki", 1, "none", False)],
            SOME,
        ),
        *(
            pytest.param(*ranks, ALL, check_sequence.STEPS, marks=pytest.mark.faults)
            for ranks in ((2, 2), (4, 4), (4, 2))
        ),
    ],
)
def test_shared_systems_learn_the_same(of_one_rank, on_ranks, tmp_path, world, sequence, cases, steps):
    """Oracle: one rank at stage 1: 8 or 20 losses of every part to 1e-6, the norms of their gradients to 5e-6; and a
    system observes each sample of a step once, however many ranks share it.
    """
    words = [(name, stage, sequence, *more, steps) for name, stage, *more in cases]
    on_ranks(world, check_sequence.work, words, tmp_path / "figures.json")
    for case, found in zip(cases, json.loads((tmp_path / "figures.json").read_text()), strict=True):
        for name, bound in (("losses", 1e-6), ("norms", 5e-6)):
            own, wanted = np.array(found[name]), np.array(of_one_rank[case[0]][name])[: len(found[name])]
            assert len(own) == len(set(wanted[:, 0])) == steps
            assert (np.abs(own - wanted) / wanted).max() < bound, (case, name)
        rows = [GLOBAL] * steps if case[0] == "phenaki.tokenizer" else []
        assert found["observed"] == of_one_rank[case[0]]["observed"][:steps] == rows, case


@pytest.mark.faults  # in CI: on the host in test_blocks.py, shared above
def test_inputs_that_wait_on_the_host_are_shared_ones(on_ranks, tmp_path):
    """Oracle: model.recompute=all on the same two ranks that share samples: the losses of 4 steps and the norms of
    their gradients to the last bit; what waits on the host is each rank's half of the tokens.
    """
    steps = 4
    cases = [(name, 2, 2, recompute, False, steps) for name in MODELS for recompute in ("all", "offload")]
    on_ranks(2, check_sequence.work, cases, tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())
    for name, kept, sent in zip(MODELS, figures[::2], figures[1::2], strict=True):
        assert (sent["losses"], sent["norms"]) == (kept["losses"], kept["norms"]), name
        assert kept["sent"] == 0 < sent["sent"], name
    (tokens, width), blocks = (16, 32), 2
    dit = figures[2 * list(MODELS).index("dit") + 1]
    assert dit["sent"] == steps * blocks * GLOBAL * tokens // 2 * width * 4


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of a run on one rank, to its end."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    finish(train(folder, 1, *MODERN, f"steps={STEPS}", num=1))
    return folder


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """The folder of a run whose samples are shared by 2 ranks at stage 2 up to step 7, by 2 of 4 at stage 3 up to step
    14, and by none, on one rank at stage 1, to its end.
    """
    folder = tmp_path_factory.mktemp("moved") / "run"
    for steps, stage, ranks, sequence in ((7, 2, 2, 2), (14, 3, 4, 2), (STEPS, 1, 1, 1)):
        said = finish(train(folder, stage, *MODERN, f"steps={steps}", f"parallel.sequence={sequence}", num=ranks))
        assert f"{8 * sequence // ranks} on {'a rank' if sequence == 1 else '2 ranks'} at a time" in said
    return folder


def test_goes_on_with_other_ranks_to_a_sample(alone, moved):
    """Oracle: the run on one rank: losses of all 20 steps and the EMA to 1e-6; and the pictures."""
    wanted, found = metrics(alone), metrics(moved)
    assert [line["step"] for line in found if "loss" in line] == [*range(1, STEPS + 1)]
    for name, bound in (("loss", 1e-6), ("base", 1e-6), ("grad_norm", 5e-6), ("param_norm", 1e-7)):
        pairs = [(a[name], b[name]) for a, b in zip(found, wanted, strict=True) if name in b]
        assert len(pairs) == STEPS and max(abs(a - b) / b for a, b in pairs) < bound, name
    of = [read_weights(run / "checkpoints" / f"step_{STEPS:08d}", "denoiser", "ema.0.9") for run in (moved, alone)]
    assert of[0].keys() == of[1].keys()
    assert max((a - of[1][name]).abs().max().item() for name, a in of[0].items()) < 1e-6
    (own, other) = (np.asarray(Image.open(next((run / "samples").glob("*20*.png")))) for run in (moved, alone))
    assert np.abs(own.astype(int) - other).max() <= 1


@pytest.mark.parametrize("world", [1, 2, 4])
def test_samples_of_a_run_that_moved(alone, moved, on_ranks, tmp_path, world):
    """Oracle: the run on one rank: 8 samples of step 20 before they are rounded to pixels, to 1e-4, on any ranks."""
    on_ranks(world, check_sequence.draw, (moved, alone), tmp_path / "drawn.pt")
    found, expected = torch.load(tmp_path / "drawn.pt", weights_only=True)
    assert found.shape == (8, 1, 32, 32) and found.std() > 0.1
    assert (found - expected).abs().max() < 1e-4
