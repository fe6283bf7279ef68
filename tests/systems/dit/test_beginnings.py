"""Steps of a DiT of clips that see only first frames: when, what they learn from, and what is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dstrain.planning.step import choose_step_to_measure
from dstrain.systems.dit.config import Config
from dstrain.systems.dit.system import DiTSystem
from tests.systems.dit.cases import VIDEO
from tests.systems.dit.test_clips import build
from tests.systems.dit.test_texts import fill


def build_with(*shares: float, **more: Any) -> DiTSystem:
    return build(video=VIDEO["video"] | {"beginnings": list(shares)} | more)


def test_when_clips_are_cut() -> None:
    """Oracle: the shares, of any 200 steps to 2 steps; the workload counts the frames that are left, and a plan takes a
    step of whole clips.
    """
    system, shares = build_with(0.5, 0.2), {1: 0.5, 3: 0.2, 5: 0.3}
    ends = [system.measure_workload(step)[1] for step in range(1, 2001)]
    for frames, share in shares.items():
        for first in (0, 77, 1700):
            assert abs(ends[first : first + 200].count(frames) - 200 * share) <= 2, (frames, first)
    assert system.measure_workload(choose_step_to_measure(SimpleNamespace(steps=300), system))[1] == 5


@pytest.mark.parametrize("shares, end", [((1.0,), 1), ((0.0, 1.0), 3), ((), 5)])
def test_a_step_learns_from_the_first_frames(shares: tuple[float, ...], end: int) -> None:
    """Oracle: the loss of clips that are as short in the data, to the bit; an evaluation sees whole clips."""
    system, whole = build_with(*shares), build()
    nets = {"denoiser": fill(system.networks()["denoiser"])}
    example = system.encode(system.synthetic(16))
    short = {**example, "x_start": example["x_start"][:, :, :end].clone()}
    expected, held_out = whole.loss("denoiser", nets, short), whole.evaluate(nets, dict(example))
    assert torch.equal(system.evaluate(nets, dict(example))["loss"], held_out["loss"])
    assert system.turns(7) == ("denoiser",)
    assert torch.equal(system.evaluate(nets, dict(example))["loss"], held_out["loss"])
    terms = system.loss("denoiser", nets, dict(example))
    assert torch.equal(terms["loss_each"], expected["loss_each"])
    if end < 5:
        assert not torch.equal(terms["loss_each"], whole.loss("denoiser", nets, dict(example))["loss_each"])


@pytest.mark.parametrize("shares, frames", [((0.0, 1.0), 3), ((), 5)])
def test_frames_that_a_step_throws_away_are_not_encoded(shares: tuple[float, ...], frames: int, monkeypatch) -> None:
    """Oracle: the frames of clips that are encoded whole, to the bit; the number of frames that are encoded. Held-out
    clips, which have no step, are encoded whole.
    """
    system, encoded, encode = build_with(*shares), [], DiTSystem._encode_clips
    monkeypatch.setattr(
        DiTSystem, "_encode_clips", lambda self, video, key: encoded.append(video.shape[1]) or encode(self, video, key)
    )
    batch = system.synthetic(3)
    whole = system.encode(batch)["x_start"]
    assert system.turns(7) == ("denoiser",)
    cut = system.encode({**batch, "step": torch.full((3,), 7)})["x_start"]
    assert torch.equal(cut, whole[:, :, :frames])
    assert torch.equal(system.encode(batch)["x_start"], whole) and encoded == [5, frames, 5]


def test_some_frames_are_left_to_draw() -> None:
    """Oracle: by hand: of a clip of 5 frames 1 or 3 are given, of one of 3 frames the first alone, of an image none."""
    system = build_with(given_share=1.0)
    example = system.encode(system.synthetic(200))
    for frames, expected in ((5, {1.0, 3.0}), (3, {1.0}), (1, {0.0})):
        short = {**example, "x_start": example["x_start"][:, :, :frames]}
        marks = system._make_condition_arguments(short)["given"][:, 1, :, 0, 0].sum(1)
        assert set(marks.tolist()) == expected


@pytest.mark.parametrize(
    "shares, words",
    [
        ((0.5, 0.6), "video.beginnings.*1 together at most"),
        ((-0.1,), "video.beginnings.*0 at least"),
        ((0.1,) * 4, "clips have 3 latent frames; .*model.video.beginnings="),
    ],
)
def test_shares_that_cannot_be(shares: tuple[float, ...], words: str) -> None:
    """Oracle: the message names the key and what it takes."""
    with pytest.raises(ValueError, match=words):
        build_with(*shares)


def test_ranks_that_cannot_share_an_image() -> None:
    """Oracle: by hand: 4 x 6 in patches of 2 has 6 tokens a patch of frames: 4 ranks share 12 of them and not 6."""
    model = VIDEO | {"num_heads": 4, "hidden_size": 32, "block": {}}
    video = VIDEO["video"] | {"frames": 3, "given": 0, "height": 6}
    assert not any("a clip" in line for line in Config(**model | {"video": video}).list_conflicts_among_ranks(4))
    cut = Config(**model | {"video": video | {"beginnings": [0.5]}})
    assert any(
        "the 6 tokens of a first frame, with model.video.beginnings" in x for x in cut.list_conflicts_among_ranks(4)
    )
