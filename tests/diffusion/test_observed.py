"""What ranks observe together, by the call that ends a step of the loop: one state, whatever the split."""

import pytest
import torch
from torch import Tensor

from dstrain.diffusion.timesteps import LossSecondMomentSampler
from dstrain.distributed import group
from tests.support import gloo

STEPS, ROWS, TIMESTEPS = 6, 96, 5  # 96 losses a step meet 5 timesteps: order decides what is kept


def seen(step: int) -> dict[str, Tensor]:
    """What all ranks together meet in a step, in the order of the global batch, (ROWS, ...) each."""
    generator = torch.Generator().manual_seed(step)
    return {
        "position": torch.arange(ROWS),
        "t": torch.randint(0, TIMESTEPS, (ROWS,), generator=generator),
        "loss": torch.rand(ROWS, generator=generator) + 0.1,
        "pair": torch.randn(ROWS, 2, generator=generator).bfloat16(),
    }


def share(rank: int, world: int, step: int) -> list[dict[str, Tensor]]:
    """A rank's micro-batches: shuffled over the ranks, which have as many rows, the last one smaller."""
    mine = torch.randperm(ROWS, generator=torch.Generator().manual_seed(100 + step))[rank::world]
    return [{name: values[part] for name, values in seen(step).items()} for part in mine.flip(0).split(9)]


def observe(rank: int, world: int) -> dict[str, Tensor]:
    """The state after STEPS steps, and the rows of the last one as the rank saw them."""
    sampler = LossSecondMomentSampler(TIMESTEPS, 4)
    for step in range(STEPS):
        micros = share(rank, world, step)
        rows = {name: torch.cat([micro[name] for micro in micros]) for name in micros[0]}
        ordered = group.gather_rows_by_position(rows.pop("position"), rows)
        sampler.observe(ordered["t"], ordered["loss"])
    return sampler.state_dict() | ordered


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_any_split_leaves_one_state(tmp_path, world):
    """Oracle: the whole batch, in order, observed by a sampler that never met a rank; bit for bit, on every rank."""
    alone = LossSecondMomentSampler(TIMESTEPS, 4)
    for step in range(STEPS):
        whole = seen(step)
        alone.observe(whole["t"], whole["loss"])
    expected = alone.state_dict() | {name: whole[name] for name in ("t", "loss", "pair")}
    found = gloo.run(tmp_path, observe, world, world=world) if world > 1 else [observe(0, 1)]
    assert len(found) == world
    for state in found:
        assert list(state) == list(expected)
        for name, values in expected.items():
            assert state[name].dtype == values.dtype and torch.equal(state[name], values), name


def test_order_decides():
    """Oracle: the same rows in another order leave another state; without this the test above might see nothing."""
    one, other = LossSecondMomentSampler(TIMESTEPS, 4), LossSecondMomentSampler(TIMESTEPS, 4)
    whole = seen(0)
    one.observe(whole["t"], whole["loss"])
    other.observe(whole["t"].flip(0), whole["loss"].flip(0))
    assert not torch.equal(one.state_dict()["history"].sort().values, other.state_dict()["history"].sort().values)
