"""Frozen text encoders: they encode a caption to one vector, and to one vector for each token.

Two kinds are read, by a local folder or a name on the Hugging Face hub:

    CLIP        text_embed is the projection that is compared with images (Radford et al. 2021)
    sentence    any encoder with token states, such as MiniLM or T5's: text_embed is their mean, or the first one where
                the 1_Pooling/config.json of sentence-transformers says so (Reimers & Gurevych 2019)

text_encodings are the last token states; text_mask is true at tokens of the text and false at padding. A text that is
longer than an encoder or a model reads is truncated in training, caches and prompts alike: `describe_cut` counts such
texts for the user.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dstrain.distributed.group import copy_to_device
from dstrain.encoders.autoencoder import hash_network
from dstrain.encoders.frozen import (
    Frozen,
    load_network,
    load_pretrained,
    read_config,
    read_encoder_json,
    reword_loading_errors,
)
from dstrain.recipe import ConfigError

CONTENT = "config.json, *.safetensors and the tokenizer's files"  # of an encoder's folder
_TEXTS = 64  # texts encoded at once


class TextEncoder(Frozen):
    """Encodes captions to embeddings, without gradient.

    path        a folder with config.json, *.safetensors and the tokenizer's files, or a name on the hub.
    max_length  tokens that are read, padding included; None means what the encoder takes, at most 256.

    Attributes: embed_dim (D), encodings_dim (E), max_length (L). Raises ConfigError where nothing can be loaded from
    `path`.
    """

    def __init__(self, path: str, max_length: int | None = None) -> None:
        super().__init__()
        self.model, self.projection, self.tokenizer = _load_encoder_and_tokenizer(path)
        self.pooling = _read_pooling_mode(path) if self.projection is None else "projection"
        set_padding_to_end(self.tokenizer, path)
        self.eval().requires_grad_(False)
        config = self.model.config
        longest = min(getattr(config, "max_position_embeddings", None) or 256, 256)  # T5 has no such bound
        if max_length is not None and max_length > longest:
            raise ConfigError(f"max_text_len: the encoder {path} takes {longest} tokens, not {max_length}: give fewer")
        self.max_length = max_length or longest
        self.encodings_dim = config.hidden_size
        self.embed_dim = config.hidden_size if self.projection is None else self.projection.out_features

    def compute_fingerprint(self) -> str:
        """Returns a hash of what decides the embeddings: the class of the network, its weights, and its pooling. 32
        hexadecimal digits.
        """
        config = {"class": type(self.model).__name__} | ({"pooling": "cls"} if self.pooling == "cls" else {})
        return hash_network(config, self.state_dict() | dict(self.named_buffers()))

    def count_tokens(self, captions: list[str]) -> list[int]:
        """Returns the number of tokens of each caption before truncation, tokens of beginning and end included."""
        return [len(ids) for ids in self.tokenizer(captions, verbose=False)["input_ids"]]

    def describe_cut(self, captions: list[str], noun: str) -> str:
        """Returns a line for the user: how many captions are truncated, and how many tokens are left out. Returns "" if
        no caption is truncated. noun: the word for the captions in this line, such as prompts.
        """
        return describe_truncated_texts(self.count_tokens(captions), self.max_length, noun)

    @torch.no_grad()
    def encode(self, captions: list[str]) -> dict[str, Tensor]:
        """Returns the encodings of captions by name, on the encoder's device, not normalized. Captions are truncated
        after max_length tokens.

        text_embed      float32 (N, D), one vector for each caption.
        text_encodings  float32 (N, L, E), one vector for each token.
        text_mask       bool (N, L), True at tokens, False at padding.
        """
        device = next(self.model.parameters()).device
        tokens = self.tokenizer(
            captions, padding="max_length", truncation=True, max_length=self.max_length, return_tensors="pt"
        )
        ids, mask = (copy_to_device(tokens[name], device) for name in ("input_ids", "attention_mask"))  # (N, L)
        out = self.model(input_ids=ids, attention_mask=mask)
        encodings = out.last_hidden_state.float()  # (N, L, E)
        if self.projection is not None:
            embed = self.projection(out.pooler_output).float()
        elif self.pooling == "cls":
            embed = encodings[:, 0]
        else:
            weights = mask[..., None].float()
            embed = (encodings * weights).sum(1) / weights.sum(1).clamp(min=1)
        return {"text_embed": embed, "text_encodings": encodings, "text_mask": mask.bool()}


def load_text_encoder(
    path: str | None,
    max_length: int | None = None,
    expected_fingerprint: str | None = None,
    open_encoder: Callable[[str, int | None], TextEncoder] = TextEncoder,
) -> TextEncoder:
    """Returns the text encoder at `path`. Raises ConfigError if `path` is None, or if the encoder's fingerprint is not
    `expected_fingerprint`.

    path                  the value of model.text_encoder: a folder or a name on the hub.
    max_length            how many tokens are read of a text; None: the encoder's usual number.
    expected_fingerprint  the fingerprint that the encoder must have; None: any.
    open_encoder          is called with path and max_length, and returns the encoder.
    """
    if path is None:
        raise ConfigError(
            "model.text_encoder: texts are to be encoded and none is named; give the folder or hub name of the encoder "
            "that the data were encoded with (generate: --text-encoder)"
        )
    encoder = open_encoder(path, max_length)
    if expected_fingerprint is not None and (loaded := encoder.compute_fingerprint()) != expected_fingerprint:
        raise ConfigError(
            f"model.text_encoder: {path} is the encoder {loaded}, the encodings of the data are of "
            f"{expected_fingerprint} (text_encoder_fingerprint); name the one of the data"
        )
    return encoder


def encode_distinct_texts(texts: list[str], encode: Callable[[list[str]], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the encodings of N texts by name, (N, ...) each, in the order of the texts. Encodes equal texts once.
    encode: returns the encodings of a list of texts by name; it is called with at most 64 distinct texts at a time.
    """
    row_of: dict[str, int] = {}
    rows = torch.tensor([row_of.setdefault(text, len(row_of)) for text in texts])
    distinct = list(row_of)
    parts = [encode(distinct[first : first + _TEXTS]) for first in range(0, len(distinct), _TEXTS)]
    return {name: torch.cat([part[name] for part in parts])[rows] for name in parts[0]}


