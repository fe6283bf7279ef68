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
    """The infinite stream of sample indices, as `Order`, but each global batch holds samples of one bucket only.
    Samples are sorted by bucket.

    counts: number of samples in each bucket. A bucket has a stream of its own, which passes over all of its samples in
    each epoch and is cut into batches. In the first e epochs of the data, a bucket of n samples gives floor(e n /
    global_batch) batches: samples that do not fill a batch move to the next epoch, so none is dropped or repeated.
    Within an epoch the batches of all buckets are permuted. Nothing is stored; a step costs O(buckets).
    """

    counts: tuple[int, ...]
    global_batch: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not sum(self.counts):
            raise ConfigError("an order needs at least one sample: is the data set empty?")

    def count_steps(self, epochs: int) -> int:
        """Returns how many optimizer steps the first `epochs` passes over the data have. Samples that fill no global
        batch in one pass are taken in the next.
        """
        return sum(epochs * count // self.global_batch for count in self.counts)

    def find_bucket_and_batch(self, step: int) -> tuple[int, int]:
        """Finds the global batch of a step. Returns (its bucket, its number among all batches of this bucket in all
        epochs, from 0).
        """
        epoch = self._find_epoch(step)
        first, last = (np.array(self.counts, object) * number // self.global_batch for number in (epoch, epoch + 1))
        ends = np.cumsum(last - first)
        turn = Order(int(ends[-1]), self.seed).find_sample_index(epoch * int(ends[-1]) + step - self.count_steps(epoch))
        bucket = int(np.searchsorted(ends, turn, side="right"))
        return bucket, int(last[bucket] - ends[bucket] + turn)

    def _find_epoch(self, step: int) -> int:
        """Returns the epoch, from 0, in which a step lies."""
        total = sum(self.counts)
        # Rounding down in `count_steps` takes less than one step from each bucket, so the epoch lies between these two.
        low, high = (value * self.global_batch // total for value in (step, step + len(self.counts)))
        high += 1
        while high - low > 1:  # steps(low) <= step < steps(high)
            middle = (low + high) // 2
            low, high = (middle, high) if self.count_steps(middle) <= step else (low, middle)
        return low

    def find_sample_index(self, position: Tensor) -> Tensor:
        """Returns which sample stands at each position >= 0 of the endless stream: int64 (b,) -> int64 (b,)."""
        index = torch.empty_like(position)
        steps = position // self.global_batch
        for step in steps.unique().tolist():
            rows = steps == step
            bucket, batch = self.find_bucket_and_batch(step)
            order = Order(self.counts[bucket], self.seed ^ _STRIDE * (bucket + 1))
            within = position[rows] + (batch - step) * self.global_batch
            index[rows] = order.find_sample_index(within) + sum(self.counts[:bucket])
        return index


def choose_buckets(sizes: np.ndarray, shapes: tuple[tuple[int, int], ...], max_upscale: float = 1.0) -> np.ndarray:
    """Returns for each picture the number of the bucket with the nearest aspect, by log(width / height): int64 (N,),
    indices into `shapes`. If the shapes have several resolutions, takes a bucket of one of them: of the highest at
    which the picture is enlarged at most `max_upscale` times, else of the lowest.

    sizes: (N, 2), width and height of each picture; a side of 0 is unknown and counts as 1 pixel
    shapes: (width, height) of each bucket
    """
    sides, targets = np.maximum(sizes, 1).astype(np.float64), np.array(shapes, np.float64)
    aspects = np.log(sides[:, 0] / sides[:, 1])
    resolution = np.round(np.log2(targets.prod(1)))
    bucket = np.full(len(sides), -1)
    for level in np.unique(resolution):  # from the lowest: a higher one that fits replaces it
        members = np.flatnonzero(resolution == level)
        distance = np.abs(aspects[:, None] - np.log(targets[members, 0] / targets[members, 1]))
        choice = members[np.round(distance, 9).argmin(1)]  # 9 digits: equally near is equal on every machine
        fits = compute_upscale_factors(sides, targets[choice]) <= max_upscale
        bucket = np.where(fits | (bucket < 0), choice, bucket)
    return bucket


def compute_upscale_factors(sizes: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Returns the factor by which each picture (width, height) must be scaled to cover its target (width, height):
    float64 (N,), above 1 if it is enlarged. sizes, targets: (N, 2).
    """
    return (targets / np.maximum(sizes, 1)).max(1)
