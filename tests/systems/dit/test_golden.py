"""The diffusion transformer and its diffusion against outputs of the original (golden/dit_tiny, golden/dit_keys)."""

import json

import pytest
import torch

from dstrain.diffusion import samplers, schedule
from dstrain.diffusion.gaussian import GaussianDiffusion
from dstrain.systems.dit.network import DiT
from dstrain.systems.dit.presets import PRESETS
from tests.support import golden

CLOSE = {"rtol": 1e-5, "atol": 1e-7}
CHAIN = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def tiny():
    tensors, meta = golden.load("dit_tiny")
    network = golden.fill(DiT(**meta["config"]).double(), keep=("pos_embed",))
    return network.requires_grad_(False), tensors, meta


@pytest.fixture(scope="module")
def diffusion():
    return GaussianDiffusion(schedule.make_betas("linear", 1000))


@pytest.mark.parametrize("size", [name for name in PRESETS if name.startswith("DiT")])
def test_names_and_shapes_of_the_official_sizes(size):
    """Oracle: state-dict names and shapes of the published models."""
    with torch.device("meta"):
        network = DiT(**PRESETS[size])
    ours = {name: list(tensor.shape) for name, tensor in network.state_dict().items()}
    assert ours == json.loads((golden.FOLDER / "dit_keys.json").read_text())[size]


def test_tiny_names(tiny):
    """Oracle: state-dict names of the original at the tiny size."""
    network, _, meta = tiny
    assert {name: list(tensor.shape) for name, tensor in network.state_dict().items()} == meta["keys"]


def test_positions(tiny):
    """Oracle: the original's fixed positions."""
    network, tensors, _ = tiny
    torch.testing.assert_close(network.pos_embed.float(), tensors["pos_embed"], rtol=0, atol=1e-7)


def test_network(tiny):
    """Oracle: the original network's output."""
    network, tensors, _ = tiny
    out = network(tensors["x"], tensors["t"], tensors["y"])
    torch.testing.assert_close(out, tensors["out"], **CLOSE)


def test_tables(tiny, diffusion):
    """Oracle: the original's tables."""
    for name, table in tiny[1].items():
        if name.startswith("table."):
            torch.testing.assert_close(diffusion.tables[name[6:]], table, rtol=1e-9, atol=1e-12)


def test_losses(tiny, diffusion):
    """Oracle: the original's training losses at given t and noise."""
    network, tensors, _ = tiny
    terms = diffusion.training_losses(
        lambda x, t: network(x, t, tensors["y"]), tensors["x"], tensors["t"], tensors["noise"]
    )
    for name, term in terms.items():
        torch.testing.assert_close(term, tensors[f"loss.{name}"], **CLOSE)


@pytest.mark.parametrize("chain", ["ddpm10", "ddim10", "ddpm10_cfg4_ch3"])
def test_chains(tiny, diffusion, chain):
    """Oracle: the original's sampled chains with the same draws."""
    network, tensors, meta = tiny
    x, y = tensors["x"], tensors["y"]
    scale = 4.0 if "cfg4" in chain else 1.0
    null = torch.full_like(y, meta["config"]["num_classes"])
    guided = samplers.make_guided_network(network, {"y": y}, {"y": null}, scale, channels=3)

    def noise(i):
        return golden.stream(f"noise/{i}", x.shape)

    if chain == "ddim10":
        out = samplers.sample_ddim(diffusion.respace("ddim10"), guided, x)
    else:
        out = samplers.sample_ancestral(diffusion.respace("10"), guided, x, noise)
    torch.testing.assert_close(out, tensors[f"sample.{chain}"], **CHAIN)


def test_bits_per_dim(tiny, diffusion):
    """Oracle: the original's variational bound over 20 timesteps."""
    network, tensors, _ = tiny
    x = tensors["x"].clamp(-1, 1)
    terms = diffusion.respace("20").compute_bits_per_dim(
        lambda x_t, t: network(x_t, t, tensors["y"]), x, lambda i: golden.stream(f"noise/{i}", x.shape)
    )
    for name in ("total", "prior", "vb"):
        torch.testing.assert_close(terms[name], tensors[f"bpd20.{name}"], rtol=1e-5, atol=1e-9)
