"""Stable Diffusion 3 as choices of the one network: its published files in two layouts, its texts, and an export."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from safetensors.torch import save_file
from torch import Tensor

from dstrain import rng
from dstrain.encoders.joined_text import JoinedTextEncoder
from dstrain.recipe import ConfigError
from dstrain.runs.weights import read_weights_adapted_to_system
from dstrain.systems.base import Request
from dstrain.systems.dit import to_diffusers
from dstrain.systems.dit.config import Config
from dstrain.systems.dit.network import DiT
from dstrain.systems.dit.system import DiTSystem
from tests.support import first_stage, towers
from tests.support.cards import draw_stock
from tests.support.sample import sampled
from tests.systems.dit.test_published import read

MODEL: dict[str, Any] = {
    "condition": "text",
    "text_encodings_dim": 12,
    "max_text_len": 6,
    "text_projection": "plain",
    "text_pooled_dim": 10,
    "block": {"joint": True},
    "sines_within": [6, 4],
    "objective": "flow",
    "learn_sigma": False,
    "class_dropout_prob": 0.0,
    "image_size": 8,
    "patch_size": 2,
    "hidden_size": 16,
    "depth": 2,
    "num_heads": 2,
}
DUAL = {"joint": True, "qk_norm": "rms", "dual": 1}
# The authors' names -> diffusers', as the conversion script of diffusers pairs them; {} is a block.
AUTHORS = {
    "pos_embed": "pos_embed.pos_embed",
    "x_embedder.proj": "pos_embed.proj",
    "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
    "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
    "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
    "context_embedder": "context_embedder",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
    "final_layer.linear": "proj_out",
    "joint_blocks.{}.x_block.attn.qkv": "transformer_blocks.{}.attn.to_q, to_k, to_v",
    "joint_blocks.{}.x_block.attn.proj": "transformer_blocks.{}.attn.to_out.0",
    "joint_blocks.{}.x_block.attn.ln_q": "transformer_blocks.{}.attn.norm_q",
    "joint_blocks.{}.x_block.attn.ln_k": "transformer_blocks.{}.attn.norm_k",
    "joint_blocks.{}.x_block.attn2.qkv": "transformer_blocks.{}.attn2.to_q, to_k, to_v",
    "joint_blocks.{}.x_block.attn2.proj": "transformer_blocks.{}.attn2.to_out.0",
    "joint_blocks.{}.x_block.attn2.ln_q": "transformer_blocks.{}.attn2.norm_q",
    "joint_blocks.{}.x_block.attn2.ln_k": "transformer_blocks.{}.attn2.norm_k",
    "joint_blocks.{}.x_block.adaLN_modulation.1": "transformer_blocks.{}.norm1.linear",
    "joint_blocks.{}.x_block.mlp.fc1": "transformer_blocks.{}.ff.net.0.proj",
    "joint_blocks.{}.x_block.mlp.fc2": "transformer_blocks.{}.ff.net.2",
    "joint_blocks.{}.context_block.attn.qkv": "transformer_blocks.{}.attn.add_q_proj, add_k_proj, add_v_proj",
    "joint_blocks.{}.context_block.attn.proj": "transformer_blocks.{}.attn.to_add_out",
    "joint_blocks.{}.context_block.attn.ln_q": "transformer_blocks.{}.attn.norm_added_q",
    "joint_blocks.{}.context_block.attn.ln_k": "transformer_blocks.{}.attn.norm_added_k",
    "joint_blocks.{}.context_block.adaLN_modulation.1": "transformer_blocks.{}.norm1_context.linear",
    "joint_blocks.{}.context_block.mlp.fc1": "transformer_blocks.{}.ff_context.net.0.proj",
    "joint_blocks.{}.context_block.mlp.fc2": "transformer_blocks.{}.ff_context.net.2",
}


def build(**changes: Any) -> DiTSystem:
    return DiTSystem(Config(**(MODEL | changes)))


def rename_as_authors(state: dict[str, Tensor], depth: int) -> dict[str, Tensor]:
    """The weights of diffusers under the authors' names, in whose last layers the shift stands before the scale, beside
    weights of the autoencoder and of text encoders.
    """
    named, left = {}, set(state)
    for block in range(depth):
        for authors, others in AUTHORS.items():
            first, *letters = others.format(block).split(", ")
            names = [first, *(f"{first.rpartition('.')[0]}.{letter}" for letter in letters)]
            for kind in ("", ".weight", ".bias"):
                if names[0] + kind in state:
                    value = torch.cat([state[name + kind] for name in names])
                    last = f"transformer_blocks.{depth - 1}.norm1_context.linear"
                    if names[0] in ("norm_out.linear", last):
                        value = torch.cat(value.chunk(2)[::-1])
                    named[f"model.diffusion_model.{authors.format(block)}{kind}"] = value
                    left -= {name + kind for name in names}
    assert not left
    others = ("first_stage_model.decoder.conv_in.bias", "first_stage_model.encoder.conv_in.bias", "text_encoders.w")
    return named | {name: torch.ones(2) for name in others}


def write(folder: Path, form: str, **fields: Any) -> Path:
    """Writes the golden weights as a folder of diffusers, in a pipeline, as its file alone, or as the authors' file."""
    state, _, config = read("sd3")
    return write_weights(folder, form, state, config | fields)


