"""What is particular to the DiT system: config, labels, guidance, latents, initialization, precision."""

import math

import pytest
import torch

from dstrain import rng, systems
from dstrain.diffusion import flow, samplers
from dstrain.diffusion.solvers import ETAS
from dstrain.recipe import Samples
from dstrain.sampling.draw import draw_all_samples
from dstrain.systems.base import Request
from dstrain.systems.dit import Config
from dstrain.systems.dit.network import DiT
from tests.support import gloo

TINY = {
    "image_size": 8,
    "in_channels": 1,
    "patch_size": 2,
    "hidden_size": 32,
    "depth": 2,
    "num_heads": 2,
    "num_classes": 10,
}


def build(**changes):
    return systems.build("dit", TINY | changes)


def random(network, scale=0.2):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn_like(parameter) * scale)
    return network


@pytest.mark.parametrize(
    "size, millions", [("DiT-S/2", 32.96), ("DiT-B/2", 130.5), ("DiT-L/2", 458.1), ("DiT-XL/2", 675.1)]
)
def test_sizes(size, millions):
    """Oracle: published counts, the fixed positions included; latents of 256 px are 32 x 32."""
    config = Config(size=size, first_stage={"path": "x"})
    assert config.input_size == 32
    with torch.device("meta"):
        network = DiT(**config.make_network_arguments())
    count = sum(tensor.numel() for tensor in network.state_dict().values()) / 1e6
    assert count == pytest.approx(millions, rel=1e-3)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"size": "DiT-S/2"}, "give either size or these"),
        ({"depth": None}, "depth must be given"),
        ({"image_size": 9}, "multiple of 2"),
        ({"num_heads": 3}, "multiple of num_heads"),
        ({"hidden_size": 30}, "multiple of 4"),
        ({"guidance_channels": 3}, "exceeds in_channels"),
        ({"size": "DiT-XL"}, "DiT-XL/2"),
        ({"diffusion": {"steps": 4}}, "steps"),
        ({"first_stage": {"path": "./nowhere"}, "image_size": 64}, "nowhere"),
    ],
)
def test_config_errors(changes, words):
    """Oracle: a ValueError that names the field and the remedy."""
    with pytest.raises(ValueError, match=words):
        build(**changes)


def test_initialization():
    """Oracle: the published one: bounds of xavier, deviations of embeddings, zeros; the output is 0."""
    network = DiT(input_size=8, patch_size=2, hidden_size=64, depth=2, num_heads=4)
    weights = dict(network.named_parameters())
    assert "pos_embed" not in weights and network.pos_embed.dtype == torch.float32
    for name, weight in weights.items():
        if name.endswith("bias") or "adaLN" in name or name.startswith("final_layer"):
            assert not bool(weight.any()), name
        elif name.startswith(("t_embedder", "y_embedder")):
            assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.05), name
        else:
            bound = math.sqrt(6 / (weight[0].numel() + weight.shape[0]))
            assert 0.98 * bound < float(weight.detach().abs().max()) <= bound, name
            assert float(weight.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.06), name
    assert not bool(network(torch.randn(2, 4, 8, 8), torch.tensor([1, 2]), torch.tensor([3, 4])).any())


def test_labels_are_dropped_by_key():
    """Oracle: the draws of the key; the share is class_dropout_prob; evaluation drops none."""
    system, seen = build(class_dropout_prob=0.25), []

    def network(x, t, y):
        seen.append(y)
        return torch.cat((x, x), 1)

    batch = system.synthetic(2000)
    system.loss("denoiser", {"denoiser": network}, system.encode(batch))
    system.evaluate({"denoiser": network}, system.encode(batch))
    dropped = rng.uniform(batch["key"], "drop") < 0.25
    assert torch.equal(seen[0], torch.where(dropped, 10, batch["label"])) and torch.equal(seen[1], batch["label"])
    assert float(dropped.float().mean()) == pytest.approx(0.25, abs=0.04)


