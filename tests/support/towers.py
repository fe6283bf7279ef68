"""Folders of tiny random encoders with their tokenizers, as transformers saves them."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

WORDS = ("a", "red", "green", "blue", "cat", "dog", "house", "on", "the", "moon")


def clip(folder: Path, seed: int = 0) -> CLIPModel:
    """CLIP with 12 projected dimensions over 8 text tokens and 16 pixels."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = CLIPTextConfig(
        **sizes, vocab_size=20, max_position_embeddings=8, eos_token_id=2, bos_token_id=1, pad_token_id=0
    )
    vision = CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    model = CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=12)).eval()
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return model


def joined(folder: Path, has_t5: bool = True, width: int = 12) -> Path:
    """A pipeline's text encoders as Stable Diffusion 3 has them: two CLIPs of 4 and 6 dimensions, and a T5 of `width`;
    without it a transformer's config says how wide its states would be.
    """
    for number, width_of_clip in enumerate((4, 6)):
        torch.manual_seed(number)
        end = "_2" if number else ""
        config = CLIPTextConfig(
            hidden_size=width_of_clip,
            intermediate_size=8,
            num_hidden_layers=3,
            num_attention_heads=2,
            projection_dim=width_of_clip,
            vocab_size=20,
            max_position_embeddings=77,
            eos_token_id=2,
            bos_token_id=1,
            pad_token_id=0,
        )
        CLIPTextModelWithProjection(config).eval().save_pretrained(folder / f"text_encoder{end}")
        _tokenizer(longest=77).save_pretrained(folder / f"tokenizer{end}")
    index: dict[str, Any] = {"_class_name": "StableDiffusion3Pipeline"}
    index["text_encoder_2"] = ["transformers", "CLIPTextModelWithProjection"]
    if has_t5:
        index["text_encoder_3"] = ["transformers", "T5EncoderModel"]
        t5(folder / "text_encoder_3", width=width)
        for path in (folder / "text_encoder_3").glob("*token*"):
            (folder / "tokenizer_3").mkdir(exist_ok=True)
            path.rename(folder / "tokenizer_3" / path.name)
    else:
        index["text_encoder_3"] = [None, None]
        (folder / "transformer").mkdir()
        (folder / "transformer/config.json").write_text(json.dumps({"joint_attention_dim": width}))
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def dinov2(folder: Path, seed: int = 0, width: int = 12, kind: str = "dinov2") -> nn.Module:
    """A DINOv2 of patches of 2 pixels, with registers or without, or a DINOv3, all weights random."""
    configs = {
        "dinov2": (Dinov2Model, Dinov2Config, {"mlp_ratio": 2}),
        "registers": (Dinov2WithRegistersModel, Dinov2WithRegistersConfig, {"mlp_ratio": 2, "num_register_tokens": 3}),
        "dinov3": (DINOv3ViTModel, DINOv3ViTConfig, {"intermediate_size": 2 * width, "num_register_tokens": 3}),
    }
    network, config, own = configs[kind]
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 6, "patch_size": 2}
    model = network(config(**sizes, **own)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)
    model.save_pretrained(folder)
    return model


def sentences(folder: Path, seed: int = 0) -> BertModel:
    """A BERT of 12 dimensions over 10 tokens, without heads: what sentence encoders are made of."""
    torch.manual_seed(seed)
    model = BertModel(
        BertConfig(
            vocab_size=20,
            hidden_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=10,
        )
    ).eval()
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return model


def t5(folder: Path, seed: int = 0, width: int = 12) -> T5EncoderModel:
    """A T5 of 12 dimensions, whose empty text is one token, that of the end."""
    torch.manual_seed(seed)
    model = T5EncoderModel(T5Config(vocab_size=20, d_model=width, d_kv=6, d_ff=24, num_layers=2, num_heads=2)).eval()
    model.save_pretrained(folder)
    _tokenizer("$A [EOS]").save_pretrained(folder)
    return model


def preprocessing(folder: Path) -> CLIPImageProcessor:
    """A preprocessor_config.json with another mean and deviation than CLIP's."""
    processor = CLIPImageProcessor(
        size={"shortest_edge": 16},
        crop_size={"height": 16, "width": 16},
        image_mean=[0.1, 0.2, 0.3],
        image_std=[0.4, 0.5, 0.6],
    )
    processor.save_pretrained(folder)
    return processor


def _tokenizer(template: str = "[BOS] $A [EOS]", longest: int | None = None) -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(("[PAD]", "[BOS]", "[EOS]", "[UNK]", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=[("[BOS]", 1), ("[EOS]", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        bos_token="[BOS]",
        eos_token="[EOS]",
        unk_token="[UNK]",
        **({} if longest is None else {"model_max_length": longest}),
    )
