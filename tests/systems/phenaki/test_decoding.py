"""Iterative decoding: what it keeps, what it finds, what decides."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dstrain import rng
from dstrain.nn.quantize import draw_gumbel_noise
from dstrain.systems.phenaki.config import Decoding
from dstrain.systems.phenaki.decoding import draw_unknown_tokens

IDS = 7


class Oracle:
    """Knows the true tokens, and keeps what it is asked."""

    def __init__(self, truth):
        self.truth, self.seen = truth, []

    def __call__(self, tokens, uniforms, temperature):
        self.seen.append((tokens.clone(), uniforms, temperature))
        return torch.where(tokens == IDS, self.truth, tokens), torch.zeros(tokens.shape)


def chance(tokens, uniforms, temperature):
    """Ids and certainties from the uniforms alone."""
    u = uniforms.view(tokens.shape)
    return torch.where(tokens == IDS, (u * IDS).long(), tokens), u.clamp(min=1e-6).log()


def keys(count, seed=0):
    return rng.keys_of_seeds(torch.arange(seed, seed + count))


def grid(seed, batch=2, shape=(3, 2, 2)):
    return torch.randint(IDS, (batch, *shape), generator=torch.Generator().manual_seed(seed))


@settings(max_examples=80, deadline=None)
@given(
    steps=st.integers(1, 40),
    seed=st.integers(0, 10**6),
    sample=st.sampled_from([0.0, 0.9, 5.0]),
    confidence=st.sampled_from([0.0, 4.5, 100.0]),
    noise=st.sampled_from([0.0, 1.0, 30.0]),
    schedule=st.sampled_from(["fixed", "decay", "increase"]),
    critic=st.booleans(),
    data=st.data(),
)
def test_no_mask_token_is_left(steps, seed, sample, confidence, noise, schedule, critic, data):
    """Oracle: the given tokens, bit for bit, and no id that is the mask token's, whatever the steps and the noise."""
    tokens = grid(seed)
    given_ = torch.tensor(data.draw(st.lists(st.booleans(), min_size=24, max_size=24))).view(tokens.shape)
    choices = Decoding(
        sample_temperature=sample, confidence_temperature=confidence, critic_noise=noise, critic_noise_schedule=schedule
    )
    found = draw_unknown_tokens(
        chance, tokens, given_, IDS, keys(2, seed), steps, choices, (lambda x: x.float()) if critic else None
    )
    assert torch.equal(found[given_], tokens[given_])
    assert int(found.min()) >= 0 and int(found.max()) < IDS


@pytest.mark.parametrize("steps", [1, 2, 18, 30])
@pytest.mark.parametrize("critic", [None, lambda x: torch.zeros(x.shape), lambda x: -x.float()])
def test_an_oracle_finds_its_own_tokens(steps, critic):
    """Oracle: the truth that the network knows."""
    truth = grid(3, 5)
    network = Oracle(truth)
    nothing = torch.zeros(truth.shape, dtype=torch.bool)
    assert torch.equal(draw_unknown_tokens(network, grid(4, 5), nothing, IDS, keys(5), steps, criticize=critic), truth)
    assert len(network.seen) == steps and bool((network.seen[0][0] == IDS).all())


@pytest.mark.parametrize("critic", [False, True])
def test_the_schedule(critic):
    """Oracle: max(1, floor(n cos(pi/2 (i + 1) / S))) mask tokens before step i + 1, n differing by sample; temperatures
    by hand.
    """
    truth, steps = grid(0, 2, (4, 4, 4)), 6
    given_ = torch.zeros(2, 4, 4, 4, dtype=torch.bool)
    given_[1, :2] = True
    for schedule in ("fixed", "decay"):
        network, choices = Oracle(truth), Decoding(sample_temperature=0.9, sample_temperature_schedule=schedule)
        draw_unknown_tokens(
            network, truth, given_, IDS, keys(2), steps, choices, (lambda x: x.float()) if critic else None
        )
        for step, (tokens, _, temperature) in enumerate(network.seen):
            left = (tokens == IDS).flatten(1).sum(1).tolist()
            assert left == [max(1, math.floor(n * math.cos(math.pi / 2 * step / steps))) for n in (64, 32)]
            assert temperature == pytest.approx(0.9 * (1 - (step + 1) / steps) if schedule == "decay" else 0.9)


