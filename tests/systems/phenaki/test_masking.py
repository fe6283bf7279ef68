"""Which tokens are masked in training."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dstrain import rng
from dstrain.systems.phenaki import masking
from dstrain.systems.phenaki.tokenizer.network import mark_latent_frames_without_padding


@pytest.mark.parametrize("u", [0.0, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("real", [1, 4, 100, 9216])
def test_number(u, real):
    """Oracle: max(1, round(real cos(pi/2 u))) by the math library."""
    found = masking.count_tokens_to_mask(torch.tensor([u], dtype=torch.float64), torch.tensor([real]))
    assert found.item() == max(1, round(real * math.cos(math.pi / 2 * u)))


def test_mean_ratio():
    """Oracle: the integral of cos(pi/2 u) over [0, 1], 2 / pi."""
    u = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    assert masking.compute_masked_share(u).mean().item() == pytest.approx(masking.MEAN_RATIO, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 40), data=st.data())
def test_masks(seed, count, data):
    """Oracle: the formula's number, the lowest noise by sorting in Python, and only real tokens."""
    real = torch.tensor([data.draw(st.lists(st.booleans(), min_size=count, max_size=count))])
    real[0, data.draw(st.integers(0, count - 1))] = True
    key = rng.keys(seed, 0, torch.arange(1))
    u, noise = rng.uniform(key, "u"), rng.uniform(key, "noise", (count,))
    found = masking.choose_masked_tokens(u, noise, real)[0]
    number = max(1, round(int(real.sum()) * math.cos(math.pi / 2 * u.item())))
    order = sorted(torch.nonzero(real[0])[:, 0].tolist(), key=lambda place: noise[0, place].item())
    assert torch.nonzero(found)[:, 0].tolist() == sorted(order[:number])


def test_equal_scores():
    """Oracle: the first of equal ones, so that no device's sorting decides; never more than were asked for."""
    found = masking.mark_lowest_scores(torch.tensor([[1.0, 0.0, 1.0, 1.0]]), torch.tensor([2]))
    assert found.tolist() == [[True, True, False, False]]
    assert masking.mark_lowest_scores(torch.zeros(2, 3), torch.tensor([0, 3])).tolist() == [[False] * 3, [True] * 3]


@pytest.mark.parametrize("patch", [1, 2, 4])
def test_real_frames(patch):
    """Oracle: a count of the latent frames whose last frame, 1 + k patch, is a real one."""
    frames = torch.arange(1, 14)
    found = mark_latent_frames_without_padding(frames, patch, 13)
    assert found.sum(1).tolist() == [sum(1 + k * patch <= count for k in range(13)) for count in range(1, 14)]
    assert not bool((found[:, 1:] & ~found[:, :-1]).any())
