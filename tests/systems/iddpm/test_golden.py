"""The UNet, its diffusion and the system about them against outputs and names of the original."""

import json

import pytest
import torch

from dstrain import systems
from dstrain.diffusion import samplers
from dstrain.systems.iddpm.network import SuperResUNet, UNet
from tests.support import golden

CLOSE = {"rtol": 1e-5, "atol": 5e-6}  # values are of order 1, in float32
# The original's frequencies are of float32's exp, ours exact. A chain makes 3e-4 of it with AVX2, 1e-4 with AVX-512.
CHAIN = dict.fromkeys(("rtol", "atol"), 1.5e-4 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 5e-4)
KEYS = json.loads((golden.FOLDER / "iddpm_keys.json").read_text())
# The published names of these flags; large_size is image_size where there is a small one.
RENAMED = {"use_checkpoint": "recompute", "large_size": "image_size"}


def section(flags, **changes):
    return {RENAMED.get(flag, flag): value for flag, value in flags.items()} | changes


def shapes(network):
    return {name: list(tensor.shape) for name, tensor in network.state_dict().items()}


@pytest.fixture(scope="module")
def tiny():
    """The system of the golden file's flags, its network filled from the names, and the original's tensors."""
    tensors, meta = golden.load("iddpm_hybrid_cosine")
    system = systems.build("iddpm", section(meta["flags"], channel_mult=[1, 2, 2, 2]))
    network = golden.fill(system.networks()["denoiser"])
    return system, network.requires_grad_(False).eval(), tensors, meta


@pytest.mark.parametrize(
    "name, millions",
    [
        ("imagenet64_uncond_hybrid", 121.1),
        ("cifar10_uncond_hybrid", 52.5),
        ("imagenet64_cond_270M", 273.0),
        ("lsun_bedroom", 113.7),
        ("upsampler_64_256", 279.8),
    ],
)
def test_names_and_shapes_of_the_official_models(name, millions):
    """Oracle: state-dict names, in their order, shapes and counts of the published models."""
    system = systems.build("iddpm", section(KEYS[name]["flags"]))
    with torch.device("meta"):
        network = system.networks()["denoiser"]
    assert type(network) is (SuperResUNet if "small_size" in KEYS[name]["flags"] else UNet)
    assert list(shapes(network).items()) == list(KEYS[name]["keys"].items())
    assert sum(parameter.numel() for parameter in network.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)


def test_tiny_names(tiny):
    """Oracle: state-dict names of the original at the tiny size."""
    _, network, _, meta = tiny
    assert shapes(network) == meta["keys"]


def test_network(tiny):
    """Oracle: the original network's output, at the timesteps that rescale_timesteps makes."""
    system, network, tensors, _ = tiny
    times = system.diffusion.convert_timesteps_for_network(tensors["t"])
    assert torch.equal(times, tensors["t"] * 10.0)
    torch.testing.assert_close(network(tensors["x"], times), tensors["out"], **CLOSE)


def test_tables(tiny):
    """Oracle: the original's tables."""
    system, _, tensors, _ = tiny
    for name in (name for name in tensors if name.startswith("table.")):
        table = system.diffusion.tables[name.removeprefix("table.")]
        torch.testing.assert_close(table, tensors[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("changes", [{}, {"rescale_learned_sigmas": False}, {"use_kl": True}, {"loss": "kl"}])
def test_losses(tiny, changes):
    """Oracle: the original's hybrid loss, mse and vb; of the other losses what the paper makes of the same two."""
    _, network, tensors, meta = tiny
    system = systems.build("iddpm", section(meta["flags"], **changes))
    terms = system.diffusion.training_losses(network, tensors["x"], tensors["t"], tensors["noise"])
    mse, vb, steps = tensors["loss.mse"], tensors["loss.vb"], meta["flags"]["diffusion_steps"]
    bound = vb * 1000 / steps  # the file's vb is weighed as in its loss
    expected = {"rescaled_mse": tensors["loss.loss"], "mse": mse + bound, "rescaled_kl": bound * steps, "kl": bound}
    torch.testing.assert_close(terms["mse"], mse, **CLOSE)
    torch.testing.assert_close(terms["loss"], expected[system.diffusion.loss], **CLOSE)
    torch.testing.assert_close(terms["vb"], vb if system.diffusion.loss == "rescaled_mse" else bound, **CLOSE)


@pytest.mark.parametrize("chain", ["ddpm10", "ddim10"])
def test_chains(tiny, chain):
    """Oracle: the original's sampled chains with the same draws, both over the timesteps of respacing "10"."""
    system, network, tensors, _ = tiny
    x = tensors["x"]
    if chain == "ddim10":
        out = samplers.sample_ddim(system.diffusion.respace("10"), network, x, clip_denoised=True)
    else:

        def noise(i):
            return golden.stream(f"noise/{i}", x.shape, torch.float32)

        out = samplers.sample_ancestral(system.diffusion.respace("10"), network, x, noise, clip_denoised=True)
    torch.testing.assert_close(out, tensors[f"sample.{chain}"], **CHAIN)


def test_bits_per_dim(tiny):
    """Oracle: the original's variational bound over 10 timesteps."""
    system, network, tensors, _ = tiny
    x = tensors["x"].clamp(-1, 1)

    def noise(i):
        return golden.stream(f"noise/{i}", x.shape, torch.float32)

    terms = system.diffusion.respace("10").compute_bits_per_dim(network, x, noise)
    for name in ("total", "vb", "mse"):
        torch.testing.assert_close(terms[name], tensors[f"bpd10.{name}"], **CLOSE)
