"""What a DiT is told: times, labels, sizes, image embeddings and texts, each as vectors of the width D, or as tokens.

B samples, D = dim. Weights start as published: normal(0.02), and zero for the last map of a condition that is added to
a network which was trained without it.
"""

import math
from collections.abc import Callable
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dstrain.nn.layers import Linear, timestep_features
from dstrain.nn.tokens import RMSNorm
from dstrain.recipe import ConfigError

TIME_FEATURES = 256  # number of sinusoids of a timestep, or of random frequencies


class TimestepEmbedder(nn.Module):
    """(B,) -> (B, D); the sinusoids in float32, since bfloat16 cannot tell timesteps apart.

    time_freq   official; diffusers, whose frequencies are spaced a little wider; or fourier, normal random frequencies
                that stay as they are, the same in every network that is not loaded.
    """

    def __init__(self, dim: int, time_freq: str) -> None:
        super().__init__()
        if time_freq not in ("official", "diffusers", "fourier"):
            raise ConfigError(f"time_freq: {time_freq!r} is unknown; one of official, diffusers, fourier")
        self.shift = int(time_freq == "diffusers")
        features = TIME_FEATURES
        if time_freq == "fourier":
            features *= 2
            # .float(), since zero.Init would create it in the compute dtype.
            self.register_buffer("W", torch.empty(TIME_FEATURES).float())
            self.reset_parameters()
        self.mlp = nn.Sequential(Linear(features, dim, init="normal"), nn.SiLU(), Linear(dim, dim, init="normal"))

    def reset_parameters(self) -> None:
        """Sets the frequencies of fourier: the weights belong to submodules."""
        if hasattr(self, "W"):
            with torch.no_grad():
                self.W.copy_(torch.from_numpy(np.random.default_rng(0).standard_normal(TIME_FEATURES)))

    def _apply(self, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Keeps the frequencies in float32 where a network is cast to halves: their phases are large."""
        frequencies = getattr(self, "W", None)
        super()._apply(change, recurse)
        if frequencies is not None and self.W.dtype in (torch.bfloat16, torch.float16):
            self.W = frequencies.to(self.W.device)
        return self

    def forward(self, t: Tensor) -> Tensor:
        if hasattr(self, "W"):
            angles = 2 * math.pi * t[:, None].to(self.W.dtype) * self.W
            features = torch.cat((angles.sin(), angles.cos()), dim=1)
        else:
            features = timestep_features(t, TIME_FEATURES, shift=self.shift)
        return self.mlp(features.to(self.mlp[0].weight.dtype))


class SizeEmbedder(nn.Module):
    """The original height and width of an image, the top and left of its crop and the crop's height and width, in
    pixels, int64 (B, 6) -> (B, D): SDXL's micro-conditioning (Podell et al. 2023). It begins as zero.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        first, last = Linear(6 * TIME_FEATURES, dim, init="normal"), Linear(dim, dim, init="zero")
        self.mlp = nn.Sequential(first, nn.SiLU(), last)

    def forward(self, size: Tensor) -> Tensor:
        features = timestep_features(size.flatten(), TIME_FEATURES).view(len(size), -1)  # (B, 6 x 256)
        return self.mlp(features.to(self.mlp[0].weight.dtype))


class ImageEmbedder(nn.Module):
    """Image embeddings (B, E), or zeros for none, to (B, D). Only their direction counts. It begins as zero."""

    def __init__(self, embedding_dim: int, dim: int) -> None:
        super().__init__()
        first, last = Linear(embedding_dim, dim, init="normal"), Linear(dim, dim, init="zero")
        self.mlp = nn.Sequential(first, nn.SiLU(), last)

    def forward(self, embed: Tensor) -> Tensor:
        unit_variance = F.normalize(embed.float(), dim=1) * embed.shape[1] ** 0.5
        return self.mlp(unit_variance.to(self.mlp[0].weight.dtype))


class LearnedTokens(nn.Module):
    """`count` learned tokens, to each of which a condition may add: (B, D) -> (B, count, D). Normal(0.02)."""

    def __init__(self, count: int, dim: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(count, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.tokens, std=0.02)

    def forward(self, condition: Tensor) -> Tensor:
        return self.tokens + condition[:, None]


class TextTokens(nn.Module):
    """States of a text encoder (B, M, text_dim) -> tokens (B, M, D): an RMS norm and a linear map."""

    def __init__(self, text_dim: int, dim: int) -> None:
        super().__init__()
        self.norm = RMSNorm(text_dim)
        self.proj = Linear(text_dim, dim, init="normal")

    def forward(self, states: Tensor) -> Tensor:
        return self.proj(self.norm(states.to(self.proj.weight.dtype)))
