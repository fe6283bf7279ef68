"""Makes the text inputs of networks from texts: hashed words, or encodings of a frozen encoder; and defines the fields
of a model section that choose between them.

Hashed words need no download. A word is a match of \\w+ in the lower-cased text, its id is 1 + crc32 modulo num_words -
1, and 0 is padding. Their vectors are learned. Two words may share a row: the probability that any two do is 0.45 for
100 words in 8192 rows, and 0.02 for 20 words.
"""

import re
import zlib
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from dstrain import rng
from dstrain.distributed.group import copy_to_device
from dstrain.encoders.joined_text import open_text_encoder
from dstrain.encoders.text import (
    TextEncoder,
    describe_truncated_texts,
    encode_distinct_texts,
    load_text_encoder,
    unpack_captions,
)
from dstrain.recipe import ConfigError, Section, mark_fixed_once_set

NAMES = ("words", "text_encodings", "text_mask")
_WORD = re.compile(r"\w+")
_CAPTION_BYTES = 512  # size of a caption in a batch
_REMEMBERED = 256  # most texts whose inputs are remembered for the next call

TextInputs = dict[str, Tensor]  # words int64 (N, L); or text_encodings (N, L, E), text_mask (N, L)


class ReadsTexts(Section):
    """Fields of a model section that reads texts. A subclass says whether it does, and where its null text is."""

    null_field: ClassVar[str] = "cond_drop_prob"  # the share of dropped texts, above 0 where there is a null text
    no_captions: ClassVar[str]  # the remedy where the data have none

    text_encoder: Annotated[str | None, mark_fixed_once_set()] = None
    """Folder or hub name of the encoder of captions (T5, CLIP, MiniLM); None hashes words into a learned table."""
    text_encodings_dim: int | None = Field(None, ge=1)
    """Width of the encodings of text_encoder (768 for t5-v1_1-base) or of the data; None where words are hashed."""
    text_encoder_fingerprint: Annotated[str | None, mark_fixed_once_set()] = None
    """The only text encoder that is accepted; filled in from the cache; None accepts any."""
    max_text_len: int = Field(64, ge=1, le=100_000)
    """Words, or tokens of the encoder, that are read of a text; filled in from cached encodings."""
    num_words: int = Field(8192, ge=2)
    """Rows of the table of hashed words."""

    @property
    def reads_texts(self) -> bool:
        """Returns whether samples are conditioned on texts."""
        raise NotImplementedError

    @property
    def has_null_text(self) -> bool:
        """Returns whether the model has a null text: an input that means "no text", which guidance needs."""
        return self.reads_texts and getattr(self, self.null_field) > 0

    @property
    def learns_null_text(self) -> bool:
        """Returns whether the null text (see `has_null_text`) is a learned token, rather than the encoding of an
        empty text.
        """
        return self.has_null_text

    @property
    def cached_text_shape(self) -> tuple[int, int] | None:
        """Returns (tokens, width) of the text encodings that the training data already hold; None if they hold none."""
        codes = getattr(self, "codes", None)
        return None if codes is None else codes.text

    def make_text_embedder_arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments for the module of the network that embeds texts, taken from these fields."""
        return {
            "num_words": None if self.text_encodings_dim else self.num_words,
            "max_text_len": self.max_text_len,
            "encodings_dim": self.text_encodings_dim,
            "learns_null": self.learns_null_text,
        }

    def require_text_encodings_dim(self) -> None:
        """Raises ConfigError if text_encoder is set but text_encodings_dim, the width of its encodings, is not."""
        if self.text_encoder is not None and self.text_encodings_dim is None:
            raise ConfigError(
                f"text_encodings_dim: {self.text_encoder} gives encodings, and how wide they are is not "
                "said; give its hidden size, for example 768 for google/t5-v1_1-base"
            )

    def require_matching_cached_texts(self, text_shape: tuple[int, int] | None, text_encoder: str | None) -> None:
        """Raises ConfigError if the text encodings in data.path differ from the model's fields in width, number of
        tokens or encoder.

        text_shape    (tokens, width) of the encodings in data.path; None: there are none.
        text_encoder  the fingerprint of their encoder; None: it is not known.
        """
        width, fingerprint = self.text_encodings_dim, self.text_encoder_fingerprint
        if text_shape is not None and width not in (None, text_shape[1]):
            raise ConfigError(
                f"text_encodings_dim {width}: the encodings in data.path are {text_shape[1]} wide; set "
                f"model.text_encodings_dim={text_shape[1]}, or encode with another text encoder"
            )
        if text_shape is not None and width is not None and text_shape[0] != self.max_text_len:
            raise ConfigError(
                f"max_text_len {self.max_text_len}: the encodings in data.path are of {text_shape[0]} "
                f"tokens, and prompts would be cut elsewhere; set model.max_text_len={text_shape[0]}, or "
                f"encode with --max-text-len {self.max_text_len}"
            )
        if width is not None and fingerprint is not None and text_encoder not in (None, fingerprint):
            raise ConfigError(
                f"text_encoder_fingerprint {fingerprint}: the encodings in data.path are of the text "
                f"encoder {text_encoder}; leave model.text_encoder_fingerprint out, or use it"
            )


def derive_text_fields_from_cache(model: dict[str, Any], codes: Any) -> dict[str, Any]:
    """Returns the values of text_encodings_dim, max_text_len and text_encoder_fingerprint, by name, that fit the text
    encodings in a cache. Returns {} if the cache has none, or if `model` hashes words, by text_encodings_dim=null.

    model  the recipe's section, which is not changed.
    codes  the cache's index.
    """
    if not codes.text or model.get("text_encodings_dim", "absent") is None:
        return {}
    return {
        "text_encodings_dim": codes.text[1],
        "max_text_len": codes.text[0],
        "text_encoder_fingerprint": codes.text_encoder,
    }


def replace_text_encoder(model: dict[str, Any], text_encoder: str, reads_texts: bool) -> dict[str, Any]:
    """Returns a copy of the recipe's section `model` with another text_encoder, a folder or hub name. Raises
    ConfigError if the model reads no texts (`reads_texts` is False), or hashes words instead of encoding texts.
    """
    if not reads_texts:
        raise ConfigError("--text-encoder: the model is unconditional and takes no texts; leave it out")
    if model.get("text_encodings_dim") is None:
        raise ConfigError("--text-encoder: the model hashes words and reads no encoder; leave it out")
    return model | {"text_encoder": text_encoder}


class Reader:
    """Makes the text inputs of a model with this config. For a model that reads no texts, batches and samples have the
    inputs {}.
    """

    def __init__(self, config: ReadsTexts) -> None:
        self.config = config
        self.encoder: TextEncoder | None = None
        self._last: tuple[dict[str, int], TextInputs] = {}, {}  # row of each text of the last call; the rows
        self._empty: TextInputs = {}

    def make_batch_inputs(self, batch: dict[str, Tensor]) -> TextInputs:
        """Returns the text inputs of a batch: the batch's own encodings or hashed words, or else those made from its
        captions. Returns {} if the model reads no texts. Raises ConfigError if the batch has none of the three, or
        encodings of another width.
        """
        config, width = self.config, self.config.text_encodings_dim
        if not config.reads_texts:
            return {}
        if width is not None and "text_encodings" in batch:
            encodings = batch["text_encodings"]
            if encodings.shape[-1] != width:
                raise ConfigError(
                    f"data: text_encodings are {encodings.shape[-1]} wide in the data and {width} in the "
                    f"model: set model.text_encodings_dim={encodings.shape[-1]}, or encode again"
                )
            mask = batch.get("text_mask", torch.ones_like(encodings[..., 0]))
            return {"text_encodings": encodings, "text_mask": mask.bool()}
        if width is None and "words" in batch:
            return {"words": batch["words"]}
        if "caption" not in batch:
            raise ConfigError(f"data.path: there are no captions, and the model reads texts: {config.no_captions}")
        # Captions are on the host, which reads them; the inputs go to the device of the rest of the batch.
        device = batch.get("key", batch["caption"]).device
        inputs = self._hash_or_encode_texts(unpack_captions(batch["caption"]), device)
        return {name: copy_to_device(value, device) for name, value in inputs.items()}

    def make_text_inputs(self, texts: list[str]) -> TextInputs:
        """Returns the text inputs of N texts, (N, ...) each, on the CPU. Encodes equal texts once. Raises ConfigError
        if the model reads no texts, or if no text encoder can be loaded.

        Keeps the inputs for the next call, if there are up to 256 distinct texts. If the training data hold encodings,
        frees the text encoder afterwards.
        """
        if not self.config.reads_texts:
            raise ConfigError("prompts: this model is unconditional and reads no texts; leave them out")
        row_of, inputs = self._last
        if not row_of.keys() >= set(texts):
            distinct, cpu = list(dict.fromkeys(texts)), torch.device("cpu")
            row_of = {text: row for row, text in enumerate(distinct)}
            inputs = encode_distinct_texts(distinct, lambda some: self._hash_or_encode_texts(some, cpu))
            self._last = (row_of, inputs) if len(row_of) <= _REMEMBERED else ({}, {})
            if self._has_cached_encodings:
                self.encoder = None
        rows = torch.tensor([row_of[text] for text in texts])
        return {name: value[rows] for name, value in inputs.items()}

    def make_prompt_inputs(self, texts: list[str]) -> TextInputs:
        """Returns the text inputs of N prompts, (N, ...) each. An empty prompt means the null text: if inputs have a
        mask, its row for that prompt is all False. Raises ConfigError for an empty prompt if the model has no null
        text, and also where `make_text_inputs` does.
        """
        empty = torch.tensor([not text.strip() for text in texts])
        if empty.any() and not self.config.has_null_text:
            raise ConfigError(
                f"prompts: an empty text is the null text, and a model with {self.config.null_field} 0 has none; give "
                "texts"
            )
        inputs = self.make_text_inputs(texts)
        if "text_mask" in inputs:
            inputs["text_mask"] = inputs["text_mask"] & ~empty[:, None]
        return inputs

    def make_null_text_inputs(self, num: int) -> TextInputs:
        """Returns the text inputs of `num` samples without text, in whose place the network reads the null text. They
        are word ids 0, or encodings of zeros with a mask of False. Returns {} if the model reads no texts. Raises
        ConfigError if the model reads texts and has no null text.
        """
        if not self.config.reads_texts:
            return {}
        if not self.config.has_null_text:
            raise ConfigError(f"prompts: a model with {self.config.null_field} 0 draws for texts alone; give some")
        if self.config.text_encodings_dim is None:
            return {"words": torch.zeros(num, self.config.max_text_len, dtype=torch.int64)}
        return {
            "text_encodings": torch.zeros(num, 1, self.config.text_encodings_dim),
            "text_mask": torch.zeros(num, 1, dtype=torch.bool),
        }

    def encode_empty_text(self, device: torch.device) -> TextInputs:
        """Returns the text inputs of one empty text, (1, ...) each, on `device`. Computes them in the first call only.
        Raises ConfigError if the tokenizer makes no token of an empty text.
        """
        if not self._empty:
            self._empty = self._hash_or_encode_texts([""], torch.device("cpu"))
            if self._has_cached_encodings:
                self.encoder = None
            if not self._empty["text_mask"].any():
                raise ConfigError(
                    f"model.null_text: the tokenizer of {self.config.text_encoder} makes no token of an empty text; "
                    "write model.null_text=learned"
                )
        if self._empty["text_mask"].device != device:
            self._empty = {name: copy_to_device(value, device) for name, value in self._empty.items()}
        return self._empty

    def _hash_or_encode_texts(self, texts: list[str], device: torch.device) -> TextInputs:
        """Returns the text inputs of N texts, (N, ...) each: ids of hashed words, on the CPU, or encodings computed on
        `device`.
        """
        if self.config.text_encodings_dim is None:
            return {"words": hash_words(texts, self.config.num_words, self.config.max_text_len)}
        return self.make_batch_inputs(select_text_inputs(self._get_or_load_encoder().to(device).encode(texts)))

    def make_encoder_fingerprint_suffix(self) -> str:
        """Returns " text_encoder=HASH", to be added to the fingerprint of the data, if captions are encoded while the
        model trains; "" if they are not.
        """
        reads = (
            self.config.text_encodings_dim is not None and not self._has_cached_encodings and self.config.reads_texts
        )
        return f" text_encoder={self._get_or_load_encoder().compute_fingerprint()}" if reads else ""

    def describe_cut(self, texts: list[str], noun: str) -> str:
        """Returns a line for the user: how many texts are truncated, and how many tokens or words are left out. Returns
        "" if no text is truncated, or if the model reads no texts. noun: the word for the texts in this line, such as
        prompts.
        """
        if not self.config.reads_texts:
            return ""
        if self.config.text_encodings_dim is not None:
            return self._get_or_load_encoder().describe_cut(texts, noun)
        return describe_truncated_texts(map(len, map(split_words, texts)), self.config.max_text_len, noun, "words")

    @property
    def _has_cached_encodings(self) -> bool:
        """Returns whether the training data hold text encodings, computed before."""
        return self.config.cached_text_shape is not None

    def _get_or_load_encoder(self) -> TextEncoder:
        """Returns the text encoder, which the first call loads. Raises ConfigError if the recipe names none, if it
        cannot be loaded, or if its fingerprint differs from the recipe's.
        """
        config = self.config
        if self.encoder is None:
            expected = config.text_encoder_fingerprint
            self.encoder = load_text_encoder(config.text_encoder, config.max_text_len, expected, open_text_encoder)
        return self.encoder


def select_text_inputs(tensors: dict[str, Tensor]) -> TextInputs:
    """Returns the tensors that are text inputs, by name: words, text_encodings and text_mask, as far as `tensors` has
    them.
    """
    return {name: tensors[name] for name in NAMES if name in tensors}


def split_words(text: str) -> list[str]:
    """Returns the words of a text in lower case. A word is a run of letters, digits and underscores."""
    return _WORD.findall(text.lower())


def hash_words(texts: list[str], num_words: int, max_text_len: int) -> Tensor:
    """Returns ids for the first max_text_len words of each text, int64 (N, max_text_len). An id is a hash of the word,
    from 1 to num_words - 1. Short texts are filled up with 0.
    """
    rows = []
    for text in texts:
        words = split_words(text)[:max_text_len]
        ids = [1 + zlib.crc32(word.encode()) % (num_words - 1) for word in words]
        rows.append(ids + [0] * (max_text_len - len(ids)))
    return torch.tensor(rows, dtype=torch.int64).view(len(texts), max_text_len)


def draw_synthetic_texts(config: ReadsTexts, key: Tensor) -> dict[str, Tensor]:
    """Returns random texts for a synthetic batch: text_encodings and text_mask if the model reads encodings, else
    `caption`, uint8 (B, bytes), up to 8 words in UTF-8. Returns {} if the model reads no texts. key int64 (B,): the
    samples' seeds, from which the texts are drawn.
    """
    longest = config.max_text_len
    if not config.reads_texts:
        return {}
    if width := config.text_encodings_dim:
        return {
            "text_encodings": rng.normal(key, "text_encodings", (longest, width)),
            "text_mask": torch.arange(longest) < 1 + rng.integers(key, "length", longest)[:, None],
        }
    words = rng.integers(key, "words", 1000, (min(longest, 8),)).tolist()
    texts = [" ".join(f"w{word}" for word in row).encode()[:_CAPTION_BYTES] for row in words]
    rows = [list(text.ljust(_CAPTION_BYTES, b"\0")) for text in texts]
    return {"caption": torch.tensor(rows, dtype=torch.uint8)}
