"""The KL autoencoder as a system, with its adversary and its perceptual distance."""

import math

import pytest
import torch

from dstrain import rng, systems
from dstrain.encoders.autoencoder import Autoencoder, encode_posterior, hash_network
from dstrain.nn.perceptual import CHANNELS, Perceptual
from dstrain.systems.vae.kl_system import compute_latent_std
from tests.support.golden import fill

TINY = {"block_out_channels": [8, 16], "norm_num_groups": 4, "layers_per_block": 1, "kl_weight": 0.1}
GAN = {"discriminator": {"start": 3, "n_layers": 1, "base_channels": 16, "weight": 0.7}}


def build(channels=1, **changes):
    return systems.build("vae", {"image_size": 16, "channels": channels, "kl": TINY | changes})


def nets_of(system):
    return {part: fill(network) for part, network in system.networks().items()}


def theirs_of(system):
    """diffusers' AutoencoderKL of the same arguments."""
    from diffusers import AutoencoderKL

    chosen = system.kl
    stages = len(chosen.block_out_channels)
    return AutoencoderKL(
        in_channels=system.config.channels,
        out_channels=system.config.channels,
        latent_channels=chosen.latent_channels,
        down_block_types=("DownEncoderBlock2D",) * stages,
        up_block_types=("UpDecoderBlock2D",) * stages,
        block_out_channels=chosen.block_out_channels,
        layers_per_block=chosen.layers_per_block,
        norm_num_groups=chosen.norm_num_groups,
        use_quant_conv=chosen.quant_conv,
        use_post_quant_conv=chosen.quant_conv,
        mid_block_add_attention=chosen.mid_block_add_attention,
    )


@pytest.mark.parametrize(
    "channels, changes",
    [
        (1, {}),
        (3, {"quant_conv": False, "latent_channels": 8}),
        (3, {"block_out_channels": [8], "mid_block_add_attention": False}),
        (3, {"block_out_channels": [8, 8, 16]}),
    ],
)
def test_it_is_diffusers_network(channels, changes):
    """Oracle: diffusers' AutoencoderKL with our state dict, loaded name by name: posterior and decoded picture."""
    system = build(channels, **changes)
    network, theirs = nets_of(system)["autoencoder"], theirs_of(system)
    theirs.load_state_dict(network.state_dict(), strict=True)
    x = torch.rand(2, channels, 16, 16) * 2 - 1
    noise = torch.randn(2, *system.latent_shape)
    with torch.no_grad():
        picture, mean, log_variance = network(x, noise)
        expected = theirs.encode(x).latent_dist
        torch.testing.assert_close(mean, expected.mean)
        torch.testing.assert_close(log_variance, expected.logvar)
        torch.testing.assert_close(picture, theirs.decode(expected.mean + expected.std * noise).sample)


def test_size_of_stable_diffusions():
    """Oracle: 83.65 M weights, the published autoencoder; its latents are 32 x 32 x 4 for 256 pixels."""
    system = systems.build("vae", {"kl": {}})
    with torch.device("meta"):
        network = system.networks()["autoencoder"]
    assert sum(p.numel() for p in network.parameters()) == 83_653_863 and system.latent_shape == (4, 32, 32)


def test_an_exported_one_is_the_same_first_stage(tmp_path):
    """Oracle: the frozen first stage of DiT, from a folder that diffusers saved: latents, codes and fingerprint."""
    system = build(3)
    nets, theirs = nets_of(system), theirs_of(system)
    theirs.load_state_dict(nets["autoencoder"].state_dict())
    theirs.save_pretrained(tmp_path)
    frozen = Autoencoder(str(tmp_path), scaling_factor=1.0)
    example = system.encode(system.synthetic(3))
    found = system.compute_codes(nets, example)
    mean, std = encode_posterior(frozen.vae, example["x_start"])
    torch.testing.assert_close(found["latent_mean"], mean)
    torch.testing.assert_close(found["latent_std"], std)
    drawn = rng.normal(example["key"], "latent", system.latent_shape) * std + mean
    torch.testing.assert_close(frozen.encode(example["x_start"], example["key"]), drawn)
    assert frozen.compute_fingerprint() == hash_network(*system.describe_identity(nets))