def describe_truncated_texts(lengths: Iterable[int], longest: int, noun: str, unit: str = "tokens") -> str:
    """Returns a line for the user: how many texts are truncated, and how many units are left out. Returns "" if no text
    is truncated.

    lengths  the length of each text, in units.
    longest  how many units of a text are read.
    noun     the word for the texts in this line, such as prompts.
    unit     the word for a unit, such as tokens.
    """
    lengths = list(lengths)
    cut = [length - longest for length in lengths if length > longest]
    if not cut:
        return ""
    return (
        f"{noun}: {len(cut):,} of {len(lengths):,} are cut: {longest} {unit} of a text are read, and they have up to "
        f"{longest + max(cut)}; {sum(cut):,} {unit} are left out"
    )


def unpack_captions(packed: Tensor) -> list[str]:
    """Decodes a batch's captions, uint8 (N, bytes), to N strings. The bytes are UTF-8, filled up with zeros. Bytes that
    are not valid UTF-8 become U+FFFD.
    """
    return [bytes(row).rstrip(b"\0").decode("utf-8", "replace") for row in packed.cpu().numpy()]


def _load_encoder_and_tokenizer(path: str) -> tuple[nn.Module, nn.Module | None, object]:
    """Returns the text encoder at `path`, CLIP's projection layer (None for other encoders), and the tokenizer. Raises
    ConfigError if they cannot be loaded.
    """
    # Slow to import, and only users of captions need it.
    from transformers import (
        AutoModel,
        AutoTokenizer,
        CLIPModel,
        CLIPTextModelWithProjection,
        PreTrainedTokenizerBase,
        T5EncoderModel,
    )

    # T5's alone reads a folder without a decoder, as pipelines of diffusers hold, and leaves a decoder on the disk.
    kinds = {"clip": CLIPModel, "clip_text_model": CLIPTextModelWithProjection, "t5": T5EncoderModel}
    with reword_loading_errors("text encoder", "model.text_encoder", path, CONTENT):
        config = read_config(path)
        kind = kinds.get(config.model_type, AutoModel)
        model, tokenizer = load_network(kind, path, config), load_pretrained(AutoTokenizer, path)
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise ValueError(f"tokenizer_config.json makes its tokenizer a {type(tokenizer).__name__}")
        if kind is T5EncoderModel or (kind is AutoModel and model.config.is_encoder_decoder):
            return model.get_encoder(), None, tokenizer
        if kind is AutoModel:
            return model, None, tokenizer
        return model.text_model, model.text_projection, tokenizer


def load_t5_and_tokenizer(path: str) -> tuple[nn.Module, Any]:
    """Returns the T5 encoder at `path`, and its tokenizer. An exported pipeline of PixArt contains both. Raises
    ConfigError if there is no T5.
    """
    from transformers import AutoTokenizer, T5EncoderModel

    with reword_loading_errors("T5", "model.text_encoder", path, CONTENT):
        config = read_config(path)
        if config.model_type != "t5":
            raise ValueError(f"its model_type is {config.model_type}, and PixArt's pipeline reads texts by T5")
        model, tokenizer = load_network(T5EncoderModel, path, config), load_pretrained(AutoTokenizer, path)
    set_padding_to_end(tokenizer, path)
    return model, tokenizer


def set_padding_to_end(tokenizer: Any, path: str) -> None:
    """Makes a tokenizer pad short texts at their end, with its pad_token or else its eos_token. Raises ConfigError if
    it has neither. path: the tokenizer's folder or hub name, for the message.
    """
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise ConfigError(
            f"model.text_encoder: the tokenizer at {path} has neither pad_token nor eos_token to pad short "
            "texts with; name one as pad_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"


def _read_pooling_mode(path: str) -> str:
    """Returns how a sentence encoder makes one vector of a text's token states: "mean" for their mean, or "cls" for the
    first state. Returns "mean" if the encoder's folder does not say. Raises ConfigError for another pooling, or if a
    layer follows that is not read here.
    """
    for module in read_encoder_json("model.text_encoder", path, "modules.json") or []:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise ConfigError(
                f"model.text_encoder: {path} ends with a layer of kind {kind} (modules.json), which is not "
                "read here; take an encoder without it"
            )
    config = read_encoder_json("model.text_encoder", path, "1_Pooling/config.json")
    if config is None:
        return "mean"
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    modes = modes or [f"pooling_mode_{config.get('pooling_mode')}"]
    known = {
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_cls_token": "cls",
        "pooling_mode_mean": "mean",
        "pooling_mode_cls": "cls",
    }
    if len(modes) != 1 or modes[0] not in known:
        raise ConfigError(
            f"model.text_encoder: 1_Pooling/config.json of {path} says {', '.join(modes)}; only the mean of "
            "all tokens or the first one (cls) is known here; take another encoder"
        )
    return known[modes[0]]