def test_guidance_needs_a_null_label():
    """Oracle: a ValueError; without dropout the table has num_classes rows and plain sampling works."""
    system = build(class_dropout_prob=0)
    nets = {"denoiser": random(system.networks()["denoiser"])}
    assert nets["denoiser"].y_embedder.embedding_table.weight.shape[0] == 10
    assert system.sample(nets, Request(seeds=torch.arange(12), num_steps=2)).shape == (12, 1, 8, 8)
    with pytest.raises(ValueError, match="class_dropout_prob"):
        system.sample(nets, Request(seeds=torch.arange(2), num_steps=2, guidance_scale=2.0))


def test_unconditional():
    """Oracle: num_classes 1 needs no label, others say so."""
    system = build(num_classes=1)
    example = system.encode(system.synthetic(3))
    del example["label"]
    assert bool(system.loss("denoiser", system.networks(), example)["loss"].isfinite())
    with pytest.raises(ValueError, match="num_classes to 1"):
        build().loss("denoiser", system.networks(), example)


def test_requests_that_do_not_fit():
    """Oracle: a ValueError that names the choices."""
    nets = build().networks()
    with pytest.raises(ValueError, match="none of dpm.*, ddpm, ddim"):
        build().sample(nets, Request(seeds=torch.arange(1), sampler="euler"))
    with pytest.raises(ValueError, match="none of .*, sde, euler, heun:"):
        build(objective="flow").sample(nets, Request(seeds=torch.arange(1), sampler="ddim"))
    with pytest.raises(ValueError, match="1001 is not between 1 and the 1000"):
        build().sample(nets, Request(seeds=torch.arange(1), num_steps=1001))
    with pytest.raises(ValueError, match=r"\(1, 8, 8\).*\(3, 8, 8\)"):
        build().encode({"image": torch.zeros(1, 3, 8, 8, dtype=torch.uint8), "key": torch.zeros(1, dtype=torch.int64)})


@pytest.mark.parametrize(
    "objective, sampler",
    [*(("diffusion", name) for name in samplers.SAMPLERS), *(("flow", name) for name in flow.SAMPLERS)],
)
def test_a_picture_belongs_to_its_seed(objective, sampler):
    """Oracle: the same request drawn one by one; as many calls as asked for, of three samples where guidance does not
    act, and of twice three where it does.
    """
    system, shapes = build(objective=objective, learn_sigma=False), []
    network = random(system.networks()["denoiser"])

    def counted(x, t, y):
        shapes.append((len(x), len(t), len(y)))
        return network(x, t, y)

    choices = {
        "num_steps": 5,
        "sampler": sampler,
        "guidance_scale": 1.5,
        "guidance_rescale": 0.5,
        "spacing": "karras",
        "guidance_interval": (0.1, 20.0),
        "eta": 0.7 if sampler in ETAS else None,
    }

    def request(seeds):
        return Request(torch.tensor(seeds), {"label": torch.tensor(seeds) + 1}, **choices)

    together = system.sample({"denoiser": counted}, request([3, 4, 7]))
    assert set(shapes) == {(3, 3, 3), (6, 6, 6)} and len(shapes) in (4, 5)
    for i, seed in enumerate((3, 4, 7)):
        alone = system.sample({"denoiser": network}, request([seed]))[0]
        assert int((alone.int() - together[i].int()).abs().max()) <= 1


def pictures_of_all_samplers(rank=0):
    """What each sampler of diffusion and of flows draws for five seeds, two at a time."""
    drawn = []
    for objective, names in (("diffusion", samplers.SAMPLERS), ("flow", flow.SAMPLERS)):
        system = build(objective=objective, learn_sigma=False)
        nets = {"denoiser": random(system.networks()["denoiser"])}
        drawn += [draw_all_samples(system, nets, Request(torch.arange(5), {}, 4, name, 1.5), 2) for name in names]
    return torch.stack(drawn).numpy()


