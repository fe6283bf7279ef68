"""Exports to diffusers without a run: what is written, read back, measured and refused. Whole runs: tests/launch."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dstrain import recipe, systems
from dstrain.config import ConfigError
from dstrain.data.sources import open_sources
from dstrain.encode import Order as Encoding
from dstrain.encode import encode
from dstrain.encoders.autoencoder import Autoencoder, fingerprint
from dstrain.export import Order, _examples, _in_diffusers, _measured, _Shuffled, _told, _writer, export
from dstrain.systems.vae import to_diffusers
from tests.support.launch import ROOT
from tests.support.pictures import folder


@pytest.fixture
def trained(tmp_path):
    """A run of a KL autoencoder over a folder of 50 images, and networks whose weights are all random."""
    torch.manual_seed(0)
    folder(tmp_path / "data", 2, 25)
    words = [f"data.path={tmp_path / 'data'}", "model.kl.norm_num_groups=2"]
    run = recipe.load(ROOT / "tests/launch/tiny-vae.yaml", words)
    run = recipe.check(run, systems.config_class("vae"))
    system = systems.build("vae", run.model)
    return run, system, system.networks()


def test_the_folder_is_the_network(tmp_path, trained):
    """Oracle: diffusers' own class, read from the folder: the same bits, the scale that was given, our decode."""
    _, system, nets = trained
    to_diffusers.save(system, nets, tmp_path / "out", lambda: {"scaling_factor": 0.75})
    read = Autoencoder(str(tmp_path / "out"))
    assert (read.scaling_factor, read.vae.config.sample_size, read.image_channels, read.factor) == (0.75, 16, 1, 2)
    assert read.fingerprint() == fingerprint(*system.identity(nets))
    example = system.encode(system.synthetic(4))
    errors = to_diffusers.errors(system, nets, tmp_path / "out", example)
    assert errors.keys() == {"mean", "std", "decoded"} and max(errors.values()) < 1e-6
    latents = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(read.decode(latents), nets["autoencoder"].decode(latents / 0.75).detach())


def test_other_weights_are_found(tmp_path, trained):
    """Oracle: a file in which one weight was moved by its last bit."""
    _, system, nets = trained
    to_diffusers.save(system, nets, tmp_path / "out", lambda: {"scaling_factor": 1.0})
    path = tmp_path / "out" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    name = "decoder.conv_out.bias"
    weights[name] = torch.nextafter(weights[name], torch.tensor(9.0))
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ValueError, match="was read back as the first stage"):
        to_diffusers.errors(system, nets, tmp_path / "out", system.encode(system.synthetic(2)))


def test_statistics(tmp_path, trained):
    """Oracle: the index of launch/encode.py over the same images; another first stage's index is refused."""
    run, system, nets = trained
    to_diffusers.save(system, nets, tmp_path / "out", lambda: {"scaling_factor": 1.0})
    order = Encoding(tmp_path / "codes", first_stage=str(tmp_path / "out"), data=run.data.path, image_size=16,
                     flip=False, dtype="float32")
    index = encode(order)
    measured = _measured(50, run, system, nets)
    assert measured.keys() == index["statistics"].keys()
    for name, value in index["statistics"].items():
        np.testing.assert_allclose(measured[name], value, rtol=1e-5, atol=1e-6)
    ordered = Order(tmp_path / "run", tmp_path / "x", statistics=tmp_path / "codes" / "index.json")
    assert _told(ordered, system, nets) == index["statistics"] == _told(
        Order(tmp_path / "run", tmp_path / "x", statistics=tmp_path / "codes"), system, nets)
    away = run.model_copy(update={"data": run.data.model_copy(update={"path": str(tmp_path / "nowhere")})})
    done = _in_diffusers(ordered, away, system, nets, to_diffusers, tmp_path / "told")
    assert done.statistics == index["statistics"] and max(done.errors.values()) < 1e-6
    other = system.networks()
    with pytest.raises(ConfigError, match="these codes are of the first stage .* name the cache"):
        _told(ordered, system, other)


def test_measured_over_all_classes(trained):
    """Oracle: the files' own classes: the folder lists 25 of the one, then 25 of the other; and no mode left behind."""
    run, system, _ = trained
    labels, classes = [], []
    for example in _examples(12, run, system):
        assert torch.is_grad_enabled()
        labels += example["label"][example["valid"]].tolist()
    source, shuffled = open_sources(run.data)[0], _Shuffled(open_sources(run.data)[0], run.seed)
    classes = [shuffled[i]["label"] for i in range(50)]
    assert [source[i]["label"] for i in range(50)] == [0] * 25 + [1] * 25 and sorted(classes) == [0] * 25 + [1] * 25
    assert labels == classes[:12] and set(labels) == {0, 1}


def test_what_has_no_form_in_diffusers(tmp_path, trained):
    """Oracle: the contract: a refusal that says what is supported."""
    run, _, _ = trained
    tiny = recipe.load(ROOT / "tests/launch/tiny.yaml")
    with pytest.raises(ConfigError, match="which has no form in diffusers here; these have: .*vae.*safetensors"):
        _writer(tmp_path, tiny)
    discrete = {"discrete": {"num_tokens": 8, "codebook_dim": 4, "num_layers": 1, "hidden_dim": 4}, "image_size": 8}
    system = systems.build("vae", discrete)
    with pytest.raises(ValueError, match="no class for a discrete VAE: only model.kl.*safetensors"):
        to_diffusers.save(system, system.networks(), tmp_path / "out", dict)
    with pytest.raises(ConfigError, match="--statistics gives .* leave it out"):
        export(Order(tmp_path, tmp_path / "out", "safetensors", statistics=tmp_path))
