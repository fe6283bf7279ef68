"""The discrete VAE as a system."""

import math

import pytest
import torch
import torch.nn.functional as F

from dstrain import rng, systems
from dstrain.nn.perceptual import load_perceptual_distance
from dstrain.nn.quantize import compute_kl_to_uniform, draw_gumbel_noise
from dstrain.systems.vae.discrete import DiscreteVAE
from dstrain.systems.vae.losses import EPS, LEAST_LOG_SCALE, compute_logit_laplace_loss, convert_logit_laplace_to_pixels
from tests.support.golden import fill

TINY = {"num_tokens": 16, "codebook_dim": 8, "num_layers": 2, "hidden_dim": 8}
GAN = {
    "discriminator": {"start": 3, "n_layers": 1, "base_channels": 16, "weight": 0.7},
    "perceptual": {"path": "builtin:fashion", "weight": 0.5},
}
FSQ, COSINE = {"quantizer": "fsq", "levels": [4, 4]}, {"quantizer": "cosine"}


def build(channels=3, **changes):
    return systems.build("vae", {"image_size": 16, "channels": channels, "discrete": TINY | changes})


def nets_of(system):
    return {part: fill(network) for part, network in system.networks().items()}


@pytest.mark.parametrize(
    "arguments, millions",
    [
        ({"num_tokens": 8192, "num_layers": 3, "num_resnet_blocks": 2, "codebook_dim": 512, "hidden_dim": 256}, 16.67),
        ({}, 1.09),
        ({"num_tokens": 8192, "num_layers": 3, "num_resnet_blocks": 1, "codebook_dim": 1024, "hidden_dim": 64}, 9.47),
    ],
)
def test_sizes(arguments, millions):
    """Oracle: counts of the original: of its command's defaults, of its constructor's, and of its README's model."""
    with torch.device("meta"):
        network = DiscreteVAE(**arguments)
    assert sum(parameter.numel() for parameter in network.parameters()) / 1e6 == pytest.approx(millions, abs=0.006)


def test_loss_of_a_sample():
    """Oracle: the formula: mean square of normalized pixels + weight * nats / values, both schedules by step."""
    system = build(kl_weight=6.6, kl_warmup=100, temperature={"start": 1.0, "minimum": 0.25, "steps": 200})
    nets, batch = nets_of(system), system.synthetic(3)
    example = system.encode(batch | {"step": torch.full((3,), 50)})
    terms = system.loss("autoencoder", nets, example)
    network, x = nets["autoencoder"], batch["image"] / 255
    logits = network.encoder(2 * x - 1)
    noise = draw_gumbel_noise(batch["key"], "gumbel", (16, 4, 4))
    soft = ((logits + noise) / 0.25**0.25).softmax(1)
    out = network.decoder(torch.einsum("bkhw,kd->bdhw", soft, network.codebook.weight))
    recon = (out - (2 * x - 1)).square().mean((1, 2, 3))
    q = logits.softmax(1)
    nats = (q * (q * 16).log()).sum((1, 2, 3))
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(terms["recon"], recon.detach(), **close)
    torch.testing.assert_close(terms["kl"], nats.detach(), **close)
    torch.testing.assert_close(terms["temperature"], torch.full((3,), 0.25**0.25))
    torch.testing.assert_close(terms["kl_weight"], torch.full((3,), 3.3))
    torch.testing.assert_close(terms["loss"], (recon + 3.3 * nats / (3 * 16 * 16)).mean(), **close)