def test_pictures_on_two_ranks(tmp_path):
    """Oracle: one process alone, byte for byte: the calls are of the same chunks."""
    alone = pictures_of_all_samplers()
    assert all((pictures == alone).all() for pictures in gloo.run(tmp_path, pictures_of_all_samplers))


def test_what_guides():
    """Oracle: with itself as the guide no scale changes anything; a guide of other noise or labels is refused."""
    system = build(learn_sigma=False, class_dropout_prob=0)
    network = random(system.networks()["denoiser"])

    def request(scale):
        return Request(torch.arange(2), {}, 4, "dpm++", scale)

    def draw(scale, **nets):
        return system.sample({"denoiser": network, **nets}, request(scale))

    torch.testing.assert_close(draw(3.0, guide=network), draw(1.0), atol=1, rtol=0)
    other = build(learn_sigma=True, depth=1, num_heads=1)
    system.require_guide(other)
    system.require_guide(build(diffusion={"min_snr": 5.0, "fixed_variance": "fixed_small"}))  # it draws nothing itself
    assert not torch.equal(draw(3.0, guide=random(other.networks()["denoiser"])), draw(1.0))
    for changes, name in (
        ({"objective": "flow"}, "diffusion"),
        ({"num_classes": 4}, "num_classes"),
        ({"diffusion": {"schedule": "cosine"}}, "diffusion"),
        ({"diffusion": {"prediction": "v"}}, "diffusion"),
    ):
        with pytest.raises(ValueError, match=f"model.*{name} differs"):
            system.require_guide(build(**changes))


@pytest.mark.parametrize("objective", ["diffusion", "flow"])
def test_pictures_are_inverted(objective):
    """Oracle: the pictures themselves, nearer with more steps; another seed changes nothing: no noise is drawn."""
    system = build(objective=objective, learn_sigma=False)

    def network(x, t, y):  # optimal for pixels of mean 0 and deviation 0.2
        t = t.view(-1, 1, 1, 1)
        if objective == "flow":
            t = t / 1000
            return (t - (1 - t) * 0.04) / ((1 - t) ** 2 * 0.04 + t**2) * x
        remaining = system.diffusion.tables["alphas_cumprod"].float()[t]
        return (1 - remaining).sqrt() / (remaining * 0.04 + 1 - remaining) * x

    nets = {"denoiser": network}
    images = torch.randint(100, 156, (2, 1, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)

    def back(count, seed=0):
        return system.sample(nets, Request(seed + torch.arange(2), {"invert": images}, count)).float()

    errors = [float((back(count) - images.float()).abs().mean()) for count in (4, 200)]
    assert errors[1] < 1.0 and errors[1] < errors[0] and torch.equal(back(200, 5), back(200))
    with pytest.raises(ValueError, match="sampler=unipc cannot be inverted"):
        system.sample(nets, Request(torch.arange(2), {"invert": images}, 4, "unipc"))


@pytest.mark.parametrize(
    "changes, choices, words",
    [
        ({}, {"sampler": "ddpm", "eta": 0.5}, "eta=0.5: the noise of sampler ddpm cannot be chosen"),
        ({"objective": "flow"}, {"spacing": "trailing"}, "spacing=trailing: .* spaced by linspace or karras"),
    ],
)
def test_choices_are_checked_before_training(changes, choices, words):
    """Oracle: a ValueError that names the key; the usual choices pass."""
    build(**changes).check_sampling(Samples())
    with pytest.raises(ValueError, match=words):
        build(**changes).check_sampling(Samples(**choices))


def test_labels_of_a_request():
    """Oracle: the labels given, else seed modulo num_classes; num_steps is the number of calls."""
    seen = []

    def network(x, t, y):
        seen.append(y.tolist())
        return torch.cat((x, x), 1)

    nets, seeds = {"denoiser": network}, torch.tensor([3, 12])
    build().sample(nets, Request(seeds=seeds, num_steps=7))
    assert seen == [[3, 2]] * 7
    build().sample(
        nets,
        Request(
            seeds=seeds, num_steps=2, sampler="ddpm", guidance_scale=2.0, conditions={"label": torch.tensor([5, 6])}
        ),
    )
    assert seen[7:] == [[5, 6, 10, 10]] * 2
    build(objective="flow").sample(nets, Request(seeds=seeds, num_steps=6, sampler="heun"))
    assert len(seen) == 15


@pytest.mark.parametrize("objective", ["diffusion", "flow"])
def test_bfloat16(objective):
    """Oracle: the float32 network with the same (rounded) weights; the loss is float32."""
    system = build(objective=objective, hidden_size=64)
    network = random(system.networks()["denoiser"], 0.1).bfloat16()
    example = system.encode(system.synthetic(16))
    half = system.loss("denoiser", {"denoiser": network}, example)
    full = system.loss("denoiser", {"denoiser": random(system.networks()["denoiser"], 0.1)}, example)
    assert half["loss"].dtype == torch.float32
    torch.testing.assert_close(half["mse"], full["mse"], rtol=0.02, atol=0.02)


def test_learns():
    """Oracle: a loss that falls: forty steps on one batch of two constant images."""
    torch.manual_seed(0)
    system = build(num_classes=2)
    nets = system.networks()
    optimizer = torch.optim.AdamW(nets["denoiser"].parameters(), lr=3e-3)
    label = torch.arange(32) % 2
    batch = {"image": (255 * label).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 8, 8), "label": label}
    losses = []
    for step in range(40):
        example = system.encode(batch | {"key": rng.keys(0, step, torch.arange(32))})
        loss = system.loss("denoiser", nets, example)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


