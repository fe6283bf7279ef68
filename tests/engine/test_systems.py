"""Every system at other stages and on other numbers of ranks, and in DeepSpeed's own files."""

import json
import subprocess
import sys

import pytest
import torch

from dstrain.commands import evaluate, generate
from dstrain.commands.job import JobOptions, prepare_job
from dstrain.recipe import ConfigError
from tests.engine.check_systems import AFTER, BACK, CASES, LATE, PLANS, Plan
from tests.support.launch import ROOT, environment
from tests.support.sample import sampled, wants_all

pytestmark = pytest.mark.slow
LOSSES = {"vae": 1e-4, "tokenizer": 1e-4}  # relative; two networks against each other; else 1e-5


def list_ways(plan: Plan) -> list[str]:
    """The ways of a plan by name: case, ranks and stage before and after."""
    there = [f"{case} 2/2 -> {world}/{stage}" for (world, stage), cases in plan.places.items() for case in cases]
    return there + ["{} 4/3 -> {}/{}".format(case, *BACK) for case in plan.returning]


WAYS = sampled(*(list_ways(PLANS[name]) for name in ("all", "sample")))
NATIVE = sampled(*([f"{case}-{stage}" for case, stage in PLANS[name].native] for name in ("all", "sample")))


@pytest.fixture(scope="module")
def checked(tmp_path_factory, request):
    """The folder that check_systems.py leaves, and all its figures."""
    folder = tmp_path_factory.mktemp("systems")
    words = [sys.executable, ROOT / "tests/engine/check_systems.py", folder, "all" if wants_all(request) else "sample"]
    done = subprocess.run(
        words,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return folder, {path.stem: json.loads(path.read_text()) for path in folder.glob("figures-*.json")}


@pytest.mark.parametrize("way", WAYS)
def test_goes_on_elsewhere(checked, way):
    """Oracle: the run that was not interrupted, on 2 ranks at stage 2 (ways are written ranks/stage): the same samples
    in each global batch; every loss of 12 further steps within LOSSES with the recipe's own optimizer (as many as
    check_systems.steady says where two networks play); EMA, masters, what a system learns on the side.
    """
    case = way.split()[0]
    found = {name: value for figures in checked[1].values() for name, value in figures.items()}[way]
    assert found["same"] and found["distinct"] == 8 * AFTER and found["skipped"] == 0
    assert max(found["losses"].values()) < LOSSES.get(case, 1e-5)
    if found["compared"] < AFTER:
        return
    averages = [kind for kind in found["apart"] if kind.startswith("ema.")]
    assert averages and all(found["apart"][kind] < 1e-6 < 1e-4 < found["moved"][kind] for kind in averages)
    assert found["apart"]["master"] < 1e-5 and found["apart"]["updates"] == 0
    # A history of losses, some of them tens of nats, and shares of codes: relative to what they moved by.
    assert "system" not in found["apart"] or found["apart"]["system"] < 1e-6 * max(found["moved"]["system"], 1.0)
    assert ("system" in found["apart"]) == (case in ("iddpm", "tokenizer"))
    assert set(found["losses"]) == {
        "vae": {"autoencoder", "discriminator"},
        "phenaki": {"maskgit", "critic"},
        "tokenizer": {"tokenizer", "discriminator"},
    }.get(case, set(found["losses"]))


def test_batches_are_recomputed(checked):
    """Oracle: by hand: the global batch of 8 over the ranks; a micro-batch that the recipe names is kept."""
    for figures in checked[1].values():
        for name, found in figures.items():
            if "batch" in found:
                world, micro, accumulation = found["batch"]
                assert world * micro * accumulation == 8
                named = any("batch.micro=2" in word for word in CASES[name.split()[0]][1])
                assert micro == (2 if named else 8 // world)


def test_what_does_not_divide_is_refused(tmp_path):
    """Oracle: by hand: 8 samples over 3 ranks and in micro-batches of 4 over 4; the numbers named do pass. A loss that
    sums over a micro-batch, as published, would be another on other ranks.
    """
    (tmp_path / "zero2.json").write_text('{"zero_optimization": {"stage": 2}}')

    def prepared(world, *words, recipe="tiny"):
        options = JobOptions(
            ROOT / f"tests/launch/{recipe}.yaml", tmp_path / "zero2.json", (f"folder={tmp_path / 'run'}", *words)
        )
        settings = prepare_job(options, world, "cpu").settings
        return settings["train_micro_batch_size_per_gpu"], settings["gradient_accumulation_steps"]

    with pytest.raises(ConfigError, match="batch.global=8 .* 3 ranks: write batch.global=6 or 9, or start 1, 2, 4, 8"):
        prepared(3)
    with pytest.raises(ConfigError, match=r"batch.micro=4 does not divide the 2 samples .* that work are 1, 2$"):
        prepared(4, "batch.micro=4")
    assert prepared(3, "batch.global=9") == (3, 1) and prepared(4, "batch.micro=1") == (1, 2)
    assert prepared(2, "batch.micro=4") == (4, 1) and prepared(1, "batch.micro=4") == (4, 2)
    legacy = ["model.kl=null", "model.discrete={num_tokens: 16, num_layers: 2, kl_weight: 1, kl_form: legacy}"]
    with pytest.raises(ConfigError, match="kl_form=legacy .* write batch.micro="):
        prepared(2, *legacy, recipe="tiny-vae")
    assert prepared(2, *legacy, "batch.micro=2", recipe="tiny-vae") == (2, 2)


@pytest.mark.parametrize("name", NATIVE)
def test_deepspeeds_own_files(checked, name):
    """Oracle: the masters as they were saved, to the bit: read by dstrain, by zero_to_fp32 and by ds_to_universal,
    and by runs that go over to the other format; at another stage or on 1 rank a refusal that names the remedy.
    """
    folder, figures = checked
    case, stage = name.split("-")
    found, at = figures["figures-native"][name], folder / case / name
    assert found["differ"] == [] and found["losses"] and found["crossed"] == []
    for said in (found["refused"], figures["figures-tools"][name]["refused"]):
        assert f"save.format=deepspeed at stage {stage} on 2 ranks" in said and "save.format=fragments" in said
    truth, merged = torch.load(at / "truth.pt"), torch.load(at / "merged.pt")
    parts = {"vae": {"autoencoder", "discriminator"}, "dit": {"denoiser"}}[case]
    assert set(merged) == parts
    for part in parts:
        prefix = f"master/{part}/"
        masters = {key.removeprefix(prefix): value for key, value in truth.items() if key.startswith(prefix)}
        assert masters.keys() <= merged[part].keys()
        for weight, value in masters.items():
            universal = torch.load(at / "universal" / part / "zero" / weight / "fp32.pt", weights_only=False)
            universal = universal["param"] if stage != "3" else universal  # as the tool writes them
            assert torch.equal(merged[part][weight], value) and torch.equal(universal.view_as(value), value)


@pytest.mark.parametrize("stages", sampled(((1, 2), (3,)), ((3,),)), ids=str)
def test_what_comes_after_deepspeeds_own_files(checked, tmp_path, stages):
    """Oracle: the averages lie in fragments: evaluated and drawn from, though a discriminator's weights do not;
    training weights are refused, and the message says how they are merged.
    """
    for stage in stages:
        run = checked[0] / "vae" / f"vae-{stage}"
        _, result = evaluate.evaluate_run(
            evaluate.EvaluateOptions(run, num=8, batch=8, out=tmp_path / f"evaluation{stage}")
        )
        assert result["weights"] == {"autoencoder": "ema.0.9"} and result["step"] == LATE
        assert 0 < result["figures"]["recon"] < 2
    with pytest.raises(ValueError, match="autoencoder in DeepSpeed's own files: merge them with `dstrain consolidate"):
        evaluate.evaluate_run(evaluate.EvaluateOptions(run, num=8, raw=True, out=tmp_path / "raw"))
    run = checked[0] / "dit" / "dit-2"
    out = generate.generate_samples(generate.GenerateOptions(run, num=2, num_steps=2, out=tmp_path / "drawn"))
    assert len(list((out / "samples").glob("0*.png"))) == 2
    with pytest.raises(ValueError, match="denoiser in DeepSpeed's own files: merge them with `dstrain consolidate"):
        generate.generate_samples(generate.GenerateOptions(run, num=2, raw=True, out=tmp_path / "raw"))
