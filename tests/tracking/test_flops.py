"""The useful operations of a step, the rates of chips, and their quotient in the reports."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from dstrain import recipe, rng, systems
from dstrain.distributed import group
from dstrain.systems.dit.system import DiTSystem
from dstrain.systems.phenaki.masking import MEAN_RATIO
from dstrain.tracking.flops import Utilization, count_step_flops, find_or_measure_chip_flops
from dstrain.tracking.hardware import find_peak_flops
from tests.support import first_stage
from tests.support.launch import ROOT
from tests.support.tracking import time_run
from tests.systems.phenaki.cases import TOKEN_CLIPS

TINY = {"patch_size": 2, "hidden_size": 16, "depth": 2, "num_heads": 2, "num_classes": 3, "in_channels": 3}


def test_the_published_size():
    """Oracle: Peebles & Xie's table 4, 118.64 G multiply-adds forward; six operations each, of which four backward."""
    system = systems.build("dit", {"size": "DiT-XL/2", "image_size": 32, "in_channels": 4})
    assert count_step_flops(system, 256) == pytest.approx(256 * 6 * 118.64e9, rel=2e-3)


def test_recomputation_is_not_useful():
    """Oracle: the same network without it; torch's checkpoint runs each block's forward pass once more, backward."""

    class Again(DiTSystem):
        def networks(self):
            networks = super().networks()
            for block in networks["denoiser"].blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
            return networks

    plain = systems.build("dit", {**TINY, "image_size": 8})
    assert count_step_flops(Again(plain.config), 6) == count_step_flops(plain, 6)


def test_tokens_that_are_masked_by_chance():
    """Oracle: twice the vocabulary adds six operations for each channel, new id and token that is masked on average."""
    small, large = (
        count_step_flops(systems.build("phenaki", TOKEN_CLIPS | {"codebook_size": size}), 1) for size in (6400, 12800)
    )
    tokens, width = math.prod(TOKEN_CLIPS["token_shape"]), TOKEN_CLIPS["dim"]
    assert large - small == pytest.approx(6 * width * 6400 * MEAN_RATIO * tokens, rel=0.03)


def test_parts_and_micro_batches():
    """Oracle: torch's FlopCounterMode around a real turn of an autoencoder; twice the samples are twice the operations;
    and a step takes more once the adversary has joined.
    """
    run = recipe.load_recipe(ROOT / "tests/launch/tiny-vae.yaml", [])
    shape = {"image_size": 16, "channels": 1}
    system = systems.build(run.system, {**run.model, **shape})
    example = system.encode(system.synthetic(4) | {"position": torch.arange(4), "step": torch.zeros(4).long()})
    # Not the fused kernel, whose backward pass computes the scores again.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        system.loss("autoencoder", system.networks(), example)["loss"].backward()
    assert count_step_flops(system, 4, 0) == counter.get_total_flops() == count_step_flops(system, 8, 0) / 2
    kl = run.model["kl"] | {"discriminator": {"start": 2, "n_layers": 1, "base_channels": 4}}
    playing = systems.build(run.system, {"kl": kl, **shape})
    assert count_step_flops(playing, 4, 5) > count_step_flops(playing, 4, 0) >= count_step_flops(system, 4)


def test_frozen_weights_count_forward_alone():
    """Oracle: torch's FlopCounterMode around a forward and a backward pass in which a head alone learns."""
    system = systems.build("dit", {**TINY, "image_size": 16})
    network = system.networks()["denoiser"].requires_grad_(False)
    network.final_layer.requires_grad_(True)
    example = system.encode(system.synthetic(4))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        system.loss("denoiser", {"denoiser": network}, example)["loss"].backward()
    assert count_step_flops(system, 4, 0, ["final_layer.*"]) == counter.get_total_flops()
    assert counter.get_total_flops() < 0.5 * count_step_flops(system, 4)


