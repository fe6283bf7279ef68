"""Buckets: samples of one shape each, such as 320 x 192, so that pictures keep their aspect and a batch has one shape.

Every sample belongs to one bucket (`choose_buckets`), and every optimizer step takes its global batch from one bucket,
so that all ranks meet the same shape. `BucketOrder` says which: a function of (seed, step) alone, at any number of
ranks.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dstrain.data.order import Order
from dstrain.recipe import ConfigError

_STRIDE = 0x9E3779B97F4A7C15  # between the seeds of two buckets


@dataclass(frozen=True)
class BucketOrder:
    """As `Order`, over samples that are sorted by bucket, so that each global batch lies in one bucket.

    counts: samples of each bucket, in the order of the samples. A bucket has a stream of its own, which passes over all
    of its samples in each of its epochs; its batches are cut from that stream one after the other. In the first e
    epochs of the data a bucket of n samples gives floor(e n / global_batch) batches: what does not fill a batch goes
    over into the next epoch, so no sample is dropped, and none has an extra turn. The batches of all buckets in an
    epoch take their turns in a permutation of that epoch. Nothing is stored; a step costs O(buckets).
    """

    counts: tuple[int, ...]
    global_batch: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not sum(self.counts):
            raise ConfigError("an order needs at least one sample: is the data set empty?")

    def count_steps(self, epochs: int) -> int:
        """Returns the steps of the first `epochs` passes over the data."""
        return sum(epochs * count // self.global_batch for count in self.counts)

    def find_batch(self, step: int) -> tuple[int, int]:
        """Returns the bucket of a step, and which of its bucket's batches it is."""
        epoch = self._find_epoch(step)
        first, last = (np.array(self.counts, object) * number // self.global_batch for number in (epoch, epoch + 1))
        ends = np.cumsum(last - first)
        turn = Order(int(ends[-1]), self.seed).index_at(epoch * int(ends[-1]) + step - self.count_steps(epoch))
        bucket = int(np.searchsorted(ends, turn, side="right"))
        return bucket, int(last[bucket] - ends[bucket] + turn)

    def _find_epoch(self, step: int) -> int:
        """Returns the last epoch that begins at `step` or before. Rounding down takes less than a step from each
        bucket.
        """
        total = sum(self.counts)
        low, high = (value * self.global_batch // total for value in (step, step + len(self.counts)))
        high += 1
        while high - low > 1:  # steps(low) <= step < steps(high)
            middle = (low + high) // 2
            low, high = (middle, high) if self.count_steps(middle) <= step else (low, middle)
        return low

    def index_at(self, position: Tensor) -> Tensor:
        """Returns the samples at stream positions >= 0, int64 (b,) each."""
        index = torch.empty_like(position)
        steps = position // self.global_batch
        for step in steps.unique().tolist():
            rows = steps == step
            bucket, batch = self.find_batch(step)
            order = Order(self.counts[bucket], self.seed ^ _STRIDE * (bucket + 1))
            within = position[rows] + (batch - step) * self.global_batch
            index[rows] = order.index_at(within) + sum(self.counts[:bucket])
        return index


def choose_buckets(sizes: np.ndarray, shapes: tuple[tuple[int, int], ...], max_upscale: float = 1.0) -> np.ndarray:
    """Returns the bucket of each picture: sizes (N, 2) and shapes as (width, height) -> int64 (N,).

    It is the one nearest in log(width / height), the first of several. Where shapes have several resolutions, which are
    areas of about the same power of two, it is of the highest one that enlarges the picture `max_upscale` times at
    most, else of the lowest. A size of 0, which is not known, counts as a small square.
    """
    sides, targets = np.maximum(sizes, 1).astype(np.float64), np.array(shapes, np.float64)
    aspects = np.log(sides[:, 0] / sides[:, 1])
    resolution = np.round(np.log2(targets.prod(1)))
    bucket = np.full(len(sides), -1)
    for level in np.unique(resolution):  # from the lowest: a higher one that fits replaces it
        members = np.flatnonzero(resolution == level)
        distance = np.abs(aspects[:, None] - np.log(targets[members, 0] / targets[members, 1]))
        choice = members[np.round(distance, 9).argmin(1)]  # 9 digits: equally near is equal on every machine
        fits = compute_upscale(sides, targets[choice]) <= max_upscale
        bucket = np.where(fits | (bucket < 0), choice, bucket)
    return bucket


def compute_upscale(sizes: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Returns how many times pictures (N, 2) are enlarged to cover targets (N, 2): float64 (N,), below 1 if reduced."""
    return (targets / np.maximum(sizes, 1)).max(1)