@pytest.mark.parametrize(
    "changes", [FSQ, COSINE, {"reconstruction": "logit_laplace", "kl_weight": 1.0}, FSQ | {"balance": "last_layer"}]
)
def test_descent_as_in_vqgan(changes):
    """Oracle: one graph through both networks, LPIPS by itself: the value of the loss and every
    gradient; a discriminator that has not begun changes nothing; its turn has the picture of this one.
    """
    changes = dict(changes)
    balance = changes.pop("balance", "picture")
    system = build(**GAN | changes | {"discriminator": GAN["discriminator"] | {"balance": balance}})
    nets, batch = nets_of(system), system.synthetic(3)
    network, x = nets["autoencoder"], batch["image"] / 255
    for step in (2, 3):
        parts, example = system.turns(step), system.encode(batch | {"step": torch.full((3,), step)})
        assert parts == ("autoencoder", "discriminator")[: step - 1]
        terms = system.loss("autoencoder", nets, example)
        ours = torch.autograd.grad(terms["loss"], list(network.parameters()))
        passed = network(x, draw_gumbel_noise(batch["key"], "gumbel", (16, 4, 4)), terms.get("temperature"))
        picture = 2 * network.convert_to_pixels(passed.out) - 1
        if "reconstruction" in changes:
            recon = compute_logit_laplace_loss(passed.out, x)
        else:
            recon = (passed.out - (2 * x - 1)).square().mean((1, 2, 3))
        total = recon + 0.5 * load_perceptual_distance("builtin:fashion")(picture, 2 * x - 1)
        loss = total
        if "levels" not in changes:
            loss = loss + (
                terms["kl_weight"] * compute_kl_to_uniform(passed.logits) / 768
                if "kl_weight" in changes
                else 0.25 * passed.commitment + passed.codebook
            )
        if step == 3:
            at = passed.out if balance == "picture" else network.decoder[-1].weight
            critique = -nets["discriminator"](picture).mean((1, 2, 3))
            lengths = [
                torch.stack([torch.autograd.grad(value, at, retain_graph=True)[0].norm() for value in values])
                for values in (total, critique)
            ]
            weight = 0.7 * lengths[0] / (lengths[1] + (1e-4 if balance == "last_layer" else 0))
            torch.testing.assert_close(terms["critique_weight"], weight, rtol=1e-3, atol=0)
            loss = loss + weight.detach() * critique
            torch.testing.assert_close(example["reconstruction"], picture.detach(), rtol=1e-4, atol=1e-5)
        loss = loss.mean().float()
        torch.testing.assert_close(terms["loss"], loss, rtol=1e-4, atol=1e-5)
        for one, other in zip(ours, torch.autograd.grad(loss, list(network.parameters()))):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert system.loss("discriminator", nets, example)["loss"].isfinite()


@pytest.mark.parametrize("changes", [FSQ | {"num_resnet_blocks": 1}, COSINE])
def test_tokens_of_other_quantizers(changes):
    """Oracle: the one forward pass: tokens, pictures by tokens, and the usage of all samples counted at once."""
    system = build(1, **changes)
    nets, batch = nets_of(system), system.synthetic(5)
    example = system.encode(batch)
    network, passed = nets["autoencoder"], nets["autoencoder"](batch["image"] / 255)
    tokens = system.compute_codes(nets, example)["tokens"]
    assert torch.equal(tokens, passed.tokens) and tokens.shape == (5, 4, 4) and 0 <= tokens.min() <= tokens.max() < 16
    torch.testing.assert_close(
        system.decode(nets, tokens), (2 * network.convert_to_pixels(passed.out) - 1).clamp(-1, 1), rtol=1e-5, atol=1e-5
    )
    figures = system.evaluate(nets, example)
    torch.testing.assert_close(figures["usage"].mean(0), torch.bincount(tokens.flatten(), minlength=16) / 80)
    assert system.make_pictures(nets, example)["reconstruction"].shape == (5, 1, 16, 32) and "kl" not in figures
    assert system.describe_identity(nets)[0]["quantizer"] == changes["quantizer"]
    half = {"autoencoder": nets["autoencoder"].bfloat16()}
    network.normalize.float()
    network.normalize.reset_parameters()
    assert system.evaluate(half, example)["loss"].isfinite().all()


@pytest.mark.parametrize("form", ["per_sample", "legacy"])
def test_divergence_and_batch_size(form):
    """Oracle: doubling the batch: nothing changes per sample; in the original's form the divergence doubles."""
    system = build(kl_weight=0.5, kl_form=form)
    nets, batch = nets_of(system), system.synthetic(2)
    twice = {name: torch.cat((tensor, tensor)) for name, tensor in batch.items()}
    one, two = (system.loss("autoencoder", nets, system.encode(b)) for b in (batch, twice))
    torch.testing.assert_close(two["kl"][:2], one["kl"], rtol=1e-5, atol=1e-5)
    share = {"per_sample": one["kl"].mean() / 768, "legacy": one["kl"].sum()}[form]
    grown = one["loss"] + (0.5 * share if form == "legacy" else 0)
    torch.testing.assert_close(two["loss"], grown, rtol=1e-5, atol=1e-5)


