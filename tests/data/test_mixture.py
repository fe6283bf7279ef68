"""Mixtures: whose sample comes when, and what becomes of labels, captions and broken samples."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dstrain.data.mixture import MixtureOrder, whole

WEIGHTS = st.lists(st.integers(1, 10**6), min_size=1, max_size=6)


@given(weights=WEIGHTS, seed=st.integers(-2**63, 2**64), begin=st.integers(0, 2**40), number=st.integers(1, 700))
@settings(max_examples=60, deadline=None)
def test_places_and_counts_are_those_of_counting(weights, seed, begin, number):
    """Oracle: counting the stream one sample after the other: over whole blocks each place of each source is taken once,
    in no gap, and `counts` is the count.
    """
    order = MixtureOrder((5,) * len(weights), tuple(weights), seed)
    begin -= begin % 256
    before = order.counts(begin)
    sources, places = order.places(np.arange(begin, begin + 3 * 256))
    for k in range(len(weights)):
        own = np.sort(places[sources == k])
        assert np.array_equal(own, np.arange(before[k], before[k] + len(own)))
    counted = np.bincount(sources[:number], minlength=len(weights)) + before
    assert counted.tolist() == order.counts(begin + number)


@given(weights=WEIGHTS, positions=st.integers(0, 2**44))
@settings(max_examples=200, deadline=None)
def test_every_source_has_its_share_at_any_time(weights, positions):
    """Oracle: the exact share, positions * weight / sum, as a fraction; less than one sample for each source away."""
    counts = MixtureOrder((1,) * len(weights), tuple(weights)).counts(positions - positions % 256)
    assert sum(counts) == positions - positions % 256
    for weight, count in zip(weights, counts):
        assert abs(count - Fraction((positions - positions % 256) * weight, sum(weights))) < len(weights)


def test_each_source_passes_through_its_own_epochs():
    """Oracle: counting: whenever a source was met k times its size, as the stream of its own places has it, each of its
    samples was met k times.
    """
    sizes, weights = (7, 40, 100), (3, 1, 2)
    order = MixtureOrder(sizes, weights, 11)
    positions = np.arange(256 * 40)
    index = order.index_at(positions)
    sources, places = order.places(positions)
    for k, size in enumerate(sizes):
        own = index[sources == k][np.argsort(places[sources == k])] - sum(sizes[:k])
        assert own.min() == 0 and own.max() == size - 1
        for epoch in own[:len(own) // size * size].reshape(-1, size):
            assert np.array_equal(np.sort(epoch), np.arange(size))
    # Ratios by samples: one pass over all is one pass over each, but for what the last block shuffles.
    natural = MixtureOrder(sizes, whole(sizes), 11)
    assert natural.counts(256 * 147) == [256 * size for size in sizes]


def test_the_order_is_a_function_of_the_position():
    """Oracle: the answer for each position by itself; positions in any order and shape, ints and tensors."""
    order = MixtureOrder((10, 20), (3, 1), 5)
    positions = np.random.default_rng(0).integers(0, 1 << 50, 300)
    one_by_one = [order.index_at(int(p)) for p in positions]
    assert all(type(index) is int for index in one_by_one)
    assert order.index_at(positions).tolist() == one_by_one
    assert order.index_at(torch.from_numpy(positions).view(3, 100)).flatten().tolist() == one_by_one
    assert MixtureOrder((10, 20), (3, 1), 6).index_at(positions).tolist() != one_by_one


def test_the_pattern_does_not_meet_the_ranks():
    """Oracle: the binomial distribution: at weights 3:1, one of four ranks that take every fourth position would get all
    samples of one source, if the slots were not shuffled.
    """
    sources, _ = MixtureOrder((10, 10), (3, 1), 0).places(np.arange(4 * 2560))
    for rank in range(4):
        assert abs(sources[rank::4].mean() - 0.25) < 0.05            # six deviations of 2,560 independent samples


@pytest.mark.parametrize("weights,numbers", [
    ((3, 1), (3, 1)), ((0.3, 0.1), (3, 1)), ((2.5, 7.5, 10), (1, 3, 4)), ((1e-9, 1), (1, 10**9)),
    ((6, 4), (3, 2)), ((1,), (1,))])
def test_weights_are_whole_in_their_ratio(weights, numbers):
    """Oracle: the ratio by hand."""
    assert whole(weights) == numbers


def test_weights_of_any_size_keep_their_ratio():
    """Oracle: the ratio as floats, at sums beyond int64; the smallest does not vanish."""
    numbers = whole((3e18, 1e18, 1))
    assert sum(numbers) <= 2**30 + 3 and numbers[2] == 1
    assert numbers[0] / numbers[1] == pytest.approx(3, rel=1e-8)
    order = MixtureOrder((4, 4, 4), numbers)
    assert sum(order.counts(2**60)) == 2**60                                # nothing overflows
