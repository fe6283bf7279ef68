"""Buckets: which one a picture belongs to, and the order of their batches."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dstrain.data.bucket_order import BucketOrder, choose_buckets
from dstrain.data.order import Order
from dstrain.recipe import ConfigError

COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=6).map(tuple).filter(any)


def _bucket_of(counts, index):
    return np.searchsorted(np.cumsum(counts), index, side="right")


@given(counts=COUNTS, batch=st.integers(1, 9), seed=st.integers(0, 2**63 - 1), epochs=st.integers(1, 6))
@settings(max_examples=80, deadline=None)
def test_each_epoch_takes_each_sample_once(counts, batch, seed, epochs):
    """Oracle: the law by counting. A step has one bucket; in e epochs a bucket of n gives floor(e n / batch) batches;
    and all that a bucket gives, in order of its batches, passes over its samples again and again, each once."""
    order = BucketOrder(counts, batch, seed)
    steps = order.count_steps(epochs)
    taken = [[] for _ in counts]
    for step in range(steps):
        bucket, number = order.find_bucket_and_batch(step)
        index = order.find_sample_index(torch.arange(step * batch, (step + 1) * batch)).numpy()
        assert (_bucket_of(counts, index) == bucket).all()
        taken[bucket].append((number, index))
    for bucket, count in enumerate(counts):
        batches = sorted(taken[bucket], key=lambda pair: pair[0])
        assert [number for number, _ in batches] == list(range(epochs * count // batch))
        stream = np.concatenate([index for _, index in batches]) if batches else np.zeros(0, int)
        for start in range(0, len(stream), max(count, 1)):
            part = stream[start : start + count]
            assert len(np.unique(part)) == len(part)


@given(counts=COUNTS, batch=st.integers(1, 9), epoch=st.integers(0, 10**9))
@settings(max_examples=80, deadline=None)
def test_a_far_step_belongs_to_its_epoch(counts, batch, epoch):
    """Oracle: an epoch's steps are those between the totals of two epochs, whose batches are each
    bucket's next ones.
    """
    order = BucketOrder(counts, batch, 3)
    first, last = order.count_steps(epoch), order.count_steps(epoch + 1)
    drawn = sorted(order.find_bucket_and_batch(step) for step in range(first, last))
    assert drawn == [
        (bucket, number)
        for bucket, count in enumerate(counts)
        for number in range(epoch * count // batch, (epoch + 1) * count // batch)
    ]


def test_any_division_of_a_step_gives_the_same_samples():
    """Oracle: the whole step at once, for 1,024 ranks, in a data set of 100 million samples; nothing is stored."""
    order, batch = BucketOrder((60_000_000, 39_999_000, 1000), 8192, 5), 8192
    whole = order.find_sample_index(torch.arange(7 * batch, 8 * batch))
    ranks = [
        order.find_sample_index(torch.arange(7 * batch + rank * 8, 7 * batch + (rank + 1) * 8)) for rank in range(1024)
    ]
    assert torch.equal(whole, torch.cat(ranks)) and len(whole.unique()) == batch
    both = order.find_sample_index(torch.arange(7 * batch - 4, 7 * batch + 4))
    assert torch.equal(both[4:], whole[:4])


def test_batches_of_buckets_are_mixed():
    """Oracle: two buckets of 500 batches each; without a permutation they would change once, not about 500 times."""
    order = BucketOrder((5000, 5000), 10)
    buckets = [order.find_bucket_and_batch(step)[0] for step in range(1000)]
    assert 400 < np.count_nonzero(np.diff(buckets)) < 600
    again = [order.find_bucket_and_batch(step)[0] for step in range(1000, 2000)]
    assert again != buckets and buckets != [
        BucketOrder((5000, 5000), 10, 1).find_bucket_and_batch(step)[0] for step in range(1000)
    ]


def test_without_samples():
    with pytest.raises(ConfigError, match="at least one sample"):
        BucketOrder((0, 0), 4)


def test_the_nearest_bucket():
    """Oracle: by hand. log(3/2) = 0.41 lies nearer to log(320/192) = 0.51 than to 0, and log(5/4) = 0.22 to 0."""
    shapes = ((256, 256), (320, 192), (192, 320))
    sizes = np.array([[600, 400], [500, 400], [400, 600], [2000, 200], [256, 256], [0, 0]])
    assert choose_buckets(sizes, shapes).tolist() == [1, 0, 2, 1, 0, 0]


def test_the_highest_resolution_that_does_not_enlarge():
    """Oracle: by hand. 600 x 600 covers 512 x 512, 400 x 400 does with a limit of 1.28 and above, 100 x 100 covers
    neither, and then the lowest is taken. A long picture takes the long shape of its resolution."""
    shapes = ((512, 512), (256, 256), (640, 384), (320, 192))
    sizes = np.array([[600, 600], [400, 400], [100, 100], [900, 540], [400, 240]])
    assert choose_buckets(sizes, shapes).tolist() == [0, 1, 1, 2, 3]
    assert choose_buckets(sizes, shapes, 1.28).tolist() == [0, 0, 1, 2, 3]


@given(shape=st.tuples(st.integers(8, 512), st.integers(8, 512)), size=st.tuples(*[st.integers(1, 4096)] * 2))
@settings(max_examples=50, deadline=None)
def test_of_one_resolution_none_is_nearer(shape, size):
    """Oracle: all distances, where every shape has as many pixels."""
    shapes = tuple((shape[0] * 2**power, shape[1] * 2 ** (6 - power)) for power in range(7))
    distances = [abs(np.log(size[0] / size[1] * high / wide)) for wide, high in shapes]
    chosen = choose_buckets(np.array([size]), shapes)[0]
    assert distances[chosen] <= min(distances) + 1e-8


def test_one_bucket_is_the_plain_order_of_its_samples():
    """Oracle: Order of the bucket's seed; batches of one bucket alone are the same set, in another turn."""
    order = BucketOrder((12,), 3)
    taken = order.find_sample_index(torch.arange(12)).view(4, 3).tolist()
    plain = Order(12, order.seed ^ 0x9E3779B97F4A7C15).find_sample_index(torch.arange(12)).view(4, 3).tolist()
    assert sorted(taken) == sorted(plain)
