"""A tiny IDDPM for tests: its section with changes, its network with random weights, its timestep sampler warm."""

import torch

from dstrain import systems

TINY = {
    "image_size": 8,
    "in_channels": 1,
    "num_channels": 32,
    "num_res_blocks": 1,
    "channel_mult": [1, 1],
    "attention_resolutions": [4],
    "num_heads": 2,
    "diffusion_steps": 20,
    "noise_schedule": "cosine",
}
AWARE = {"schedule_sampler": "loss-second-moment", "history_per_term": 3, "uniform_prob": 0.01}
LABELS = {"class_cond": True, "num_classes": 10}


def build(**changes):
    return systems.build("iddpm", TINY | changes)


def random(system, scale=0.1):
    network = system.networks()["denoiser"]
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn_like(parameter) * scale)
    return {"denoiser": network}


def warm(system):
    """The timestep sampler after its full history, with losses that differ widely."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        t = torch.randperm(20, generator=generator)
        system.observe({"timestep": t, "loss_seen": torch.rand(20, generator=generator) * (t + 1.0)})
    return system
