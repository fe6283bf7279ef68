"""Clips frame by frame: training on beginnings of clips, and drawing one latent frame after the other."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from dstrain import rng
from dstrain.planning.step import choose_step_to_measure
from dstrain.recipe import ConfigError
from dstrain.systems.base import Request
from tests.support import tokenizers
from tests.systems.phenaki.test_phenaki_system import build, networks


def test_when_clips_are_cut():
    """Oracle: the shares, of any 200 steps to 2 steps; the same step twice; an evaluation sees whole clips."""
    system, shares = build(beginnings=[0.5, 0.0, 0.2]), {0: 0.5, 1: 0.0, 2: 0.2, 3: 0.3}
    nets, batch = networks(system), system.synthetic(4)
    cuts = []
    for step in range(1, 2001):
        assert system.turns(step) == ("maskgit",)
        cuts.append(system._cut)
        assert system.measure_workload(step) == ((1, 3, 3) if cuts[-1] is None else (1, cuts[-1] + 1, 1))
    for frame, share in shares.items():
        for first in (0, 77, 1700):
            assert abs(cuts[first : first + 200].count(None if frame == 3 else frame) - 200 * share) <= 2, (
                frame,
                first,
            )
    for rare in (system, build(beginnings=[0.99])):
        for steps in (300, 2000, 10_000):  # what plan.py counts
            assert rare.measure_workload(choose_step_to_measure(SimpleNamespace(steps=steps), rare)) == (1, 3, 3)
    again = build(beginnings=[0.5, 0.0, 0.2])
    again.turns(77)
    assert again._cut == cuts[76]
    step = cuts.index(0) + 1
    system.turns(step)
    held_out = system.evaluate(nets, system.encode(batch))
    expected = build().evaluate(nets, system.encode(batch))
    assert all(torch.equal(held_out[name], expected[name]) for name in expected)


@pytest.mark.parametrize("critic", [None, "token", "self"])
@pytest.mark.parametrize("end", [1, 2, 3])
def test_a_beginning_is_a_short_clip(critic, end):
    """Oracle: clips that are as short in the data, by MaskGit's and the critic's own calls: masked tokens lie in the
    last real latent frame alone, as many as the cosine asks of its four.
    """
    system = build(beginnings=[0.0] * (end - 1) + [1.0], critic=critic)
    nets, batch = networks(system), system.synthetic(48)
    whole, example = system.encode(batch), system.encode(batch)
    system.turns(1)
    terms = {part: system.loss(part, nets, example) for part in system.parts}
    key, last = batch["key"], whole["real"].sum(1).clamp(max=end) - 1
    asked = torch.arange(end) == last[:, None]
    number = (torch.cos(math.pi / 2 * rng.uniform(key, "mask_ratio").double()) * 4).round().clamp(min=1).long()
    masked = example["masked"]
    assert masked.shape[1] == end and not masked[~asked].any()
    assert torch.equal(masked.flatten(1).sum(1), number)
    tokens, real, dropped = whole["tokens"][:, :end], whole["real"][:, :end], system._draw_text_drop_mask(whole)
    conditions = {"real": real, "dropped": dropped, "words": whole["words"]}
    drawn = {} if critic is None else {"uniforms": rng.uniform(key, "filled", (4 * end,))}
    passed = nets["maskgit"](tokens, masked, torch.ones(48), **conditions, **drawn)
    torch.testing.assert_close(terms["maskgit"]["cross_entropy"], passed.loss / number, rtol=1e-5, atol=1e-6)
    of_maskgit = terms["maskgit"]["loss_each"] - terms["maskgit"].get("critic_loss", 0)
    torch.testing.assert_close(of_maskgit, passed.loss * math.pi / 2 / 4, rtol=1e-5, atol=1e-5)
    if critic is not None:
        judge = (
            nets["critic"]
            if critic == "token"
            else (lambda x, **given: nets["maskgit"].to_critic(nets["maskgit"].trunk(x, **given))[..., 0])
        )
        each = F.binary_cross_entropy_with_logits(judge(passed.filled, **conditions), masked.float(), reduction="none")
        of_critic = terms["critic"]["loss_each"] if critic == "token" else terms["maskgit"]["critic_loss"]
        torch.testing.assert_close(of_critic, each[asked].flatten(1).mean(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "shares, words",
    [([0.5, 0.6], "1 together at most"), ([-0.1], "0 at least"), ([0.1] * 4, "clips have 3 latent frames")],
)
def test_shares_that_cannot_be(shares, words):
    """Oracle: the message names the key and what it takes."""
    with pytest.raises(ConfigError, match=f"beginnings.*{words}"):
        build(beginnings=shares)


@pytest.mark.parametrize("sampler, critic", [("confidence", None), ("critic", "token"), ("critic", "self")])
def test_frames_in_turn(tmp_path, sampler, critic):
    """Oracle: shorter clips of the same seeds: with order=frames each is the beginning of the longer one, which goes on
    from its tokens alike; with order=all it is not so.
    """
    path, seeds = str(tokenizers.save(tmp_path)), torch.arange(6)
    clips = {}
    for order in ("frames", "all"):
        system = build(critic=critic, tokenizer={"path": path}, decoding={"order": order})
        nets, conditions = networks(system), system.conditions_from_texts([f"a text {number}" for number in range(6)])

        def draw(frames):
            return Request(seeds, conditions, 3, sampler, 1.5, num_frames=frames)

        for frames in (1, 3, 5):
            clips[order, frames] = system.sample(nets, draw(frames))
        nothing = torch.zeros(6, 3, 2, 2, dtype=torch.int64)
        clips[order] = system.draw_tokens(nets, nothing, nothing.bool(), draw(5))
        known = torch.arange(3)[:, None, None] < torch.ones_like(nothing)
        clips[order, "on"] = system.draw_tokens(nets, torch.where(known, clips[order], 0), known, draw(5))
    for frames in (1, 3):
        assert torch.equal(clips["frames", 5][:, :frames], clips["frames", frames])
    assert torch.equal(clips["frames", "on"], clips["frames"])
    assert not torch.equal(clips["all", 5][:, :3], clips["all", 3])
    assert not torch.equal(clips["all", "on"], clips["all"])