def write_weights(folder: Path, form: str, state: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    if form == "authors":
        save_file(rename_as_authors(state, config["num_layers"]), folder / "sd3_medium.safetensors")
        return folder / "sd3_medium.safetensors"
    if form == "file":
        save_file(state, folder / "weights.safetensors")
        return folder / "weights.safetensors"
    inner = folder
    if form == "pipeline":
        (folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusion3Pipeline"}))
        inner = folder / "transformer"
        inner.mkdir()
    save_file(state, inner / "diffusion_pytorch_model.safetensors")
    config = {"_class_name": "SD3Transformer2DModel", "_diffusers_version": "0.42.1"} | config
    (inner / "config.json").write_text(json.dumps(config))
    return folder


def join(pooled: Tensor, text: Tensor) -> Tensor:
    """Texts as they are cached: the pooled vector before the states."""
    row = torch.zeros_like(text[:, :1])
    row[:, 0, : pooled.shape[1]] = pooled
    return torch.cat((row, text), dim=1)


@pytest.mark.parametrize("form", ["folder", "pipeline", "file", "authors"])
def test_golden_network(tmp_path: Path, form: str) -> None:
    """Oracle: diffusers' SD3Transformer2DModel, 2e-5 (its sinusoids are in float32). Every name of the file is read, or
    in a note, and none of ours is without a value.
    """
    _, tensors, _ = read("sd3")
    system = build()
    values, notes = read_weights_adapted_to_system(write(tmp_path, form), system)["denoiser"]
    network = system.networks()["denoiser"]
    network.load_state_dict(values, strict=True)
    out = network(tensors["in/x"], tensors["in/t"], text=join(tensors["in/pooled"], tensors["in/text"]))
    assert torch.allclose(out, tensors["out/velocity"], atol=2e-5)
    assert any("pos_embed: 4 x 4 patches in the middle of the file's 6 x 6, equal" in note for note in notes)
    left = [note for note in notes if "left out" in note]
    assert len(left) == (3 if form == "authors" else 0), notes
    assert any("2 weights are left out: the autoencoder" in note for note in left) == (form == "authors")


@pytest.fixture(scope="module")
def dual() -> SD3Transformer2DModel:
    """A tiny network of SD3.5 medium's kind, all weights random."""
    torch.manual_seed(0)
    _, _, config = read("sd3")
    theirs = SD3Transformer2DModel(
        **config | {"num_layers": 3, "dual_attention_layers": (0,), "qk_norm": "rms_norm", "pos_embed_max_size": 12}
    )
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return theirs.eval()


@pytest.mark.parametrize("form", ["folder", "authors"])
def test_dual_blocks(tmp_path: Path, form: str, dual: SD3Transformer2DModel) -> None:
    """Oracle: diffusers' SD3Transformer2DModel with dual attention and norms of queries and keys, 2e-5: of the image's
    size and of another, that is not square, whose positions are the middle of the same square.
    """
    config = {name: value for name, value in dual.config.items() if not name.startswith("_")}
    path = write_weights(tmp_path / "weights", form, dual.state_dict(), config)
    system = build(block=DUAL, depth=3, sines_within=[12, 4])
    values, _ = read_weights_adapted_to_system(path, system)["denoiser"]
    network = system.networks()["denoiser"]
    network.load_state_dict(values, strict=True)
    draw = torch.Generator().manual_seed(1)
    text, pooled, t = (
        torch.randn(2, 5, 12, generator=draw),
        torch.randn(2, 10, generator=draw),
        torch.tensor([3.0, 70]),  # the error of diffusers' sinusoids grows with time, by the CPU
    )
    for high, wide in ((8, 8), (12, 6)):
        x = torch.randn(2, 4, high, wide, generator=draw)
        with torch.no_grad():
            expected = dual(x, encoder_hidden_states=text, pooled_projections=pooled, timestep=t).sample
            out = network(x, t, text=join(pooled, text))
        assert torch.allclose(out, expected, atol=2e-5)


def test_other_positions_of_a_file(tmp_path: Path) -> None:
    """Oracle: the middle of the file's table, to the bit, where it is not what is computed here; and a note of it. Our
    own weights at another size have that size's positions.
    """
    state, _, config = read("sd3")
    state["pos_embed.pos_embed"] = torch.randn(1, 36, 16)
    system = build()
    values, notes = read_weights_adapted_to_system(
        write_weights(tmp_path / "weights", "folder", state, config), system
    )["denoiser"]
    middle = state["pos_embed.pos_embed"].view(6, 6, 16)[1:5, 1:5].reshape(1, 16, 16)
    assert torch.equal(values["pos_embed"], middle) and any("not those computed here" in note for note in notes)
    larger = build(image_size=12)
    values, notes = larger.adapt_weights("denoiser", system.networks()["denoiser"].state_dict())
    assert torch.equal(values["pos_embed"], larger.networks()["denoiser"].pos_embed)
    assert "pos_embed: computed for 6 x 6 patches" in notes


@pytest.mark.parametrize(
    ("size", "fields"),
    [
        ("SD3-medium", {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536}),
        (
            "SD3.5-medium",
            {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536, "qk_norm": "rms_norm"}
            | {"dual_attention_layers": tuple(range(13)), "pos_embed_max_size": 384},
        ),
        (
            "SD3.5-large",
            {"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "qk_norm": "rms_norm"},
        ),
    ],
)
def test_published_sizes(size: str, fields: dict[str, Any]) -> None:
    """Oracle: the number of weights of diffusers' network of the published configs, and what a preset says beside."""
    usual = {"attention_head_dim": 64, "joint_attention_dim": 4096, "pooled_projection_dim": 2048, "sample_size": 128}
    config = Config(size=size, condition="text", text_encodings_dim=4096, class_dropout_prob=0, image_size=128)
    with torch.device("meta"):
        theirs = SD3Transformer2DModel(**{"pos_embed_max_size": 192} | usual | fields)
        ours = DiT(**config.make_network_arguments())
    counts = [sum(weight.numel() for weight in network.parameters()) for network in (theirs, ours)]
    pos_embed = sum(value.numel() for name, value in theirs.named_parameters() if "pos_embed.pos_embed" in name)
    assert counts[0] - pos_embed == counts[1]
    assert (config.in_channels, config.flow.shift, config.objective) == (16, 3.0, "flow")


@pytest.mark.parametrize(
    ("fields", "changes", "named"),
    [
        ({"joint_attention_dim": 10}, {}, "joint_attention_dim is 10 in config.json, and 12 by model.text_encodings"),
        ({"pooled_projection_dim": 8}, {}, "pooled_projection_dim is 8 in config.json, and 10 by model.text_pooled"),
        ({"pos_embed_max_size": 8}, {}, "pos_embed_max_size is 8 in config.json, and 6 by model.sines_within"),
        ({"sample_size": 16}, {}, "sample_size is 16 in config.json, and 8 by model.sines_within"),
        ({"qk_norm": "rms_norm"}, {}, "qk_norm is rms_norm in config.json, and None by model.block.qk_norm"),
        ({"dual_attention_layers": [0]}, {}, "dual_attention_layers is [0] in config.json, and () by model.block.dual"),
        ({"rope": True}, {}, "config.json has rope=True, which is not read here"),
        ({}, {"objective": "diffusion"}, "model.objective=diffusion"),
        ({}, {"flow": {"time_scale": 1.0}}, "model.flow.time_scale=1.0: weights of sd3 were trained with 1000.0"),
        ({}, {"block": {}}, "model.block.joint=False: weights of sd3 were trained with True"),
        ({}, {"text_projection": "linear"}, "text_projection"),
    ],
)
def test_weights_that_do_not_fit(tmp_path: Path, fields: dict[str, Any], changes: dict[str, Any], named: str) -> None:
    """Oracle: the message names the entry."""
    with pytest.raises(ConfigError, match=re.escape(named)):
        read_weights_adapted_to_system(write(tmp_path, "folder", **fields), build(**changes))


def test_a_square_of_another_size(tmp_path: Path) -> None:
    """Oracle: the message names the entry and the square of the file, which has no config."""
    with pytest.raises(ConfigError, match=re.escape("6 x 6 patches, and of 8 by model.sines_within; set its first")):
        read_weights_adapted_to_system(write(tmp_path, "authors"), build(sines_within=[8, 4]))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block": {"dual": 1}}, "block.dual: there are no 1 joint blocks"),
        ({"block": {"joint": True, "dual": 3}}, "block.dual: there are no 3 joint blocks"),
        ({"block": {"joint": True, "rope": True}}, "block.joint: joint blocks have norm=layer"),
        ({"block": {"joint": True, "mlp": "swiglu"}}, "block.joint: joint blocks have norm=layer"),
        ({"cross_attention": True}, "block.joint: joint blocks read texts"),
        ({"tokens": {"joins": 1}}, "block.joint: joint blocks read texts"),
        ({"sines_within": [3, 3]}, "sines_within: a side of 4 patches"),
        ({"interpolation_scale": 2}, "interpolation_scale: sines_within gives the range"),
        ({"sizes": [[8, 8], [16, 8]]}, "sines_within: a side of 8 patches"),
        ({"text_pooled_dim": 13}, "text_pooled_dim: 13 values do not fit"),
        ({"text_encodings_dim": None, "text_pooled_dim": 0}, "text_projection: plain maps states"),
        (
            {"condition": "label", "text_encodings_dim": None, "block": {}},
            "text_pooled_dim: with condition=label no text is read",
        ),
    ],
)
def test_choices_that_do_not_fit(changes: dict[str, Any], named: str) -> None:
    """Oracle: the message names the entry."""
    with pytest.raises(ValueError, match=re.escape(named)):
        build(**changes)


def build_told(folder: Path, has_t5: bool = True, **changes: Any) -> tuple[DiTSystem, JoinedTextEncoder]:
    """A system with the encoders' null text and an autoencoder of 2 x 2 pixels, and its encoders."""
    if not (folder / "texts").exists():
        towers.joined(folder / "texts", has_t5)
    stage = first_stage.save(folder / "stage", channels=3, depth=2, latent_channels=4)
    told = {"null_text": "encoder", "text_encoder": str(folder / "texts"), "class_dropout_prob": 0.5, "image_size": 16}
    told["first_stage"] = {"path": str(stage), "factor": 2, "scaling_factor": 0.5, "shift": 0.1}
    told |= {"max_text_len": 98, "flow": {"shift": 3.0}}
    return build(**(told | changes)), JoinedTextEncoder(str(folder / "texts"), 98)


def test_a_text_is_dropped_with_its_pooled_vector(tmp_path: Path) -> None:
    """Oracle: the encoders' rows of "", the pooled one among them, to the bit: where the key drops a text, in an empty
    prompt, without prompts, and as what guidance leads away from. With a learned null text a dropped text's states and
    pooled vector change nothing.
    """
    system, encoder = build_told(tmp_path)
    empty, batch = encoder.encode([""]), system.synthetic(64)
    assert empty["text_encodings"][0, 0, :10].abs().min() > 0
    told = system._make_condition_arguments(system.encode(batch), drop=True)
    dropped = rng.uniform(batch["key"], "drop") < 0.5
    assert 20 < dropped.sum() < 44
    assert torch.equal(told["text"][dropped], empty["text_encodings"].expand(int(dropped.sum()), -1, -1))
    assert torch.equal(told["text"][~dropped], batch["text_encodings"][~dropped])
    for conditions in (system.conditions_from_texts(["", "a red cat"]), {}):
        told, null = system.make_conditional_and_negative_arguments(Request(torch.arange(2), conditions))
        assert torch.equal(told["text"][:1], empty["text_encodings"])
        assert empty["text_mask"].all() and "mask" not in told and "mask" not in null  # all tokens are read
        assert torch.equal(null["text"][1:], empty["text_encodings"])
    learned, _ = build_told(tmp_path, null_text="learned")
    network = learned.networks()["denoiser"].eval()
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.1)
    x, t = torch.randn(2, 4, 8, 8), torch.tensor([3.0, 700])
    told, null = learned.make_conditional_and_negative_arguments(
        Request(torch.arange(2), learned.conditions_from_texts(["a cat", "the moon"]))
    )
    with torch.no_grad():
        seen, unseen = network(x, t, **told), network(x, t, **null)
        changed = network(x, t, text=null["text"] + 1, mask=null["mask"])
        pooled = told | {"text": told["text"] + torch.nn.functional.pad(torch.ones(2, 1, 12), (0, 0, 0, 97))}
        assert torch.equal(unseen, changed) and not torch.allclose(seen, unseen, atol=1e-3)
        assert not torch.allclose(network(x, t, **pooled), seen, atol=1e-3)


