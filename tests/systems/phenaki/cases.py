"""Tiny token models for the contract of all systems."""

import torch

from dstrain.systems.base import Request
from tests.support import tokenizers

TOKEN_CLIPS = {
    "token_shape": [3, 2, 2],
    "codebook_size": 64,
    "temporal_patch_size": 2,
    "dim": 32,
    "depth": 2,
    "heads": 2,
    "dim_head": 8,
    "num_words": 50,
    "max_text_len": 4,
    "cond_drop_prob": 0.5,
}
CASES = [
    TOKEN_CLIPS,
    TOKEN_CLIPS | {"critic": "token", "text_encodings_dim": 6, "recompute": True},
    TOKEN_CLIPS | {"critic": "self", "unconditional": True, "peg": False, "gradient_shrink": 0.5},
]


def completed(config, folder):
    """With a tokenizer that decodes what is drawn, made in `folder`."""
    return config | {"tokenizer": {"path": str(tokenizers.save(folder))}}


def request(system, seeds):
    """Four steps for given texts, guided where there are any."""
    seeds, texts = torch.tensor(seeds), system.encode(system.synthetic(16))
    conditions = {key: texts[key][seeds] for key in ("words", "text_encodings", "text_mask") if key in texts}
    return Request(seeds, conditions, 4, None, 1.5 if conditions else 1.0)
