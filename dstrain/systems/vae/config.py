"""The `model` section of a recipe for an autoencoder: a documented field for each choice. It has either the section
discrete or the section kl.
"""

from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from dstrain.nn.finite_scalar import require_valid_levels
from dstrain.nn.picture_loss import (
    Discriminator,
    Perceptual,
    describe_missing_perceptual_weights,
    require_suitable_picture_shape,
)
from dstrain.nn.quantize import SAMPLINGS
from dstrain.recipe import ConfigError, Run, Section
from dstrain.systems.base import SystemConfig


class ImageDiscriminator(Discriminator):
    balance: Literal["picture", "last_layer"] = "picture"
    """Gradients whose lengths are compared: with respect to the picture, or to the decoder's last layer as in VQGAN."""


class Temperature(Section):
    schedule: Literal["exponential", "cosine", "legacy", "constant"] = "exponential"
    """From start to minimum in `steps`: by a constant factor, or half a cosine; legacy compounds, as train_vae does."""
    start: float = Field(1.0, gt=0)
    """The temperature at step 0; constant keeps it."""
    minimum: float = Field(0.0625, gt=0)
    """The temperature at the end; held-out data are always measured with it."""
    steps: int = Field(150_000, ge=1)
    """exponential, cosine: optimizer steps to the minimum."""
    rate: float = Field(1e-6, ge=0)
    """legacy: every 100 steps the current temperature is multiplied by exp(-rate * step)."""

    @model_validator(mode="after")
    def _require_falling_temperature(self) -> "Temperature":
        """Returns the section. Raises ConfigError if the minimum is above the start, unless the schedule is
        constant.
        """
        if self.schedule != "constant" and self.minimum > self.start:
            raise ConfigError(
                f"minimum {self.minimum:g} is above start {self.start:g}: temperatures only fall; raise "
                "start, or take schedule constant"
            )
        return self


class Discrete(Section):
    """The discrete VAE of Ramesh et al. 2021 with the network of DALLE-pytorch, by its constructor's names."""

    num_tokens: int = Field(8192, ge=2)
    """Entries of the codebook."""
    codebook_dim: int = Field(512, ge=1)
    """Width of an entry; fsq has none."""
    num_layers: int = Field(3, ge=1, le=16)
    """Halvings of the side: a token stands for a square of 2 ** num_layers pixels."""
    num_resnet_blocks: int = Field(0, ge=0)
    """Residual blocks at the tokens' resolution, in the encoder and in the decoder."""
    hidden_dim: int = Field(64, ge=1)
    """Width of every layer in between."""
    normalization: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    """Means and standard deviations by channel, of pixels in [0, 1]; None: 0.5 and 0.5, for alpha 0 and 1."""
    quantizer: Literal["gumbel", "fsq", "cosine"] = "gumbel"
    """gumbel: tokens are drawn, DALL-E's. fsq: few numbers rounded to levels. cosine: the nearest of unit vectors."""
    levels: tuple[int, ...] | None = None
    """fsq: levels of each number, whose product is num_tokens, such as [8, 6, 5] for 240; see nn/finite_scalar.py."""
    commitment_weight: float = Field(0.25, ge=0)
    """cosine: weight of the squared distance to the entry, which itself moves towards the encoder with weight 1."""
    sampling: Literal[SAMPLINGS] = "soft"
    """gumbel: how a token is drawn: relaxed, or as one token with the gradient of the relaxation or of ReinMax."""
    temperature: Temperature = Temperature()
    """gumbel: temperature of the relaxation, by step."""
    reconstruction: Literal["mse", "smooth_l1", "logit_laplace"] = "mse"
    """A mean over values: mse, smooth_l1 (of normalized pixels) or logit_laplace (minus log likelihood, in nats)."""
    kl_weight: float = Field(0.0, ge=0)
    """gumbel: weight of the KL from uniform; 1 makes logit_laplace the evidence lower bound, DALL-E has 6.6."""
    kl_warmup: int = Field(0, ge=0)
    """Steps in which the weight grows from 0."""
    kl_form: Literal["per_sample", "legacy"] = "per_sample"
    """per_sample: nats of a sample / values of its image. legacy: nats of the micro-batch, undivided, as published."""
    perceptual: Perceptual | None = None
    """LPIPS beside the reconstruction, as in VQGAN; None: there is none."""
    discriminator: ImageDiscriminator | None = None
    """An adversary that judges patches, with an optimizer of its own; None: there is none."""

    @model_validator(mode="after")
    def _require_consistent_fields(self) -> "Discrete":
        """Returns the section. Raises ConfigError if levels, quantizer, num_tokens, kl_weight or normalization do not
        go together.
        """
        if (self.levels is not None) != (self.quantizer == "fsq"):
            raise ConfigError(
                f"levels belong to quantizer fsq, quantizer is {self.quantizer}: give both, such as "
                "quantizer=fsq levels=[8,6,5] num_tokens=240, or neither (levels=null)"
            )
        if self.levels is not None:
            require_valid_levels(self.levels, self.num_tokens, "num_tokens")
        if self.kl_weight and self.quantizer != "gumbel":
            raise ConfigError(
                f"kl_weight {self.kl_weight:g}: quantizer {self.quantizer} has no distribution of tokens "
                "that could be compared with a uniform one: write kl_weight=0"
            )
        if self.normalization and min(self.normalization[1]) <= 0:
            raise ConfigError(f"normalization: the standard deviations {list(self.normalization[1])} must be above 0")
        return self


