"""Joins the three text encoders of Stable Diffusion 3 into one: CLIP-L and CLIP-G, and T5 (Esser et al. 2024, section
5.2).

They are in a pipeline's folder of diffusers, or on the hub, as text_encoder, text_encoder_2 and text_encoder_3, each
beside its tokenizer. A text becomes rows of the width E of T5's states,

    1 row       the two CLIPs' pooled vectors, concatenated, padded with zeros
    77 rows     the states before their last layer, side by side, padded with zeros
    the rest    T5's last states, or zeros where the folder has no T5

so that a text's states are always cached, dropped and guided together with its pooled vector. All rows are read, those
of padding too, as in the original: no encoder is told where a text ends.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
from dstrain.encoders.text import CONTENT, TextEncoder, describe_truncated_texts, set_padding_to_end
from dstrain.recipe import ConfigError

_FOLDERS = "model_index.json, text_encoder, text_encoder_2 and their tokenizers"
CLIP_TOKENS = 77  # that either CLIP reads of a text
_T5_TOKENS = 256  # that StableDiffusion3Pipeline reads of a text


class JoinedTextEncoder(TextEncoder):
    """Encodes captions as rows, see above, without gradient.

    path        a pipeline's folder or name on the hub.
    max_length  rows of a text; None: as StableDiffusion3Pipeline reads them, 334.

    Attributes: embed_dim (of the pooled vector), encodings_dim (E) and max_length, as of TextEncoder. Raises
    ConfigError where nothing can be loaded from `path`, or CLIPs are wider than E.
    """

    def __init__(self, path: str, max_length: int | None = None) -> None:
        Frozen.__init__(self)
        with reword_loading_errors("text encoders", "model.text_encoder", path, _FOLDERS):
            self.clips = torch.nn.ModuleList(_load_clip_or_t5(path, f"text_encoder{end}", "clip") for end in ("", "_2"))
            self.tokenizers = [_load_tokenizer(path, f"tokenizer{end}") for end in ("", "_2")]
            self.t5 = None
            if has_t5(path):
                self.t5 = _load_clip_or_t5(path, "text_encoder_3", "t5")
                self.tokenizers.append(_load_tokenizer(path, "tokenizer_3"))
                self.encodings_dim = self.t5.config.d_model
            else:
                self.encodings_dim = _read_joint_attention_dim(path)
        self.eval().requires_grad_(False)
        first, second = (clip.config for clip in self.clips)
        self.embed_dim = first.projection_dim + second.projection_dim
        if (widest := max(self.embed_dim, first.hidden_size + second.hidden_size)) > self.encodings_dim:
            raise ConfigError(
                f"model.text_encoder: states of the two CLIPs at {path} are {widest} wide together, and those of T5, "
                f"beside which they stand, {self.encodings_dim}; take the encoders of Stable Diffusion 3"
            )
        longest = 1 + CLIP_TOKENS + _T5_TOKENS
        self.max_length = max_length or longest
        if not 1 + CLIP_TOKENS < self.max_length <= longest:
            raise ConfigError(
                f"max_text_len: {path} gives a pooled vector, {CLIP_TOKENS} states of CLIP and up to {_T5_TOKENS} of "
                f"T5, and not {max_length} in all; give {2 + CLIP_TOKENS} to {longest}, which is what Stable Diffusion "
                "3 reads"
            )

    def compute_fingerprint(self) -> str:
        """Returns a hash of what decides the encodings: the class of this encoder, and all weights. 32 hexadecimal
        digits.
        """
        return hash_network({"class": type(self).__name__}, self.state_dict() | dict(self.named_buffers()))

    def count_tokens(self, captions: list[str]) -> list[int]:
        """Returns the number of tokens of each caption before truncation. Counts by T5's tokenizer, or by that of the
        second CLIP if there is no T5.
        """
        return [len(ids) for ids in self.tokenizers[-1](captions, verbose=False)["input_ids"]]

    def describe_cut(self, captions: list[str], noun: str) -> str:
        """Returns a line for the user: how many captions are truncated by T5 (by CLIP, if there is no T5), and how many
        tokens are left out. Returns "" if no caption is truncated. noun: the word for the captions in this line, such
        as prompts.
        """
        longest = CLIP_TOKENS if self.t5 is None else self.max_length - 1 - CLIP_TOKENS
        return describe_truncated_texts(self.count_tokens(captions), longest, noun)

    @torch.no_grad()
    def encode(self, captions: list[str]) -> dict[str, Tensor]:
        """Returns the encodings of captions by name, on the encoders' device:

        text_embed      float32 (N, D), the pooled vectors of both CLIPs, side by side.
        text_encodings  float32 (N, L, E): one row with these pooled vectors, 77 rows with the states of both CLIPs side
                        by side, and rows with the states of T5; zeros fill up each row to width E.
        text_mask       bool (N, L), True everywhere.
        """
        device, states, pooled = next(self.clips.parameters()).device, [], []
        for clip, tokenizer in zip(self.clips, self.tokenizers):
            out = clip(_tokenize_captions(tokenizer, captions, CLIP_TOKENS, device), output_hidden_states=True)
            states.append(out.hidden_states[-2].float())
            pooled.append(out.text_embeds.float())
        embed, of_clips, width = torch.cat(pooled, dim=-1), torch.cat(states, dim=-1), self.encodings_dim
        count = self.max_length - 1 - CLIP_TOKENS
        of_t5 = of_clips.new_zeros(len(captions), count, width)
        if self.t5 is not None:
            of_t5 = self.t5(_tokenize_captions(self.tokenizers[-1], captions, count, device)).last_hidden_state.float()
        rows = [F.pad(part, (0, width - part.shape[-1])) for part in (embed[:, None], of_clips)]
        encodings = torch.cat((*rows, of_t5), dim=1)  # (N, L, E)
        return {
            "text_embed": embed,
            "text_encodings": encodings,
            "text_mask": torch.ones_like(encodings[..., 0], dtype=torch.bool),
        }


def open_text_encoder(path: str, max_length: int | None = None) -> TextEncoder:
    """Returns the text encoder at `path`: a JoinedTextEncoder for a pipeline with several text encoders, else a
    TextEncoder. Raises ConfigError if none can be loaded, or if max_length does not fit.

    path        a folder or a name on the hub.
    max_length  how many rows the encodings of a text have: tokens and, of a JoinedTextEncoder, a pooled vector; None:
                the encoder's usual number.
    """
    if not (Path(path) / "config.json").is_file():
        with reword_loading_errors("text encoder", "model.text_encoder", path, CONTENT):
            index = read_encoder_json("model.text_encoder", path, "model_index.json")
        if isinstance(index, dict) and "text_encoder_2" in index:
            return JoinedTextEncoder(path, max_length)
    return TextEncoder(path, max_length)


def has_t5(path: str) -> bool:
    """Returns whether the pipeline at `path`, a folder or hub name, has a third text encoder. In Stable Diffusion 3
    that is T5.
    """
    index = read_encoder_json("model.text_encoder", path, "model_index.json")
    return (index.get("text_encoder_3") or [None])[0] is not None


def _tokenize_captions(tokenizer: Any, captions: list[str], count: int, device: torch.device) -> Tensor:
    """Returns the token ids of captions, each truncated or padded to `count` tokens: int64 (N, count), on `device`."""
    tokens = tokenizer(captions, padding="max_length", truncation=True, max_length=count, return_tensors="pt")
    return copy_to_device(tokens["input_ids"], device)


def _load_clip_or_t5(path: str, folder: str, kind: str) -> torch.nn.Module:
    """Returns the text encoder in the subfolder `folder` of a pipeline. kind: "clip", with its projection, or "t5".
    Raises ValueError if the subfolder holds another kind, or a CLIP that reads fewer than 77 tokens.
    """
    from transformers import CLIPTextModelWithProjection, T5EncoderModel

    config = read_config(path, folder)
    if not config.model_type.startswith(kind):
        raise ValueError(f"{folder}/config.json is of model_type {config.model_type}, and not of {kind}")
    if kind == "clip" and config.max_position_embeddings < CLIP_TOKENS:
        raise ValueError(f"{folder}/config.json has places for {config.max_position_embeddings} tokens, not for 77")
    loader = T5EncoderModel if kind == "t5" else CLIPTextModelWithProjection
    return load_network(loader, path, config, subfolder=folder)


def _load_tokenizer(path: str, folder: str) -> Any:
    """Returns the tokenizer in the subfolder `folder` of a pipeline, set to pad at the end. Sets its longest text to 77
    tokens if it is one of the CLIPs'.
    """
    from transformers import AutoTokenizer

    tokenizer = load_pretrained(AutoTokenizer, path, subfolder=folder)
    set_padding_to_end(tokenizer, f"{path}/{folder}")
    if folder != "tokenizer_3":
        tokenizer.model_max_length = CLIP_TOKENS  # which diffusers' pipeline reads there
    return tokenizer


def _read_joint_attention_dim(path: str) -> int:
    """Returns the width of the text encodings that a pipeline's transformer takes: joint_attention_dim of its config.
    Raises ValueError if there is none.
    """
    width = (read_encoder_json("model.text_encoder", path, "transformer/config.json") or {}).get("joint_attention_dim")
    if not isinstance(width, int):
        raise ValueError("it has no text_encoder_3, and no joint_attention_dim in transformer/config.json")
    return width
