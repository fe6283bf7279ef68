"""What alignments and routing compute, and what refuses them."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dstrain import rng
from dstrain.distributed.progress import get_phases
from dstrain.encoders.image import VisionTower
from dstrain.planning.step import choose_step_to_measure
from dstrain.recipe import ConfigError, Run
from dstrain.systems.base import Request
from dstrain.systems.dit.align import Align, Alignment
from dstrain.systems.dit.blocks import BlockInputs
from dstrain.systems.dit.config import Config
from dstrain.systems.dit.network import DiT
from dstrain.systems.dit.system import DiTSystem
from dstrain.systems.dit.to_diffusers import describe_export
from dstrain.systems.dit.trunk import draw_kept_tokens
from dstrain.systems.dit.weights import rename_to_diffusers
from tests.support import towers
from tests.systems.dit.cases import MODERN
from tests.systems.dit.test_published import arguments, read

LAYERSYNC = {"kind": "layersync", "depth": 1, "target": 2}
TOKENS = 16  # of 8 x 8 pixels by patches of 2


def build(changes: dict[str, Any], folder: Path | None = None) -> DiTSystem:
    """A tiny modern flow; with a folder it is aligned to the encoder there."""
    if folder is not None:
        align = Align.fill_in_encoder_fields(
            {"kind": "repa", "depth": 1, "hidden": 8, "path": str(folder), **changes["align"]}
        )
        changes = changes | {"align": align}
    return DiTSystem(Config(**(MODERN | changes)))


def nets(system: DiTSystem) -> dict[str, DiT]:
    network = system.networks()["denoiser"]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in network.parameters():
            weight.normal_(std=0.2, generator=generator)
    return {"denoiser": network}


@pytest.mark.parametrize("kind", ["dinov2", "registers", "dinov3"])
@pytest.mark.parametrize("sides", [(8, 8), (4, 10)])
def test_features_are_those_of_transformers(tmp_path: Path, kind: str, sides: tuple[int, int]) -> None:
    """Oracle: transformers' own model on the pixels that REPA gives its encoder: of [0, 1], by ImageNet's mean and
    deviation, resampled to a patch for each token, bicubic and not smoothed; its patch tokens and its class token.
    """
    model = towers.dinov2(tmp_path, kind=kind)
    image = rng.integers(rng.keys(0, 0, torch.arange(3)), "image", 256, (3, 16, 16)).to(torch.uint8)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    pixels = (image / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    with torch.no_grad():
        states = model(pixel_values=F.interpolate(pixels, sides, mode="bicubic")).last_hidden_state
    before = {"dinov2": 1, "registers": 4, "dinov3": 4}[kind]
    tower = VisionTower(tmp_path, ("dinov2", "dinov3"))
    found = tower.compute_tokens(image, sides, smooth=False)
    assert found.patches.shape == (3, sides[0] * sides[1] // 4, 12)
    torch.testing.assert_close(found.patches, states[:, before:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.first, states[:, 0], rtol=1e-5, atol=1e-5)
    alignment = Alignment(Align(kind="repa", path=str(tmp_path), width=12))
    features = alignment.read_or_compute_targets({"image": image}, (sides[0] // 2, sides[1] // 2))
    torch.testing.assert_close(features, states[:, before:], rtol=1e-5, atol=1e-5)


def test_the_golden_alignment() -> None:
    """Oracle: REPA's own alignment of its projected tokens at the noised input, 1e-6; its total, 0.5 of it."""
    state, tensors, config = read("repa")
    network = DiT(**arguments("repa", config))
    network.load_state_dict(state)
    t = tensors["in/t"].view(-1, 1, 1, 1)
    found = network((1 - t) * tensors["in/x"] + t * tensors["in/noise"], tensors["in/t"], tensors["in/y"], extras=True)
    alignment = Alignment(Align(kind="repa", width=10))
    each = alignment.compute_loss(found, {"features": tensors["in/z0"]}, (4, 4), None)
    assert each.shape == (3,) and alignment.weight == 0.5
    torch.testing.assert_close(each.mean(), tensors["out/alignment_loss"].view(()), rtol=1e-6, atol=1e-6)
    squared = Alignment(Align(kind="repa", width=10, loss="mse")).compute_loss(
        found, {"features": tensors["in/z0"]}, (4, 4), None
    )
    torch.testing.assert_close(squared.mean(), F.mse_loss(found["projected"][0], tensors["in/z0"]))  # as RAEv2's


