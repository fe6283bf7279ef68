"""Text and image encoders against transformers' own models, with tiny random weights."""

import json

import pytest
import torch
from PIL import Image
from transformers import T5Config, T5EncoderModel, T5Model

from dstrain.encoders.image import ImageEncoder
from dstrain.encoders.text import TextEncoder
from tests.support import towers
from tests.support.pictures import picture

CAPTIONS = ["a red cat", "the green dog on the blue moon on the house on the moon", "unheard"]


def test_clip_texts(tmp_path):
    """Oracle: transformers' CLIPModel.get_text_features and token states; padding is masked, long captions are cut."""
    model = towers.clip(tmp_path)
    encoder = TextEncoder(str(tmp_path))
    assert (encoder.embed_dim, encoder.encodings_dim, encoder.max_length) == (12, 16, 8)
    found = encoder.encode(CAPTIONS)
    tokens = encoder.tokenizer(CAPTIONS, padding="max_length", truncation=True, max_length=8, return_tensors="pt")
    with torch.no_grad():
        out = model.get_text_features(**tokens)
        states = model.text_model(**tokens).last_hidden_state
    expected = getattr(out, "pooler_output", out)  # an object since transformers 5
    torch.testing.assert_close(found["text_embed"], expected)
    torch.testing.assert_close(found["text_encodings"], states)
    assert found["text_mask"].sum(1).tolist() == [5, 8, 3] and found["text_encodings"].shape == (3, 8, 16)


def test_sentences(tmp_path):
    """Oracle: the mean of BERT's token states over what is no padding, one caption at a time and without padding."""
    model = towers.sentences(tmp_path)
    encoder = TextEncoder(str(tmp_path))
    found = encoder.encode(CAPTIONS)
    for row, caption in enumerate(CAPTIONS):
        tokens = encoder.tokenizer(caption, truncation=True, max_length=10, return_tensors="pt")
        with torch.no_grad():
            states = model(input_ids=tokens["input_ids"]).last_hidden_state[0]
        torch.testing.assert_close(found["text_embed"][row], states.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found["text_encodings"][row, : len(states)], states, rtol=1e-4, atol=1e-5)
    assert TextEncoder(str(tmp_path), 4).encode(CAPTIONS)["text_encodings"].shape == (3, 4, 12)


def test_pooling(tmp_path):
    """Oracle: BERT's first token state where 1_Pooling/config.json says cls, the mean where it says so; other ways and
    a dense layer behind are refused."""
    towers.sentences(tmp_path)
    plain = TextEncoder(str(tmp_path)).encode(CAPTIONS)
    file = tmp_path / "1_Pooling" / "config.json"
    file.parent.mkdir()
    words = ("cls_token", "mean_tokens", "max_tokens")

    def found(*modes: str) -> torch.Tensor:
        file.write_text(json.dumps({f"pooling_mode_{word}": word in modes for word in words}))
        return TextEncoder(str(tmp_path)).encode(CAPTIONS)["text_embed"]

    torch.testing.assert_close(found("cls_token"), plain["text_encodings"][:, 0])
    torch.testing.assert_close(found("mean_tokens"), plain["text_embed"])
    for modes in (("max_tokens",), ("cls_token", "mean_tokens")):
        with pytest.raises(ValueError, match=f"1_Pooling/config.json.*{modes[0]}"):
            found(*modes)
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Dense"}]))
    with pytest.raises(ValueError, match="kind Dense"):
        found("mean_tokens")