def test_masked_words_are_not_read() -> None:
    """Oracle: the text without its masked states: the same prediction, 1e-6; and another with all of them."""
    network = build().networks()["denoiser"]
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())))
    draw = torch.Generator().manual_seed(1)
    x, t, text = (
        torch.randn(2, 4, 8, 8, generator=draw),
        torch.tensor([3.0, 700]),
        torch.randn(2, 6, 12, generator=draw),
    )
    mask = torch.tensor([[True] * 4 + [False] * 2] * 2)
    with torch.no_grad():
        masked, cut, whole = (
            network(x, t, text=text, mask=mask),
            network(x, t, text=text[:, :4]),
            network(x, t, text=text),
        )
    assert torch.allclose(masked, cut, atol=1e-6) and not torch.allclose(masked, whole, atol=1e-3)


@pytest.mark.parametrize("has_t5", [True, False])
def test_card_names_absent_encoder(tmp_path: Path, has_t5: bool) -> None:
    """Oracle: diffusers' own arguments, by which a pipeline is opened without its third encoder."""
    code = to_diffusers.describe_export(build_told(tmp_path, has_t5)[0])[2]
    assert ("text_encoder_3=None, tokenizer_3=None" in code) == (not has_t5)


@pytest.mark.parametrize("has_t5", sampled((True, False), (True,)))
def test_stock_pipeline_draws_from_an_export(tmp_path: Path, has_t5: bool) -> None:
    """Oracle: diffusers' own pipeline, in a process without dstrain, draws what the trained network draws, within two
    levels; its transformer predicts the same, 2e-5 relative, and has the weights that came in, to the bit.
    """
    system, _ = build_told(tmp_path, has_t5)
    values, _ = read_weights_adapted_to_system(write(tmp_path / "weights", "folder"), system)["denoiser"]
    nets = system.networks()
    nets["denoiser"].load_state_dict(values)
    out = tmp_path / "out"
    system.require_expressible_in_diffusers()
    to_diffusers.save_export(system, nets, out)
    errors = to_diffusers.measure_export_errors(system, nets, out, system.encode(system.synthetic(4)))
    assert errors.keys() == {"with text", "without text"} and max(errors.values()) < 2e-5
    state, _, _ = read("sd3")
    written = SD3Transformer2DModel.from_pretrained(out / "transformer").state_dict()
    assert written.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(written[name], value) or (
            name == "pos_embed.pos_embed" and torch.allclose(written[name], value)
        )
    drawn, expected = draw_stock(to_diffusers, system, nets, out)
    assert to_diffusers.describe_export(system)[0] == "StableDiffusion3Pipeline" and (drawn - expected).abs().max() <= 2
    assert (expected[0] - expected[1]).abs().max() > 20  # of two prompts and noises
    with torch.no_grad():
        nets["denoiser"].blocks[1].text.attn.qkv.bias[-1] += 1  # of values
    assert (
        min(to_diffusers.measure_export_errors(system, nets, out, system.encode(system.synthetic(4))).values()) > 2e-5
    )