class KL(Section):
    """The autoencoder of Rombach et al. 2022 (LDM), with diffusers' AutoencoderKL as the network, by its names."""

    block_out_channels: tuple[PositiveInt, ...] = (128, 256, 512, 512)
    """Width at each resolution; the latents' side is the image's / 2 ** (their number - 1)."""
    layers_per_block: int = Field(2, ge=1)
    """Residual blocks at each resolution of the encoder (the decoder has one more)."""
    latent_channels: int = Field(4, ge=1)
    """Channels of the latents."""
    norm_num_groups: int = Field(32, ge=1)
    """Groups of every GroupNorm; divides each of block_out_channels."""
    quant_conv: bool = True
    """Whether 1 x 1 convolutions stand before and after the latents, as in Stable Diffusion 1 and 2 (not 3)."""
    mid_block_add_attention: bool = True
    """Whether there is self-attention at the lowest resolution."""
    reconstruction: Literal["l1", "mse"] = "l1"
    """Mean absolute or squared error of pixels in [-1, 1]."""
    kl_weight: float = Field(1e-6, ge=0)
    """Weight of the KL from the standard normal, in nats of a sample / values of its image, as in LDM."""
    perceptual: Perceptual | None = None
    """LPIPS beside the reconstruction; None: there is none."""
    discriminator: ImageDiscriminator | None = None
    """An adversary that judges patches, with an optimizer of its own; None: there is none."""

    @model_validator(mode="after")
    def _require_consistent_fields(self) -> "KL":
        """Returns the section. Raises ConfigError if block_out_channels is empty, or norm_num_groups does not divide
        each of its numbers.
        """
        if not self.block_out_channels:
            raise ConfigError("block_out_channels is empty: give a width for each resolution, such as [128, 256]")
        if any(width % self.norm_num_groups for width in self.block_out_channels):
            raise ConfigError(
                f"block_out_channels {list(self.block_out_channels)}: every width must be a multiple of "
                f"norm_num_groups, {self.norm_num_groups}"
            )
        return self


class Config(SystemConfig):
    unshared = "convolutions need the neighbours of each pixel, and its tokens are not cut"

    image_size: int = Field(256, ge=1)
    """Side of the images in pixels; a multiple of `downsampling_factor`, 2 to the number of halvings."""
    channels: Literal[1, 3, 4] = 3
    """Of the images: 1 grey, 3 RGB, 4 RGBA."""
    discrete: Discrete | None = None
    """The discrete VAE."""
    kl: KL | None = None
    """The KL autoencoder, which has a Gaussian posterior."""

    @model_validator(mode="after")
    def _require_consistent_fields(self) -> "Config":
        """Returns the section. Raises ConfigError unless exactly one of `discrete` and `kl` is given and its fields
        suit the size and the channels of the images.
        """
        if (self.discrete is None) == (self.kl is None):
            number = "neither is" if self.kl is None else "both are"
            raise ConfigError(
                f"discrete and kl: {number} given; give the section of the kind you want ({{}} is all "
                "defaults), null for the other"
            )
        if self.image_size % self.downsampling_factor:
            whole = max(self.image_size // self.downsampling_factor, 1) * self.downsampling_factor
            by = "kl.block_out_channels" if self.kl else "discrete.num_layers"
            raise ConfigError(
                f"image_size {self.image_size} is no multiple of {self.downsampling_factor}, the downsampling of "
                f"{by}; take {whole} or {whole + self.downsampling_factor}, or another {by}"
            )
        if self.discrete and self.discrete.normalization:
            means, stds = self.discrete.normalization
            if not len(means) == len(stds) == self.channels:
                raise ConfigError(
                    f"discrete.normalization has {len(means)} means and {len(stds)} deviations, channels "
                    f"is {self.channels}: give one of each for every channel"
                )
        require_suitable_picture_shape(
            self.variant.perceptual, self.variant.discriminator, self.image_shape, f"{self.variant_name}."
        )
        return self

    @property
    def variant(self) -> "Discrete | KL":
        """Returns the section `discrete` or `kl`, of which exactly one is given."""
        return self.discrete or self.kl

    @property
    def variant_name(self) -> Literal["discrete", "kl"]:
        """Returns which of the two sections is given: "discrete" or "kl"."""
        return "discrete" if self.discrete else "kl"

    @property
    def downsampling_factor(self) -> int:
        """Returns the downsampling factor: the side of an image in pixels / the side of its latents or tokens."""
        return 2 ** (self.discrete.num_layers if self.discrete else len(self.kl.block_out_channels) - 1)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Returns (channels, height, width) of an image, in pixels."""
        return self.channels, self.image_size, self.image_size

    @classmethod
    def complete_section(cls, model: dict[str, Any], run: Run) -> dict[str, Any]:
        """Fills in image_size and channels from the data if the section `model` leaves them out. Returns the
        section.
        """
        return {"image_size": run.data.image_size, "channels": run.data.channels, **model}

    def list_conflicts(self, run: Run) -> list[str]:
        """Returns an error message for each conflict with the rest of the recipe; [] if there are none. Conflicts are
        an image size or channels that differ from the data's, missing weights of the perceptual loss, and
        kl_form=legacy without batch.micro.
        """
        problems = self.list_unequal_fields(run, image_size="image_size", channels="channels")
        problems += describe_missing_perceptual_weights(
            self.variant.perceptual, f"model.{self.variant_name}.perceptual"
        )
        if self.discrete and self.discrete.kl_form == "legacy" and self.discrete.kl_weight and not run.batch.micro:
            problems.append(
                "model.discrete.kl_form=legacy sums over a micro-batch, whose size then decides what is "
                "learned, and without batch.micro changes with the number of ranks: write batch.micro=, "
                "what a rank takes at a time, or model.discrete.kl_form=per_sample"
            )
        return problems
