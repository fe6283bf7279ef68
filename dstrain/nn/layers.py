"""Layers that several systems use. A module sets all its own parameters and buffers in its own `reset_parameters`.

No parent initializes a child. Under ZeRO-3 the child's weights are already scattered when the parent's constructor goes
on, and the engine initializes each module again by itself, under a key made from its name. So each layer takes its
initialization as an argument of its constructor (`init=`).
"""

import math
from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dstrain.recipe import ConfigError


class Linear(nn.Linear):
    """A linear layer with an initialization `init` of its weight: xavier (uniform), normal (std 0.02) or zero. Biases
    start at 0. Raises ConfigError for any other name.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, init: str = "xavier") -> None:
        self.init = init  # before the parent, whose constructor calls reset_parameters
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        """Draws the weight as `init` says, and sets the bias, if any, to 0. Raises ConfigError if `init` is unknown."""
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


class Pointwise(nn.Conv1d):
    """A linear layer over tokens whose weight has the shape of a 1-D convolution's with kernel size 1: (B,
    N, C) -> (B, N, D).

    Its constructor is torch's own, with a kernel_size of 1: peft builds adapters by the class of the layer they adapt.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        """Applies the linear layer to each token: (B, N, C) -> (B, N, D)."""
        return F.linear(tokens, self.weight.squeeze(2), self.bias)


class Patches(nn.Conv2d):
    """Maps non-overlapping patches by one linear map: (B, C, H, W) -> (B, dim, H/p, W/p).

    The weight starts as that of a linear layer over flattened patches (xavier).
    """

    def __init__(
        self, in_channels: int, dim: int, patch_size: Any, stride: Any = None, padding: Any = 0, **more: Any
    ) -> None:
        # The stride is the patch; peft gives one of its own, since it builds adapters by the class of their layer.
        super().__init__(in_channels, dim, patch_size, patch_size if stride is None else stride, padding, **more)

    def reset_parameters(self) -> None:
        """Draws the weight from the Xavier uniform distribution of a linear layer over flattened patches, and sets the
        bias, if any, to 0.
        """
        bound = math.sqrt(6 / (self.weight[0].numel() + self.out_channels))
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """A table of `count` vectors (dim,), which start normal with standard deviation `std`."""

    def __init__(self, count: int, dim: int, std: float = 0.02) -> None:
        self.std = std  # before the parent, whose constructor calls reset_parameters
        super().__init__(count, dim)

    def reset_parameters(self) -> None:
        """Draws the vectors from a normal distribution of mean 0 and standard deviation `std`."""
        nn.init.normal_(self.weight, std=self.std)


def make_dropout(share: float) -> nn.Module:
    """Returns a dropout layer that drops this share of values in training, or an identity layer if the share is 0."""
    return nn.Dropout(share) if share else nn.Identity()


def chain_named_layers(**layers: nn.Module) -> nn.Sequential:
    """Returns an nn.Sequential of `layers`, in their order, whose children have the names of the arguments."""
    return nn.Sequential(OrderedDict(layers))


def compute_timestep_frequencies(
    dim: int, max_period: float = 10000.0, shift: int = 0, device: torch.device | None = None
) -> Tensor:
    """Returns the angular frequencies of sinusoidal timestep features: max_period ** (-i / (dim // 2 - shift)) for i =
    0, 1, ..., float64 (dim // 2,).
    """
    half = dim // 2
    index = torch.arange(half, device=device).double()
    return torch.exp(-math.log(max_period) * index / (half - shift))


def compute_timestep_features(t: Tensor, dim: int, max_period: float = 10000.0, shift: int = 0) -> Tensor:
    """Returns the sinusoidal embedding of timesteps t (B,), float32 (B, dim): dim // 2 cosines, as many sines, and a 0
    at the end if dim is odd.

    shift  1: the lowest frequency is 1 / max_period (`downscale_freq_shift` of diffusers' DiT); 0: it is a little
           higher, as in most networks since DDPM.

    Frequencies are computed in float64 and rounded once to float32, so that all CPUs give the same values.
    """
    frequencies = compute_timestep_frequencies(dim, max_period, shift, t.device).float()
    angles = t[:, None].float() * frequencies[None]  # (B, half)
    features = torch.cat((torch.cos(angles), torch.sin(angles)), dim=1)
    return F.pad(features, (0, dim % 2))