def test_full_masks_change_nothing(tmp_path: Path) -> None:
    """Oracle: the same prediction with a mask that shows all tokens, 1e-6, where the system leaves it out."""
    system, _ = build_told(tmp_path)
    example, network = system.encode(system.synthetic(2)), system.networks()["denoiser"].eval()
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())))
    told = system._make_condition_arguments(example)
    x, t = torch.randn(2, 4, 8, 8), torch.tensor([3.0, 700])
    with torch.no_grad():
        out, masked = network(x, t, **told), network(x, t, **told, mask=torch.ones(told["text"].shape[:2]).bool())
    assert told.keys() == {"text"} and torch.allclose(out, masked, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"null_text": "learned"}, "null_text: diffusers' StableDiffusion3Pipeline takes"),
        ({"block": {"joint": True, "qk_norm": "layer"}}, "block.qk_norm: diffusers' SD3Transformer2DModel"),
        ({"mlp_ratio": 2.0}, "mlp_ratio: diffusers' SD3Transformer2DModel"),
        ({"time_freq": "diffusers"}, "time_freq: diffusers' SD3Transformer2DModel"),
        ({"learn_sigma": True}, "learn_sigma: diffusers' SD3Transformer2DModel"),
        ({"text_projection": "linear"}, "text_projection: diffusers' SD3Transformer2DModel"),
        ({"text_pooled_dim": 0}, "text_pooled_dim: diffusers' SD3Transformer2DModel"),
        ({"sines_within": None}, "sines_within: diffusers' SD3Transformer2DModel"),
        ({"flow": {"prediction": "x", "t_min": 0.05}}, "flow.prediction"),
        ({"first_stage": None, "image_size": 8}, "first_stage: diffusers' StableDiffusion3Pipeline"),
    ],
)
def test_what_the_pipeline_cannot_express(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    """Oracle: the message names the entry, before anything is written."""
    with pytest.raises(ConfigError, match=re.escape(named)):
        build_told(tmp_path, **changes)[0].require_expressible_in_diffusers()
