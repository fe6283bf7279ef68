"""The first stage, on a tiny autoencoder of the real class."""

from argparse import Namespace

import pytest
import torch

from dstrain import rng, systems
from dstrain.encoders.autoencoder import Autoencoder, encode_posterior, get_config_and_weights_to_hash, hash_network
from dstrain.recipe import ConfigError
from dstrain.runs.first_stage import open_diffusers_autoencoder
from dstrain.systems.base import Request
from tests.support import first_stage


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(4, 4, 4, 4),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=2,
        layers_per_block=1,
        sample_size=32,
        scaling_factor=0.5,
    )
    path = tmp_path_factory.mktemp("pipeline")
    vae.save_pretrained(path / "vae")
    return path


def test_encode_and_decode(folder):
    """Oracle: the autoencoder itself, called directly."""
    first_stage = Autoencoder(str(folder))
    assert (first_stage.channels, first_stage.factor, first_stage.scaling_factor) == (4, 8, 0.5)
    image, key = torch.rand(2, 3, 32, 32) * 2 - 1, rng.keys(0, 0, torch.arange(2))
    posterior = first_stage.vae.encode(image).latent_dist
    latents = first_stage.encode(image, key)
    torch.testing.assert_close(latents, 0.5 * (posterior.mean + posterior.std * rng.normal(key, "latent", (4, 4, 4))))
    torch.testing.assert_close(first_stage.encode(image[1:], key[1:]), latents[1:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first_stage.decode(latents), first_stage.vae.decode(latents / 0.5).sample)
    doubled = Autoencoder(str(folder / "vae"), scaling_factor=1.0)
    torch.testing.assert_close(doubled.encode(image, key), 2 * latents)


def test_frozen(folder):
    """Oracle: no gradient, no training mode, float32 latents from a bfloat16 autoencoder."""
    first_stage = Autoencoder(str(folder)).train()
    assert not first_stage.training and not any(module.training for module in first_stage.modules())
    assert not any(parameter.requires_grad for parameter in first_stage.parameters())
    latents = first_stage.bfloat16().encode(torch.zeros(1, 3, 32, 32), torch.zeros(1, dtype=torch.int64))
    assert latents.dtype == torch.float32 and not latents.requires_grad
    assert first_stage.decode(latents).dtype == torch.float32


def test_fingerprint(tmp_path, monkeypatch):
    """Oracle: what changes codes changes it; scale, size, precision and what other versions of diffusers say do not."""
    from diffusers import AutoencoderKL

    def of(name, **changes):
        return Autoencoder(str(first_stage.save(tmp_path / name, **changes))).compute_fingerprint()

    plain = of("plain")
    same = {
        "force_upcast": False,
        "sample_size": 7,
        "scaling_factor": 3.0,
        "shift_factor": 0.5,
        "latents_mean": [0.0, 1.0, 2.0],
    }
    assert of("same", **same) == plain
    assert (
        len(
            {
                plain,
                of("seed", seed=1),
                of("act", act_fn="gelu"),
                of("groups", norm_num_groups=4),
                of("grey", channels=3),
            }
        )
        == 5
    )
    vae = AutoencoderKL.from_pretrained(tmp_path / "plain", low_cpu_mem_usage=False)
    known = dict(vae.config)
    for config in (known | {"a_new_key": "x"}, {name: known[name] for name in known if name != "use_quant_conv"}):
        other = Namespace(config=config, state_dict=vae.state_dict)
        assert hash_network(*get_config_and_weights_to_hash(other)) == plain
    other = Namespace(config=known | {"mid_block_add_attention": False}, state_dict=vae.state_dict)
    assert hash_network(*get_config_and_weights_to_hash(other)) != plain


def test_missing(tmp_path, monkeypatch):
    """Oracle: a ValueError that names the path and the remedy."""
    with pytest.raises(ValueError, match="there is no folder .*nowhere.*save_pretrained"):
        Autoencoder(str(tmp_path / "nowhere"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("diffusers.AutoencoderKL.load_config", lambda *_, **__: pytest.fail("the hub was asked"))
    for path in ("runs/first_stage", "here/first_stage", "first_stage", "a/b/c", "~/vae", "vae/"):
        with pytest.raises(ValueError, match=f"there is no folder {path}; where it lies .* dstrain export RUN"):
            Autoencoder(path)
    with pytest.raises(pytest.fail.Exception, match="the hub was asked"):
        Autoencoder("stabilityai/sd-vae-ft-mse")
    monkeypatch.undo()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no AutoencoderKL can be loaded .*empty.*config.json"):
        Autoencoder(str(tmp_path / "empty"))


def test_latent_dit(folder):
    """Oracle: latents of the first stage, and images of its size; what does not fit is named."""
    config = {
        "image_size": 32,
        "patch_size": 2,
        "hidden_size": 32,
        "depth": 1,
        "num_heads": 2,
        "num_classes": 3,
        "first_stage": {"path": str(folder)},
    }
    system = systems.build("dit", config)
    batch = system.synthetic(2)
    assert batch["image"].shape == (2, 3, 32, 32)
    example = system.encode(batch)
    torch.testing.assert_close(
        example["x_start"], system.first_stage.encode(batch["image"].float() / 127.5 - 1, batch["key"])
    )
    mean, std = encode_posterior(system.first_stage.vae, batch["image"].float() / 127.5 - 1)
    cached = system.encode({"latent_mean": mean, "latent_std": std, "label": batch["label"], "key": batch["key"]})
    assert torch.equal(cached["x_start"], example["x_start"]) and "latent_mean" not in cached
    nets = system.networks()
    assert bool(system.loss("denoiser", nets, example)["loss"].isfinite())
    images = system.sample(nets, Request(seeds=torch.arange(2), num_steps=2))
    assert images.shape == (2, 3, 32, 32) and images.dtype == torch.uint8
    assert system.frozen() == (system.first_stage,)
    with pytest.raises(ValueError, match="in_channels: 3 in the recipe, 4 in autoencoder"):
        systems.build("dit", config | {"in_channels": 3})
    with pytest.raises(ValueError, match="first_stage.factor: 4 in the recipe, 8"):
        systems.build("dit", config | {"first_stage": {"path": str(folder), "factor": 4}})


def test_an_autoencoder_of_representations(tmp_path):
    """Oracle: diffusers' AutoencoderRAE itself, of pictures in [0, 1]: the same latents, drawn without noise, and the
    same pictures; normalized as its config says; another normalization is another fingerprint, a copy is not.
    """
    from diffusers import AutoencoderRAE

    generator = torch.Generator().manual_seed(1)
    moments = {
        "latents_mean": torch.randn(64, 2, 2, generator=generator),
        "latents_std": 1 + torch.rand(64, 2, 2, generator=generator),
    }
    path = first_stage.save_of_representations(tmp_path / "rae", **moments)
    theirs = AutoencoderRAE.from_pretrained(path)
    ours = Autoencoder(str(path))
    assert (ours.channels, ours.image_channels, ours.factor, ours.scaling_factor) == (64, 3, 8, 1.0)
    assert ours.read_channel_means_and_stds() is None  # It applies them itself.
    image, keys = torch.rand(2, 3, 16, 16, generator=generator), rng.keys_of_seeds(torch.arange(2))
    with torch.no_grad():
        latents = theirs.encode(image).latent
        pictures = theirs.decode(latents).sample
    torch.testing.assert_close(ours.encode(2 * image - 1, keys), latents)
    torch.testing.assert_close(ours.decode(latents), 2 * pictures - 1)
    assert Autoencoder(str(path)).compute_fingerprint() == ours.compute_fingerprint()
    other = first_stage.save_of_representations(tmp_path / "other", latents_std=moments["latents_std"])
    assert Autoencoder(str(other)).compute_fingerprint() != ours.compute_fingerprint()
    ours.set_encode_precision("bf16")
    ours.drop_encoder()
    torch.testing.assert_close(ours.decode(latents), 2 * pictures - 1)


def test_a_dit_of_representations(tmp_path):
    """Oracle: the autoencoder's own latents, online and from a cache, and its own pictures of them; a whole way."""
    path = first_stage.save_of_representations(tmp_path / "rae")
    model = {"image_size": 16, "in_channels": 64, "first_stage": {"path": str(path), "factor": 8}, "num_classes": 10}
    model |= {"patch_size": 1, "hidden_size": 16, "depth": 1, "num_heads": 2, "objective": "flow", "learn_sigma": False}
    system = systems.build("dit", model)
    batch = system.synthetic(2)
    online = system.encode(batch)["x_start"]
    nets = system.networks()
    assert torch.isfinite(system.loss("denoiser", nets, system.encode(batch))["loss"])
    assert system.sample(nets, Request(torch.arange(2), {}, 2)).shape == (2, 3, 16, 16)
    mean, std = encode_posterior(system.first_stage.vae, batch["image"].float() / 127.5 - 1)
    cached = system.encode({"key": batch["key"], "label": batch["label"], "latent_mean": mean, "latent_std": std})
    assert torch.equal(cached["x_start"], online) and not bool(std.any())
    with pytest.raises(ConfigError, match="image_size: 32 in the recipe, 16 in autoencoder"):
        systems.build("dit", model | {"image_size": 32})
    with pytest.raises(ConfigError, match=f"--image-size 32: {path} encodes pictures of 16 pixels alone"):
        open_diffusers_autoencoder(str(path), 32)
