"""What makes a run fit, and what is fastest: every choice counted."""

import itertools
import json
from dataclasses import replace

import pytest

from dstrain.commands import plan
from dstrain.commands.job import load_and_check_recipe
from dstrain.engine.settings import read_offload_device
from dstrain.engine.settings import read_zero_stage as stage_of
from dstrain.planning import advice
from dstrain.planning.counts import Collective, Counts
from dstrain.planning.estimate import find_changed_choices
from dstrain.recipe import ConfigError
from dstrain.tracking.hardware import CHIPS, Chip
from tests.support.launch import ROOT

WORLD, BATCH = 4, 8


@pytest.fixture(scope="module", autouse=True)
def _count_once():
    """What is counted anew for an oracle and by advice is the same: it is counted once."""
    known, count = {}, advice.count_costs

    def remembering(run, settings, layout):
        key = run.model_dump_json(), json.dumps(settings, sort_keys=True), layout
        if key not in known:
            known[key] = count(run, settings, layout)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advice, "count_costs", remembering)
        yield


def tiny(ds_config, *overrides):
    """A tiny DiT on four GPUs of more memory than there are."""
    run = load_and_check_recipe(ROOT / "tests/launch/tiny.yaml", ["model.hidden_size=64", *overrides])
    return plan.make_planning_case(run, ROOT / "ds_configs" / ds_config, WORLD, 8, "900TB", None)


@pytest.fixture(scope="module")
def case():
    """Two samples a rank at stage 2."""
    return tiny("zero2.json", f"batch.global={BATCH}", "model.recompute=attention")


def on(case, memory):
    """The case on GPUs with so many bytes."""
    return replace(case, chip=Chip(memory))


def count_by_formula(run, settings, layout):
    """Counts of a device that are sums by hand, in millions of bytes: a higher stage keeps fewer states, a larger
    micro-batch more activations, and several micro-batches a sum of gradients, which may be more than these; sharing
    takes a buffer of its own.
    """
    million, micro, ranks = 10**6, settings["train_micro_batch_size_per_gpu"], run.parallel.sequence
    kept, again = {"none": (16, 0), "attention": (10, 1), "all": (5, 4), "offload": (3, 4)}[run.model["recompute"]]
    away = 4 if read_offload_device(settings, "offload_optimizer") != "none" else 0
    sent = micro if run.model["recompute"] == "offload" else 0
    return Counts(
        weights={"denoiser": 1000},
        device={
            "weights": (7 - stage_of(settings) - away) * million,
            "gradients": 6 * million if settings["gradient_accumulation_steps"] > 1 else 0,
            "activations": kept * micro * million // ranks,
            "working": (ranks - 1) * million,
        },
        elsewhen={},
        host={"moments": away * million, "activations": sent * million},
        collectives=(Collective("all_gather", 1, stage_of(settings) * million, layout.world),),
        flops=1e12,
        recomputed=again * 1e11,
        checkpoint=0,
        moved=sent * million,
    )


@pytest.fixture(params=["formula", pytest.param("fake ranks", marks=pytest.mark.faults)])
def counting(request, monkeypatch):
    """What counts where choices are many: a formula; at full counts the ranks that do not exist, as in other tests."""
    if request.param == "formula":
        monkeypatch.setattr(advice, "count_costs", count_by_formula)


def takes(estimate):
    return estimate.device_bytes + estimate.reserved_bytes


def neighbours():
    """Every way to change one choice of the case."""
    return [
        {"recompute": "all"},
        {"recompute": "offload"},
        {"micro": 1},
        {"stage": 3},
        {"offload": ("offload_optimizer",)},
    ]


def test_the_smallest_change(case):
    """Oracle: all ways to change one choice, each counted anew: advice is one of those that fit, where one does."""
    ways = {takes(case.copy_with(**way).estimate_costs()): way for way in neighbours()}
    least = min(ways)
    tight = on(case, least)
    assert not tight.estimate_costs().fits
    change = advice.find_smallest_fitting_change(tight.estimate_costs(), tight)
    assert change.fits and takes(change) == least
    assert find_changed_choices(tight.estimate_costs(), change) == find_changed_choices(
        case.estimate_costs(), case.copy_with(**ways[least]).estimate_costs()
    )
    assert len(find_changed_choices(tight.estimate_costs(), change)) == 1


def test_an_empty_section_is_none(case):
    """Oracle: the DeepSpeed config without it: `"zero_optimization": null` is advised like it."""
    plain = {name: value for name, value in case.ds_config.items() if name != "zero_optimization"}
    null, absent = (replace(case, ds_config=config) for config in (plain | {"zero_optimization": None}, plain))
    assert null.copy_with(stage=3).ds_config == absent.copy_with(stage=3).ds_config


