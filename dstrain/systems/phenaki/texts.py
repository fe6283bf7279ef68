"""Texts as the networks read them: hashed words, or encodings of a frozen encoder.

Words need no download: a word is what \\w+ finds in the lower-cased text, its id 1 + crc32 modulo num_words - 1, and 0
fills up. Their vectors are learned. Two words may share a row: of 100 words in 8192 rows some two do with a probability
of 0.45, of 20 words with 0.02.
"""

import re
import zlib

import torch
from torch import Tensor

from dstrain.encoders.text import TextEncoder, captions_of, sent
from dstrain.recipe import ConfigError
from dstrain.systems.phenaki.config import Config

NAMES = ("words", "text_encodings", "text_mask")
_WORD = re.compile(r"\w+")
_CAPTION_BYTES = 512                              # of a caption as batches hold it
_PROMPTS = 64                                     # texts that are encoded at once
_KEPT = 256                                       # texts of one question whose answer is kept

Said = dict[str, Tensor]                          # words int64 (N, L); or text_encodings (N, L, E), text_mask (N, L)


class Reader:
    """What a model of `config` reads of texts; {} where it is unconditional."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.encoder: TextEncoder | None = None
        self._kept: tuple[dict[str, int], Said] = {}, {}       # texts that were asked for, their rows in what was read

    def of_batch(self, given: dict[str, Tensor]) -> Said:
        """From what the data hold: encodings, or captions as UTF-8. ConfigError: neither, or of another width."""
        config, width = self.config, self.config.text_encodings_dim
        if config.unconditional:
            return {}
        if width is not None and "text_encodings" in given:
            encodings = given["text_encodings"]
            if encodings.shape[-1] != width:
                raise ConfigError(f"data: text_encodings are {encodings.shape[-1]} wide in the data and {width} in the "
                                  f"model: set model.text_encodings_dim={encodings.shape[-1]}, or give those of "
                                  "another encoder")
            mask = given.get("text_mask", torch.ones(encodings.shape[:2], device=encodings.device)).bool()
            return {"text_encodings": encodings, "text_mask": mask}
        if width is None and "words" in given:
            return {"words": given["words"]}
        if "caption" not in given:
            raise ConfigError("data: there are no captions, and the model reads texts: give X.txt beside each video, "
                              "data.captions=FILE or class folders, or set model.unconditional=true")
        # Captions stay on the host, which reads them; what it makes of them goes to the rest of the batch.
        device = given.get("key", given["caption"]).device
        return {name: sent(value, device) for name, value in self._read(captions_of(given["caption"]), device).items()}

    def of_texts(self, texts: list[str]) -> Said:
        """On the CPU, of each text once. ConfigError: the model is unconditional, or no encoder is named.

        The same texts, or some of them, may be asked for again without an encoder: where the data hold encodings it is
        loaded for prompts alone, and let go when they are read.
        """
        if self.config.unconditional:
            raise ConfigError("prompts: this model is unconditional and reads no texts; leave them out")
        places, read = self._kept
        if not places.keys() >= set(texts):
            places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
            once, cpu = list(places), torch.device("cpu")
            batches = [self._read(once[i:i + _PROMPTS], cpu) for i in range(0, len(once), _PROMPTS)]
            read = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
            self._kept = (places, read) if len(places) <= _KEPT else ({}, {})
            if self.config.codes is not None and self.config.codes.text is not None:
                self.encoder = None
        rows = torch.tensor([places[text] for text in texts])
        return {name: value[rows] for name, value in read.items()}

    def of_nothing(self, num: int) -> Said:
        """Texts without a word, which the null text stands for. ConfigError: the model has none."""
        if self.config.unconditional:
            return {}
        if not self.config.has_null:
            raise ConfigError("prompts: this model was never trained without a text (cond_drop_prob is 0) and draws "
                              "for texts alone; give some")
        if self.config.text_encodings_dim is None:
            return {"words": torch.zeros(num, self.config.max_text_len, dtype=torch.int64)}
        return {"text_encodings": torch.zeros(num, 1, self.config.text_encodings_dim),
                "text_mask": torch.zeros(num, 1, dtype=torch.bool)}

    def _read(self, texts: list[str], device: torch.device) -> Said:
        if self.config.text_encodings_dim is None:
            return {"words": word_ids(texts, self.config.num_words, self.config.max_text_len)}
        found = self._loaded().to(device).encode(texts)
        return self.of_batch({name: found[name] for name in NAMES if name in found})

    def fingerprint(self) -> str:
        """Of the encoder of captions that are not cached, to stand behind that of the data; "" where there is none."""
        cached = self.config.codes is not None and self.config.codes.text is not None
        live = self.config.text_encodings_dim is not None and not cached and not self.config.unconditional
        return f" text_encoder={self._loaded().fingerprint()}" if live else ""

    def _loaded(self) -> TextEncoder:
        """The encoder, loaded where captions are first met: cached encodings need none."""
        if self.encoder is None:
            if self.config.text_encoder is None:
                raise ConfigError("model.text_encoder: texts are to be encoded and none is named; give the folder or "
                                  "hub name of the encoder of the data's encodings (generate: --text-encoder)")
            encoder = TextEncoder(self.config.text_encoder, self.config.max_text_len)
            wanted = self.config.text_encoder_fingerprint
            if wanted is not None and (found := encoder.fingerprint()) != wanted:
                raise ConfigError(f"text_encoder: {self.config.text_encoder} is the encoder {found}, the data's text "
                                  f"encodings are of {wanted} (text_encoder_fingerprint); name the one that made them")
            self.encoder = encoder
        return self.encoder


def chosen(given: dict[str, Tensor]) -> Said:
    """What of a batch, an example or conditions is text."""
    return {name: given[name] for name in NAMES if name in given}


def word_ids(texts: list[str], num_words: int, max_text_len: int) -> Tensor:
    """int64 (N, max_text_len); words beyond are not read."""
    rows = []
    for text in texts:
        words = _WORD.findall(text.lower())[:max_text_len]
        ids = [1 + zlib.crc32(word.encode()) % (num_words - 1) for word in words]
        rows.append(ids + [0] * (max_text_len - len(ids)))
    return torch.tensor(rows, dtype=torch.int64).view(len(texts), max_text_len)


def packed(texts: list[str]) -> Tensor:
    """Texts as batches hold captions: UTF-8 filled up with zeros, uint8 (N, 512). For made-up batches."""
    rows = [list(text.encode()[:_CAPTION_BYTES].ljust(_CAPTION_BYTES, b"\0")) for text in texts]
    return torch.tensor(rows, dtype=torch.uint8)
