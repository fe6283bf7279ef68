"""Sizes that are not square, several sizes in one run, and conditions on the size of an image."""

import pytest
import torch
from diffusers import DiTTransformer2DModel
from diffusers.models.embeddings import Timesteps, get_2d_sincos_pos_embed

from dstrain import rng, systems
from dstrain.engine.blocks import wrap_block_forwards
from dstrain.nn.positions import make_sincos_positions
from dstrain.recipe import ConfigError, Samples
from dstrain.sampling.draw import draw_all_samples
from dstrain.systems.base import Request
from dstrain.systems.dit import weights
from dstrain.systems.dit.blocks import Block
from dstrain.systems.dit.conditions import SizeEmbedder
from dstrain.systems.dit.network import DiT
from tests.support import first_stage

TINY = {
    "image_size": 8,
    "in_channels": 1,
    "patch_size": 2,
    "hidden_size": 32,
    "depth": 2,
    "num_heads": 2,
    "num_classes": 10,
}
SHAPES = [[8, 8], [12, 6], [4, 16]]


def build(**changes):
    return systems.build("dit", TINY | changes)


def network(seed=0, **changes):
    torch.manual_seed(seed)
    net = DiT(
        **{
            "input_size": 8,
            "patch_size": 2,
            "in_channels": 1,
            "hidden_size": 32,
            "depth": 2,
            "num_heads": 2,
            "num_classes": 10,
        }
        | changes
    )
    with torch.no_grad():
        for weight in net.parameters():
            weight.normal_(std=0.2)
    return net


def batch_of(wide, high, count=3, size=None):
    key = rng.keys(0, 0, torch.arange(count))
    batch = {
        "key": key,
        "label": rng.integers(key, "label", 10),
        "image": rng.integers(key, "image", 256, (1, high, wide)).to(torch.uint8),
    }
    return batch | ({} if size is None else {"size": torch.tensor(size).expand(count, -1)})


@pytest.mark.parametrize("high, wide, base", [(4, 4, 4), (3, 6, 4), (32, 32, 16), (10, 6, 8)])
def test_positions(high, wide, base):
    """Oracle: diffusers' positions of PixArt, whose base_size is the trained grid; at that grid the plain ones, to the
    bit."""
    theirs = torch.as_tensor(get_2d_sincos_pos_embed(64, (high, wide), base_size=base, output_type="pt"))
    assert torch.allclose(make_sincos_positions(64, high, wide, base), theirs.float(), atol=2e-6)
    assert torch.equal(make_sincos_positions(64, base, base, base), make_sincos_positions(64, base, base))


def test_another_square_is_that_of_diffusers():
    """Oracle: diffusers' DiTTransformer2DModel of the same weights at a size that it was not made for."""
    net = network(time_freq="diffusers", learn_sigma=True)
    config = systems.build_config("dit", TINY | {"time_freq": "diffusers"})
    theirs = DiTTransformer2DModel(**weights.make_diffusers_dit_arguments(config), num_embeds_ada_norm=10).eval()
    theirs.load_state_dict(weights.rename_to_diffusers(net.state_dict(), 2, 10, True), strict=False)
    x, t, y = torch.randn(2, 1, 12, 12), torch.tensor([3, 400]), torch.tensor([1, 9])
    with torch.no_grad():
        assert torch.allclose(net(x, t, y), theirs(x, t, y).sample, atol=1e-4)


def test_patches_return_to_their_places():
    """Oracle: a linear map of each patch. Without blocks' and positions' part, cells of the output depend on the cells
    of the same patch alone, at 12 x 6 as at 6 x 12 transposed."""
    net = network(depth=1, learn_sigma=False)
    with torch.no_grad():
        net.blocks[0].adaLN_modulation[1].weight.zero_()
        net.blocks[0].adaLN_modulation[1].bias.zero_()
    x, t, y = torch.randn(1, 1, 6, 12, requires_grad=True), torch.tensor([5]), torch.tensor([1])
    net(x, t, y)[0, 0, 3, 8].backward()
    rows, columns = x.grad[0, 0].nonzero().unbind(1)
    assert set(rows.tolist()) == {2, 3} and set(columns.tolist()) == {8, 9}