def test_what_computes_least(case):
    """Oracle: each single change, counted anew: where no chip is named, advice is the one of those that fit which puts
    least on the host and computes least again; and the network of no chip is refused.
    """
    tight = on(case, takes(case.estimate_costs()) - 1)
    fitting = [other for way in neighbours() if (other := tight.copy_with(**way).estimate_costs()).fits]
    costs = sorted((other.host_bytes, other.counts.recomputed) for other in fitting)
    change = advice.find_smallest_fitting_change(tight.estimate_costs(), tight)
    assert len(set(costs)) > 1 and (change.host_bytes, change.counts.recomputed) == costs[0] and change.time is None
    with pytest.raises(ConfigError, match="^--network: --gpu 900TB names no chip, so that nothing is timed"):
        plan.make_planning_case(case.run, ROOT / "ds_configs" / "zero2.json", WORLD, 8, "900TB", 100.0)


def test_several_changes(case, counting):
    """Oracle: all pairs of choices, each counted anew, where no single one fits."""
    singles = [takes(case.copy_with(**way).estimate_costs()) for way in neighbours()]
    pairs = [
        takes(case.copy_with(**one, **other).estimate_costs())
        for one, other in itertools.combinations(neighbours(), 2)
        if not set(one) & set(other)
    ]
    assert min(pairs) < min(singles)
    tight = on(case, min(singles) - 1)
    change = advice.find_smallest_fitting_change(tight.estimate_costs(), tight)
    assert change.fits and len(find_changed_choices(tight.estimate_costs(), change)) == 2 and takes(change) in pairs


def test_sharing():
    """Oracle: two ranks that share each sample, the most that two heads allow, counted anew: they keep less."""
    case = tiny("zero2.json", f"batch.global={BATCH}", "model.recompute=attention", "model.patch_size=1")
    least = {"stage": 3, "micro": 1, "recompute": "offload"}
    shared = case.copy_with(**least, sequence=2).estimate_costs()
    assert takes(shared) < takes(case.copy_with(**least).estimate_costs())
    tight = on(case, takes(shared))
    found = advice.find_fit_with_shared_samples(tight)
    assert found.fits and find_changed_choices(case.estimate_costs(), found)["parallel.sequence"] == 2
    assert advice.find_fit_with_shared_samples(on(case, takes(shared) - 1)) is None
    # It fits, so that no advice is looked for.
    text = plan.describe_costs_and_memory_fit(replace(case, run=found.run))[0]
    assert f"batch {BATCH} = {WORLD // 2} groups of 2 ranks x 1 x 4" in text


def test_inputs_on_the_host():
    """Oracle: by hand: 9 blocks on 2 samples of 256 tokens of width 64 in bf16: all inputs but the last one's are off
    the GPU when it holds most, and the H100's link to its host takes them there and back.
    """
    words = ("model.depth=9", "model.patch_size=2", f"batch.global={BATCH}")
    case = replace(tiny("zero2.json", *words), chip=CHIPS["h100"])
    kept, sent = (case.copy_with(recompute=choice).estimate_costs() for choice in ("all", "offload"))
    one = 2 * 256 * 64 * 2
    assert kept.device_bytes - sent.device_bytes == 8 * one and sent.counts.moved == 9 * one and kept.counts.moved == 0
    assert sent.host_bytes - kept.host_bytes == sent.counts.host["activations"] == 9 * one
    assert sent.time.compute == kept.time.compute
    assert sent.time.links - kept.time.links == pytest.approx(2 * 9 * one / CHIPS["h100"].host_link)
    assert sent.collect_cost_figures()["moved_bytes"] == 9 * one
    assert any(
        "to the host, and back" in line
        for line in plan.describe_costs_and_memory_fit(replace(case, run=sent.run))[0].splitlines()
    )


def test_no_change_fits():
    """Oracle: a run whose choices all take the least memory already."""
    least = on(tiny("zero3_offload.json", f"batch.global={WORLD}", "model.recompute=offload"), 2**30)
    assert advice.find_smallest_fitting_change(least.estimate_costs(), least) is None
    assert "take larger GPUs" in plan.describe_costs_and_memory_fit(least)[0]


def test_the_fastest_change(case):
    """Oracle: the model's time of each single change that fits: of equally few changes, advice is the fastest."""
    chip = replace(CHIPS["h200"], memory=takes(case.estimate_costs()) - 1)
    tight = replace(case, chip=chip)
    assert not tight.estimate_costs().fits
    ways = [replace(case.copy_with(**way).estimate_costs(), chip=chip) for way in neighbours()]
    fitting = [estimate for estimate in ways if estimate.fits]
    assert len(fitting) >= 2
    assert advice.find_smallest_fitting_change(tight.estimate_costs(), tight).time.total == min(
        estimate.time.total for estimate in fitting
    )


