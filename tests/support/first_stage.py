"""Tiny autoencoders of diffusers' real class with random weights, saved as first stages."""

from pathlib import Path

import torch


def save_of_representations(folder: Path, **changes) -> Path:
    """A folder with an AutoencoderRAE of pictures of 16 x 16 pixels, whose latents are 64 x 2 x 2."""
    from diffusers import AutoencoderRAE

    torch.manual_seed(0)
    arguments = {
        "encoder_hidden_size": 64,
        "encoder_num_hidden_layers": 1,
        "encoder_input_size": 28,
        "patch_size": 8,
        "decoder_hidden_size": 32,
        "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 64,
    }
    AutoencoderRAE(**arguments | changes).save_pretrained(folder)
    return folder


def save(folder: Path, seed: int = 0, channels: int = 1, depth: int = 3, **changes) -> Path:
    """A folder with an AutoencoderKL that shrinks images by 2 ** (depth - 1)."""
    from diffusers import AutoencoderKL

    torch.manual_seed(seed)
    arguments = {
        "in_channels": channels,
        "out_channels": channels,
        "block_out_channels": (4,) * depth,
        "down_block_types": ("DownEncoderBlock2D",) * depth,
        "up_block_types": ("UpDecoderBlock2D",) * depth,
        "latent_channels": 3,
        "norm_num_groups": 2,
        "layers_per_block": 1,
        "sample_size": 28,
        "scaling_factor": 0.5,
    }
    AutoencoderKL(**arguments | changes).save_pretrained(folder)
    return folder