def test_held_out_figures_do_not_depend_on_the_schedules():
    """Oracle: the same terms at any step, those of the end of the schedules."""
    system = build(kl_weight=0.5, kl_warmup=100, temperature={"steps": 10})
    nets, batch = nets_of(system), system.synthetic(2)
    found = system.evaluate(nets, system.encode(batch))
    last = system.evaluate(nets, system.encode(batch | {"step": torch.full((2,), 10**6)}))
    for name in ("loss", "recon", "kl", "temperature", "kl_weight"):
        torch.testing.assert_close(found[name], last[name])


def test_usage():
    """Oracle: the tokens of all samples, counted at once."""
    system = build()
    nets, batch = nets_of(system), system.synthetic(6)
    usage = system.evaluate(nets, system.encode(batch))["usage"]
    tokens = system.compute_codes(nets, system.encode(batch))["tokens"]
    shares = torch.bincount(tokens.flatten(), minlength=16) / tokens.numel()
    torch.testing.assert_close(usage.mean(0), shares)
    found = system.compute_figures({"usage": usage.mean(0)})
    entropy = -(shares[shares > 0] * shares[shares > 0].log()).sum()
    assert found == {
        "perplexity": pytest.approx(float(entropy.exp()), rel=1e-5),
        "dead_tokens": float((shares == 0).float().mean()),
    }
    assert 1 < found["perplexity"] < 16


def test_logit_laplace_is_a_density():
    """Oracle: it integrates to 1 over (0, 1); torch's Laplace at logit(y), with the Jacobian of the logit."""
    mean, log_scale = torch.tensor(0.4), torch.tensor(-1.0)
    y = torch.linspace(0, 1, 200_001, dtype=torch.float64)[1:-1]
    truth = ((y - EPS) / (1 - 2 * EPS))[:, None, None, None]  # beyond [0, 1] at the ends, as a formula
    out = torch.stack((mean, log_scale)).double().view(1, 2, 1, 1).expand(len(y), -1, -1, -1)
    nats = compute_logit_laplace_loss(out, truth)
    assert float((-nats).exp().mean()) == pytest.approx(1, abs=1e-4)
    laplace = torch.distributions.Laplace(mean.double(), log_scale.double().exp())
    torch.testing.assert_close(-nats, laplace.log_prob(torch.logit(y)) - (y * (1 - y)).log())


def test_logit_laplace_pixels():
    """Oracle: the inverse of pixels -> logit(0.8 x + 0.1); a scale below the least one changes nothing."""
    x = torch.rand(2, 3, 4, 4, dtype=torch.float64)
    mean = torch.logit(0.8 * x + 0.1)
    torch.testing.assert_close(convert_logit_laplace_to_pixels(torch.cat((mean, mean), 1)), x)
    low = [torch.cat((mean, torch.full_like(mean, value)), 1) for value in (LEAST_LOG_SCALE, -50.0)]
    torch.testing.assert_close(compute_logit_laplace_loss(low[0], x), compute_logit_laplace_loss(low[1], x))


@pytest.mark.parametrize("channels, reconstruction", [(1, "mse"), (3, "smooth_l1"), (4, "logit_laplace"), (4, "mse")])
def test_channels(channels, reconstruction):
    """Oracle: shapes; each loss by torch's own; RGBA normalizes colours and leaves alpha in [0, 1]."""
    system = build(channels, reconstruction=reconstruction)
    nets, batch = nets_of(system), system.synthetic(2)
    network, x = nets["autoencoder"], batch["image"] / 255
    example = system.encode(batch)
    passed = network(x, draw_gumbel_noise(batch["key"], "gumbel", (16, 4, 4)), torch.full((2,), 1 / 16))
    assert passed.out.shape[1] == channels * (2 if reconstruction == "logit_laplace" else 1)
    target = 2 * x - 1 if channels < 4 else torch.cat((2 * x[:, :3] - 1, x[:, 3:]), 1)
    torch.testing.assert_close(network.normalize(x), target, rtol=1e-5, atol=1e-6)
    if reconstruction != "logit_laplace":
        expected = {"mse": F.mse_loss, "smooth_l1": F.smooth_l1_loss}[reconstruction](passed.out, target)
        torch.testing.assert_close(
            system.loss("autoencoder", nets, example)["recon"].mean(), expected.detach(), rtol=1e-4, atol=1e-5
        )
    pictures = system.make_pictures(nets, example)["reconstruction"]
    assert pictures.shape == (2, channels, 16, 48) and torch.equal(pictures[..., :16], batch["image"])
    hard = network.decode(network.encode(x))
    assert torch.equal(pictures[..., 32:], (hard * 255).round().to(torch.uint8)) and bool((hard >= 0).all())


