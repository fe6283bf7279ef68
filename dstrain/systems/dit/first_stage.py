"""The sections of a DiT's first stage, which is the autoencoder of its latents, of cached latents, and of their
scale.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from dstrain.encoders.autoencoder import Autoencoder, Values
from dstrain.encoders.precision import Precision
from dstrain.recipe import MAY_CHANGE, ConfigError, Section, mark_fixed_once_set
from dstrain.recipe import Codes as RunCodes


class FirstStage(Section):
    path: str
    """Folder of a diffusers AutoencoderKL (or of a pipeline with a vae/) or AutoencoderRAE, or its name on the Hugging
    Face hub."""
    scaling_factor: Annotated[float | None, mark_fixed_once_set()] = Field(None, gt=0)
    """Latents are multiplied by it. None takes the autoencoder's own; that of a folder is written into the run."""
    shift: Annotated[float | None, mark_fixed_once_set()] = None
    """Subtracted from latents before they are scaled; None as for scaling_factor."""
    fingerprint: Annotated[
        str | None, mark_fixed_once_set("put the earlier autoencoder back at model.first_stage.path")
    ] = None
    """Fingerprint of the only autoencoder to accept. None accepts any; that of a folder is written into the run."""
    factor: int = Field(8, ge=1)
    """Image side / latent side."""
    precision: Annotated[Precision | None, MAY_CHANGE] = None
    """fp32, tf32 or bf16: in which it encodes while the DiT trains; None: tf32 where the GPU has it, as DiT's train.py.
    """
    image_channels: int | None = Field(None, ge=1)
    """Channels of its images, filled in from data.channels; None takes the autoencoder's."""


class Codes(Section):
    shape: tuple[int, int, int]
    """Channels, height and width of an image's latents."""
    scaling_factor: float = Field(gt=0)
    """1 / their standard deviation; without first_stage they are multiplied by it."""
    first_stage: str
    """Fingerprint of the autoencoder that made them."""
    text: tuple[int, int] | None = None
    """Tokens and width of the text encodings beside them, for condition=text; None: there are none."""
    text_encoder: Annotated[str | None, mark_fixed_once_set("give the data.path of the earlier latents")] = None
    """Fingerprint of the encoder that made these."""

    def require_latents_match_input(
        self, in_channels: int, image_size: int, input_size: int, factor: int, patch_size: int
    ) -> None:
        """Raises ConfigError if the cached latents are not the network's input: if their channels or sides differ from
        the model's, or patches do not divide their side.

        input_size  side of the network's input, in latents.
        factor      image side / latent side.
        patch_size  side of a patch, in latents.
        """
        channels, *sides = self.shape
        if in_channels != channels:
            raise ConfigError(
                f"in_channels {in_channels}: the latents in data.path have {channels} channels; set in_channels to "
                f"{channels}"
            )
        if sides != [input_size] * 2:
            other = "" if image_size % sides[0] else f", or first_stage.factor to {image_size // sides[0]}"
            raise ConfigError(
                f"image_size {image_size}: images of this side would have latents of side {input_size} by "
                f"first_stage.factor {factor}, those in data.path are {sides[0]} x {sides[1]}; set image_size to "
                f"{sides[0] * factor}{other}"
            )
        if sides[0] % patch_size:
            raise ConfigError(f"patch_size {patch_size} does not divide the latents' side, {sides[0]}")


class Latents(Section):
    normalize: Literal["scale", "channels"] = "scale"
    """By one factor for all channels, or each channel to mean 0 and deviation 1 (LightningDiT, RAE)."""
    mean: Annotated[tuple[float, ...] | None, mark_fixed_once_set()] = None
    """Of each channel, for channels. None takes those of the latents in data.path, which `dstrain encode` has measured,
    else latents_mean of the autoencoder's config."""
    std: Annotated[tuple[Annotated[float, Field(gt=0)], ...] | None, mark_fixed_once_set()] = None
    """Deviation of each channel; None as for mean, of latents_std."""

    @classmethod
    def fill_in_channel_moments(
        cls, section: dict[str, Any], codes: RunCodes | None, autoencoder: Autoencoder | None
    ) -> dict[str, Any]:
        """Returns the recipe's section `latents` with the mean and std of each channel filled in, if normalize=channels
        and the section has neither. Takes them from the cache (`codes`) or, without a cache, from the autoencoder's
        config. Returns the section unchanged in all other cases, and if that config has none.
        """
        if section.get("normalize") != "channels" or section.get("mean") or section.get("std"):
            return section
        moments = (codes.channel_mean, codes.channel_std) if codes else None
        if moments is None and autoencoder is not None:
            moments = autoencoder.read_channel_means_and_stds()
        return section | dict(zip(("mean", "std"), moments or ()))

    def require_channel_moments(self, channels: int) -> None:
        """Raises ConfigError if normalize=channels lacks the mean or the std of the channels, if their number is not
        `channels`, or if normalize=scale has either.
        """
        if self.normalize == "scale" and (self.mean or self.std):
            raise ConfigError("latents.mean, latents.std: they are read by latents.normalize=channels alone")
        if self.normalize == "channels" and not (self.mean and self.std):
            raise ConfigError(
                "latents.normalize: channels needs the mean and deviation of each, which neither the data nor the "
                "autoencoder's config (latents_mean, latents_std) say: encode the images, since `dstrain encode` "
                "measures them, or write latents.mean and latents.std"
            )
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values and len(values) != channels:
                raise ConfigError(f"latents.{name}: it has {len(values)} values, and the latents {channels} channels")


def load_first_stage(
    section: FirstStage, codes: Codes | None, in_channels: int, image_size: int, scale_and_shift: tuple[Values, Values]
) -> Autoencoder:
    """Returns the autoencoder that `section` names. Drops its encoder if the latents come from a cache.

    codes            what is known of the cached latents; None: there is no cache.
    in_channels      number of channels of the latents.
    image_size       side of the images, in pixels.
    scale_and_shift  (scale, shift) of the latents.

    Raises ConfigError if the autoencoder's factor, channels or image size differ from the recipe's, or if its
    fingerprint differs from that of the section or of the cache.
    """
    path = section.path
    autoencoder = Autoencoder(path, *scale_and_shift)
    for name, configured, actual in (
        ("first_stage.factor", section.factor, autoencoder.factor),
        ("in_channels", in_channels, autoencoder.channels),
        ("data.channels", section.image_channels, autoencoder.image_channels),
        ("image_size", autoencoder.image_size and image_size, autoencoder.image_size),
    ):
        if configured not in (None, actual):
            raise ConfigError(f"{name}: {configured} in the recipe, {actual} in autoencoder {path}: make both equal")
    # Hashing all weights takes a while, so it is done once and only where there is something to compare with.
    hashed = autoencoder.compute_fingerprint() if codes is not None or section.fingerprint is not None else None
    if section.fingerprint not in (None, hashed):
        raise ConfigError(
            f"model.first_stage.path: {path} is the autoencoder {hashed}, this model was trained with "
            f"{section.fingerprint} (first_stage.fingerprint); put that one back there"
        )
    if codes is not None:
        if hashed != codes.first_stage:
            raise ConfigError(
                f"model.first_stage.path: {path} is the autoencoder {hashed}, the latents in data.path are of "
                f"{codes.first_stage}; name the one that encoded them, or encode with this one"
            )
        autoencoder.drop_encoder()
    else:
        autoencoder.set_encode_precision(section.precision)
    return autoencoder
