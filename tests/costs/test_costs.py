"""What a run costs, counted without running it, beside what real ranks allocate, exchange and save."""

import json

import pytest

from tests.costs import check_costs
from tests.costs.check_costs import configurations

WORLDS = (1, 2, 4)
STATES = ("weights", "persistent", "masters", "moments", "gradients", "average")
ALL = [f"{world} {case} {stage} {bf16}" for world in WORLDS for case, stage, bf16 in configurations(world)]


@pytest.fixture(scope="module")
def figures(on_ranks, in_fork, tmp_path_factory):
    """Of each configuration what is real and what is counted."""
    folder = tmp_path_factory.mktemp("costs")
    for world in WORLDS:
        on_ranks(world, check_costs.real, folder, world)
    in_fork(check_costs.counted, folder, WORLDS)
    counted = json.loads((folder / "counted.json").read_text())
    real = {f"{world} {name}": found for world in WORLDS
            for name, found in json.loads((folder / f"real {world}.json").read_text()).items()}
    assert real.keys() == counted.keys()
    return {name: (real[name], counted[name]) for name in real}


@pytest.mark.parametrize("name", ALL)
def test_bytes_between_steps(figures, name):
    """Oracle: the tensors that real ranks have allocated, by kind, to the byte; their sum as tests/support/live.py
    counts it, which knows nothing of kinds.
    """
    real, counted = figures[name]
    assert {"weights", "masters", "moments", "average"} <= counted["kept"].keys()
    assert all(counted["kept"].get(kind) == real["kept"].get(kind) for kind in STATES)
    assert sum(counted["kept"].values()) == pytest.approx(real["still"], rel=0.02)


@pytest.mark.parametrize("name", ALL)
def test_peak(figures, name):
    """Oracle: the most bytes that are alive in the real command, within a fifth."""
    real, counted = figures[name]
    peak = max(sum(counted[when].values()) for when in ("passes", "update"))
    assert peak == pytest.approx(real["live"], rel=0.2)


@pytest.mark.parametrize("name", ALL)
def test_exchanges(figures, name):
    """Oracle: the collectives of a real step: operation, calls, bytes and ranks."""
    real, counted = figures[name]
    assert counted["collectives"] == real["collectives"]
    assert bool(counted["collectives"]) == (name[0] != "1")


@pytest.mark.parametrize("name", [name for name in ALL if name.split()[-2] in "13"])
def test_checkpoint(figures, name):
    """Oracle: the tensors in the files of a real checkpoint."""
    real, counted = figures[name]
    assert counted["checkpoint"] == real["checkpoint"]


def test_many_micro_batches(in_fork, tmp_path):
    """Oracle: the count of the whole step: what is extended from fewer micro-batches equals it."""
    in_fork(check_costs.many, tmp_path)
    for whole, extended in json.loads((tmp_path / "many.json").read_text()).values():
        assert extended["recomputed"] == pytest.approx(whole["recomputed"])
        assert extended["collectives"] == whole["collectives"] and extended["collectives"]
        for when in ("kept", "passes"):
            assert extended[when] == pytest.approx(whole[when], rel=0.001)
