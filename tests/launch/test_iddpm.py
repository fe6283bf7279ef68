"""IDDPM through the real launcher: resumed, on other numbers of ranks, measured, and as a chain with its upsampler."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from dstrain import rng, systems
from dstrain.checkpoint.layout import COMMON
from dstrain.checkpoint.store import Store
from dstrain.data.decode.pixels import read_pictures
from dstrain.diffusion.timesteps import LossSecondMomentSampler
from dstrain.engine.checkpoint import read_weights
from dstrain.runs import trained
from dstrain.sampling.draw import draw_all_samples
from dstrain.systems.base import Request
from tests.support.launch import ROOT, command, here
from tests.support.runs import assert_equal_runs, finish, kill_in_the_middle, metrics, train

pytestmark = pytest.mark.slow
RECIPE = ROOT / "tests" / "launch" / "tiny-iddpm.yaml"
STEPS = 30


def history(folder, step=STEPS):
    """The timestep sampler that a checkpoint holds."""
    with safe_open(folder / "checkpoints" / f"step_{step:08d}" / COMMON, "pt") as file:
        state = {
            name.removeprefix("system/"): file.get_tensor(name) for name in file.keys() if name.startswith("system/")
        }
    sampler = LossSecondMomentSampler(10, 3)
    sampler.load_state_dict(state)
    return sampler, state


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """stage -> the folder of a run on 2 ranks that nothing has disturbed; made once."""
    made = {}

    def of(stage):
        if stage not in made:
            made[stage] = tmp_path_factory.mktemp(f"zero{stage}") / "whole"
            assert f"complete: {STEPS} steps" in finish(train(made[stage], stage, recipe=RECIPE))
        return made[stage]

    return of


# In CI stage 1 is test_phenaki.py's, and 3 test_resume.py's.
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.faults), 2])
def test_kill_minus_nine(undisturbed, stage):
    """Oracle: the undisturbed run, bit for bit, with loss-aware timesteps, dropout and two averages.

    The real launcher's ranks are test_resume.py's.
    """
    folder = undisturbed(stage)
    sampler, state = history(folder, 10)
    assert int(state["seen"].min()) >= 3 and float(sampler.get_probabilities().std()) > 1e-3  # warm, and not uniform
    killed = folder.parent / "killed"
    kill_in_the_middle(train(killed, stage, recipe=RECIPE), killed, 10)
    assert not (killed / "checkpoints" / f"step_{STEPS:08d}").exists(), "killed too late to show anything"
    finish(train(killed, stage, recipe=RECIPE))
    assert_equal_runs(folder, killed, STEPS)


def test_best_is_kept(undisturbed):
    """Oracle: the least held-out loss in metrics.jsonl: its step lies beside the newest two, named the best."""
    folder = undisturbed(2)
    losses = {line["step"]: line["held_out/loss"] for line in metrics(folder) if "held_out/loss" in line}
    assert sorted(losses) == [8, 16, 24, 30]
    step = min(losses, key=lambda step: (losses[step], step))
    better = {at for at in losses if all(losses[at] < losses[before] for before in losses if before < at)}
    store = Store(folder / "checkpoints")
    assert store.find_best_checkpoint() == (step, losses[step])
    assert set(store.list_steps()) == {10, 20, 30, step, *sorted(better | {10, 20, 30})[-2:]}


def test_one_rank_meets_the_same(undisturbed, tmp_path):
    """Oracle: the run on 2 ranks: the same timesteps (seen equal), losses and history up to rounding, same dropout."""
    one, two = tmp_path / "one", undisturbed(2)
    finish(train(one, 2, recipe=RECIPE, num=1))
    (sampler, state), (other, expected) = history(one), history(two)
    assert torch.equal(state["seen"], expected["seen"])
    torch.testing.assert_close(state["history"], expected["history"], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(sampler.get_probabilities(), other.get_probabilities(), rtol=1e-3, atol=0)
    for a, b in zip(metrics(one), metrics(two)):
        assert a == pytest.approx(b, rel=1e-3)
    first = metrics(two)[0]
    assert {"loss", "mse", "vb", "loss_q0", "vb_q3", "mse_q1", "grad_norm", "param_norm", "lr"} <= first.keys()
    assert {"metrics/fd", "metrics/ema_0.9/fd", "metrics/accuracy"} <= set().union(*metrics(two))


@pytest.mark.faults  # in CI: engine/test_systems.py, to other ranks and stages, with the same history
def test_goes_on_at_another_stage_and_world(undisturbed, tmp_path):
    """Oracle: the history of an undisturbed run at stage 2: 2 ranks of stage 3 go on as 1 rank of stage 1."""
    folder = tmp_path / "moved"
    finish(train(folder, 3, "steps=20", recipe=RECIPE))
    finish(train(folder, 1, "steps=30", recipe=RECIPE, num=1))
    (_, state), (_, expected) = history(folder), history(undisturbed(2))
    assert torch.equal(state["seen"], expected["seen"])
    torch.testing.assert_close(state["history"], expected["history"], rtol=1e-2, atol=1e-5)


def test_an_average_of_choice(undisturbed, tmp_path):
    """Oracle: the checkpoint's own averages: two decays draw two pictures, and a third is refused."""
    run = undisturbed(2)
    saved = run / "checkpoints" / f"step_{STEPS:08d}"
    a, b = (read_weights(saved, "denoiser", f"ema.{decay}") for decay in (0.9, 0.99))
    assert any(not torch.equal(a[name], b[name]) for name in a)
    words = ["launch/generate.py", run, "--num-samples", "2", "--no-pngs"]
    arrays = []
    for decay in ("0.9", "0.99"):
        finish(command(*words, "--ema", decay, "--out", tmp_path / decay, num=1))
        arrays.append(np.load(tmp_path / decay / "samples_2x16x16x3.npz")["arr_0"])
    assert not np.array_equal(*arrays)
    assert "holds no EMA of decay 0.5" in finish(command(*words, "--ema", "0.5", num=1), code=2)


