"""The order of the samples: a pseudorandom permutation of each epoch, computed and never stored.

Stream position p lies in epoch p // size at place p % size. The sample there is a function of (size, seed, epoch,
place), so that resuming at any step is arithmetic: no state, no list, O(1) at any size and any world size.

The permutation is a Feistel network with cycle walking (Black and Rogaway 2002, "Ciphers with arbitrary finite
domains"). An index is written as (left, right) in Z_a x Z_b with a = ceil(sqrt(size)) and b = ceil(size / a). Each
round adds a keyed hash of one half to the other, which is a bijection of the a * b pairs. A result outside of [0, size)
goes through again until it lies inside; as a * b < size + a, hardly any does. The hash: splitmix64 (Steele 2014).
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dstrain.recipe import ConfigError

# Four rounds are a pseudorandom permutation for large halves (Luby, Rackoff); small halves mix less in each round.
_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class Order:
    """The infinite stream of sample indices of a data set: each epoch passes over all `size` samples once.

    size: samples in the data set, 1 to 2^62. seed: any int; another seed is another stream.
    """

    size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.size <= 1 << 62:
            raise ConfigError(f"an order needs between 1 and 2^62 samples, not {self.size}: is the data set empty?")

    def find_sample_index(self, position: int | np.ndarray | Tensor) -> int | np.ndarray | Tensor:
        """Returns the index of the sample at each position >= 0 of the endless stream of training samples. Returns an
        int for an int, int64 of the same shape for an array or a CPU tensor. Raises ConfigError if a position is
        negative.
        """
        if isinstance(position, Tensor):
            return torch.from_numpy(self.find_sample_index(position.numpy()))
        if not isinstance(position, np.ndarray):
            return int(self.find_sample_index(np.array([position], np.int64))[0])
        if position.size and position.min() < 0:
            raise ConfigError(f"a stream position is at least 0, not {position.min()}")
        size = np.uint64(self.size)  # the hash needs uint64, which wraps around
        a = np.uint64(math.isqrt(self.size - 1) + 1)
        b = np.uint64(-(-self.size // int(a)))
        epoch, index = np.divmod(position.astype(np.uint64), size)
        key = _hash_with_splitmix(
            _hash_with_splitmix(np.full(1, self.seed & (1 << 64) - 1, np.uint64)) + epoch * _GOLDEN
        )
        outside = np.ones(index.shape, bool)  # all go through once
        while outside.any():
            index[outside] = _permute_by_feistel_cipher(index[outside], key[outside], a, b)
            outside = index >= size
        return index.astype(np.int64)


def _permute_by_feistel_cipher(
    index: np.ndarray, key: np.ndarray, num_left: np.uint64, num_right: np.uint64
) -> np.ndarray:
    """Returns each index below num_left * num_right permuted by one pass of a Feistel cipher over Z_a x Z_b, a =
    num_left and b = num_right: uint64 (N,). key: uint64 (N,), one for each index.
    """
    left, right = np.divmod(index, num_right)
    for _ in range(_ROUNDS // 2):
        key = key + _GOLDEN
        left = (
            left + (_hash_with_splitmix(right ^ key) >> np.uint64(1))
        ) % num_left  # 63 bits: a sum that wraps would not be one-to-one
        key = key + _GOLDEN
        right = (right + (_hash_with_splitmix(left ^ key) >> np.uint64(1))) % num_right
    return left * num_right + right


def _hash_with_splitmix(values: np.ndarray) -> np.ndarray:
    """Returns a hash of each number of a uint64 array: the finalizer of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))