def test_normalization():
    """Oracle: by hand; decode undoes it."""
    system = build(1, normalization=[[0.3], [0.2]])
    network = nets_of(system)["autoencoder"]
    x = torch.rand(2, 1, 16, 16)
    torch.testing.assert_close(network.normalize(x), (x - 0.3) / 0.2)
    out = torch.randn(2, 1, 16, 16)
    torch.testing.assert_close(network.convert_to_pixels(out), out * 0.2 + 0.3)
    assert not any(name.startswith("normalize") for name in network.state_dict())


def test_bfloat16():
    """Oracle: the float32 network with the same (rounded) weights; logits and loss are float32."""
    system = build(num_resnet_blocks=1)
    network = nets_of(system)["autoencoder"]
    example = system.encode(system.synthetic(8))
    full = system.loss("autoencoder", {"autoencoder": network}, example)
    network.bfloat16()
    network.normalize.float()
    network.normalize.reset_parameters()
    half = system.loss("autoencoder", {"autoencoder": network}, example)
    assert half["loss"].dtype == torch.float32
    torch.testing.assert_close(half["kl"], full["kl"], rtol=0.03, atol=0.03)


def test_learns():
    """Oracle: a loss that falls: forty steps on images of two colours, to a fifth of the first reconstruction error."""
    torch.manual_seed(0)
    system = build(1, temperature={"schedule": "constant", "start": 0.5})
    nets = system.networks()
    optimizer = torch.optim.AdamW(nets["autoencoder"].parameters(), lr=1e-2)
    image = (255 * (torch.arange(16) % 2)).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 16, 16)
    errors = []
    for step in range(60):
        key = rng.keys(0, step, torch.arange(16))
        terms = system.loss("autoencoder", nets, system.encode({"image": image, "key": key}))
        optimizer.zero_grad()
        terms["loss"].backward()
        optimizer.step()
        errors.append(float(terms["recon"].mean()))
    assert sum(errors[-5:]) < 0.2 * sum(errors[:5]) and math.isfinite(errors[-1])


@pytest.mark.parametrize(
    "model, words",
    [
        ({}, "neither is given"),
        ({"discrete": {}, "kl": {}}, "both are given"),
        (
            {"image_size": 18, "discrete": TINY},
            "18 is no multiple of 4, the downsampling of discrete.num_layers.*16 or 20",
        ),
        ({"image_size": 36, "kl": {}}, "36 is no multiple of 8.*kl.block_out_channels.*32 or 40"),
        ({"image_size": 16, "discrete": TINY | {"normalization": [[0.5], [0.5]]}}, "1 means and 1 deviations"),
        ({"image_size": 16, "discrete": TINY | {"sampling": "hard"}}, "reinmax"),
        ({"image_size": 16, "discrete": TINY | {"levels": [4, 4]}}, "levels belong to quantizer fsq"),
        ({"image_size": 16, "discrete": TINY | FSQ | {"levels": [8, 3]}}, "make 24 tokens and num_tokens is 16"),
        (
            {"image_size": 16, "discrete": TINY | FSQ | {"kl_weight": 1}},
            "kl_weight 1: quantizer fsq has no distribution",
        ),
        (
            {"image_size": 16, "discrete": TINY | {"discriminator": {}}},
            "discrete.discriminator.n_layers 3 needs pictures",
        ),
        ({"kl": {"block_out_channels": [48, 64]}}, r"multiple of norm_num_groups, 32"),
        ({"image_size": 16, "kl": {"discriminator": {}}}, "n_layers 3 needs pictures of 24 pixels"),
        ({"kl": {"block_out_channels": [0, 0]}}, "greater than 0"),
        ({"kl": {"block_out_channels": []}}, "is empty"),
        ({"channels": 4, "kl": {"perceptual": {"path": "x"}}}, "1 or 3 channels"),
    ],
)
def test_config_errors(model, words):
    """Oracle: a ValueError that names the field and the remedy."""
    with pytest.raises(ValueError, match=words):
        systems.build("vae", model)


def test_data_of_another_shape():
    """Oracle: a ValueError with both shapes."""
    system = build()
    with pytest.raises(ValueError, match=r"\(3, 16, 16\).*\(1, 16, 16\)"):
        system.encode({"image": torch.zeros(1, 1, 16, 16, dtype=torch.uint8), "key": torch.zeros(1, dtype=torch.int64)})
