"""Finds which of the numbers 0 .. n - 1 belong to a split, by a hash of each number, without a list of all numbers.

The hash of a number decides whether it is held out, so only the count of members in each block of 128 numbers is kept:
6 MB for 100 million samples. A lookup hashes one block a sample, some 4 us.
"""

import numpy as np
import torch

from dstrain import rng

_BLOCK = 128
_CHUNK = 1 << 16  # numbers hashed at once: what they need fits into a core's cache
_HELD_ENDS: dict[tuple[int, float], np.ndarray] = {}  # of the folder that was opened last, since its splits follow


class Members:
    """The members of a split among the numbers 0 to `number` - 1, in ascending order. The split "held_out" has the
    numbers whose hash, uniform in [0, 1), is below the share `held_out`; any other split has all other numbers.
    """

    def __init__(self, number: int, held_out: float, split: str) -> None:
        self.number, self.held_out, self.split = number, held_out, split
        self.ends = _cumulate_member_counts_by_block(number, held_out, split)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def find_members_at(self, positions: np.ndarray) -> np.ndarray:
        """Returns the members at the positions int64 (b,) in the ascending list of all members: int64 (b,)."""
        block = np.searchsorted(self.ends, positions, side="right")  # (b,)
        place = positions - np.where(block > 0, self.ends[block - 1], 0)  # within the block
        numbers = block[:, None] * _BLOCK + np.arange(_BLOCK)  # (b, _BLOCK)
        inside = self.contains(numbers.ravel()).reshape(numbers.shape) & (numbers < self.number)
        return numbers[inside & (inside.cumsum(1) == place[:, None] + 1)]

    def contains(self, numbers: np.ndarray) -> np.ndarray:
        """Returns whether each of the numbers int64 (b,) is a member: bool (b,)."""
        held = _are_held_out(numbers, self.held_out)
        return held if self.split == "held_out" else ~held


def _are_held_out(numbers: np.ndarray, share: float) -> np.ndarray:
    """Returns whether each of the numbers int64 (b,) is held out: bool (b,). A number is held out if its hash, uniform
    in [0, 1), is below `share`.
    """
    return (rng.uniform(rng.keys_of_seeds(torch.from_numpy(numbers)), "held_out") < share).numpy()


def _cumulate_member_counts_by_block(number: int, share: float, split: str) -> np.ndarray:
    """Returns cumulative counts int64 (blocks,). The numbers 0 .. number - 1 are divided into blocks of 128; a count
    says how many of the numbers up to the end of a block are members of the split. Caches the counts of the last
    `number` and `share`.
    """
    if (number, share) not in _HELD_ENDS:
        counts = [
            np.add.reduceat(
                _are_held_out(np.arange(start, min(start + _CHUNK, number)), share),
                np.arange(0, min(_CHUNK, number - start), _BLOCK),
                dtype=np.int64,
            )
            for start in range(0, number, _CHUNK)
        ]
        _HELD_ENDS.clear()
        _HELD_ENDS[number, share] = np.concatenate([np.zeros(0, np.int64), *counts]).cumsum()
    held = _HELD_ENDS[number, share]
    return held if split == "held_out" else np.minimum(np.arange(1, len(held) + 1) * _BLOCK, number) - held