def test_layersync() -> None:
    """Oracle: by hand: the cosine of both blocks' tokens, whose target has no gradient: without the loss of the flow
    the second block learns nothing.
    """
    system = build({"align": LAYERSYNC})
    both, example = nets(system), system.encode(system.synthetic(3))
    network, seen = both["denoiser"], {}
    hooks = [
        network.blocks[number].register_forward_hook(lambda _, __, out, number=number: seen.update({number: out}))
        for number in (0, 1)
    ]
    terms = system.compute_denoiser_loss(both, example)
    for hook in hooks:
        hook.remove()
    expected = -F.cosine_similarity(seen[0], seen[1], dim=-1).mean(1)
    torch.testing.assert_close(terms["align"], expected)
    plain = build({})
    torch.testing.assert_close(
        terms["loss_each"] - plain.compute_denoiser_loss(both, example)["loss_each"], 0.2 * expected
    )
    found = network(example["x_start"], example["key"] % 7 / 7, example["label"], extras=True)
    system.alignment.compute_loss(found, example, (4, 4), None).sum().backward()
    assert network.blocks[0].attn.qkv.weight.grad.any() and network.blocks[1].attn.qkv.weight.grad is None


@pytest.mark.parametrize("kind", ["layersync", "repa"])
def test_until(tmp_path: Path, kind: str) -> None:
    """Oracle: the loss without an alignment, to the bit, from the step `until` on, whatever came before; projectors
    then have a gradient of zero, as every weight must have one. Work and operations are those of the step.
    """
    if kind == "repa":
        towers.dinov2(tmp_path)
        system = build({"align": {"until": 5}}, tmp_path)
    else:
        system = build({"align": LAYERSYNC | {"until": 5}})
    both, example, plain = nets(system), system.encode(system.synthetic(3)), build({})
    expected, found = plain.compute_denoiser_loss(both, example)["loss"], {}
    for step in (4, 5, 6, 0, 5):
        assert system.turns(step) == ("denoiser",) and system.measure_workload(step) == (1, 1, int(step < 5))
        found[step] = system.compute_denoiser_loss(both, example)["loss"]
        assert torch.equal(found[step], expected) == (step >= 5)
    found[5].backward()
    gradients = {name: weight.grad for name, weight in both["denoiser"].named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    assert not any(gradient.any() for name, gradient in gradients.items() if name.startswith("projectors."))
    assert torch.equal(found[0], found[4])


def test_a_plan_counts_an_alignment_that_ends() -> None:
    """Oracle: by hand: a late step, or the first where the alignment has ended by then."""
    for until, expected in ((0, 9984), (9990, 9984), (100, 0)):
        system = build({"align": LAYERSYNC | {"until": until}})
        assert choose_step_to_measure(Run(system="dit", steps=10_000), system) == expected


def test_with_a_second_and_a_wide_head() -> None:
    """Oracle: a gradient of every weight; the same patches are routed and aligned, whatever else is read."""
    heads = {"wide": {"hidden_size": 48, "depth": 1, "num_heads": 3}, "internal": {"depth": 3}, "depth": 4}
    heads |= {"align": LAYERSYNC | {"target": 3}, "routing": {"start": 2, "end": 3}, "time_freq": "fourier"}
    system = build(heads)
    both = nets(system)
    terms = system.compute_denoiser_loss(both, system.encode(system.synthetic(3)))
    terms["loss"].backward()
    assert {"align", "base"} <= terms.keys()
    assert all(weight.grad is not None and weight.grad.any() for weight in both["denoiser"].parameters())


def test_held_out_losses_are_those_of_the_flow(tmp_path: Path) -> None:
    """Oracle: the evaluation without alignment and routing, to the bit; and so are samples."""
    towers.dinov2(tmp_path)
    system = build({"align": {}, "routing": {"start": 1, "end": 2}}, tmp_path)
    plain, both = build({}), nets(system)
    example = system.encode(system.synthetic(3))
    terms, expected = system.evaluate(both, example), plain.evaluate(both, example)
    assert terms.keys() == expected.keys() and all(torch.equal(terms[name], expected[name]) for name in expected)
    request = Request(torch.arange(2), {}, 2)
    assert torch.equal(system.sample(both, request), plain.sample(both, request))


# ---------------------------------------------------------------------------------------- routing


def test_the_golden_routing() -> None:
    """Oracle: TREAD's own network with its tokens to keep, and with all, 1e-5."""
    state, tensors, config = read("tread")
    (route,) = config.pop("routes")
    routed = route["start_layer_idx"] + 1, route["end_layer_idx"] + 1
    network = DiT(**config, learn_sigma=False, routed=routed)
    network.load_state_dict(state)
    x, t, y = (tensors[f"in/{name}"] for name in "xty")
    assert torch.allclose(network(x, t, y), tensors["out/dense"], atol=1e-5)
    found = network(x, t, y, keep=tensors["in/ids_keep0"])
    assert torch.allclose(found, tensors["out/routed"], atol=1e-5)


def test_which_tokens_are_kept() -> None:
    """Oracle: N - int(ratio N) of them, ascending, by the sample's key alone; each as often as the others."""
    key = rng.keys(0, 0, torch.arange(4000))
    assert draw_kept_tokens(key, 9, 0.1) is None
    for ratio, count in ((0.12, 8), (0.5, 5), (0.99, 1)):
        keep = draw_kept_tokens(key, 9, ratio)
        assert keep.shape == (4000, count) and bool((keep.diff(dim=1) > 0).all())
        assert torch.equal(draw_kept_tokens(key[7:9], 9, ratio), keep[7:9])
    share = torch.bincount(draw_kept_tokens(key, 9, 0.5).flatten(), minlength=9) / 4000
    assert bool(((share - 5 / 9).abs() < 4 * (5 / 9 * 4 / 9 / 4000) ** 0.5).all())


def test_no_ratio_is_no_routing() -> None:
    """Oracle: the network without routing, loss and gradients to the bit."""
    found = []
    for routing in ({"ratio": 0.0, "start": 1, "end": 2}, None):
        system = build({"routing": routing, "tokens": {"label": 2, "joins": 1}})
        both = nets(system)
        loss = system.compute_denoiser_loss(both, system.encode(system.synthetic(3)))["loss"]
        loss.backward()
        found.append([loss, *(weight.grad for weight in both["denoiser"].parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_routed_tokens_keep_their_places() -> None:
    """Oracle: by hand, a sample at a time: the kept patches with their own rotations, the condition tokens behind them,
    through the routed blocks; the others join unchanged. The picture is not square.
    """
    system = build({"tokens": {"label": 2, "joins": 1}, "routing": {"start": 2, "end": 3}, "depth": 4})
    network = nets(system)["denoiser"]
    key = rng.keys(0, 0, torch.arange(3))
    x, c, tokens = (rng.normal(key, name, shape) for name, shape in (("x", (15, 32)), ("c", (32,)), ("k", (2, 32))))
    keep, rotation = draw_kept_tokens(key, 15, 0.4), network.get_rotary_positions((3, 5), 16, 2, x.device)
    found, _ = network.blocks(x, BlockInputs(c, rotation=rotation), tokens, (), keep)
    one, two, three, four = network.blocks
    for number in range(3):
        here, own = keep[number], slice(number, number + 1)
        y = one(x[own], *BlockInputs(c[own], rotation=rotation[:, :, :15]))
        places = torch.cat((here, torch.tensor([15, 16])))
        z = torch.cat((y[:, here], tokens[own]), dim=1)
        for block in (two, three):
            z = block(z, *BlockInputs(c[own], rotation=rotation[:, :, places]))
        y = y.clone()
        y[:, here] = z[:, : len(here)]
        y = four(torch.cat((y, z[:, len(here) :]), dim=1), *BlockInputs(c[own], rotation=rotation))
        torch.testing.assert_close(found[own], y[:, :15], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("depth, target, routed", [(2, 3, (2, 4)), (1, 3, (2, 4)), (2, 4, (2, 3)), (1, 3, (2, 3))])
def test_alignment_among_routed_blocks(depth: int, target: int, routed: tuple[int, int]) -> None:
    """Oracle: the cosine of the same tokens of both blocks, the kept ones where a block saw them alone."""
    align = {"kind": "layersync", "depth": depth, "target": target}
    system = build({"align": align, "routing": {"start": routed[0], "end": routed[1]}, "depth": 4})
    both, seen = nets(system), {}
    for number, block in enumerate(both["denoiser"].blocks, 1):
        block.register_forward_hook(lambda _, __, out, number=number: seen.update({number: out}))
    example = system.encode(system.synthetic(3))
    terms, keep = system.compute_denoiser_loss(both, example), draw_kept_tokens(example["key"], TOKENS, 0.5)
    whole, few = {}, [number for number in (depth, target) if routed[0] <= number < routed[1]]
    for number in (depth, target):
        whole[number] = seen[number]
        if number == routed[1]:  # The others have joined unchanged.
            whole[number] = seen[routed[0] - 1].scatter(1, keep[..., None].expand(-1, -1, 32), seen[number])
    rows = torch.arange(3)[:, None]
    values = [whole[number] if number in few or not few else whole[number][rows, keep] for number in (depth, target)]
    torch.testing.assert_close(terms["align"], -F.cosine_similarity(*values, dim=-1).mean(1))


def test_a_warning_of_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: by hand: 16 tokens are said, 1,024 are not."""
    said: list[str] = []
    monkeypatch.setattr(get_phases(), "print_lines", lambda *lines: said.extend(lines))
    source = SimpleNamespace(read_first_readable=dict)
    build({"routing": {"start": 1}}).require_usable_source(source)
    assert len(said) == 1 and said[0].startswith("warning: model.routing: an image has 16 tokens")
    build({"routing": {"start": 1}, "image_size": 64}).require_usable_source(source)
    assert len(said) == 1


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"align": {"kind": "layersync", "depth": 1, "target": 3}}, "align.target: 3 is above depth 2"),
        ({"align": {"kind": "layersync", "depth": 2, "target": 2}}, "align.target: 2 is not above align.depth 2"),
        ({"align": LAYERSYNC | {"path": "x"}}, "align.path: layersync reads no encoder"),
        ({"align": {"kind": "repa"}}, "align.path: no encoder is named"),
        ({"align": {"kind": "repa", "depth": 3, "width": 12}}, "align.depth: 3 is above depth 2"),
        ({"align": {"kind": "repa", "path": "nowhere"}}, "align.path: there is no folder nowhere"),
        ({"routing": {"start": 2}}, "routing: blocks 2 to 1"),
        ({"routing": {"start": 1, "end": 3}}, "routing: blocks 1 to 3"),
        ({"routing": {"start": 1, "end": 2}, "internal": {"depth": 1}}, "internal.depth"),
        ({"routing": {"ratio": 1.0, "start": 1}}, "routing.ratio"),
    ],
)
def test_choices_that_do_not_fit(changes: dict[str, Any], named: str) -> None:
    """Oracle: the message names the entry."""
    with pytest.raises(ValueError, match=re.escape(named)):
        Config(**(MODERN | changes))


def test_encoders_that_do_not_fit(tmp_path: Path) -> None:
    """Oracle: the message names the entry: another encoder than the run's, another kind, damaged, or none."""
    towers.dinov2(tmp_path / "a")
    towers.dinov2(tmp_path / "b", seed=1, width=18)
    towers.sentences(tmp_path / "bert")
    first = Align.fill_in_encoder_fields({"kind": "repa", "path": str(tmp_path / "a")})
    assert first["width"] == 12 and Align.fill_in_encoder_fields(first) == first
    for path, named in (("b", "model.align.width: 12 in the recipe, 18"), ("bert", "a model of type bert")):
        with pytest.raises(ConfigError, match=named):
            Align.fill_in_encoder_fields(first | {"path": str(tmp_path / path)})
    with pytest.raises(ConfigError, match=r"model\.align\.fingerprint: "):
        Align.fill_in_encoder_fields(first | {"path": str(tmp_path / "a"), "fingerprint": "0"})
    weights = tmp_path / "b" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="model.align.path: no dinov2 or dinov3 model can be loaded"):
        Align.fill_in_encoder_fields({"kind": "repa", "path": str(tmp_path / "b")})
    section = Align(**first)
    assert section.list_data_conflicts(False, 3) == section.list_data_conflicts(False, 1) == []
    for problems, named in (
        (section.list_data_conflicts(True, 3), "the data are latents and hold no images"),
        (section.list_data_conflicts(False, 4), "data.channels is 4"),
        (Align(**first | {"path": str(tmp_path / "c")}).list_data_conflicts(False, 3), "there is no folder"),
    ):
        assert len(problems) == 1 and named in problems[0]
    with pytest.raises(ConfigError, match="model.align.path: no encoder is named"):
        build({"align": first | {"path": None, "depth": 1}}).require_usable_source(
            SimpleNamespace(read_first_readable=dict)
        )


def test_a_finished_run_draws_without_its_encoder(tmp_path: Path) -> None:
    """Oracle: the samples with it, to the bit."""
    towers.dinov2(tmp_path / "encoder")
    system = build({"align": {}}, tmp_path / "encoder")
    both, request = nets(system), Request(torch.arange(2), {}, 2)
    expected = system.sample(both, request)
    assert len(system.frozen()) == 1 and not any(weight.requires_grad for weight in system.frozen()[0].parameters())
    (tmp_path / "encoder").rename(tmp_path / "elsewhere")
    again = DiTSystem(system.config)
    assert again.frozen() == () and torch.equal(again.sample(both, replace(request)), expected)


def test_projectors_of_files(tmp_path: Path) -> None:
    """Oracle: REPA's file with its projectors, without, and for a network that trains none; shapes are named."""
    state, _, _ = read("repa")
    model = {"num_classes": 5, "objective": "flow", "learn_sigma": False, "image_size": 4, "patch_size": 1, "depth": 2}
    model |= {"hidden_size": 24, "num_heads": 3, "flow": {"time_scale": 1.0}}
    align = {"kind": "repa", "depth": 1, "width": 10, "hidden": 32}
    aligned, plain = (DiTSystem(Config(**model, **more)) for more in ({"align": align}, {}))
    names = {f"projectors.0.{number}.{kind}" for number in (0, 2, 4) for kind in ("weight", "bias")}
    fitted, _ = aligned.adapt_weights("denoiser", aligned.rename_published("denoiser", state)[0])
    assert all(torch.equal(fitted[name], state[name]) for name in names)
    aligned.networks()["denoiser"].load_state_dict(fitted)
    fitted, notes = plain.adapt_weights("denoiser", dict(state))
    assert not names & fitted.keys() and any("6 weights of the alignment are left" in note for note in notes)
    bare = {name: value for name, value in state.items() if name not in names}
    (fitted, notes), (again, _) = (aligned.adapt_weights("denoiser", dict(bare)) for _ in range(2))
    assert names <= fitted.keys() and any("begin anew" in note for note in notes)
    assert all(torch.equal(fitted[name], again[name]) for name in names) and fitted["projectors.0.2.weight"].std() > 0.1
    other = DiTSystem(Config(**model, align=align | {"width": 11}))
    with pytest.raises(ConfigError, match=r"projectors\.0\.4\.bias .* align.width and align.hidden"):
        other.adapt_weights("denoiser", dict(state))


def test_projectors_are_not_exported() -> None:
    """Oracle: the weights for diffusers of the same network without projectors; a note says so."""
    model = {"block": {}, "objective": "flow", "time_freq": "diffusers", "depth": 2}
    align = {"kind": "repa", "depth": 1, "width": 12, "hidden": 8}
    aligned, plain = (build(model | more) for more in ({"align": align}, {}))
    state = nets(aligned)["denoiser"].state_dict()
    bare = {name: value for name, value in state.items() if not name.startswith("projectors.")}
    found, expected = (rename_to_diffusers(weights, 2, 10, True) for weights in (state, bare))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    aligned.require_expressible_in_diffusers()
    assert "projectors of the alignment are left out" in describe_export(aligned)[1]
    assert "projectors" not in describe_export(plain)[1]


def test_a_plan_needs_no_encoder(tmp_path: Path) -> None:
    """Oracle: by hand: the same projectors, and a note; features come with the samples."""
    align = {"kind": "repa", "depth": 1, "path": str(tmp_path / "nowhere"), "width": 12, "hidden": 8}
    run = Run(system="dit", model=MODERN | {"align": align}, data={"image_size": 8, "channels": 1})
    planned, note = Config.drop_missing_networks(run)
    assert "nowhere is not here: the encoder is not counted" in note
    system = DiTSystem(Config(**planned.model))
    example = system.encode(system.synthetic(2))
    assert example["features"].shape == (2, TOKENS, 12) and system.frozen() == ()
    assert system.config.align.list_data_conflicts(cached_latents=False, channels=4) == []  # latents for pixels
    assert system.compute_denoiser_loss(nets(system), example)["align"].shape == (2,)