def test_the_host_is_full(case):
    """Oracle: an offload that puts more into the host's memory than it has is no advice."""
    offloaded = case.copy_with(offload=("offload_optimizer",)).estimate_costs()
    assert offloaded.host_bytes > 0
    full = replace(case, chip=Chip(2**40, host=offloaded.host_bytes))
    assert case.estimate_costs().host_bytes < 0.9 * offloaded.host_bytes
    assert full.estimate_costs().fits and not full.copy_with(offload=("offload_optimizer",)).estimate_costs().fits


@pytest.mark.slow
def test_search(case, counting):
    """Oracle: stage x micro-batch x recomputation, each counted anew; the fastest stands first. All are reported as
    they are counted, those that do not fit as well.
    """
    fast = replace(case, chip=CHIPS["h200"])
    counted = []
    estimates = advice.search_fitting_estimates(fast, counted.append)
    every = [
        fast.copy_with(stage=stage, micro=micro, recompute=choice).estimate_costs()
        for stage in (1, 2, 3)
        for micro in (1, 2)
        for choice in advice.RECOMPUTE
    ]
    assert len(estimates) == len(counted) == len(every) == 24
    assert [estimate.time.total for estimate in estimates] == sorted(estimate.time.total for estimate in every)
    text, some = plan.find_and_describe_fitting_settings(fast)
    lines = text.splitlines()
    assert some and len(lines) == 2 + plan._ROWS + 2 and "no step is that short" in lines[-1]
    assert int(lines[2].split()[1]) == estimates[0].micro_batch
    sizes = sorted(map(takes, every))
    found = advice.search_fitting_estimates(on(fast, sizes[9]), counted.append)
    alone = [estimate for estimate in found if estimate.run.parallel.sequence == 1]
    assert sorted(map(takes, alone)) == [size for size in sizes if size <= sizes[9]]
    # Two ranks share a sample, the two heads of it, only where one rank has no room for one sample.
    kinds = {(stage_of(estimate.settings), estimate.collect_choices()["model.recompute"]) for estimate in alone}
    shared = [estimate for estimate in found if estimate not in alone]
    assert all(estimate.run.parallel.sequence == 2 and estimate.fits for estimate in shared)
    assert kinds.isdisjoint((stage_of(each.settings), each.collect_choices()["model.recompute"]) for each in shared)
    assert any(not estimate.fits for estimate in counted)
    assert not plan.find_and_describe_fitting_settings(on(fast, sizes[0] - 1))[1]


def test_the_table(case):
    """Oracle: its own JSON: every kind of bytes, the sum, the verdict and the change."""
    values = json.loads(plan.describe_costs_and_memory_fit(case, json=True)[0])
    text, fits = plan.describe_costs_and_memory_fit(case)
    assert values["fits"] is fits is True and "it fits" in text and "advice" not in values
    assert values["device_bytes"] == sum(values["device"].values()) and len(text.splitlines()) <= 40
    for kind, size in values["device"].items():
        assert any(line.split()[:1] == [kind] for line in text.splitlines()) == (size > 0)
    tight = on(case, takes(case.estimate_costs()) - 1)
    values, (text, fits) = (
        json.loads(plan.describe_costs_and_memory_fit(tight, json=True)[0]),
        plan.describe_costs_and_memory_fit(tight),
    )
    assert values["fits"] is fits is False and "DOES NOT FIT" in text and values["advice"]["fits"]
    assert len(values["advice"]["changes"]) == 1
    assert values["elsewhen"].keys().isdisjoint(values["device"])
    states = {"weights", "masters", "moments", "gradients", "average"}
    assert states <= values["elsewhen"].keys() | values["device"].keys()
    assert all(f"  {kind:14} {'none':>10}    then" in text for kind in values["elsewhen"]) and values["elsewhen"]
    chips = CHIPS["h200"], replace(CHIPS["h200"], link=1e6), case.chip  # some ms, minutes, none
    texts = [plan.describe_costs_and_memory_fit(replace(case, chip=chip))[0] for chip in chips]
    assert ["no step is that short: below 5 ms" in text for text in texts] == [True, False, False]
    fast = json.loads(plan.describe_costs_and_memory_fit(replace(case, chip=CHIPS["h200"]), json=True)[0])
    seconds = fast["seconds"]
    assert seconds["total"] == seconds["compute"] + seconds["links"]
    assert fast["days"] == pytest.approx(60 * seconds["total"] / 86400)
    assert fast["kwh"] == pytest.approx(fast["days"] * 24 * WORLD * 0.7)
    assert fast["samples_per_second"] == pytest.approx(BATCH / seconds["total"])