@pytest.mark.parametrize("objective", ["diffusion", "flow"])
@pytest.mark.parametrize("recompute", ["none", "all", "attention"])
def test_learns_from_every_shape(objective, recompute):
    """Oracle: a batch of one sample after the other, in loss and gradients, at each shape; recomputed blocks as plain
    ones."""
    system = build(sizes=SHAPES, objective=objective)
    plain, nets = network(1), network(1)
    wrap_block_forwards(nets, (Block,), recompute)
    for wide, high in SHAPES:
        example = system.encode(batch_of(wide, high))
        one = system.loss("denoiser", {"denoiser": nets}, example)["loss"]
        one.backward()
        parts = [
            system.loss("denoiser", {"denoiser": plain}, {name: value[i : i + 1] for name, value in example.items()})
            for i in range(3)
        ]
        (sum(part["loss"] for part in parts) / 3).backward()
        assert one.item() == pytest.approx(sum(part["loss"].item() for part in parts) / 3, rel=1e-5)
    for mine, theirs in zip(nets.parameters(), plain.parameters()):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-5, rtol=1e-3)


def test_a_graph_for_each_number_of_tokens(monkeypatch):
    """Oracle: the plain network, at each shape, forward and back; three shapes of 16, 18 and 16 tokens have two graphs,
    and keep them."""
    graphs, compile_ = [], torch.compile

    def count(graph, inputs):
        return graphs.append(graph) or torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend=count, **options))
    plain, compiled = network(2), network(2)
    wrap_block_forwards(compiled, (Block,), compiled=True)
    for wide, high in SHAPES * 2:
        x, t, y = torch.randn(2, 1, high, wide), torch.tensor([3, 400]), torch.tensor([1, 9])
        results = [net(x, t, y) for net in (plain, compiled)]
        assert torch.allclose(*results, atol=1e-5)
        for result in results:
            result.square().sum().backward()
    assert len(graphs) == 2
    for mine, theirs in zip(compiled.parameters(), plain.parameters()):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-4, rtol=1e-3)


def test_draws_any_size():
    """Oracle: the shape; a seed's picture is the same in any batch; the model's own size is the plain one's, to the
    bit."""
    system, nets = build(sizes=SHAPES), {"denoiser": network(3)}
    seeds = torch.arange(4)
    wide = draw_all_samples(system, nets, Request(seeds, num_steps=3, size=(12, 6)), 4)
    assert wide.shape == (4, 1, 6, 12)
    alone = draw_all_samples(system, nets, Request(seeds[2:3], num_steps=3, size=(12, 6)), 1)
    assert (wide[2:3].int() - alone.int()).abs().max() <= 1
    plain = draw_all_samples(build(), nets, Request(seeds, num_steps=3), 4)
    assert torch.equal(plain, draw_all_samples(system, nets, Request(seeds, num_steps=3, size=(8, 8)), 4))
    with pytest.raises(ConfigError, match="multiples of 2"):
        system.check_sampling(Samples(size=(12, 7)))


@pytest.mark.parametrize("changes, words", [({"sizes": [[8, 8], [9, 6]]}, "9 x 6.*multiples of 2"), ({}, "image_size")])
def test_sizes_that_do_not_fit(changes, words):
    """Oracle: a ConfigError that names the size and the remedy."""
    with pytest.raises(ValueError, match=words):
        build(**changes).encode(batch_of(12, 6))


def test_the_largest_is_what_costs_are_of():
    """Oracle: the shape of most pixels."""
    assert build(sizes=[[8, 8], [16, 6], [4, 16]]).synthetic(2)["image"].shape == (2, 1, 6, 16)
    batch = build(sizes=[[8, 8], [16, 6]], size_conditions=True).synthetic(2)
    assert batch["size"].tolist() == [[6, 16, 0, 0, 6, 16]] * 2


