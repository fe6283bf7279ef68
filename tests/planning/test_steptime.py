"""The model of a step's time, and chips by name."""

from dataclasses import replace
from pathlib import Path

import pytest

from dstrain import recipe
from dstrain.planning import steptime
from dstrain.planning.counts import Collective, Counts, Layout
from dstrain.recipe import ConfigError
from dstrain.tracking.hardware import CHIPS, GIB, chip
from tests.support.engines import resolve
from tests.support.launch import ROOT

H200, WEIGHTS = CHIPS["h200"], 10**9
NOTHING = Counts({"denoiser": WEIGHTS, "frozen/first_stage": 10**12}, {}, {}, {}, (), 0.0, 0.0, 12 * WEIGHTS)


def seconds(counts, stage, world=8, per_node=8, accumulation=1, decays=1, **zero):
    """The model's answer for an H200 in bf16."""
    run = recipe.load(
        Path(ROOT / "tests/launch/tiny.yaml"),
        [f"batch.global={accumulation * world}", "batch.micro=1", f"ema.decays={[0.9, 0.99][:decays]}"],
    )
    settings = resolve({"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, **zero}}, run, world, "cuda")
    return steptime.step_time(counts, run, settings, Layout(world, per_node), H200)


def test_computing():
    """Oracle: operations over 0.45 of 989.4 TFLOP/s, those done again included, at any number of micro-batches."""
    counts = replace(NOTHING, flops=2e15, recomputed=1e15)
    assert seconds(counts, 1).compute == pytest.approx(3e15 / (0.45 * 989.4e12))
    assert seconds(counts, 1, accumulation=4).compute == pytest.approx(3e15 / (0.45 * 989.4e12))


def test_few_samples_wait_for_the_weights():
    """Oracle: weights of 2 bytes, read three times a micro-batch at 0.8 of 4.8 TB/s, where there is nothing else."""
    assert seconds(NOTHING, 1, accumulation=4).compute == pytest.approx(4 * 3 * 2 * WEIGHTS / (0.8 * 4.8e12))


def test_update():
    """Oracle: 30 bytes a weight for AdamW and 12 an average: of all weights at stage 0, of an eighth at stage 1."""
    assert seconds(NOTHING, 0).update == pytest.approx(42 * WEIGHTS / (0.8 * 4.8e12))
    assert seconds(NOTHING, 1).update == pytest.approx(42 * WEIGHTS / 8 / (0.8 * 4.8e12))
    assert seconds(NOTHING, 1, decays=2).update == pytest.approx(54 * WEIGHTS / 8 / (0.8 * 4.8e12))
    on_host = seconds(NOTHING, 1, offload_optimizer={"device": "cpu"})
    assert on_host.update == pytest.approx(WEIGHTS / 8 * (42 / 40e9 + 4 / (0.8 * 64e9))) and on_host.stall == 0


@pytest.mark.parametrize("world, per_node, rate, nodes", [(8, 8, 450e9, 1), (64, 8, 400e9, 8), (8, 4, 200e9, 2)])
def test_network(world, per_node, rate, nodes):
    """Oracle: NCCL's own formula, bytes * (n - 1) / n a ring and twice that of an all-reduce, over the slowest link."""

    def network(operation):
        call = Collective(operation, 10, 1e9, world)
        return seconds(replace(NOTHING, collectives=(call,)), 1, world, per_node).network - 10 * (
            20e-6 + 5e-6 * (nodes - 1)
        )

    once = 1e9 * (world - 1) / world / (0.8 * rate)
    assert network("all_reduce") == pytest.approx(2 * once)
    assert network("all_gather") == pytest.approx(once)
    assert seconds(replace(NOTHING, collectives=(Collective("all_reduce", 10, 1e9, 1),)), 1, 8).network == 0


def test_what_computing_hides():
    """Oracle: a second of gradients' traffic beside 9 of computing: 0.1 shows; of weights at stages 1 and 2, all."""
    work = replace(NOTHING, flops=9 * 0.45 * 989.4e12)
    bytes_ = 0.8 * 450e9 * 8 / 7
    gradients = replace(work, collectives=(Collective("reduce_scatter", 0, bytes_, 8),))
    weights = replace(work, collectives=(Collective("all_gather", 0, bytes_, 8),))
    assert seconds(gradients, 2, overlap_comm=False).exposed == pytest.approx(1)
    assert seconds(gradients, 2, overlap_comm=True).exposed == pytest.approx(0.1)
    assert seconds(gradients, 3).exposed == pytest.approx(0.1)
    assert seconds(gradients, 1, overlap_comm=True, accumulation=8).exposed == pytest.approx(1 - 9 * 2 / 3 / 8)
    assert seconds(weights, 2, overlap_comm=True).exposed == pytest.approx(1)
    assert seconds(weights, 3).exposed == pytest.approx(0.1)
    both = seconds(gradients, 2, overlap_comm=False)
    assert both.total == pytest.approx(9 + 1 + both.update)


def test_chips():
    """Oracle: data sheets, and sizes in powers of ten and of two."""
    assert chip("H200").memory == 141 * GIB and chip("h200").rate("bf16") == 989.4e12
    assert chip("a100").rate("fp32") == 19.5e12 and chip("4090").rate("fp16") == 165.2e12
    assert [chip(text).memory for text in ("96GiB", "80GB", "8e10", "80g", "24 gib")] == [
        96 * GIB,
        80 * 10**9,
        80 * 10**9,
        80 * 10**9,
        24 * GIB,
    ]
    assert chip("96GiB").name is None


@pytest.mark.parametrize("text", ["h300", "", "80GiBs", "-3GB", "nan", "12", "1e30"])
def test_unknown_chips(text):
    """Oracle: one ConfigError that names the option and what there is."""
    with pytest.raises(ConfigError, match="--gpu.*h200, h100, a100, 4090"):
        chip(text)
