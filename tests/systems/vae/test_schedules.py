"""Temperatures and weights as functions of the step."""

import math

import pytest
import torch

from dstrain.systems.vae.config import Temperature
from dstrain.systems.vae.schedules import compute_kl_weight, compute_temperature, get_final_temperature


def at(schedule, *steps):
    return compute_temperature(schedule, torch.tensor(steps)).tolist()


def test_exponential():
    """Oracle: the geometric mean half-way; the ends; constant afterwards."""
    schedule = Temperature(start=1.0, minimum=1 / 16, steps=150_000)
    assert at(schedule, 0, 75_000, 150_000, 3_000_000) == pytest.approx([1, 1 / 4, 1 / 16, 1 / 16])
    first, second, third = at(schedule, 10_000, 20_000, 30_000)
    assert second / first == pytest.approx(third / second)


def test_cosine():
    """Oracle: the arithmetic mean half-way; flat at both ends."""
    schedule = Temperature(schedule="cosine", start=1.0, minimum=1 / 16, steps=1000)
    assert at(schedule, 0, 500, 1000, 2000) == pytest.approx([1, 17 / 32, 1 / 16, 1 / 16])
    assert at(schedule, 1)[0] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("rate, minimum", [(1e-6, 0.5), (3e-5, 0.1)])
def test_legacy(rate, minimum):
    """Oracle: train_vae's loop: after every hundredth iteration temp = max(temp * exp(-rate * step), minimum)."""
    schedule = Temperature(schedule="legacy", start=1.0, minimum=minimum, rate=rate)
    temperature, expected = 1.0, []
    for step in range(13_000):
        expected.append(temperature)
        if step % 100 == 0:
            temperature = max(temperature * math.exp(-rate * step), minimum)
    assert at(schedule, *range(13_000)) == pytest.approx(expected, rel=1e-6)


def test_legacy_reaches_half_early():
    """Oracle: the step measured on the original, 11,801, where a plain exponential would need 693,147."""
    schedule = Temperature(schedule="legacy", start=1.0, minimum=0.5, rate=1e-6)
    before, after = at(schedule, 11_800, 11_801)
    assert before > 0.5 == after


def test_constant():
    """Oracle: the start, also where held-out data are measured."""
    schedule = Temperature(schedule="constant", start=0.9)
    assert at(schedule, 0, 10**6) == pytest.approx([0.9, 0.9]) and get_final_temperature(schedule) == 0.9
    assert get_final_temperature(Temperature(minimum=0.1)) == 0.1


def test_it_only_falls():
    """Oracle: a ValueError with the remedy."""
    with pytest.raises(ValueError, match="minimum 2 is above start 1.*raise start"):
        Temperature(minimum=2.0)


def test_weight():
    """Oracle: a line from 0 at step 0; without warm-up the weight."""
    assert compute_kl_weight(6.6, 5000, torch.tensor([0, 2500, 5000, 9999])).tolist() == pytest.approx(
        [0, 3.3, 6.6, 6.6]
    )
    assert compute_kl_weight(6.6, 0, torch.tensor([0, 1])).tolist() == pytest.approx([6.6, 6.6])
