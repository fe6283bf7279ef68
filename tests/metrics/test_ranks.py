"""Figures of one, two and four ranks."""

from pathlib import Path

import pytest

from tests.metrics.oracles import measured, two_sets
from tests.support import gloo

SIZES = (5, 16, 48)  # batches


def work(rank: int, first: Path, second: Path) -> list[dict[str, float]]:
    return [*(measured(first, second, size) for size in SIZES), measured(first, second, 7, keep=31)]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_and_batches_agree(tmp_path, world):
    """Oracle: one process with batches of 16; some ranks of four have nothing at all in batches of 48."""
    sets = two_sets(tmp_path)
    alone = [*[measured(*sets, 16)] * len(SIZES), measured(*sets, 16, keep=31)]
    for values_of_rank in gloo.run(tmp_path, work, *sets, world=world):
        for values, expected in zip(values_of_rank, alone, strict=True):
            assert values == pytest.approx(expected, rel=1e-6)
