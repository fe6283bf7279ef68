"""Timestep samplers against the original's weights and against a history kept one loss at a time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from dstrain.diffusion import timesteps
from dstrain.diffusion.timesteps import LossSecondMomentSampler, UniformSampler
from tests.support import golden


def test_original_weights():
    """Oracle: the original's weights after the same losses in the same order."""
    tensors, meta = golden.load("loss_second_moment_public")
    sampler = LossSecondMomentSampler(meta["num_timesteps"], meta["history_per_term"], meta["uniform_prob"])
    for t, losses in zip(tensors["timesteps"], tensors["losses"]):
        sampler.observe(t, losses)
    torch.testing.assert_close(sampler.get_probabilities(), tensors["weights"], rtol=1e-10, atol=1e-12)


def filled(sampler, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(sampler.history_per_term):
        t = torch.randperm(sampler.num_timesteps, generator=generator)
        sampler.observe(t, torch.rand(len(t), generator=generator) + 0.1)
    return sampler


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(st.lists(st.integers(-1, 4), max_size=20), max_size=8), st.integers(1, 4))
def test_append_equals_one_at_a_time(batches, length):
    """Oracle: the last `length` losses of each timestep, kept in Python lists; -1 is padding."""
    sampler, lists, loss = LossSecondMomentSampler(5, length), [[] for _ in range(5)], 0.0
    single = LossSecondMomentSampler(5, length)
    for batch in batches:
        losses = []
        for t in batch:
            loss += 1.0
            losses.append(loss)
            single.observe(torch.tensor([t]), torch.tensor([loss]))
            if t >= 0:
                lists[t] = (lists[t] + [loss])[-length:]
        sampler.observe(torch.tensor(batch, dtype=torch.int64), torch.tensor(losses))
    state = sampler.state_dict()
    for name, tensor in single.state_dict().items():
        assert torch.equal(tensor, state[name])
    for t, kept in enumerate(lists):
        assert sorted(state["history"][t].tolist(), reverse=True)[: len(kept)] == sorted(kept, reverse=True)
        assert min(int(state["seen"][t]), length) == len(kept)


def test_more_timesteps_than_short_integers_hold():
    """Oracle: by hand: the last two losses of each timestep, on both sides of 2^15 and at the end."""
    sampler = LossSecondMomentSampler(40_000, 2)
    t = torch.tensor([39_999, 32_768, 32_767, 0, 39_999, 32_768, 39_999])
    sampler.observe(t, torch.arange(1.0, 8.0))
    state = sampler.state_dict()
    kept = {39_999: [5.0, 7.0], 32_768: [2.0, 6.0], 32_767: [0.0, 3.0], 0: [0.0, 4.0]}
    assert {t: sorted(state["history"][t].tolist()) for t in kept} == kept
    assert float(state["history"].sum()) == sum(map(sum, kept.values())) and state["seen"][[39_999, 0]].tolist() == [
        3,
        1,
    ]


def test_uneven_split_changes_nothing():
    """Oracle: the whole batch observed at once, in order of position."""
    generator = torch.Generator().manual_seed(0)
    t, losses = torch.randint(0, 6, (50,), generator=generator), torch.rand(50, generator=generator)
    whole, parts = LossSecondMomentSampler(6, 3), LossSecondMomentSampler(6, 3)
    whole.observe(t, losses)
    for part in (slice(0, 7), slice(7, 8), slice(8, 50)):
        parts.observe(t[part], losses[part])
    assert torch.equal(whole.get_probabilities(), parts.get_probabilities())


@pytest.mark.parametrize(
    "make",
    [lambda: UniformSampler(1025), lambda: LossSecondMomentSampler(40), lambda: filled(LossSecondMomentSampler(40, 4))],
)
def test_inverse_distribution_and_weights(make):
    """Oracle: a fine grid of uniform numbers meets each t in proportion to p(t); weight * p(t) * T is 1."""
    sampler = make()
    uniforms = (torch.arange(2**20) + 0.5) / 2**20
    t, weight = sampler.sample(uniforms)
    assert t.dtype == torch.int64 and weight.dtype == torch.float32
    shares = t.bincount(minlength=sampler.num_timesteps).double() / len(t)
    expected = (
        sampler.get_probabilities() if isinstance(sampler, LossSecondMomentSampler) else 1 / sampler.num_timesteps
    )
    assert float((shares - expected).abs().max()) < 1e-5
    assert float((weight.double() * (shares * sampler.num_timesteps)[t] - 1).abs().max()) < 0.02
    ends, _ = sampler.sample(torch.tensor([0.0, 1 - 2**-24]))
    assert ends.tolist() == [0, sampler.num_timesteps - 1]


