"""What a step costs beside its arithmetic, with the shipped JSONs: reads by the host, collectives, calls of aten."""

import json
import math

import pytest

from tests.engine import check_step_counts
from tests.engine.check_step_counts import CASES

BUCKET, PERSISTS = 5 * 10**7, 10**5  # elements, of ds_configs/
GROUPS = 2  # of weights, with and without decay


@pytest.fixture(scope="module")
def figures(in_fork, tmp_path_factory):
    folder = tmp_path_factory.mktemp("counts")
    in_fork(check_step_counts.main, folder)
    return json.loads((folder / "figures.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_reads_by_the_host(figures, case):
    """Oracle: none, but for one flag of each network that has stepped, and that flag is of the step before."""
    turns = 1 if case == "zero3 tokenizer" else figures[case]["parts"]  # its adversary has not begun
    assert (figures[case]["reads"], figures[case]["late"]) == (0, turns)


@pytest.mark.parametrize("case", CASES)
def test_collectives(figures, case):
    """Oracle: the formulas of cost: gradients at every micro-batch or once, weights, and one norm of each network."""
    found, stage = figures[case], int(case[4])
    weights, padded, turns, micros = sum(found["sizes"]), found["padded"], found["parts"], found["accumulation"]
    seen = dict(found["collectives"])
    if case == "zero3 tokenizer":
        assert seen.pop("allgather")[0] == 2  # codes in use, and their places in the global batch
        padded, turns = seen["allgather_base"][1], 1
        assert 0 <= padded - weights + 2473 < 8 * len(found["sizes"])
    buckets = math.ceil(weights / turns / BUCKET) * turns
    if stage == 0:
        assert seen == {"allreduce": [buckets, weights]}
    elif stage < 3:
        times = micros if stage == 2 else 1
        assert seen == {
            "allreduce": [times * buckets + turns, times * weights + turns],
            "allgather_base": [GROUPS * turns, padded],
        }
    else:
        large = sum(size for size in found["sizes"] if size > PERSISTS)
        fetches = micros if large else 0  # a network of this size stays from forward to backward
        assert seen == {
            "reduce_scatter_base": [micros * buckets, micros * padded],
            "allreduce": [turns, turns],
            "allgather_base": [fetches + 1, fetches * large + padded - large],
        }


def test_calls_of_the_update(figures):
    """Oracle: finding E1: 6,484 calls of the optimizer, the checks and the average at 291 weights; below 1,600 now."""
    calls = {case: found["update"] for case, found in figures.items() if len(found["sizes"]) == 291}
    assert calls.keys() == {"zero1", "zero3", "zero2_fp32", "zero2_fp16"}
    assert all(count < 200 for case, count in calls.items() if case != "zero3") and calls["zero3"] < 1600
