"""Tiny priors for the contract of all systems."""

import torch

from dstrain.systems.base import Request

PAIRS = {
    "image_embed_dim": 12,
    "max_text_len": 4,
    "depth": 2,
    "heads": 2,
    "dim_head": 16,
    "text_cond_drop_prob": 0.5,
    "timesteps": 50,
    "evaluate_steps": [3],
}
CASES = [
    PAIRS,
    PAIRS | {"self_cond": True, "prediction": "v", "loss": "huber", "recompute": True},
    PAIRS
    | {
        "max_text_len": 0,
        "text_cond_drop_prob": 0,
        "prediction": "eps",
        "loss": "l1",
        "beta_schedule": "sigmoid",
        "norm_in": True,
        "embedding_proj_norm": True,
    },
    PAIRS | {"self_cond": True, "lucidrains": {"normformer": True}, "recompute": True},
]


def request(system, seeds):
    """Four steps for given texts."""
    seeds, texts = torch.tensor(seeds), system.synthetic(16)
    return Request(
        seeds,
        {name: texts[name][seeds] for name in ("text_embed", "text_encodings", "text_mask") if name in texts},
        4,
        "ddpm",
    )
