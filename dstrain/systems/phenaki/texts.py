"""Texts as the networks read them: hashed words, or encodings of a frozen encoder.

Hashed words need no download. A word is a match of \\w+ in the lower-cased text, its id is 1 + crc32 modulo
num_words - 1, and 0 is padding. Their vectors are learned. Two words may share a row: the probability that any two do
is 0.45 for 100 words in 8192 rows, and 0.02 for 20 words.
"""

import re
import zlib

import torch
from torch import Tensor

from dstrain.distributed.group import to_device
from dstrain.encoders.text import TextEncoder, describe_cut, encode_distinct, load_text_encoder, unpack_captions
from dstrain.recipe import ConfigError
from dstrain.systems.phenaki.config import Config

NAMES = ("words", "text_encodings", "text_mask")
_WORD = re.compile(r"\w+")
_CAPTION_BYTES = 512  # size of a caption in a batch
_REMEMBERED = 256  # most texts whose inputs are remembered for the next call

TextInputs = dict[str, Tensor]  # words int64 (N, L); or text_encodings (N, L, E), text_mask (N, L)


class Reader:
    """Makes the text inputs of a model of `config`; {} where it is unconditional."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.encoder: TextEncoder | None = None
        self._last: tuple[dict[str, int], TextInputs] = {}, {}  # row of each text of the last call; the rows

    def of_batch(self, batch: dict[str, Tensor]) -> TextInputs:
        """Reads encodings, or captions as UTF-8. Raises ConfigError if the batch has neither, or of another width."""
        config, width = self.config, self.config.text_encodings_dim
        if config.unconditional:
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
            raise ConfigError(
                "data: there are no captions, and the model reads texts: give X.txt beside each video, "
                "data.captions=FILE or class folders, or set model.unconditional=true"
            )
        # Captions are on the host, which reads them; the inputs go to the device of the rest of the batch.
        device = batch.get("key", batch["caption"]).device
        inputs = self._read(unpack_captions(batch["caption"]), device)
        return {name: to_device(value, device) for name, value in inputs.items()}

    def of_texts(self, texts: list[str]) -> TextInputs:
        """Returns inputs for each text, on the CPU. Raises ConfigError without an encoder, or if unconditional.

        Each distinct text is encoded once, and its inputs are remembered for the next call. Where the data hold
        encodings, the encoder serves prompts alone and is freed when they are encoded.
        """
        if self.config.unconditional:
            raise ConfigError("prompts: this model is unconditional and reads no texts; leave them out")
        row_of, inputs = self._last
        if not row_of.keys() >= set(texts):
            distinct, cpu = list(dict.fromkeys(texts)), torch.device("cpu")
            row_of = {text: row for row, text in enumerate(distinct)}
            inputs = encode_distinct(distinct, lambda some: self._read(some, cpu))
            self._last = (row_of, inputs) if len(row_of) <= _REMEMBERED else ({}, {})
            if self._cached:
                self.encoder = None
        rows = torch.tensor([row_of[text] for text in texts])
        return {name: value[rows] for name, value in inputs.items()}

    def of_nothing(self, num: int) -> TextInputs:
        """Returns inputs for `num` empty texts, which the null text replaces. Raises ConfigError if there is none."""
        if self.config.unconditional:
            return {}
        if not self.config.has_null:
            raise ConfigError("prompts: a model with cond_drop_prob 0 draws for texts alone; give some")
        if self.config.text_encodings_dim is None:
            return {"words": torch.zeros(num, self.config.max_text_len, dtype=torch.int64)}
        return {
            "text_encodings": torch.zeros(num, 1, self.config.text_encodings_dim),
            "text_mask": torch.zeros(num, 1, dtype=torch.bool),
        }

    def _read(self, texts: list[str], device: torch.device) -> TextInputs:
        if self.config.text_encodings_dim is None:
            return {"words": hash_words(texts, self.config.num_words, self.config.max_text_len)}
        return self.of_batch(select_texts(self._loaded().to(device).encode(texts)))

    def fingerprint(self) -> str:
        """Returns what is added to the data's fingerprint: the encoder of captions, if it reads them; else ""."""
        reads = self.config.text_encodings_dim is not None and not self._cached and not self.config.unconditional
        return f" text_encoder={self._loaded().fingerprint()}" if reads else ""

    def describe_cut(self, texts: list[str], what: str) -> str:
        """Says how much of the texts the model cannot read; "" if it reads all."""
        if self.config.unconditional:
            return ""
        if self.config.text_encodings_dim is not None:
            return self._loaded().describe_cut(texts, what)
        return describe_cut(map(len, map(split_words, texts)), self.config.max_text_len, what, "words")

    @property
    def _cached(self) -> bool:
        """Tells whether the data hold text encodings."""
        return self.config.codes is not None and self.config.codes.text is not None

    def _loaded(self) -> TextEncoder:
        """Loads the encoder at the first caption: cached encodings need none."""
        config = self.config
        if self.encoder is None:
            self.encoder = load_text_encoder(config.text_encoder, config.max_text_len, config.text_encoder_fingerprint)
        return self.encoder


def select_texts(tensors: dict[str, Tensor]) -> TextInputs:
    """Picks the text inputs among the tensors of a batch, an example or conditions."""
    return {name: tensors[name] for name in NAMES if name in tensors}


def split_words(text: str) -> list[str]:
    """Returns the words that are hashed, in lower case."""
    return _WORD.findall(text.lower())


def hash_words(texts: list[str], num_words: int, max_text_len: int) -> Tensor:
    """Ids of hashed words, int64 (N, max_text_len); later words are left out."""
    rows = []
    for text in texts:
        words = split_words(text)[:max_text_len]
        ids = [1 + zlib.crc32(word.encode()) % (num_words - 1) for word in words]
        rows.append(ids + [0] * (max_text_len - len(ids)))
    return torch.tensor(rows, dtype=torch.int64).view(len(texts), max_text_len)


def pack_captions(texts: list[str]) -> Tensor:
    """Texts as captions of a batch: UTF-8, padded with zeros, uint8 (N, 512). For synthetic batches."""
    rows = [list(text.encode()[:_CAPTION_BYTES].ljust(_CAPTION_BYTES, b"\0")) for text in texts]
    return torch.tensor(rows, dtype=torch.uint8)
