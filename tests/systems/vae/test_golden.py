"""The discrete VAE against outputs of the original, DALLE-pytorch (golden/dvae_tiny)."""

import pytest
import torch

from dstrain import systems
from tests.support import golden

CLOSE = {"rtol": 1e-5, "atol": 1e-7}


@pytest.fixture(scope="module")
def tiny():
    """The original's arguments in our recipe's words, its weights, and what it gave."""
    tensors, meta = golden.load("dvae_tiny")
    said = dict(meta["config"])
    image_size, weight = said.pop("image_size"), said.pop("kl_div_loss_weight")
    assert said.pop("smooth_l1_loss")
    system = systems.build(
        "vae",
        {
            "image_size": image_size,
            "discrete": said
            | {
                "reconstruction": "smooth_l1",
                "kl_weight": weight,
                "kl_form": "legacy",
                "temperature": {"schedule": "constant", "start": 0.7},
            },
        },
    )
    network = golden.fill(system.networks()["autoencoder"].double())
    return system, network.requires_grad_(False), tensors, meta


def test_names(tiny):
    """Oracle: state-dict names and shapes of the original."""
    _, network, _, meta = tiny
    assert {name: list(tensor.shape) for name, tensor in network.state_dict().items()} == meta["keys"]


def test_tokens(tiny):
    """Oracle: the original's logits and codebook indices."""
    _, network, tensors, _ = tiny
    passed = network(tensors["x"], tensors["gumbel"], torch.full((2,), 0.7))
    torch.testing.assert_close(passed.logits, tensors["logits"], **CLOSE)
    assert torch.equal(network.encode(tensors["x"]).flatten(1), tensors["ids"])


def test_decode(tiny):
    """Oracle: the original's decode, which leaves pixels normalized: ours undoes that and keeps to [0, 1]."""
    _, network, tensors, _ = tiny
    tokens = tensors["ids"].view(2, 4, 4)
    torch.testing.assert_close(network.decoder(network.codebook(tokens)), tensors["decoded"], **CLOSE)
    torch.testing.assert_close(network.decode(tokens), (tensors["decoded"] / 2 + 0.5).clamp(0, 1), **CLOSE)


def test_loss_and_reconstruction(tiny, monkeypatch):
    """Oracle: the original's loss, with its KL summed over the batch, and its relaxed reconstruction."""
    system, network, tensors, _ = tiny
    monkeypatch.setattr(
        "dstrain.systems.vae.discrete_system.draw_gumbel_noise", lambda key, name, shape: tensors["gumbel"]
    )
    example = {"x_start": 2 * tensors["x"] - 1, "key": torch.arange(2), "step": torch.tensor([3, 3])}
    terms = system.loss("autoencoder", {"autoencoder": network}, example)
    torch.testing.assert_close(terms["loss"].double(), tensors["loss"], **CLOSE)
    passed = network(tensors["x"], tensors["gumbel"], torch.full((2,), 0.7))
    torch.testing.assert_close(passed.out, tensors["recons"], **CLOSE)