@pytest.mark.parametrize("reconstruction", ["l1", "mse"])
def test_loss_of_a_sample(reconstruction):
    """Oracle: the formula; the divergence by torch.distributions, in nats of a sample / values of its image."""
    system = build(reconstruction=reconstruction)
    nets, example = nets_of(system), system.encode(system.synthetic(3))
    terms = system.loss("autoencoder", nets, example)
    x = example["x_start"]
    picture, mean, log_variance = nets["autoencoder"](x, rng.normal(example["key"], "latent", (4, 8, 8)))
    error = (picture - x).abs() if reconstruction == "l1" else (picture - x).square()
    normal = torch.distributions.Normal(mean, (0.5 * log_variance).exp())
    nats = torch.distributions.kl_divergence(normal, torch.distributions.Normal(0.0, 1.0)).sum((1, 2, 3))
    torch.testing.assert_close(terms["recon"], error.mean((1, 2, 3)).detach())
    torch.testing.assert_close(terms["kl"], nats.detach(), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(terms["loss"], (error.mean((1, 2, 3)) + 0.1 * nats / 256).mean(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("balance", ["picture", "last_layer"])
def test_descent_with_an_adversary(balance):
    """Oracle: one graph through both networks: the value of the loss and every gradient of the autoencoder. The lengths
    that are compared: of gradients with respect to the picture, or to the last layer's filters, a sample at a time.
    """
    system = build(discriminator=GAN["discriminator"] | {"balance": balance})
    nets, example = nets_of(system), system.encode(system.synthetic(3))
    assert system.turns(3) == ("autoencoder", "discriminator")
    terms = system.loss("autoencoder", nets, example)
    weights = list(nets["autoencoder"].parameters())
    found = torch.autograd.grad(terms["loss"], weights)
    x = example["x_start"]
    picture, mean, log_variance = nets["autoencoder"](x, rng.normal(example["key"], "latent", (4, 8, 8)))
    distance = (picture - x).abs().mean((1, 2, 3))
    nats = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum((1, 2, 3))
    critique = -nets["discriminator"](picture).mean((1, 2, 3))
    at = picture if balance == "picture" else nets["autoencoder"].decoder.conv_out.weight
    lengths = [
        torch.stack([torch.autograd.grad(value, at, retain_graph=True)[0].norm() for value in values])
        for values in (distance, critique)
    ]
    weight = 0.7 * (lengths[0] / lengths[1] if balance == "picture" else lengths[0] / (lengths[1] + 1e-4))
    loss = (distance + 0.1 * nats / 256 + weight * critique).mean().float()
    torch.testing.assert_close(terms["critique_weight"], weight, rtol=1e-4, atol=0)
    torch.testing.assert_close(terms["critique_share"], weight * lengths[1] / lengths[0])
    torch.testing.assert_close(terms["loss"], loss, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(found, torch.autograd.grad(loss, weights)):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
    assert not any(weight.grad is not None for weight in nets["discriminator"].parameters())


def test_the_discriminators_turn():
    """Oracle: the hinge loss on the originals and on the very picture of the autoencoder's turn; no gradient to it."""
    system = build(**GAN)
    nets, example = nets_of(system), system.encode(system.synthetic(3))
    system.turns(3)
    system.loss("autoencoder", nets, example)
    noise = rng.normal(example["key"], "latent", (4, 8, 8))
    picture = nets["autoencoder"](example["x_start"], noise)[0].detach()
    with torch.no_grad():  # the autoencoder has learned in between
        for weight in nets["autoencoder"].parameters():
            weight.add_(0.1)
    terms = system.loss("discriminator", nets, example)
    real, fake = (nets["discriminator"](images).float() for images in (example["x_start"], picture))
    loss = ((1 - real).clamp(min=0) + (1 + fake).clamp(min=0)).mean() / 2
    torch.testing.assert_close(terms["loss"], loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(terms["real"], real.mean((1, 2, 3)).detach(), rtol=1e-4, atol=1e-5)
    terms["loss"].backward()
    assert all(weight.grad is None for weight in nets["autoencoder"].parameters())


def test_before_the_start():
    """Oracle: the loss without a discriminator in the config, to the bit; and nobody calls it."""
    with_it, without = build(**GAN), build()
    nets = nets_of(with_it) | {"discriminator": None}
    example = with_it.encode(with_it.synthetic(3))
    assert with_it.turns(2) == ("autoencoder",) == without.turns(10**9)
    ours, theirs = (system.loss("autoencoder", nets, example) for system in (with_it, without))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert "reconstruction" not in example


def test_perceptual_distance(tmp_path):
    """Oracle: LPIPS itself, added by weight; 0 leaves it out and needs no file; frozen, no part of the networks."""
    from torchvision.models import vgg16

    torch.manual_seed(0)
    state = {f"features.{name}": tensor for name, tensor in vgg16(weights=None).features.state_dict().items()}
    heads = {f"lin{number}.model.1.weight": torch.rand(1, width, 1, 1) for number, width in enumerate(CHANNELS)}
    torch.save(state | heads, tmp_path / "lpips.pth")
    said = {"path": str(tmp_path / "lpips.pth"), "weight": 0.5}
    system = build(**GAN, perceptual=said)
    nets, example, lpips = nets_of(system), system.encode(system.synthetic(2)), Perceptual(said["path"])
    for step in (0, 3):
        system.turns(step)
        terms = system.loss("autoencoder", nets, example)
        noise = rng.normal(example["key"], "latent", (4, 8, 8))
        picture = nets["autoencoder"](example["x_start"], noise)[0].detach()
        expected = lpips(picture, example["x_start"])
        torch.testing.assert_close(terms["perceptual"], expected, rtol=1e-4, atol=1e-6)
        rest = terms["recon"] + 0.1 * terms["kl"] / 256
        if step == 3:
            rest = rest + terms["critique_weight"] * terms["critique"]
        torch.testing.assert_close(terms["loss"].detach(), (rest + 0.5 * expected).mean(), rtol=1e-4, atol=1e-6)
        terms["loss"].backward()
    assert all(weight.grad is None for weight in system.picture_loss.network.parameters())
    assert not any("features" in name for name in nets["autoencoder"].state_dict())
    assert "perceptual" not in build(perceptual={"path": "/nowhere", "weight": 0}).loss("autoencoder", nets, example)
    without = build(perceptual={"path": "/nowhere"})  # a finished run, whose weights file has gone
    assert without.compute_codes(nets, example).keys() == {"latent_mean", "latent_std"}
    with pytest.raises(ValueError, match="perceptual.path=/nowhere: no weights are there.*weight to 0"):
        without.loss("autoencoder", nets, example)


def test_statistics():
    """Oracle: many samples drawn from the posterior; scaled latents have unit deviation."""
    system = build(3)
    nets, example = nets_of(system), system.encode(system.synthetic(6))
    found = {name: values.mean(0) for name, values in system.evaluate(nets, example).items() if values.ndim == 2}
    mean, log_variance = nets["autoencoder"].encode(example["x_start"])
    drawn = mean + (0.5 * log_variance).exp() * torch.randn(400, *mean.shape)
    torch.testing.assert_close(found["latent_mean"], drawn.mean((0, 1, 3, 4)).detach(), rtol=0.01, atol=0.01)
    torch.testing.assert_close(found["latent_square"], drawn.square().mean((0, 1, 3, 4)).detach(), rtol=0.01, atol=0)
    assert compute_latent_std(found) == pytest.approx(float(drawn.std().detach()), rel=0.005)
    digest = system.compute_figures(found)
    assert digest["scaling_factor"] * digest["latent_std"] == pytest.approx(1)
    assert float((drawn.detach() * digest["scaling_factor"]).std()) == pytest.approx(1, rel=0.005)


def test_held_out_figures():
    """Oracle: psnr of the picture by its mean square error; the terms of the loss, without an adversary."""
    system = build(**GAN)
    nets, example = nets_of(system), system.encode(system.synthetic(3))
    found = system.evaluate(nets, example)
    assert {"loss", "recon", "kl", "psnr", "ssim"} <= found.keys() and "critique" not in found
    shown = system.make_pictures(nets, example)["reconstruction"].float() / 255  # (3, 1, 16, 48)
    error = (shown[..., 16:32] - shown[..., :16]).square().mean((1, 2, 3))
    torch.testing.assert_close(found["psnr"], -10 * error.log10(), rtol=1e-2, atol=0)
    mean_alone = nets["autoencoder"].decode(system.compute_codes(nets, example)["latent_mean"])
    shown_mean = ((mean_alone.clamp(-1, 1) + 1) * 127.5).round() / 255
    torch.testing.assert_close(shown[..., 32:], shown_mean.detach())


def test_bfloat16():
    """Oracle: the float32 network with the same (rounded) weights; posterior and loss are float32."""
    system = build(**GAN)
    nets, example = nets_of(system), system.encode(system.synthetic(8))
    full = system.loss("autoencoder", nets, example)
    half = system.loss("autoencoder", {part: network.bfloat16() for part, network in nets.items()}, example)
    assert half["loss"].dtype == torch.float32 and example["reconstruction"].dtype == torch.float32
    torch.testing.assert_close(half["recon"], full["recon"], rtol=0.05, atol=0.02)
    torch.testing.assert_close(half["kl"], full["kl"], rtol=0.05, atol=1.0)


def test_learns():
    """Oracle: a reconstruction error that falls, with the adversary joining half-way."""
    torch.manual_seed(0)
    system = build(kl_weight=1e-4, discriminator=GAN["discriminator"] | {"start": 20, "weight": 0.1})
    nets = system.networks()
    optimizers = {part: torch.optim.AdamW(network.parameters(), lr=3e-3) for part, network in nets.items()}
    image = (255 * (torch.arange(8) % 2)).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 16, 16)
    errors = []
    for step in range(40):
        example = system.encode({"image": image, "key": rng.keys(0, step, torch.arange(8))})
        for part in system.turns(step):
            terms = system.loss(part, nets, example)
            optimizers[part].zero_grad()
            terms["loss"].backward()
            optimizers[part].step()
            if part == "autoencoder":
                errors.append(float(terms["recon"].mean()))
    assert sum(errors[-5:]) < 0.3 * sum(errors[:5]) and math.isfinite(errors[-1])
