"""PixArt as choices of the one network: its published files in two layouts, its null text, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import PixArtTransformer2DModel
from safetensors.torch import save_file
from torch import Tensor

from dstrain import rng
from dstrain.encoders.text import TextEncoder
from dstrain.recipe import ConfigError
from dstrain.runs.weights import read_weights_adapted_to_system
from dstrain.systems.base import Request
from dstrain.systems.dit import to_diffusers
from dstrain.systems.dit.config import Config
from dstrain.systems.dit.network import DiT
from dstrain.systems.dit.presets import PRESETS
from dstrain.systems.dit.system import DiTSystem
from tests.support import first_stage, towers
from tests.support.cards import draw_stock
from tests.support.sample import sampled
from tests.systems.dit.test_published import read

MODEL: dict[str, Any] = {
    "condition": "text",
    "text_encodings_dim": 12,
    "max_text_len": 5,
    "text_projection": "mlp",
    "cross_attention": True,
    "block": {"modulation": "shared"},
    "class_dropout_prob": 0.0,
    "image_size": 8,
    "patch_size": 2,
    "hidden_size": 16,
    "depth": 2,
    "num_heads": 2,
}
# The authors' names of PixArt-alpha -> diffusers', as the conversion script of diffusers pairs them; {} is a block.
AUTHORS = {
    "x_embedder.proj": "pos_embed.proj",
    "t_embedder.mlp.0": "adaln_single.emb.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "adaln_single.emb.timestep_embedder.linear_2",
    "t_block.1": "adaln_single.linear",
    "y_embedder.y_proj.fc1": "caption_projection.linear_1",
    "y_embedder.y_proj.fc2": "caption_projection.linear_2",
    "final_layer.scale_shift_table": "scale_shift_table",
    "final_layer.linear": "proj_out",
    "csize_embedder.mlp.0": "adaln_single.emb.resolution_embedder.linear_1",
    "csize_embedder.mlp.2": "adaln_single.emb.resolution_embedder.linear_2",
    "ar_embedder.mlp.0": "adaln_single.emb.aspect_ratio_embedder.linear_1",
    "ar_embedder.mlp.2": "adaln_single.emb.aspect_ratio_embedder.linear_2",
    "blocks.{}.scale_shift_table": "transformer_blocks.{}.scale_shift_table",
    "blocks.{}.attn.qkv": "transformer_blocks.{}.attn1.to_q, to_k, to_v",
    "blocks.{}.attn.proj": "transformer_blocks.{}.attn1.to_out.0",
    "blocks.{}.cross_attn.q_linear": "transformer_blocks.{}.attn2.to_q",
    "blocks.{}.cross_attn.kv_linear": "transformer_blocks.{}.attn2.to_k, to_v",
    "blocks.{}.cross_attn.proj": "transformer_blocks.{}.attn2.to_out.0",
    "blocks.{}.mlp.fc1": "transformer_blocks.{}.ff.net.0.proj",
    "blocks.{}.mlp.fc2": "transformer_blocks.{}.ff.net.2",
}


def build(**changes: Any) -> DiTSystem:
    return DiTSystem(Config(**(MODEL | changes)))


def rename_as_authors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of diffusers under the authors' names, with the states of an empty text that their files hold."""
    named, left = {"y_embedder.y_embedding": torch.ones(5, 12)}, set(state)
    for block in ("0", "1"):
        for authors, others in AUTHORS.items():
            first, *letters = others.format(block).split(", ")
            names = [first, *(f"{first.rpartition('.')[0]}.{letter}" for letter in letters)]
            for kind in ("", ".weight", ".bias"):
                if names[0] + kind in state:
                    named[authors.format(block) + kind] = torch.cat([state[name + kind] for name in names])
                    left -= {name + kind for name in names}
    assert not left
    return named