def test_image_embeddings():
    """Oracle: zeros, what a dropped embedding is; the loss of the same direction at another length; the network alone.

    Weights without such an embedder compute what they did, whatever the embedding; diffusers has no place for it.
    """
    example = {"x_start": torch.randn(6, 1, 8, 8), "key": rng.keys(0, 0, torch.arange(6))}
    embed, losses = torch.randn(6, 5), {}
    for drop in (0.0, 1.0):
        system = build(embedding_dim=5, num_classes=1, class_dropout_prob=drop)
        nets = {"denoiser": random(system.networks()["denoiser"])}
        losses[drop] = [
            system.compute_denoiser_loss(nets, example | {"image_embed": values})["loss"]
            for values in (embed, 7 * embed, embed.roll(1, 0), torch.zeros_like(embed))
        ]
    torch.testing.assert_close(losses[0.0][0], losses[0.0][1])
    assert len({round(loss.item(), 5) for loss in losses[0.0][::1]}) == 3
    assert len({loss.item() for loss in losses[1.0]}) == 1
    plain, system = build(num_classes=1), build(embedding_dim=5, num_classes=1)
    old = random(plain.networks()["denoiser"])
    state, notes = system.adapt_weights("denoiser", old.state_dict())
    network = system.networks()["denoiser"]
    network.load_state_dict(state)
    inputs = example["x_start"], torch.arange(6), torch.zeros(6, dtype=torch.int64)
    assert torch.equal(network(*inputs, embed=embed), old(*inputs)) and "e_embedder: not in the file" in notes[0]
    with pytest.raises(ValueError, match="image_embed: these are 4 wide, and model.embedding_dim is 5"):
        system.sample({"denoiser": network}, Request(torch.arange(2), {"image_embed": torch.ones(2, 4)}, 2))
    with pytest.raises(ValueError, match="image_embed: this model draws from image embeddings"):
        system.encode({"image": torch.zeros(1, 1, 8, 8, dtype=torch.uint8), "key": example["key"][:1]})
    with pytest.raises(ValueError, match="embedding_dim: .* takes labels alone; take --format safetensors"):
        build(embedding_dim=5, time_freq="diffusers").require_expressible_in_diffusers()