def test_uniform_until_every_history_is_full():
    """Oracle: weight 1 for all timesteps."""
    sampler = LossSecondMomentSampler(3, 2)
    sampler.observe(torch.tensor([0, 0, 1, 1, 2]), torch.ones(5))
    assert torch.equal(sampler.sample(torch.rand(9))[1], torch.ones(9))
    sampler.observe(torch.tensor([2]), torch.ones(1) * 9)
    assert sampler.sample(torch.tensor([0.99]))[1] < 1


@pytest.mark.parametrize("readable", [True, False])
def test_probabilities(readable, monkeypatch):
    """Oracle: the formula by hand: sqrt of the mean square, normalized, a share mixed with 1 / T; the same for losses
    of any size, and uniform where all are 0.
    """
    monkeypatch.setattr(timesteps, "_can_numpy_read", lambda values: readable)
    for scale in (1.0, 1e-6, 1e6):
        sampler = LossSecondMomentSampler(3, 2, uniform_prob=0.25)
        sampler.observe(torch.tensor([0, 1, 2, 0, 1, 2]), scale * torch.tensor([3.0, 0.0, 1.0, 4.0, 0.0, 7.0]))
        roots = [math.sqrt(12.5), 0.0, 5.0]
        expected = [0.75 * root / sum(roots) + 0.25 / 3 for root in roots]
        assert sampler.get_probabilities().tolist() == pytest.approx(expected, rel=1e-6)
    sampler = LossSecondMomentSampler(3, 1)
    sampler.observe(torch.arange(3), torch.zeros(3))
    assert sampler.get_probabilities().tolist() == pytest.approx([1 / 3] * 3)
    t, weights = sampler.sample(torch.tensor([0.1, 0.5, 0.9]))
    assert t.tolist() == [0, 1, 2] and weights.tolist() == pytest.approx([1.0] * 3)
    halves = LossSecondMomentSampler(2, 1).sample(torch.tensor([0.0, 0.5]))[0]  # where one ends, the next begins
    assert halves.tolist() == [0, 1]


@pytest.mark.parametrize("count", [1, 40])
def test_timesteps_without_mass_are_never_drawn(count):
    """Oracle: the inverse of the distribution at a number where several timesteps end: the next that has mass; by a
    plain search and by the table of large draws.
    """
    sampler = LossSecondMomentSampler(4, 1, uniform_prob=0.0)
    sampler.observe(torch.arange(4), torch.tensor([17.0, 0.0, 0.0, 15.0]))
    t, weights = sampler.sample(torch.full((count,), 17 / 32))
    assert t.tolist() == [3] * count and weights.tolist() == pytest.approx([32 / 60] * count)


def test_state():
    """Oracle: the sampler that the state was taken from."""
    sampler = filled(LossSecondMomentSampler(40, 4))
    other = LossSecondMomentSampler(40, 4)
    other.load_state_dict(sampler.state_dict())
    assert torch.equal(other.get_probabilities(), sampler.get_probabilities())
    sampler.observe(torch.tensor([3, 3]), torch.tensor([1.0, 2.0]))
    other.observe(torch.tensor([3, 3]), torch.tensor([1.0, 2.0]))
    assert torch.equal(other.get_probabilities(), sampler.get_probabilities())
    with pytest.raises(ValueError, match=r"\(40, 4\) in the checkpoint, \(40, 10\)"):
        LossSecondMomentSampler(40).load_state_dict(sampler.state_dict())
    state = sampler.state_dict()
    for part, words in (({}, "none"), ({"seen": state["seen"]}, "none"), ({"history": state["history"]}, r"\(40, 4\)")):
        with pytest.raises(ValueError, match=rf"{words} in the checkpoint, \(40, 4\) in this run"):
            sampler.load_state_dict(part)
    assert UniformSampler(4).state_dict() == {}
    with pytest.raises(ValueError, match="history"):
        UniformSampler(4).load_state_dict(sampler.state_dict())


@pytest.mark.parametrize("readable", [True, False])
def test_losses_that_are_not_finite_are_padding(readable, monkeypatch):
    """Oracle: the same batch without them; one of each kind, in every place of a ring that the batch overruns."""
    monkeypatch.setattr(timesteps, "_can_numpy_read", lambda values: readable)
    with_them, without = filled(LossSecondMomentSampler(3, 4)), filled(LossSecondMomentSampler(3, 4))
    t = torch.tensor([0, 1, 0, 2, 0, 0, 0, 0, 1, 0, 2])
    losses = torch.arange(1.0, 12.0)
    for place, value in ((0, torch.nan), (3, torch.inf), (5, -torch.inf), (8, torch.nan), (10, torch.inf)):
        losses[place] = value
    with_them.observe(t, losses)
    without.observe(t[losses.isfinite()], losses[losses.isfinite()])
    for name, kept in without.state_dict().items():
        assert torch.equal(with_them.state_dict()[name], kept)
    with_them.observe(torch.tensor([1]), torch.tensor([torch.nan]))
    assert torch.equal(with_them.get_probabilities(), without.get_probabilities())
    assert bool(with_them.get_probabilities().isfinite().all())


