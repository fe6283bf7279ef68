"""The rule of a step's time, and chips by name."""

from dataclasses import replace
from pathlib import Path

import pytest

from dstrain import recipe
from dstrain.planning.counts import Collective, Counts, Layout
from dstrain.planning.estimate import Estimate
from dstrain.recipe import ConfigError
from dstrain.tracking.hardware import CHIPS, GIB, parse_chip
from tests.support.engines import resolve
from tests.support.launch import ROOT

H200, WEIGHTS = CHIPS["h200"], 10**9
NOTHING = Counts({"denoiser": WEIGHTS, "frozen/first_stage": 10**12}, {}, {}, {}, (), 0.0, 0.0, 12 * WEIGHTS)


def seconds(counts, stage, world=8, per_node=8, efficiency=0.45, **zero):
    """The rule's answer for an H200 in bf16."""
    run = recipe.load_recipe(Path(ROOT / "tests/launch/tiny.yaml"), [f"batch.global={world}", "batch.micro=1"])
    settings = resolve({"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, **zero}}, run, world, "cuda")
    return Estimate(run, settings, Layout(world, per_node), H200, counts, efficiency).time


def test_computing():
    """Oracle: operations, those done again included, over the user's share of 989.4 TFLOP/s, beside the links."""
    counts = replace(NOTHING, flops=2e15, recomputed=1e15)
    for efficiency in (0.45, 0.6):
        time = seconds(counts, 1, efficiency=efficiency)
        assert time.compute == pytest.approx(3e15 / (efficiency * 989.4e12)) and time.links == 0
    both = seconds(replace(counts, collectives=(Collective("all_reduce", 1, 1e9, 8),)), 1)
    assert both.total == both.compute + both.links > both.compute > 0


def test_offload():
    """Oracle: gradients and weights of 2 bytes over 64 GB/s: of an eighth of the weights, and of all on one rank."""
    assert seconds(NOTHING, 1, offload_optimizer={"device": "cpu"}).links == pytest.approx(4 * WEIGHTS / 8 / 64e9)
    on_one = seconds(NOTHING, 1, world=1, offload_optimizer={"device": "cpu"})
    assert on_one.links == pytest.approx(4 * WEIGHTS / 64e9)


@pytest.mark.parametrize("world, per_node, rate", [(8, 8, 450e9), (64, 8, 400e9), (8, 4, 200e9)])
def test_links(world, per_node, rate):
    """Oracle: NCCL's own formula, bytes * (n - 1) / n a ring and twice that of an all-reduce, over the slowest link."""

    def links(operation):
        call = Collective(operation, 10, 1e9, world)
        return seconds(replace(NOTHING, collectives=(call,)), 1, world, per_node).links

    once = 1e9 * (world - 1) / world / rate
    assert links("all_reduce") == pytest.approx(2 * once)
    assert links("all_gather") == pytest.approx(once)
    assert seconds(replace(NOTHING, collectives=(Collective("all_reduce", 10, 1e9, 1),)), 1, 8).links == 0


def test_chips():
    """Oracle: data sheets, and sizes in powers of ten and of two."""
    assert parse_chip("H200").memory == 141 * GIB and parse_chip("h200").get_peak_flops("bf16") == 989.4e12
    assert (
        parse_chip("a100").get_peak_flops("fp32") == 19.5e12 and parse_chip("4090").get_peak_flops("fp16") == 165.2e12
    )
    assert [parse_chip(text).memory for text in ("96GiB", "80GB", "8e10", "80g", "24 gib")] == [
        96 * GIB,
        80 * 10**9,
        80 * 10**9,
        80 * 10**9,
        24 * GIB,
    ]
    assert parse_chip("96GiB").name is None


@pytest.mark.parametrize("text", ["h300", "", "80GiBs", "-3GB", "nan", "12", "1e30"])
def test_unknown_chips(text):
    """Oracle: one ConfigError that names the option and what there is."""
    with pytest.raises(ConfigError, match="--gpu.*h200, h100, a100, 4090"):
        parse_chip(text)
