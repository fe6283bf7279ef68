"""Tiny DiTs for the contract of all systems."""

import torch

from dstrain.systems.base import Request
from dstrain.systems.dit.align import Align
from tests.support import towers

TINY = {
    "image_size": 8,
    "in_channels": 1,
    "patch_size": 2,
    "hidden_size": 32,
    "depth": 2,
    "num_heads": 2,
    "num_classes": 10,
}
CASES = [
    TINY,
    TINY | {"objective": "flow", "learn_sigma": False},
    TINY | {"recompute": True, "in_channels": 4},
    TINY | {"learn_sigma": False, "num_classes": 1, "diffusion": {"prediction": "v", "schedule": "cosine"}},
    TINY | {"sizes": [[8, 8], [16, 6]], "size_conditions": True, "objective": "flow"},
    TINY | {"learn_sigma": False, "num_classes": 1, "embedding_dim": 6},
    TINY
    | {
        "objective": "flow",
        "learn_sigma": False,
        "block": {"norm": "rms", "mlp": "swiglu", "qk_norm": "rms", "rope": True},
        "tokens": {"label": 2, "joins": 1},
        "patch_bottleneck": 3,
        "flow": {"prediction": "x", "loss": "velocity", "t_min": 0.05},
    },
    TINY
    | {
        "objective": "flow",
        "learn_sigma": False,
        "block": {"norm": "rms", "mlp": "swiglu", "rope": True, "modulation": "none"},
        "sines": False,
        "time_freq": "fourier",
        "tokens": {"time": 2, "label": 2},
        "wide": {"hidden_size": 48, "depth": 1, "num_heads": 3},
        "internal": {"depth": 1, "scale": 1.5},
        "flow": {"shift": "dimension", "path": "gvp"},
    },
]


MODERN = TINY | {
    "objective": "flow",
    "learn_sigma": False,
    "block": {"norm": "rms", "mlp": "swiglu", "qk_norm": "rms", "rope": True},
}
CASES += [
    MODERN | {"align": {"kind": "layersync", "depth": 1, "target": 2}, "tokens": {"label": 2, "joins": 1}},
    MODERN
    | {
        "align": {"kind": "repa", "depth": 1, "hidden": 8, "width": 12},
        "routing": {"ratio": 0.5, "start": 1, "end": 1},
    },
]
TEXT = TINY | {"condition": "text", "num_words": 40, "max_text_len": 5}
CASES += [
    TEXT | {"learn_sigma": False, "class_dropout_prob": 0.5},
    MODERN
    | {
        "condition": "text",
        "text_encodings_dim": 6,
        "max_text_len": 4,
        "class_dropout_prob": 0.5,
        "block": MODERN["block"] | {"modulation": "none"},
        "tokens": {"time": 2, "joins": 1},
        "routing": {"ratio": 0.5, "start": 1, "end": 1},
    },
    TEXT | {"cross_attention": True, "class_dropout_prob": 0.5},
    TEXT
    | {
        "text_encodings_dim": 6,
        "max_text_len": 4,
        "text_projection": "mlp",
        "block": {"modulation": "shared"},
        "cross_attention": True,
        "class_dropout_prob": 0.5,
    },
]
CASES += [
    TEXT
    | {
        "objective": "flow",
        "learn_sigma": False,
        "text_encodings_dim": 6,
        "max_text_len": 4,
        "text_projection": "plain",
        "text_pooled_dim": 5,
        "block": {
            "joint": True,
            "dual": 1,
        },  # norms of the last block's text have no gradient: nobody reads its queries
        "sines_within": [6, 4],
        "class_dropout_prob": 0.5,
        "routing": {"ratio": 0.5, "start": 1, "end": 1},
    },
]
VIDEO = MODERN | {
    "image_size": 4,
    "condition": "text",
    "num_words": 40,
    "max_text_len": 5,
    "class_dropout_prob": 0.5,
    "video": {"frames": 5, "patch_frames": 2, "given": 3},
}
CASES += [
    VIDEO | {"text_pooled_dim": 6, "tokens": {"joins": 1}, "routing": {"ratio": 0.5, "start": 1, "end": 1}},
    TINY | {"image_size": 4, "video": {"frames": 3, "height": 6, "beginnings": [0.5]}, "class_dropout_prob": 0.5},
]


def completed(config, folder):
    """The section with a tiny encoder of random weights, where it is aligned to one."""
    if config.get("align", {}).get("kind") != "repa":
        return config
    towers.dinov2(folder / "encoder")
    return config | {"align": Align.fill_in_encoder_fields(config["align"] | {"path": str(folder / "encoder")})}


def request(system, seeds):
    """Guided, of four steps, by the sampler that is not the usual one where noise matters."""
    embeddings = system.synthetic(16).get("image_embed")
    conditions = {} if embeddings is None else system.conditions_from(embeddings[torch.tensor(seeds) % 16])
    return Request(
        torch.tensor(seeds), conditions, 4, None if system.config.objective == "flow" else "ddpm", guidance_scale=1.5
    )