def test_size_features():
    """Oracle: diffusers' Timesteps as SDXL calls it for its time ids, through the two layers."""
    embedder = SizeEmbedder(32)
    torch.nn.init.normal_(embedder.mlp[2].weight)
    size = torch.tensor([[480, 640, 0, 12, 256, 320], [100, 100, 3, 0, 64, 64]])
    features = Timesteps(256, flip_sin_to_cos=True, downscale_freq_shift=0)(size.flatten()).view(2, -1)
    with torch.no_grad():
        assert torch.allclose(embedder(size), embedder.mlp(features), atol=2e-3)


def test_size_conditions_begin_as_nothing():
    """Oracle: the outputs of the model without them, whose weights it begins with, to the bit; then they matter."""
    plain = network(4)
    told = DiT(8, 2, 1, 32, 2, 2, num_classes=10, size_conditions=True)
    state, notes = weights.adapt_weights(plain.state_dict(), told)
    told.load_state_dict(state)
    assert any("s_embedder" in note for note in notes)
    x, t, y = torch.randn(2, 1, 6, 12), torch.tensor([3, 400]), torch.tensor([1, 9])
    sizes = torch.tensor([[480, 640, 0, 12, 6, 12], [100, 100, 3, 0, 6, 12]])
    assert torch.equal(told(x, t, y, size=sizes), plain(x, t, y))
    told(x, t, y, size=sizes).square().sum().backward()
    assert told.s_embedder.mlp[2].weight.grad.any()
    torch.nn.init.normal_(told.s_embedder.mlp[2].weight)
    assert not torch.allclose(told(x, t, y, size=sizes), told(x, t, y, size=sizes.flip(0)))
    with pytest.raises(ConfigError, match="data.size_conditions"):
        weights.adapt_weights(told.state_dict(), plain)


def test_a_model_of_sizes_learns_and_draws():
    """Oracle: the network's calls: the batch's sizes in training; when drawing, a picture of the asked size, uncut."""
    system, calls = build(sizes=SHAPES, size_conditions=True, class_dropout_prob=0.1), []
    net = network(5, size_conditions=True)

    def watched(x, t, y, size):
        calls.append(size.tolist())
        return net(x, t, y, size)

    example = system.encode(batch_of(12, 6, size=[60, 120, 2, 0, 6, 12]))
    system.loss("denoiser", {"denoiser": watched}, example)
    assert calls == [[[60, 120, 2, 0, 6, 12]] * 3]
    calls.clear()
    system.sample({"denoiser": watched}, Request(torch.arange(2), num_steps=1, guidance_scale=2.0, size=(12, 6)))
    assert calls == [[[6, 12, 0, 0, 6, 12]] * 4]
    with pytest.raises(ConfigError, match="size_conditions=false"):
        system.loss("denoiser", {"denoiser": watched}, system.encode(batch_of(12, 6)))


def test_latents_of_any_size(tmp_path):
    """Oracle: the autoencoder by itself, whose latents are half as wide and high; the size that is asked for."""
    stage = {"path": str(first_stage.save(tmp_path / "stage", channels=1, depth=2)), "factor": 2}
    system = build(first_stage=stage, image_size=16, in_channels=3, sizes=[[16, 16], [24, 12]])
    batch = batch_of(24, 12)
    latents = system.encode(batch)["x_start"]
    assert latents.shape == (3, 3, 6, 12)
    assert torch.equal(latents, system.first_stage.encode(batch["image"].float() / 127.5 - 1, batch["key"]))
    nets = {"denoiser": network(6, in_channels=3)}
    assert system.loss("denoiser", nets, system.encode(batch))["loss"].isfinite()
    assert system.sample(nets, Request(torch.arange(2), num_steps=2, size=(24, 12))).shape == (2, 1, 12, 24)
