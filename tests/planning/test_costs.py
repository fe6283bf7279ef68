"""What a run costs, counted without running it, beside what real ranks allocate, exchange and save."""

import json

import pytest

from tests.planning import check_costs
from tests.planning.check_costs import EVERY, SAMPLE, STAGES, configurations
from tests.support.sample import sampled, wants_all

STATES = ("weights", "persistent", "masters", "moments", "gradients", "average", "staging")


def list_names(stages):
    """The configurations of check_costs.py, by the names that tests give them."""
    return [f"{world} {case} {stage}" for world in stages for case, stage in configurations(stages[world])]


ALL = sampled(list_names(STAGES), list_names(SAMPLE))
SAVED = [name for name in list_names(STAGES) if name[-1] in "13"]


def both(on_ranks, in_fork, folder, stages):
    """Of each configuration what is real and what is counted."""
    from diffusers import AutoencoderKL  # noqa: F401  the forks need it: once for all of them

    for world in stages:
        on_ranks(world, check_costs.real, folder, world, stages[world])
    in_fork(check_costs.counted, folder, stages)
    counted = json.loads((folder / "counted.json").read_text())
    real = {
        f"{world} {name}": found
        for world in stages
        for name, found in json.loads((folder / f"real {world}.json").read_text()).items()
    }
    assert real.keys() == counted.keys()
    return {name: (real[name], counted[name]) for name in real}


@pytest.fixture(scope="module")
def figures(on_ranks, in_fork, tmp_path_factory, request):
    return both(on_ranks, in_fork, tmp_path_factory.mktemp("costs"), STAGES if wants_all(request) else SAMPLE)


@pytest.mark.parametrize("name", ALL)
def test_bytes_between_steps(figures, name):
    """Oracle: the tensors that real ranks have allocated, by kind, to the byte; their sum as tests/support/live.py
    counts it, which knows nothing of kinds.
    """
    real, counted = figures[name]
    assert {"weights", "moments", "average"} <= counted["kept"].keys()
    assert all(counted["kept"].get(kind) == real["kept"].get(kind) for kind in STATES)
    assert sum(size for kind, size in counted["kept"].items() if kind != "inputs") == pytest.approx(
        real["still"], rel=0.002
    )


@pytest.mark.parametrize("name", ALL)
def test_peak(figures, name):
    """Oracle: the most bytes that are alive in the real command."""
    real, counted = figures[name]
    peak = max(sum(counted[when].values()) for when in ("passes", "update"))
    if counted["on_host"]:  # a CPU has one memory for both
        assert 0.97 * peak < real["live"] < 1.03 * (peak + counted["on_host"])
        return
    assert peak == pytest.approx(real["live"], rel=0.05 if "phenaki" in name else 0.03)


@pytest.mark.parametrize("name", ALL)
def test_exchanges(figures, name):
    """Oracle: the collectives of a real step: operation, calls, bytes and ranks."""
    real, counted = figures[name]
    assert counted["collectives"] == real["collectives"]
    assert bool(counted["collectives"]) == (name[0] != "1")


@pytest.mark.parametrize("name", ALL)
def test_states_without_a_count(figures, name):
    """Oracle: the tensors that real ranks have allocated, but for padding and the networks' buffers: at most a tenth of
    networks of a few thousand weights.
    """
    real, counted = figures[name]
    for kind in ("weights", "masters", "moments", "average"):
        assert counted["states"].get(kind, 0) == pytest.approx(real["kept"].get(kind, 0), rel=0.1)
    waiting = [
        sum(kinds.get(kind, 0) for kind in ("gradients", "staging"))
        for kinds in (counted["states"], real["kept"], real["passes"])
    ]
    summed = "summed" in name or name[-1] == "3"  # else a gradient ends when it is reduced
    assert not summed or waiting[0] == pytest.approx(max(waiting[1:]), rel=0.1)


@pytest.mark.faults
def test_every_stage_on_every_number_of_ranks(on_ranks, in_fork, tmp_path):
    """Oracle: as above, for a DiT, a VAE with its adversary and Phenaki at stages 0 to 3 on 1, 2 and 4 ranks."""
    found = both(on_ranks, in_fork, tmp_path, EVERY)
    assert len(found) == 3 * 4 * 3
    for name in found:
        test_bytes_between_steps(found, name)
        test_peak(found, name)
        test_exchanges(found, name)
        test_states_without_a_count(found, name)


@pytest.mark.parametrize("stage", sampled((2, 3), (3,)))
def test_inputs_on_the_host(figures, stage):
    """Oracle: by hand: three blocks send 2 samples of 16 tokens of width 32 in bf16, in each of two micro-batches, of
    which one is there at a time. Real ranks send as much.
    """
    for side in figures[f"2 dit at the host {stage}"]:
        assert side["on_host"] == 3 * 2 * 16 * 32 * 2 and side["moved"] == 2 * side["on_host"]


def test_computed_again(figures):
    """Oracle: stage 2, for stage 3, whose linear layers are ZeRO's own: the same blocks compute as much again."""
    again = [side["recomputed"] for stage in (2, 3) for side in figures[f"2 dit summed {stage}"]]
    assert min(again) == max(again) > 0


@pytest.mark.parametrize("name", sampled(SAVED, [name for name in SAVED if name in list_names(SAMPLE)]))
def test_checkpoint(figures, name):
    """Oracle: the tensors in the files of a real checkpoint. Small flats have no moments of 8 bits."""
    real, counted = figures[name]
    assert counted["checkpoint"] == pytest.approx(real["checkpoint"], rel=0.002 if "8 bits" in name else 0)


def test_many_micro_batches(in_fork, tmp_path):
    """Oracle: the count of the whole step: what is extended from fewer micro-batches equals it."""
    in_fork(check_costs.many, tmp_path)
    for whole, extended in json.loads((tmp_path / "many.json").read_text()).values():
        assert extended["recomputed"] == pytest.approx(whole["recomputed"])
        assert extended["collectives"] == whole["collectives"] and extended["collectives"]
        for when in ("kept", "passes"):
            assert extended[when] == pytest.approx(whole[when], rel=0.001)