def test_frozen_networks_count_for_nothing_and_stay(tmp_path):
    """Oracle: the same model on the latents' own pixels; the encoder's weights are where and what they were."""
    path = str(first_stage.save(tmp_path))
    system = systems.build("dit", {**TINY, "image_size": 32, "first_stage": {"path": path, "factor": 4}})
    before = {name: value.clone() for name, value in system.first_stage.state_dict().items()}
    alone = systems.build("dit", {**TINY, "image_size": 8})
    state = torch.get_rng_state()
    assert count_step_flops(system, 6) == count_step_flops(alone, 6) > 0
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in system.first_stage.state_dict().items())
    assert system.encode(system.synthetic(2))["x_start"].isfinite().all()


def test_rates_of_chips():
    """Oracle: the makers' data sheets; a part of a GPU and an unknown one are not listed, and are measured."""
    names = {
        "NVIDIA H200": 989.4,
        "NVIDIA H100 80GB HBM3": 989.4,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA H20": 148,
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA A100 80GB PCIe": 312,
        "NVIDIA L4": 121,
        "NVIDIA GeForce RTX 4090": 165.2,
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
        "NVIDIA L40": None,
        "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    }
    for name, peak in names.items():
        assert find_peak_flops(name, torch.bfloat16) == (peak and peak * 1e12), name
    assert find_peak_flops("NVIDIA A100-SXM4-40GB", torch.float32) == 19.5e12
    assert find_peak_flops("NVIDIA A100-SXM4-40GB", torch.float32, tf32=True) == 156e12
    assert find_or_measure_chip_flops(torch.device("cpu"), torch.float32) > 0


def test_reports(monkeypatch):
    """Oracle: the count of a step times 10 steps, over 4 s and the rate of an H200; a CPU reports none of it."""
    run = recipe.load_recipe(Path(ROOT / "tests/launch/tiny.yaml"), ["batch.global=8", "model.image_size=8"])
    system = systems.build("dit", {**run.model, "in_channels": 1})
    assert Utilization(system, 8, "bf16").compute_tflops_and_mfu(0, 10, 4.0) == {}
    monkeypatch.setattr(group, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    clock = [100.0]
    monkeypatch.setattr("dstrain.tracking.throughput.time.perf_counter", lambda: clock[0])
    made = time_run(run, 20, system=system, precision="bf16")
    clock[0] += 4
    figures, work = made.compute_interval_figures(30), 10 * count_step_flops(system, 8)
    assert figures["mfu"] == pytest.approx(work / 4 / 989.4e12) and figures["tflops"] == pytest.approx(work / 4e12)
    assert figures["step_seconds"] == pytest.approx(0.4)

    class Values(type(system)):
        """A system whose loss reads values."""

        def loss(self, part, nets, example):
            assert rng.uniform(example["key"], "x").max().item() < 2
            return super().loss(part, nets, example)

    with pytest.warns(UserWarning, match="mfu is not reported"):
        assert Utilization(Values(system.config), 8, "bf16").compute_tflops_and_mfu(0, 10, 4.0) == {}


def test_steps_of_different_cost(monkeypatch):
    """Oracle: the sum of each step's own count: steps with cut clips, and parts of unlike size in turn."""
    monkeypatch.setattr(group, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")

    class InTurn(type(systems.build("phenaki", TOKEN_CLIPS))):
        def turns(self, step):
            super().turns(step)
            return ("critic",) if step % 2 else ("maskgit",)

    model = TOKEN_CLIPS | {"critic": "token", "critic_depth": 1, "beginnings": [0.4, 0.3]}
    cut = systems.build("phenaki", model)
    for system in (cut, InTurn(cut.config)):
        each = [count_step_flops(system, 8, step) for step in range(6)]
        assert len(set(each)) > 2
        figures = Utilization(system, 8, "bf16").compute_tflops_and_mfu(0, 6, 2.0)
        assert figures["tflops"] == pytest.approx(sum(each) / 2e12, rel=1e-6)