def test_bits_per_dim(undisturbed, tmp_path, monkeypatch, capsys):
    """Oracle: two ranks with other batches than one's, over the whole chain; terms add up; raw weights differ."""
    words, name = [undisturbed(2), "--num-samples", "37"], "step_00000030_{}_n37"
    results = {}
    for kind, batch in (("ema0.99", "16"), ("raw", "9")):
        weights = ["--raw"] if kind == "raw" else ["--ema", "0.99"]
        code, _, err = here("evaluate.py", [*words, *weights, "--batch", batch, "--out", tmp_path], monkeypatch, capsys)
        assert code == 0 and (tmp_path / f"{name.format(kind)}.png").exists(), err
        results[kind] = json.loads((tmp_path / f"{name.format(kind)}.json").read_text())
    one = results["ema0.99"]
    finish(command("launch/evaluate.py", *words, "--ema", "0.99", "--batch", "5", "--out", tmp_path / "two"))
    two = json.loads((tmp_path / "two" / f"{name.format('ema0.99')}.json").read_text())
    assert (one["ranks"], two["ranks"]) == (1, 2) and one["timesteps"] == two["timesteps"] == list(range(10))
    for group in ("figures", "curves"):
        for term, values in one[group].items():
            assert two[group][term] == pytest.approx(values, rel=1e-5, abs=1e-9), term
    assert sum(one["curves"]["vb"]) + one["figures"]["prior"] == pytest.approx(one["figures"]["total"], rel=1e-6)
    assert len(one["curves"]["mse"]) == 10 and one["figures"]["total"] != results["raw"]["figures"]["total"]


def test_chain_of_base_and_upsampler(undisturbed, tmp_path):
    """Oracle: the base's own pictures and labels handed to the upsampler's system, with other noise than theirs."""
    upsampler = tmp_path / "upsampler"
    finish(
        train(
            upsampler,
            2,
            "model.image_size=32",
            "model.small_size=16",
            "data.image_size=32",
            "steps=10",
            "model.channel_mult=[1,1]",
            "model.attention_resolutions=[16]",
            "samples.labels=null",
            "samples.num=20",
            "every.metrics=0",
            recipe=RECIPE,
        )
    )
    grids = [Image.open(upsampler / "samples" / f"step_00000010{suffix}.png") for suffix in ("", "_low_res")]
    assert grids[0].size == grids[1].size and grids[0].width > 10 * 32  # a class a column, in both
    words = ["launch/generate.py", undisturbed(2), "--num-samples", "5", "--batch", "2"]
    finish(command(*words, "--out", tmp_path / "small", num=1))
    for num in (1, 2):
        finish(command(*words, "--then", upsampler, "--out", tmp_path / f"large{num}", num=num))
    large = [np.load(tmp_path / f"large{num}" / "samples_5x32x32x3.npz")["arr_0"] for num in (1, 2)]
    assert np.array_equal(*large)

    run = trained.read_recipe(upsampler)
    system = systems.build(run.system, run.model)
    at = trained.find_checkpoint(upsampler)
    networks = trained.load_networks(system, at, trained.choose_raw_or_ema_by_part(system, at, 0.99), torch.float32)

    def enlarged(labels, pictures):
        request = Request(
            rng.keys_of_seeds(torch.arange(5)),
            {"label": torch.tensor(labels)} | system.conditions_from(pictures),
            3,
            "ddpm",
        )
        return draw_all_samples(system, networks, request, 2)[:, 0].numpy()

    small = read_pictures(tmp_path / "small", 1)
    assert np.array_equal(enlarged([7, 3, 7, 3, 7], small), large[0][..., 0])  # the recipe's labels
    assert not np.array_equal(enlarged([0, 1, 2, 3, 4], small), large[0][..., 0])
    assert not np.array_equal(enlarged([7, 3, 7, 3, 7], 255 - small), large[0][..., 0])

    finish(
        command(
            "launch/generate.py",
            upsampler,
            "--low-res",
            tmp_path / "small",
            "--num-samples",
            "5",
            "--batch",
            "2",
            "--labels",
            "7,3",
            "--out",
            tmp_path / "again",
            num=1,
        )
    )
    again = np.load(tmp_path / "again" / "samples_5x32x32x3.npz")["arr_0"]
    assert again.shape == large[0].shape and not np.array_equal(again, large[0])  # the chain's noise is its own
    output = finish(command("launch/generate.py", upsampler, num=1), code=2)
    assert "--low-res" in output and "--then" in output
    output = finish(command(*words, "--then", upsampler, "--then", upsampler, num=1), code=2)
    assert "draws pictures of 32 pixels, and is given some of 32" in output