def test_t5(tmp_path):
    """Oracle: the mean of the states of transformers' T5EncoderModel over what is no padding, one caption at a time."""
    torch.manual_seed(0)
    config = T5Config(vocab_size=20, d_model=12, d_kv=6, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
    T5Model(config).save_pretrained(tmp_path)
    towers._tokenizer().save_pretrained(tmp_path)
    model = T5EncoderModel.from_pretrained(tmp_path).eval()
    encoder = TextEncoder(str(tmp_path), 16)
    found = encoder.encode(CAPTIONS)
    assert (encoder.embed_dim, encoder.encodings_dim) == (12, 12) and TextEncoder(str(tmp_path)).max_length == 256
    for row, caption in enumerate(CAPTIONS):
        tokens = encoder.tokenizer(caption, truncation=True, max_length=16, return_tensors="pt")
        with torch.no_grad():
            states = model(input_ids=tokens["input_ids"]).last_hidden_state[0]
        torch.testing.assert_close(found["text_embed"][row], states.mean(0), rtol=1e-4, atol=1e-5)


def test_a_tokenizer_without_a_token_for_padding(tmp_path):
    """Oracle: the embeddings with a token for padding: its end token takes the place; without either it is refused."""
    towers.sentences(tmp_path)
    expected = TextEncoder(str(tmp_path)).encode(CAPTIONS)["text_embed"]
    tokenizer = towers._tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    encoder = TextEncoder(str(tmp_path))
    assert encoder.tokenizer.pad_token == "[EOS]"
    torch.testing.assert_close(encoder.encode(CAPTIONS)["text_embed"], expected, rtol=1e-4, atol=1e-5)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="neither pad_token nor eos_token"):
        TextEncoder(str(tmp_path))


def test_images(tmp_path):
    """Oracle: transformers' CLIPImageProcessor and CLIPModel.get_image_features on squares of the model's size."""
    model, processor = towers.clip(tmp_path), towers.preprocessing(tmp_path)
    encoder = ImageEncoder(str(tmp_path))
    images = torch.stack(
        [
            torch.frombuffer(bytearray(picture(seed, 16, 16).tobytes()), dtype=torch.uint8)
            .view(16, 16, 3)
            .permute(2, 0, 1)
            for seed in range(3)
        ]
    )
    pixels = processor([Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images], return_tensors="pt")
    with torch.no_grad():
        out = model.get_image_features(pixel_values=pixels["pixel_values"])
    torch.testing.assert_close(encoder.encode(images), getattr(out, "pooler_output", out), rtol=1e-4, atol=1e-5)
    assert encoder.encode(images.repeat_interleave(3, 2).repeat_interleave(3, 3)).shape == (3, 12)
    (tmp_path / "preprocessor_config.json").unlink()
    assert not torch.allclose(ImageEncoder(str(tmp_path)).encode(images), encoder.encode(images))


def test_they_stay_frozen(tmp_path):
    """Oracle: no gradient, no dropout, whatever the network around them does."""
    towers.clip(tmp_path)
    for encoder in (TextEncoder(str(tmp_path)), ImageEncoder(str(tmp_path))):
        around = torch.nn.Sequential(encoder).train()
        assert around.training and not any(module.training for module in encoder.modules())
        assert not any(weight.requires_grad for weight in encoder.parameters())


@pytest.mark.parametrize(
    "make, how, words",
    [
        *(
            (make, how, words)
            for make in (TextEncoder, ImageEncoder)
            for how, words in (
                ("nowhere", "there is no folder"),
                ("empty", "can be loaded from"),
                ("weights", "can be loaded from"),
            )
        ),
        (ImageEncoder, "kind", "of type bert"),  # a text encoder may be of any type
    ],
)
def test_what_cannot_be_loaded(tmp_path, make, how, words):
    """Oracle: a ValueError that names the key and what to give; pickled weights are not read."""
    if how == "kind":
        towers.sentences(tmp_path)
    elif how == "weights":
        model = towers.clip(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    path = str(tmp_path / "nowhere") if how == "nowhere" else str(tmp_path)
    with pytest.raises(ValueError, match=f"(text|image)_encoder: .*{words}"):
        make(path)
    if make is TextEncoder and how == "empty":
        towers.clip(tmp_path)
        with pytest.raises(ValueError, match="takes 8 tokens, not 9"):
            make(path, 9)