def write(folder: Path, form: str, **fields: Any) -> Path:
    """Writes the golden weights as a folder of diffusers, in a pipeline, as its file alone, or as the authors' file."""
    state, _, config = read("pixart")
    folder.mkdir(exist_ok=True)
    if form == "authors":
        torch.save({"state_dict": rename_as_authors(state), "epoch": 3}, folder / "PixArt.pth")
        return folder / "PixArt.pth"
    if form == "file":
        save_file(state, folder / "weights.safetensors")
        return folder / "weights.safetensors"
    inner = folder
    if form == "pipeline":
        (folder / "model_index.json").write_text(json.dumps({"_class_name": "PixArtAlphaPipeline"}))
        inner = folder / "transformer"
        inner.mkdir()
    save_file(state, inner / "diffusion_pytorch_model.safetensors")
    config = {"_class_name": "PixArtTransformer2DModel"} | config | fields
    (inner / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("form", ["folder", "older", "pipeline", "file", "authors"])
def test_golden_network(tmp_path: Path, form: str) -> None:
    """Oracle: diffusers' PixArtTransformer2DModel, with a mask and without, 2e-5 (its sinusoids are in float32). Every
    name of the file is read, or in a note, and none of ours is without a value.
    """
    _, tensors, _ = read("pixart")
    older = {"_class_name": "Transformer2DModel"} if form == "older" else {}
    system = build()
    values, notes = read_weights_adapted_to_system(write(tmp_path, form, **older), system)["denoiser"]
    network = system.networks()["denoiser"]
    network.load_state_dict(values, strict=True)
    for mask, expected in ((tensors["in/mask"], "out/masked"), (None, "out/unmasked")):
        out = network(tensors["in/x"], tensors["in/t"], text=tensors["in/text"], mask=mask)
        assert torch.allclose(out, tensors[expected], atol=2e-5)
    assert any(note.startswith("y_embedder.y_embedding: left out") for note in notes) == (form == "authors")
    assert any(note.startswith("pos_embed: not in the file") for note in notes)


def test_null_text_is_the_encoders_empty_text(tmp_path: Path) -> None:
    """Oracle: the network told of the encoder's states of "", as diffusers' pipeline does, 1e-6. Without an encoder the
    null text begins anew, and is said to.
    """
    _, tensors, _ = read("pixart")
    x, t = tensors["in/x"], tensors["in/t"]
    encoder, path = towers.t5(tmp_path / "t5"), write(tmp_path / "weights", "folder")
    system = build(class_dropout_prob=0.1, text_encoder=str(tmp_path / "t5"))
    values, notes = read_weights_adapted_to_system(path, system)["denoiser"]
    assert any("the empty text of" in note for note in notes) and not any("anew" in note for note in notes)
    network = system.networks()["denoiser"]
    network.load_state_dict(values, strict=True)
    states = encoder(torch.tensor([[2]])).last_hidden_state.detach()
    expected = network(x, t, text=states.expand(3, 1, 12))
    told = system.network_conditions[0].make_arguments_from_request(
        Request(torch.arange(3), system.conditions_from_texts([""] * 3))
    )
    assert torch.allclose(network(x, t, **told), expected, atol=1e-6)
    assert not torch.allclose(network(x, t, text=tensors["in/text"]), expected, atol=1e-3)
    _, notes = read_weights_adapted_to_system(path, build(class_dropout_prob=0.1))["denoiser"]
    assert any("the null text begins anew" in note for note in notes)


def test_published_size() -> None:
    """Oracle: the number of weights of diffusers' network of the published size."""
    with torch.device("meta"):
        theirs = PixArtTransformer2DModel(sample_size=32, caption_channels=4096)
        ours = DiT(**Config(size="PixArt-XL/2", condition="text", text_encodings_dim=4096).make_network_arguments())
    null = PRESETS["PixArt-XL/2"]["hidden_size"]
    counts = [sum(weight.numel() for weight in network.parameters()) for network in (theirs, ours)]
    assert counts[0] == counts[1] - null


@pytest.mark.parametrize(
    ("fields", "changes", "named"),
    [
        ({"caption_channels": 10}, {}, "caption_channels is 10 in config.json, and 12 by model.text_encodings_dim"),
        ({"num_layers": 3}, {}, "num_layers is 3 in config.json, and 2 by model.depth"),
        ({"sample_size": 128}, {}, "interpolation_scale is 2 by config.json"),
        ({"interpolation_scale": 0.5}, {}, "interpolation_scale is 0.5 by config.json"),
        ({}, {"interpolation_scale": 2}, "and 2 by model.interpolation_scale"),
        ({"sample_size": 128}, {"interpolation_scale": 2}, "data.size_conditions=true and model.size_embedding=pixart"),
        ({"use_additional_conditions": True}, {"size_conditions": True}, "model.size_embedding=pixart"),
        ({}, {"objective": "flow"}, "model.objective=flow"),
        ({}, {"diffusion": {"schedule": "cosine"}}, "model.diffusion.schedule=cosine"),
        ({}, {"diffusion": {"prediction": "v"}}, "model.diffusion.prediction=v"),
        ({}, {"block": {}}, "block.modulation"),
        ({}, {"text_projection": "linear"}, "text_projection"),
        ({}, {"cross_attention": False}, "cross_attention"),
    ],
)
def test_weights_that_do_not_fit(tmp_path: Path, fields: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    """Oracle: the message names the entry."""
    with pytest.raises(ConfigError, match=re.escape(named)):
        read_weights_adapted_to_system(write(tmp_path, "folder", **fields), build(**changes))


@pytest.mark.parametrize(
    ("added", "named"),
    [
        ("adaln_single.emb.resolution_embedder.linear_1.weight", "data.size_conditions"),
        ("transformer_blocks.0.attn1.norm_q.weight", "queries and keys are normed"),
        ("other.weight", "other.weight is"),
        ("-transformer_blocks.1.attn2.to_v.bias", "transformer_blocks.1.attn2.to_v.bias is missing"),
    ],
)
def test_names_without_a_place(added: str, named: str) -> None:
    """Oracle: the message names the weight of the file."""
    state, system = read("pixart")[0], build()
    if added.startswith("-"):
        del state[added[1:]]
    else:
        state[added] = torch.ones(2)
    with pytest.raises(ConfigError, match=re.escape(named)):
        system.adapt_weights("denoiser", system.rename_published("denoiser", state)[0])


def test_hashed_words_have_no_projection() -> None:
    """Oracle: the message names the entry and the remedy."""
    with pytest.raises(ValueError, match="text_projection: .*text_encodings_dim"):
        build(text_encodings_dim=None)


def build_told(folder: Path, **changes: Any) -> tuple[DiTSystem, TextEncoder]:
    """A system with the encoder's null text and an autoencoder of 2 x 2 pixels, and its encoder."""
    towers.t5(folder / "t5")
    stage = first_stage.save(folder / "stage", channels=3, depth=2, latent_channels=4)
    told = {"null_text": "encoder", "text_encoder": str(folder / "t5"), "class_dropout_prob": 0.5, "image_size": 16}
    told["first_stage"] = {"path": str(stage), "factor": 2, "scaling_factor": 0.5}
    return build(**(told | changes)), TextEncoder(str(folder / "t5"), 5)


def test_what_is_dropped_reads_the_encoders_empty_text(tmp_path: Path) -> None:
    """Oracle: the encoder's states and mask of "", to the bit: where the key drops a text, in an empty prompt, without
    prompts, and as what guidance leads away from. The network has no null text of its own.
    """
    system, encoder = build_told(tmp_path)
    assert not any("null" in name for name in system.networks()["denoiser"].state_dict())
    empty, batch = encoder.encode([""]), system.synthetic(64)
    example = system.encode(batch)
    told = system._make_condition_arguments(example, drop=True)
    dropped = rng.uniform(batch["key"], "drop") < 0.5
    assert 20 < dropped.sum() < 44
    for name, of_empty, of_batch in (
        ("text", empty["text_encodings"], batch["text_encodings"]),
        ("mask", empty["text_mask"], batch["text_mask"]),
    ):
        assert torch.equal(told[name][dropped], of_empty.expand(int(dropped.sum()), *of_empty.shape[1:]))
        assert torch.equal(told[name][~dropped], of_batch[~dropped])
    for conditions in (system.conditions_from_texts(["", "a red cat"]), {}):
        told, null = system.make_conditional_and_negative_arguments(Request(torch.arange(2), conditions))
        assert torch.equal(told["text"][:1], empty["text_encodings"]) and torch.equal(
            told["mask"][:1], empty["text_mask"]
        )
        assert torch.equal(null["text"][1:], empty["text_encodings"]) and torch.equal(
            null["mask"][1:], empty["text_mask"]
        )
    avoided = system.conditions_from_texts(["the moon"]) | system.make_negative_prompt_conditions("", 1)
    _, null = system.make_conditional_and_negative_arguments(Request(torch.arange(1), avoided))
    assert torch.equal(null["text"], empty["text_encodings"])


def test_a_learned_null_text_gives_way(tmp_path: Path) -> None:
    """Oracle: the same weights without the null text, to the bit, and a note that names it."""
    system, _ = build_told(tmp_path)
    learned, _ = build_told(tmp_path, null_text="learned")
    state = learned.networks()["denoiser"].state_dict()
    values, notes = system.adapt_weights("denoiser", state)
    assert "text_tokens.null.weight: left out, since null_text is encoder" in notes
    assert values.keys() == state.keys() - {"text_tokens.null.weight"}
    assert all(torch.equal(value, state[name]) for name, value in values.items())


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_card_of_texts_that_were_dropped(tmp_path: Path, share: float) -> None:
    """Oracle: by hand: without dropped texts nothing leads away from an empty text, so the example's guidance is 1."""
    told = build_told(tmp_path, class_dropout_prob=share, null_text="encoder" if share else "learned")
    _, note, code = to_diffusers.describe_export(told[0])
    assert ("trained without dropped texts: sample with guidance_scale=1" in note) == (not share)
    assert ("guidance_scale=1.0" in code) == (not share)


@pytest.mark.parametrize("share", sampled((0.0, 0.1), (0.1,)))
def test_stock_pipeline_draws_from_an_export(tmp_path: Path, share: float) -> None:
    """Oracle: diffusers' own pipeline, in a process without dstrain, draws what the trained network draws, within two
    levels; its transformer predicts the same, 1e-5 relative, and has the weights that came in, to the bit.
    """
    system, _ = build_told(tmp_path, class_dropout_prob=share, null_text="encoder" if share else "learned")
    values, _ = read_weights_adapted_to_system(write(tmp_path / "weights", "folder"), system)["denoiser"]
    nets = system.networks()
    nets["denoiser"].load_state_dict(values)
    out = tmp_path / "out"
    system.require_expressible_in_diffusers()
    to_diffusers.save_export(system, nets, out)
    errors = to_diffusers.measure_export_errors(system, nets, out, system.encode(system.synthetic(4)))
    assert errors.keys() == ({"with text", "without text"} if share else {"with text"})
    assert max(errors.values()) < 1e-5
    state, _, _ = read("pixart")
    written = PixArtTransformer2DModel.from_pretrained(out / "transformer").state_dict()
    assert written.keys() == state.keys() and all(torch.equal(written[name], state[name]) for name in state)
    name, note, _ = to_diffusers.describe_export(system)
    assert "DiTTransformer2DModel" not in note  # diffusers' own class of PixArt holds it
    drawn, expected = draw_stock(to_diffusers, system, nets, out)
    assert name == "PixArtAlphaPipeline" and (drawn - expected).abs().max() <= 2
    assert (expected[0] - expected[1]).abs().max() > 20  # of two prompts and noises
    with torch.no_grad():
        nets["denoiser"].blocks[1].cross.kv.bias[-1] += 1  # of values
    assert (
        min(to_diffusers.measure_export_errors(system, nets, out, system.encode(system.synthetic(4))).values()) > 1e-5
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"null_text": "learned"}, "null_text: this one is learned"),
        ({"mlp_ratio": 2.0}, "mlp_ratio: diffusers' PixArtTransformer2DModel"),
        ({"block": {"modulation": "shared", "qk_norm": "rms"}}, "block: diffusers' PixArtTransformer2DModel"),
        ({"time_freq": "diffusers"}, "time_freq: diffusers' PixArtTransformer2DModel"),
        ({"objective": "flow", "learn_sigma": False}, "objective: diffusers' PixArtTransformer2DModel"),
        ({"text_projection": "linear"}, "text_projection: diffusers' PixArtTransformer2DModel"),
        ({"first_stage": None, "image_size": 8}, "first_stage: diffusers' PixArtAlphaPipeline"),
    ],
)
def test_what_pixart_cannot_express(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    """Oracle: the message names the entry, before anything is written."""
    with pytest.raises(ConfigError, match=re.escape(named)):
        build_told(tmp_path, **changes)[0].require_expressible_in_diffusers()


def test_another_encoder_is_not_exported(tmp_path: Path) -> None:
    """Oracle: the message names the entry and the kind of encoder."""
    system, _ = build_told(tmp_path)
    towers.sentences(tmp_path / "t5")
    with pytest.raises(ConfigError, match="text_encoder: .*model_type is bert"):
        to_diffusers.save_export(system, system.networks(), tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"text_encoder": None}, "null_text: encoder takes"),
        ({"condition": "label", "text_encodings_dim": None, "cross_attention": False}, "null_text: with condition"),
    ],
)
def test_a_null_text_without_an_encoder(changes: dict[str, Any], named: str) -> None:
    """Oracle: the message names the entry."""
    with pytest.raises(ValueError, match=re.escape(named)):
        build(**({"null_text": "encoder"} | changes))
