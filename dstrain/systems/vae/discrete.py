"""The network of DALLE-pytorch's discrete VAE: strided convolutions to the logits of tokens, and back from a codebook.

Notation: B samples, C channels, K tokens, D = codebook_dim, h = H / 2 ** num_layers. Images are float in [0, 1]; they
are normalized inside, and `decode` undoes it. State-dict names are the original's, so that its files load unchanged.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dstrain.nn.quantize import Codebook, relax, wide
from dstrain.recipe import ConfigError
from dstrain.systems.vae.losses import from_logit_laplace

Normalization = tuple[tuple[float, ...], tuple[float, ...]]


class Relaxed(NamedTuple):
    """What one pass gives to the loss."""

    out: Tensor                                   # the decoder's output, (B, C or 2C, H, W)
    target: Tensor                                # the normalized image, (B, C, H, W)
    logits: Tensor                                # of the tokens, (B, K, h, w)


class DiscreteVAE(nn.Module):
    """Images to relaxed tokens and back.

    sampling        how `forward` draws tokens, see nn/quantize.relax.
    logit_laplace   the decoder has 2C outputs, means and logarithms of scales of a logit-Laplace distribution.
    normalization   means and standard deviations by channel; None: 0.5 and 0.5, for alpha 0 and 1.
    """

    def __init__(self, image_size: int = 256, num_tokens: int = 512, codebook_dim: int = 512, num_layers: int = 3,
                 num_resnet_blocks: int = 0, hidden_dim: int = 64, channels: int = 3, *, sampling: str = "soft",
                 logit_laplace: bool = False, normalization: Normalization | None = None) -> None:
        super().__init__()
        if image_size % 2 ** num_layers:
            raise ConfigError(f"image_size: {image_size} is no multiple of 2 ** num_layers, {2 ** num_layers}")
        self.sampling, self.logit_laplace, self.num_tokens = sampling, logit_laplace, num_tokens
        self.normalize = Normalize(*(normalization or default_normalization(channels)))
        self.codebook = Codebook(num_tokens, codebook_dim)
        widths = [channels, *[hidden_dim] * num_layers]
        down = [Down(before, after) for before, after in zip(widths, widths[1:])]
        residual = [ResBlock(hidden_dim) for _ in range(2 * num_resnet_blocks)]
        entry = [nn.Conv2d(codebook_dim, hidden_dim, 1)] if num_resnet_blocks else []
        widths = [hidden_dim if num_resnet_blocks else codebook_dim, *[hidden_dim] * num_layers]
        up = [Up(before, after) for before, after in zip(widths, widths[1:])]
        self.encoder = nn.Sequential(*down, *residual[:num_resnet_blocks], nn.Conv2d(hidden_dim, num_tokens, 1))
        self.decoder = nn.Sequential(*entry, *residual[num_resnet_blocks:], *up,
                                     nn.Conv2d(hidden_dim, channels * (1 + logit_laplace), 1))

    def forward(self, x: Tensor, noise: Tensor, temperature: Tensor) -> Relaxed:
        """A relaxed pass: images in [0, 1], Gumbel noise (B, K, h, w), temperatures (B,)."""
        target = self.normalize(x)
        logits = self._logits(target)                                                             # (B, K, h, w)
        tokens = relax(logits, noise, temperature, self.sampling)
        return Relaxed(wide(self.decoder(self.codebook(tokens))), target, logits)

    def encode(self, x: Tensor) -> Tensor:
        """The likeliest tokens of images in [0, 1]: (B, C, H, W) -> int64 (B, h, w)."""
        return self._logits(self.normalize(x)).argmax(1)

    def decode(self, tokens: Tensor) -> Tensor:
        """Images in [0, 1]: int64 (B, h, w) -> (B, C, H, W)."""
        return self.pixels(wide(self.decoder(self.codebook(tokens))))

    def pixels(self, out: Tensor) -> Tensor:
        """The decoder's output as images in [0, 1]: (B, C or 2C, H, W) -> (B, C, H, W)."""
        if self.logit_laplace:
            return from_logit_laplace(out)
        return self.normalize.undo(out).clamp(0, 1)

    def _logits(self, target: Tensor) -> Tensor:
        return wide(self.encoder(target.to(self.codebook.weight.dtype)))


class Normalize(nn.Module):
    """(x - mean) / std by channel. Means and stds belong to the recipe, not to the state dict."""

    def __init__(self, means: tuple[float, ...], stds: tuple[float, ...]) -> None:
        super().__init__()
        self._means, self._stds = means, stds
        for name in ("means", "stds"):            # .float(): zero.Init would create them in the compute dtype
            self.register_buffer(name, torch.empty(len(means), 1, 1).float(), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for buffer, values in ((self.means, self._means), (self.stds, self._stds)):
                for channel, value in enumerate(values):
                    buffer[channel].fill_(value)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.means) / self.stds

    def undo(self, x: Tensor) -> Tensor:
        return x * self.stds + self.means


def default_normalization(channels: int) -> Normalization:
    """Colours to [-1, 1]; alpha stays in [0, 1]."""
    return ((0.5,) * 3 + (0.0,))[:channels], ((0.5,) * 3 + (1.0,))[:channels]


class Down(nn.Sequential):
    """Halves the side."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(nn.Conv2d(in_channels, out_channels, 4, stride=2, padding=1), nn.ReLU())


class Up(nn.Sequential):
    """Doubles the side."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(nn.ConvTranspose2d(in_channels, out_channels, 4, stride=2, padding=1), nn.ReLU())


class ResBlock(nn.Module):
    """Two convolutions of 3 x 3 and one of 1 x 1, with a shortcut."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(dim, dim, 3, padding=1), nn.ReLU(), nn.Conv2d(dim, dim, 3, padding=1),
                                 nn.ReLU(), nn.Conv2d(dim, dim, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)
