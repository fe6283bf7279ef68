"""Layers that several systems use. A module sets all its own parameters and buffers in its own `reset_parameters`.

No parent initializes a child. Under ZeRO-3 the child's weights are already scattered when the parent's constructor goes
on, and the engine initializes each module again by itself, under a key made from its name. So each layer takes its
initialization as an argument of its constructor (`init=`).
"""

import math
from collections import OrderedDict

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dstrain.nn.attention import attend
from dstrain.recipe import ConfigError


class Linear(nn.Linear):
    """A linear layer that knows its initialization: xavier (uniform), normal (std 0.02) or zero. Biases start at 0."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, init: str = "xavier") -> None:
        self.init = init  # before the parent, whose constructor calls reset_parameters
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        if self.init == "xavier":
            nn.init.xavier_uniform_(self.weight)
        elif self.init == "normal":
            nn.init.normal_(self.weight, std=0.02)
        elif self.init == "zero":
            nn.init.zeros_(self.weight)
        else:
            raise ConfigError(f"init: {self.init!r} is unknown; one of xavier, normal, zero")
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Patches(nn.Conv2d):
    """Non-overlapping patches through one linear map: (B, C, H, W) -> (B, dim, H/p, W/p).

    The weight starts as that of a linear layer over flattened patches (xavier).
    """

    def __init__(self, in_channels: int, dim: int, patch_size: int) -> None:
        super().__init__(in_channels, dim, kernel_size=patch_size, stride=patch_size)

    def reset_parameters(self) -> None:
        bound = math.sqrt(6 / (self.weight[0].numel() + self.out_channels))
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """A table of vectors, normal with standard deviation `std`."""

    def __init__(self, count: int, dim: int, std: float = 0.02) -> None:
        self.std = std  # before the parent, whose constructor calls reset_parameters
        super().__init__(count, dim)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


def dropout_of(share: float) -> nn.Module:
    """Drops this share of values in training. 0 is no work, and a graph that does not ask whether it is training."""
    return nn.Dropout(share) if share else nn.Identity()


def name_layers(**layers: nn.Module) -> nn.Sequential:
    """Chains the layers under the names that they have in published files."""
    return nn.Sequential(OrderedDict(layers))


class SelfAttention(nn.Module):
    """Multi-head self-attention over tokens, queries, keys and values from one map: (B, N, dim) -> (B, N, dim)."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        if dim % num_heads:
            raise ConfigError(f"num_heads: {num_heads} does not divide hidden_size {dim}")
        self.num_heads = num_heads
        self.qkv = Linear(dim, 3 * dim)
        self.proj = Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, count, dim = x.shape
        qkv = self.qkv(x).view(batch, count, 3, self.num_heads, dim // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, N, dim / heads) each
        x = attend(query, key, value)
        return self.proj(x.transpose(1, 2).reshape(batch, count, dim))


class Mlp(nn.Module):
    """Two linear layers with a tanh-approximated GELU between them: (..., dim) -> (..., dim)."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = Linear(dim, hidden)
        self.fc2 = Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


def timestep_features(t: Tensor, dim: int, max_period: float = 10000.0, shift: int = 0) -> Tensor:
    """Sinusoids of timesteps, cosines first, always float32: (B,) -> (B, dim).

    shift 0 spaces frequencies as DDPM's successors do, so that the lowest is not quite 1 / max_period; 1 is the
    `downscale_freq_shift` of diffusers' DiT, which reaches it.

    Frequencies are computed in float64 and rounded once: exp in float32 is up to 5 units in the last place off on some
    CPUs, which at t = 999 is 1e-4 in a phase, and a model would not be the same function everywhere.
    """
    half = dim // 2
    index = torch.arange(half, device=t.device).double()
    frequencies = torch.exp(-math.log(max_period) * index / (half - shift)).float()
    angles = t[:, None].float() * frequencies[None]  # (B, half)
    features = torch.cat((torch.cos(angles), torch.sin(angles)), dim=1)
    return F.pad(features, (0, dim % 2))


def sincos_positions(dim: int, height: int, width: int, base: int | None = None) -> Tensor:
    """Returns fixed 2-D positions, computed in float64: float32 (height * width, dim), row-major.

    The first half of a vector encodes the column, the second the row; each half is sines, then cosines (Vaswani et al.
    2017, per axis as in He et al. 2021, MAE). By numpy, since zero.Init rounds tensors that torch creates to bfloat16.

    base: both axes run over 0 .. base, however many patches they have, so that a network meets the positions of its
    square grid of base x base patches at other sizes, too (PixArt-alpha, Chen et al. 2023); None: 0, 1, 2, ...
    """
    if dim % 4:
        raise ConfigError(f"hidden_size: {dim} is not a multiple of 4, which two axes of sines and cosines need")
    column, row = (np.arange(count) * ((base or count) / count) for count in (width, height))
    column, row = np.tile(column, height), np.repeat(row, width)
    frequencies = 10000.0 ** (-np.arange(dim // 4) / (dim // 4))
    halves = []
    for position in (column, row):
        angles = position[:, None] * frequencies[None]  # (N, dim / 4)
        halves += [np.sin(angles), np.cos(angles)]
    return torch.from_numpy(np.concatenate(halves, axis=1).astype(np.float32))
