"""The network of DALLE-pytorch's discrete VAE: strided convolutions from images to the logits of tokens, and back to
images from vectors of a codebook.

With another quantizer than gumbel the convolutions end in vectors, which are then quantized, as in VQGAN (Esser et al.
2021).

Notation: B samples, C channels, K tokens, D = codebook_dim, h = H / 2 ** num_layers. Images are float in [0, 1]; the
network normalizes them itself, and `decode` undoes it. State-dict names are the original's, so that its files load
unchanged.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dstrain.nn.finite_scalar import FiniteScalar
from dstrain.nn.lookup_free import CosineQuantizer
from dstrain.nn.quantize import Codebook, draw_relaxed_tokens, upcast_to_float32
from dstrain.recipe import ConfigError
from dstrain.systems.vae.losses import convert_logit_laplace_to_pixels

Normalization = tuple[tuple[float, ...], tuple[float, ...]]


class RelaxedOutput(NamedTuple):
    """The outputs of one forward pass with relaxed tokens (gumbel), for the loss."""

    out: Tensor  # the decoder's output, (B, C or 2C, H, W)
    logits: Tensor  # of the tokens, (B, K, h, w)


class RoundedOutput(NamedTuple):
    """The outputs of one forward pass with fsq or cosine, for the loss."""

    out: Tensor  # the decoder's output, (B, C or 2C, H, W)
    tokens: Tensor  # int64 (B, h, w)
    commitment: Tensor  # see nn/lookup_free.Quantized: (B,)
    codebook: Tensor  # (B,)


class DiscreteVAE(nn.Module):
    """Encodes images to tokens, and decodes tokens to images.

    quantizer       gumbel, fsq with its `levels`, or cosine.
    sampling        gumbel: how `forward` draws tokens, see nn/quantize.draw_relaxed_tokens.
    logit_laplace   whether the decoder has 2C outputs: means and log scales of a logit-Laplace distribution.
    normalization   means and standard deviations by channel; None: 0.5 and 0.5, for alpha 0 and 1.

    Raises ConfigError if 2 ** num_layers does not divide image_size.
    """

    def __init__(
        self,
        image_size: int = 256,
        num_tokens: int = 512,
        codebook_dim: int = 512,
        num_layers: int = 3,
        num_resnet_blocks: int = 0,
        hidden_dim: int = 64,
        channels: int = 3,
        *,
        quantizer: str = "gumbel",
        levels: tuple[int, ...] = (),
        sampling: str = "soft",
        logit_laplace: bool = False,
        normalization: Normalization | None = None,
    ) -> None:
        super().__init__()
        if image_size % 2**num_layers:
            raise ConfigError(f"image_size: {image_size} is no multiple of 2 ** num_layers, {2**num_layers}")
        self.sampling, self.logit_laplace, self.num_tokens = sampling, logit_laplace, num_tokens
        self.normalize = Normalize(*(normalization or get_default_normalization(channels)))
        self.quantizer: FiniteScalar | CosineQuantizer | None = None
        if quantizer == "gumbel":
            self.codebook = Codebook(num_tokens, codebook_dim)
        else:
            self.quantizer = (
                FiniteScalar(hidden_dim, levels)
                if quantizer == "fsq"
                else CosineQuantizer(hidden_dim, num_tokens, codebook_dim)
            )
        widths = [channels, *[hidden_dim] * num_layers]
        down = [Down(before, after) for before, after in itertools.pairwise(widths)]
        residual = [ResBlock(hidden_dim) for _ in range(2 * num_resnet_blocks)]
        gumbel = self.quantizer is None  # others project to their codes and back themselves
        entry = [nn.Conv2d(codebook_dim, hidden_dim, 1)] if num_resnet_blocks and gumbel else []
        widths = [codebook_dim if gumbel and not num_resnet_blocks else hidden_dim, *[hidden_dim] * num_layers]
        up = [Up(before, after) for before, after in itertools.pairwise(widths)]
        to_logits = [nn.Conv2d(hidden_dim, num_tokens, 1)] if gumbel else []
        self.encoder = nn.Sequential(*down, *residual[:num_resnet_blocks], *to_logits)
        self.decoder = nn.Sequential(
            *entry, *residual[num_resnet_blocks:], *up, nn.Conv2d(hidden_dim, channels * (1 + logit_laplace), 1)
        )

    def forward(
        self, x: Tensor, noise: Tensor | None = None, temperature: Tensor | None = None
    ) -> RelaxedOutput | RoundedOutput:
        """Encodes and decodes images x (B, C, H, W) in [0, 1].

        noise        Gumbel noise (B, K, h, w), by which the quantizer gumbel draws tokens; None for other quantizers.
        temperature  (B,), of the quantizer gumbel; None for other quantizers.

        Returns a RelaxedOutput with the quantizer gumbel, and a RoundedOutput with others.
        """
        if self.quantizer is None:
            logits = upcast_to_float32(self._encode_to_features(x))  # (B, K, h, w)
            tokens = draw_relaxed_tokens(logits, noise, temperature, self.sampling)
            return RelaxedOutput(upcast_to_float32(self.decoder(self.codebook(tokens))), logits)
        vectors = self._encode_to_features(x).movedim(1, -1)  # (B, h, w, D)
        coded = self.quantizer(vectors, vectors.new_ones(vectors.shape[:-1], dtype=torch.float32))
        return RoundedOutput(
            upcast_to_float32(self.decoder(move_channels_first(coded.x))),
            coded.tokens,
            coded.commitment,
            coded.codebook,
        )

    def encode(self, x: Tensor) -> Tensor:
        """Encodes images in [0, 1] to tokens: (B, C, H, W) -> int64 (B, h, w). With the quantizer gumbel these are the
        most likely ones.
        """
        if self.quantizer is None:
            return upcast_to_float32(self._encode_to_features(x)).argmax(1)
        return self.quantizer.encode(self._encode_to_features(x).movedim(1, -1))

    def decode(self, tokens: Tensor) -> Tensor:
        """Decodes tokens to images in [0, 1]: int64 (B, h, w) -> (B, C, H, W)."""
        vectors = (
            self.codebook(tokens) if self.quantizer is None else move_channels_first(self.quantizer.decode(tokens))
        )
        return self.convert_to_pixels(upcast_to_float32(self.decoder(vectors))).clamp(0, 1)

    def convert_to_pixels(self, decoder_output: Tensor) -> Tensor:
        """Converts the decoder's output (B, C or 2C, H, W) to images (B, C, H, W) in about [0, 1]; they are not
        clamped.
        """
        return (
            convert_logit_laplace_to_pixels(decoder_output)
            if self.logit_laplace
            else self.normalize.denormalize(decoder_output)
        )

    def _encode_to_features(self, x: Tensor) -> Tensor:
        """Returns the encoder's output for images (B, C, H, W) in [0, 1]: logits (B, K, h, w) with gumbel, else
        vectors.
        """
        return self.encoder(self.normalize(x).to(self.decoder[-1].weight.dtype))


def move_channels_first(vectors: Tensor) -> Tensor:
    """Moves the last axis to axis 1 and makes the result contiguous: (B, h, w, D) -> (B, D, h, w)."""
    return vectors.movedim(-1, 1).contiguous()


class Normalize(nn.Module):
    """Normalizes images by channel, (x - mean) / std. Means and stds come from the recipe, and are not in the state
    dict.
    """

    def __init__(self, means: tuple[float, ...], stds: tuple[float, ...]) -> None:
        super().__init__()
        self._means, self._stds = means, stds
        for name in ("means", "stds"):  # .float(): zero.Init would create them in the compute dtype
            self.register_buffer(name, torch.empty(len(means), 1, 1).float(), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fills the buffers with the means and standard deviations of the recipe."""
        with torch.no_grad():
            for buffer, values in ((self.means, self._means), (self.stds, self._stds)):
                for channel, value in enumerate(values):
                    buffer[channel].fill_(value)

    def forward(self, x: Tensor) -> Tensor:
        """Returns (x - mean) / std by channel: (B, C, H, W) -> (B, C, H, W)."""
        return self.normalize(x)

    def normalize(self, x: Tensor) -> Tensor:
        """Returns (x - mean) / std by channel, as `forward` does. Losses call this method, since under ZeRO-3 a module
        may be called only within the network's forward pass.
        """
        return (x - self.means) / self.stds

    def denormalize(self, x: Tensor) -> Tensor:
        """Inverts `normalize`: returns x * std + mean by channel."""
        return x * self.stds + self.means


def get_default_normalization(channels: int) -> Normalization:
    """Returns the default (means, standard deviations) by channel, for 1, 3 or 4 channels in [0, 1]: colours are moved
    to [-1, 1], alpha stays in [0, 1].
    """
    return ((0.5,) * 3 + (0.0,))[:channels], ((0.5,) * 3 + (1.0,))[:channels]


class Down(nn.Sequential):
    """A convolution and ReLU that halve the side."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(nn.Conv2d(in_channels, out_channels, 4, stride=2, padding=1), nn.ReLU())


class Up(nn.Sequential):
    """A transposed convolution and ReLU that double the side."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(nn.ConvTranspose2d(in_channels, out_channels, 4, stride=2, padding=1), nn.ReLU())


class ResBlock(nn.Module):
    """Two convolutions of 3 x 3 and one of 1 x 1, with a shortcut."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(dim, dim, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(dim, dim, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(dim, dim, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns x plus the output of the convolutions for x: (B, dim, h, w) -> (B, dim, h, w)."""
        return x + self.net(x)