def test_few_tokens_take_every_step():
    """Oracle: a critic has the doubtful one of two tokens drawn again at every step, although floor(2 cos) is 0."""
    network, truth = Oracle(grid(0, 1, (1, 1, 2))), grid(0, 1, (1, 1, 2))
    draw_unknown_tokens(
        network, truth, torch.zeros(1, 1, 1, 2, dtype=torch.bool), IDS, keys(1), 6, criticize=lambda x: x.float()
    )
    assert [int((tokens == IDS).sum()) for tokens, _, _ in network.seen] == [2, 1, 1, 1, 1, 1]


def test_confidence_keeps_the_likeliest():
    """Oracle: the certainties plus annealed Gumbel noise of the draws by name, sorted here; what is kept stays."""
    truth, steps = grid(1, 1, (2, 4, 4)), 4
    certainty = torch.linspace(-5, 0, 32).view(truth.shape)
    seen = []

    def predict(tokens, uniforms, temperature):
        seen.append(tokens == IDS)
        return torch.where(tokens == IDS, truth, tokens), certainty

    for noise in (0.0, 4.5):
        seen.clear()
        draw_unknown_tokens(
            predict,
            truth,
            torch.zeros(truth.shape, dtype=torch.bool),
            IDS,
            keys(1),
            steps,
            Decoding(confidence_temperature=noise),
        )
        for step in range(steps - 1):
            before, after = seen[step].flatten(), seen[step + 1].flatten()
            trust = (
                certainty.flatten()
                + noise * (1 - (step + 1) / steps) * draw_gumbel_noise(keys(1), f"choice/{step}", (32,))[0]
            )
            kept, masked = trust[before & ~after], trust[after]
            assert bool((after <= before).all()) and float(kept.min()) > float(masked.max())


def test_a_critic_masks_what_it_doubts():
    """Oracle: the places with the largest logits, kept tokens among them; given tokens never, however doubted."""
    truth, steps = grid(2, 1, (2, 4, 4)), 4
    doubt = torch.linspace(-3, 3, 32)[torch.randperm(32, generator=torch.Generator().manual_seed(0))].view(truth.shape)
    given_ = torch.zeros(truth.shape, dtype=torch.bool)
    given_[0, 0, 0] = True
    doubt[given_] = 99.0
    network = Oracle(truth)
    draw_unknown_tokens(network, truth, given_, IDS, keys(1), steps, Decoding(critic_noise=0.0), lambda x: doubt)
    for tokens, _, _ in network.seen[1:]:
        masked = (tokens == IDS).flatten()
        order = torch.where(given_, -99.0, doubt).flatten().argsort(descending=True)[: int(masked.sum())]
        assert set(order.tolist()) == set(torch.nonzero(masked)[:, 0].tolist())
    # What one step keeps, a later one may mask again.
    flips = iter([doubt, -doubt, doubt])
    network = Oracle(truth)
    draw_unknown_tokens(network, truth, given_, IDS, keys(1), steps, Decoding(critic_noise=0.0), lambda x: next(flips))
    one, two = (tokens == IDS for tokens, _, _ in network.seen[1:3])
    assert bool((two & ~one).any())


@pytest.mark.parametrize(
    "schedule, expected", [("fixed", [2.0] * 4), ("decay", [1.5, 1.0, 0.5, 0.0]), ("increase", [0.5, 1.0, 1.5, 2.0])]
)
def test_schedules_of_critic_noise(schedule, expected):
    """Oracle: widths written out."""
    choices = Decoding(critic_noise=2.0, critic_noise_schedule=schedule)
    assert [choices.compute_critic_noise_width(done) for done in (0.25, 0.5, 0.75, 1.0)] == pytest.approx(expected)


@pytest.mark.parametrize("critic", [None, lambda x: torch.zeros(x.shape)])
def test_a_sample_belongs_to_its_key(critic):
    """Oracle: the same keys decoded alone and in another order; another key gives other tokens."""
    tokens, nothing = grid(5, 6), torch.zeros(6, 3, 2, 2, dtype=torch.bool)

    def run(index):
        return draw_unknown_tokens(chance, tokens[index], nothing[index], IDS, keys(6)[index], 5, criticize=critic)

    whole = run(torch.arange(6))
    for index in (torch.tensor([4]), torch.tensor([5, 0, 3])):
        assert torch.equal(run(index), whole[index])
    assert len({tuple(row.flatten().tolist()) for row in whole}) == 6


def test_no_steps():
    """Oracle: a ValueError that names the key."""
    with pytest.raises(ValueError, match="num_steps: 0 steps decode nothing"):
        draw_unknown_tokens(chance, grid(0), torch.zeros(2, 3, 2, 2, dtype=torch.bool), IDS, keys(2), 0)