def test_accelerator_path_is_the_same(monkeypatch):
    """Oracle: the path of the CPU, whose state is equal bit for bit, and whose timesteps are."""
    generator = torch.Generator().manual_seed(0)
    paths = {readable: LossSecondMomentSampler(50, 4) for readable in (True, False)}
    for _ in range(12):
        t = torch.randint(-1, 50, (200,), generator=generator)
        losses, uniforms = (torch.rand(count, generator=generator) + 0.1 for count in (200, 2000))
        losses[::17] = torch.nan
        drawn = {}
        for readable, sampler in paths.items():
            monkeypatch.setattr(timesteps, "_can_numpy_read", lambda values: readable)
            sampler.observe(t, losses)
            drawn[readable] = sampler.sample(uniforms % 1)
        assert torch.equal(drawn[True][0], drawn[False][0])
        torch.testing.assert_close(drawn[True][1], drawn[False][1], rtol=3e-7, atol=0)
        for name, kept in paths[True].state_dict().items():
            assert torch.equal(kept, paths[False].state_dict()[name])
    assert int(paths[True].state_dict()["seen"].min()) > 8  # warm, and every ring has gone round


@pytest.mark.parametrize("make", [lambda: UniformSampler(9), lambda: filled(LossSecondMomentSampler(9, 4))])
def test_an_accelerator_is_never_waited_for(make):
    """Oracle: the meta device, whose tensors hold no values: what reads one, or takes a shape from one, raises."""
    sampler = make()
    sampler.observe(torch.empty(20, dtype=torch.int64, device="meta"), torch.empty(20, device="meta"))
    for each in (sampler, make()):
        t, weights = each.sample(torch.empty(7, device="meta"))
        assert t.device.type == weights.device.type == "meta" and t.dtype == torch.int64 and weights.shape == (7,)


@pytest.mark.parametrize("num_timesteps", [1, 2, 40, 1000, 4000])
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_large_draws_search_as_small_ones(num_timesteps, spread):
    """Oracle: draws of one, which take a plain binary search; mass spread over timesteps evenly to extremely unevenly,
    uniform numbers at random, at both ends, and on both sides of where timesteps end."""
    draw = np.random.default_rng(0)
    sampler = LossSecondMomentSampler(num_timesteps, 1)
    losses = np.exp(spread * draw.standard_normal(num_timesteps))
    sampler.observe(torch.arange(num_timesteps), torch.from_numpy(losses))
    ends = sampler.get_probabilities().cumsum(0)[:-1].numpy().astype(np.float32)
    near = np.concatenate([np.nextafter(ends, 0), ends, np.nextafter(ends, 1), [0, 1 - 2**-24, 2**-30]])
    uniforms = torch.from_numpy(np.concatenate([draw.random(1000, np.float32), near[near < 1].astype(np.float32)]))
    t, weights = sampler.sample(uniforms)
    assert torch.equal(t, torch.searchsorted(sampler.get_probabilities().cumsum(0)[:-1], uniforms.double(), right=True))
    for i in range(0, len(t), 1 + len(t) // 200):
        one, weight = sampler.sample(uniforms[i : i + 1])
        assert one == t[i] and weight == weights[i]


def test_no_uniform_number_is_rounded_up_to_the_end():
    """Oracle: T - 1 at the float32 below 1, for every T to 2^14 and around every power of two to 2^24."""
    last = torch.tensor([1 - 2**-24])
    assert last.dtype == torch.float32 and last < 1
    around = [2**power + step for power in range(14, 24) for step in (-1, 0, 1, 3)]
    for num_timesteps in [*range(1, 2**14), *around]:
        assert UniformSampler(num_timesteps).sample(last)[0] == num_timesteps - 1


def test_a_draw_without_values():
    """Oracle: shapes and types by hand, where tensors on the host hold no values, as in a plan, and of no samples."""
    sampler = LossSecondMomentSampler(10, 3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        t, weights = sampler.sample(torch.rand(4))
    assert (t.shape, t.dtype, weights.shape, weights.dtype) == ((4,), torch.int64, (4,), torch.float32)
    assert sampler.sample(torch.rand(4))[0].max() < 10
    assert [part.shape for part in sampler.sample(torch.rand(0))] == [(0,), (0,)]
