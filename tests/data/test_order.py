"""The order of the samples."""

import dataclasses
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dstrain.data.order import Order

GOLDEN = [1, 9, 4, 3, 8, 0, 7, 5, 2, 6, 9, 8, 2, 7, 4, 3, 5, 1, 0, 6]
# (size, seed): of the first indices, int64 in little-endian order; squares of whole numbers among the sizes.
CRCS = {(9, 0): 562689658, (16, 3): 705810459, (100, 7): 3123847928, (99991, -1): 3330276169, (10**6, 5): 3119797380}


@given(size=st.integers(1, 3000), seed=st.integers(-(2**63), 2**64), epoch=st.integers(0, 10**9))
@settings(max_examples=150, deadline=None)
def test_every_epoch_is_a_permutation(size, seed, epoch):
    """Oracle: the sorted indices of an epoch are 0 .. size - 1."""
    indices = Order(size, seed).find_sample_index(np.arange(size) + epoch * size)
    assert np.array_equal(np.sort(indices), np.arange(size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9, 16, 17, 255, 256, 257, 65536, 99991, 10**6])
def test_permutation_at_edges(size):
    """Oracle: bincount of an epoch is one everywhere, at squares, primes and powers of two."""
    assert (np.bincount(Order(size, 3).find_sample_index(np.arange(size) + 7 * size)) == 1).all()


def test_kinds_of_positions_agree():
    """Oracle: the int answer; arrays, tensors of any shape and ints are one function."""
    order = Order(1000, 5)
    one_by_one = [order.find_sample_index(p) for p in range(990, 1020)]
    assert all(type(index) is int for index in one_by_one)
    assert order.find_sample_index(np.arange(990, 1020)).tolist() == one_by_one
    tensor = order.find_sample_index(torch.arange(990, 1020).view(2, 15))
    assert tensor.dtype == torch.int64 and tensor.flatten().tolist() == one_by_one


def test_epochs_and_seeds_differ():
    """Oracle: two independent permutations of n have one fixed point on average (Poisson(1))."""
    n = 4000
    orders = [Order(n, seed).find_sample_index(np.arange(n) + epoch * n) for seed in (0, 1, -1) for epoch in (0, 1, 2)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one == other).sum() < 12


@pytest.mark.parametrize("size", [3, 5, 10, 64, 100])
def test_places_are_uniform(size):
    """Oracle: chi-square of (place, index) counts over epochs; its mean is (n-1)^2, its variance
    twice that.
    """
    epochs = 3000
    places = np.tile(np.arange(size), epochs)
    indices = Order(size, 11).find_sample_index(np.arange(epochs * size))
    counts = np.zeros((size, size))
    np.add.at(counts, (places, indices), 1)
    chi = ((counts - epochs / size) ** 2 / (epochs / size)).sum()
    freedom = (size - 1) ** 2
    assert abs(chi - freedom) < 5 * (2 * freedom) ** 0.5 + 5


def test_neighbours_are_unrelated():
    """Oracle: the serial correlation of a random permutation is 0 +- 1 / sqrt(n), also across its
    halves' boundary.
    """
    n = 100_000
    x = Order(n, 2).find_sample_index(np.arange(n)).astype(float)
    for lag in (1, 2, 316, 317, n // 2):
        assert abs(np.corrcoef(x[:-lag], x[lag:])[0, 1]) < 5 / (n - lag) ** 0.5


def test_a_billion_samples():
    """Oracle: distinct indices in range, of uniform mean, where no permutation could be stored."""
    n = 10**9
    indices = Order(n, 0).find_sample_index(np.arange(10**5) + 12 * n)
    assert len(np.unique(indices)) == 10**5 and indices.min() >= 0 and indices.max() < n
    assert abs(indices.mean() / n - 0.5) < 0.005
    assert 0 <= Order(1 << 62, 1).find_sample_index(1 << 62) < 1 << 62


def test_order_never_changes():
    """Oracle: indices written down when the order was made; another order would break every
    resume.
    """
    assert (
        Order(10).find_sample_index(np.arange(20)).tolist()
        == Order(10, 0).find_sample_index(np.arange(20)).tolist()
        == GOLDEN
    )
    for (size, seed), crc in CRCS.items():
        places = np.arange(min(3 * size, 10_000))
        assert zlib.crc32(Order(size, seed).find_sample_index(places).astype("<i8").tobytes()) == crc


@pytest.mark.parametrize("size", [0, -1, 2**62 + 1])
def test_impossible_sizes(size):
    """Oracle: the contract, 1 to 2^62 samples, also later: an order is a value."""
    with pytest.raises(ValueError, match="samples"):
        Order(size)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Order(1).size = size


def test_negative_position():
    """Oracle: the contract, positions are at least 0."""
    with pytest.raises(ValueError, match="at least 0"):
        Order(10).find_sample_index(np.array([3, -1]))
