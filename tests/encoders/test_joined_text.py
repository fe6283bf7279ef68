"""The three text encoders of Stable Diffusion 3, against diffusers' own pipeline."""

import json
import re
from pathlib import Path

import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import AutoTokenizer, CLIPTextModelWithProjection, T5EncoderModel

from dstrain.encoders.joined_text import JoinedTextEncoder, open_text_encoder
from dstrain.encoders.text import TextEncoder
from dstrain.recipe import ConfigError
from tests.support import towers

TEXTS = ["a red cat on the moon", "", "green " * 90]


def build_pipeline(folder: Path, has_t5: bool) -> StableDiffusion3Pipeline:
    """diffusers' pipeline of the encoders in a folder, with a transformer that only says how wide states are."""
    parts = {}
    for end in ("", "_2"):
        parts[f"text_encoder{end}"] = CLIPTextModelWithProjection.from_pretrained(folder / f"text_encoder{end}")
        parts[f"tokenizer{end}"] = AutoTokenizer.from_pretrained(folder / f"tokenizer{end}")
    parts |= {"text_encoder_3": None, "tokenizer_3": None}
    if has_t5:
        parts["text_encoder_3"] = T5EncoderModel.from_pretrained(folder / "text_encoder_3")
        parts["tokenizer_3"] = AutoTokenizer.from_pretrained(folder / "tokenizer_3")
    transformer = SD3Transformer2DModel(
        num_layers=1, attention_head_dim=8, num_attention_heads=1, joint_attention_dim=12, caption_projection_dim=8
    )
    return StableDiffusion3Pipeline(transformer=transformer, scheduler=None, vae=None, **parts)


@pytest.mark.parametrize("has_t5", [True, False])
def test_rows_are_the_pipelines(tmp_path: Path, has_t5: bool) -> None:
    """Oracle: encode_prompt of diffusers' StableDiffusion3Pipeline, 1e-6: the states of the CLIPs, then those of T5, or
    zeros without it; the pooled vector is the first row. An empty text and one that is cut are among them.
    """
    towers.joined(tmp_path, has_t5)
    encoder = open_text_encoder(str(tmp_path), 1 + 77 + 20)
    encoded = encoder.encode(TEXTS)
    with torch.no_grad():
        states, _, pooled, _ = build_pipeline(tmp_path, has_t5).encode_prompt(
            TEXTS, None, None, do_classifier_free_guidance=False, max_sequence_length=20, device=torch.device("cpu")
        )
    rows = encoded["text_encodings"]
    assert isinstance(encoder, JoinedTextEncoder) and rows.shape == (3, 98, 12) and states.shape == (3, 97, 12)
    assert torch.allclose(rows[:, 1:], states, atol=1e-6) and torch.allclose(rows[:, 0, :10], pooled, atol=1e-6)
    assert torch.equal(encoded["text_embed"], rows[:, 0, :10]) and not rows[:, 0, 10:].any()
    assert encoded["text_mask"].all() and (rows[0] - rows[1]).abs().max() > 0.1
    assert open_text_encoder(str(tmp_path)).max_length == 1 + 77 + 256  # as the pipeline's own


def test_what_is_cut_is_counted(tmp_path: Path) -> None:
    """Oracle: by hand: 90 words and the token of the end, of which 20 are read by T5, or 77 by CLIP with two more."""
    encoder = JoinedTextEncoder(str(towers.joined(tmp_path / "whole")), 98)
    assert "1 of 3 are cut: 20 tokens of a text are read, and they have up to 91" in encoder.describe_cut(TEXTS, "x")
    encoder = JoinedTextEncoder(str(towers.joined(tmp_path / "clips", has_t5=False)), 98)
    assert "1 of 3 are cut: 77 tokens of a text are read, and they have up to 92" in encoder.describe_cut(TEXTS, "x")


def test_a_fingerprint_is_of_all_encoders(tmp_path: Path) -> None:
    """Oracle: it changes with a weight of any of the three, and with nothing else."""
    folder = towers.joined(tmp_path)
    found = [JoinedTextEncoder(str(folder)).compute_fingerprint()]
    assert JoinedTextEncoder(str(folder), 98).compute_fingerprint() == found[0]
    for name, kind in (
        ("text_encoder", CLIPTextModelWithProjection),
        ("text_encoder_2", CLIPTextModelWithProjection),
        ("text_encoder_3", T5EncoderModel),
    ):
        network = kind.from_pretrained(folder / name)
        with torch.no_grad():
            next(network.parameters())[0, 0] += 1
        network.save_pretrained(folder / name)
        found.append(JoinedTextEncoder(str(folder)).compute_fingerprint())
    assert len(set(found)) == 4


def test_one_encoder_stays_one(tmp_path: Path) -> None:
    """Oracle: a folder of one network is opened as before, to the bit."""
    towers.t5(tmp_path)
    encoder = open_text_encoder(str(tmp_path), 8)
    assert type(encoder) is TextEncoder
    for name, value in TextEncoder(str(tmp_path), 8).encode(TEXTS).items():
        assert torch.equal(value, encoder.encode(TEXTS)[name])


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("short", "max_text_len: .*not 78 in all; give 79 to 334"),
        ("narrow", "model.text_encoder: states of the two CLIPs at .* are 10 wide together.* 8; take"),
        ("swapped", "model.text_encoder: .*text_encoder_3/config.json is of model_type clip_text_model"),
        ("missing", "model.text_encoder: no text encoders can be loaded from .*text_encoder_2 and their tokenizers"),
        ("places", "model.text_encoder: .*text_encoder/config.json has places for 8 tokens, not for 77"),
    ],
)
def test_folders_that_are_none(tmp_path: Path, fault: str, named: str) -> None:
    """Oracle: the message names the entry, the fault and the remedy."""
    folder = towers.joined(tmp_path / "whole", width=8 if fault == "narrow" else 12)
    if fault == "swapped":
        (folder / "text_encoder_3").rename(tmp_path / "t5")
        (folder / "text_encoder_2").rename(folder / "text_encoder_3")
        (tmp_path / "t5").rename(folder / "text_encoder_2")
        named = named.replace("_3/config.json is of model_type clip_text_model", "_2/config.json is of model_type t5")
    if fault == "missing":
        (folder / "tokenizer_2").rename(tmp_path / "gone")
    if fault == "places":
        config = json.loads((folder / "text_encoder/config.json").read_text())
        (folder / "text_encoder/config.json").write_text(json.dumps(config | {"max_position_embeddings": 8}))
    with pytest.raises(ConfigError, match=named):
        open_text_encoder(str(folder), 78 if fault == "short" else None)


def test_a_folder_that_is_absent() -> None:
    """Oracle: the message of one encoder's folder, and no other."""
    with pytest.raises(ConfigError, match=re.escape("model.text_encoder: there is no folder runs/none")):
        open_text_encoder("runs/none")
