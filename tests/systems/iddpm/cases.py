"""Tiny UNets for the contract of all systems."""

import torch

from dstrain.systems.base import Request

UNET = {
    "image_size": 8,
    "in_channels": 1,
    "num_channels": 32,
    "num_res_blocks": 1,
    "channel_mult": [1, 1],
    "attention_resolutions": [4],
    "num_heads": 2,
    "diffusion_steps": 50,
    "noise_schedule": "cosine",
}
CASES = [
    UNET | {"learn_sigma": True, "class_cond": True, "num_classes": 10},
    UNET | {"learn_sigma": True, "use_kl": True, "schedule_sampler": "loss-second-moment"},
    UNET | {"small_size": 4, "class_cond": True, "num_classes": 3, "use_scale_shift_norm": False},
    UNET | {"in_channels": 3, "predict_xstart": True, "sigma_small": True, "recompute": True},
    UNET | {"learn_sigma": True, "sizes": [[8, 8], [12, 6]]},
    UNET | {"objective": "flow", "class_cond": True, "num_classes": 10, "class_dropout_prob": 0.1},
    UNET | {"objective": "flow", "learn_sigma": True, "small_size": 4, "class_cond": True, "num_classes": 3},
]


def request(system, seeds):
    """Four steps of noise; an upsampler begins from pictures and labels."""
    seeds, conditions = torch.tensor(seeds), {}
    if system.starts_from_data:
        conditions = system.conditions_from(system.synthetic(16)["image"][seeds]) | {"label": seeds % 3}
    return Request(seeds, conditions, 4, "ddpm" if system.diffusion else None)
