"""Timestep samplers against the original's weights and against a history kept one loss at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dstrain.diffusion.timesteps import LossSecondMomentSampler, UniformSampler
from tests.support import golden


def test_original_weights():
    """Oracle: the original's weights after the same losses in the same order."""
    tensors, meta = golden.load("loss_second_moment_public")
    sampler = LossSecondMomentSampler(meta["num_timesteps"], meta["history_per_term"], meta["uniform_prob"])
    for t, losses in zip(tensors["timesteps"], tensors["losses"]):
        sampler.observe(t, losses)
    torch.testing.assert_close(sampler.probabilities(), tensors["weights"], rtol=1e-10, atol=1e-12)


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
        assert sorted(state["history"][t].tolist(), reverse=True)[:len(kept)] == sorted(kept, reverse=True)
        assert min(int(state["seen"][t]), length) == len(kept)


def test_uneven_split_changes_nothing():
    """Oracle: the whole batch observed at once, in order of position."""
    generator = torch.Generator().manual_seed(0)
    t, losses = torch.randint(0, 6, (50,), generator=generator), torch.rand(50, generator=generator)
    whole, parts = LossSecondMomentSampler(6, 3), LossSecondMomentSampler(6, 3)
    whole.observe(t, losses)
    for part in (slice(0, 7), slice(7, 8), slice(8, 50)):
        parts.observe(t[part], losses[part])
    assert torch.equal(whole.probabilities(), parts.probabilities())


@pytest.mark.parametrize("make", [lambda: UniformSampler(1025), lambda: LossSecondMomentSampler(40),
                                  lambda: filled(LossSecondMomentSampler(40, 4))])
def test_inverse_distribution_and_weights(make):
    """Oracle: a fine grid of uniform numbers meets each t in proportion to p(t); weight * p(t) * T is 1."""
    sampler = make()
    uniforms = (torch.arange(2 ** 20) + 0.5) / 2 ** 20
    t, weight = sampler.sample(uniforms)
    assert t.dtype == torch.int64 and weight.dtype == torch.float32
    shares = t.bincount(minlength=sampler.num_timesteps).double() / len(t)
    expected = sampler.probabilities() if isinstance(sampler, LossSecondMomentSampler) else 1 / sampler.num_timesteps
    assert float((shares - expected).abs().max()) < 1e-5
    assert float((weight.double() * (shares * sampler.num_timesteps)[t] - 1).abs().max()) < 0.02
    ends, _ = sampler.sample(torch.tensor([0.0, 1 - 2 ** -24]))
    assert ends.tolist() == [0, sampler.num_timesteps - 1]


def test_uniform_until_every_history_is_full():
    """Oracle: weight 1 for all timesteps."""
    sampler = LossSecondMomentSampler(3, 2)
    sampler.observe(torch.tensor([0, 0, 1, 1, 2]), torch.ones(5))
    assert torch.equal(sampler.sample(torch.rand(9))[1], torch.ones(9))
    sampler.observe(torch.tensor([2]), torch.ones(1) * 9)
    assert sampler.sample(torch.tensor([0.99]))[1] < 1


def test_state():
    """Oracle: the sampler that the state was taken from."""
    sampler = filled(LossSecondMomentSampler(40, 4))
    other = LossSecondMomentSampler(40, 4)
    other.load_state_dict(sampler.state_dict())
    assert torch.equal(other.probabilities(), sampler.probabilities())
    sampler.observe(torch.tensor([3, 3]), torch.tensor([1.0, 2.0]))
    other.observe(torch.tensor([3, 3]), torch.tensor([1.0, 2.0]))
    assert torch.equal(other.probabilities(), sampler.probabilities())
    with pytest.raises(ValueError, match=r"\(40, 4\) in the checkpoint, \(40, 10\)"):
        LossSecondMomentSampler(40).load_state_dict(sampler.state_dict())
    assert UniformSampler(4).state_dict() == {}
    with pytest.raises(ValueError, match="history"):
        UniformSampler(4).load_state_dict(sampler.state_dict())
