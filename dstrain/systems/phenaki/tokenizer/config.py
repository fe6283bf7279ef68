"""The `model` section of a recipe for Phenaki's tokenizer: a documented field for each choice."""

from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from dstrain.nn.finite_scalar import require_valid_levels
from dstrain.nn.lookup_free import compute_codebook_bits
from dstrain.nn.picture_loss import (
    Discriminator,
    Penalty,
    Perceptual,
    describe_missing_perceptual_weights,
    require_suitable_picture_shape,
)
from dstrain.recipe import ConfigError, Run
from dstrain.systems.base import SystemConfig, list_indivisible_counts


class FrameDiscriminator(Discriminator):
    weight: float = Field(0.1, ge=0)
    """Length of the adversarial gradient with respect to the judged frame / length of the reconstruction's."""
    penalty: Penalty | None = Penalty()
    """Penalty on its slope at real frames; None: there is none."""


class Config(SystemConfig):
    learns_from = ("clips", "images")
    learns_durations = True

    image_size: PositiveInt | tuple[PositiveInt, PositiveInt] = 128
    """Side of a frame in pixels, or [height, width]; patch_size divides each."""
    num_frames: int = Field(11, ge=1)
    """Frames of the clips that it learns from, 1 + a multiple of temporal_patch_size; 1 for images alone."""
    channels: Literal[1, 3, 4] = 3
    """Of a frame: 1 grey, 3 RGB, 4 RGBA."""
    dim: int = Field(512, ge=1)
    """Width of the transformers."""
    codebook_size: int = Field(8192, ge=2)
    """Number of tokens; a power of two for lookup_free."""
    patch_size: int = Field(8, ge=1)
    """Side of a patch in pixels."""
    temporal_patch_size: int = Field(2, ge=1)
    """Frames of a patch after the first frame."""
    spatial_depth: int = Field(4, ge=1)
    """Blocks with attention within a latent frame, in the encoder and in the decoder."""
    temporal_depth: int = Field(4, ge=1)
    """Blocks with attention to earlier latent frames, in the encoder and in the decoder."""
    dim_head: int = Field(64, ge=1)
    """Width of an attention head."""
    heads: int = Field(8, ge=1)
    """Attention heads of a block."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of values dropped in attention and in feed-forwards."""
    quantizer: Literal["lookup_free", "fsq", "cosine"] = "lookup_free"
    """lookup_free: signs of log2(codebook_size) numbers. fsq: few numbers rounded to levels. cosine: the nearest of
    codebook_size learned unit vectors."""
    levels: tuple[int, ...] | None = None
    """fsq: levels of each number, whose product is codebook_size, such as [8, 5, 5, 5] for 1000."""
    codebook_dim: int = Field(32, ge=1)
    """cosine: width of an entry."""
    commitment_weight: float = Field(0.25, ge=0)
    """Weight of the squared distance to the code: a mean over bits (lookup_free), a sum over a vector (cosine)."""
    codebook_weight: float = Field(1.0, ge=0)
    """cosine: weight of the same distance as a loss of the codebook."""
    entropy_weight: float = Field(0.1, ge=0)
    """lookup_free: weight of a token's entropy in nats, minus diversity_gamma * that of the mean over tokens."""
    diversity_gamma: float = Field(1.0, ge=0)
    """lookup_free: weight of an even use of all codes, relative to certainty about each token."""
    inv_temperature: float = Field(1.0, gt=0)
    """lookup_free: sharpness of the distribution with these entropies; a bit's logit is 4 * inv_temperature * z."""
    usage_decay: float = Field(0.9, ge=0, lt=1)
    """lookup_free: decay by step of the running share of each code in the global batches."""
    perceptual: Perceptual | None = None
    """LPIPS beside the reconstruction; None: there is none."""
    discriminator: FrameDiscriminator | None = None
    """An adversary that judges patches of single frames, with an optimizer of its own; None: there is none."""

    @model_validator(mode="after")
    def _require_consistent_fields(self) -> "Config":
        """Returns the section. Raises ConfigError if quantizer, levels, codebook_size, sizes or patch sizes do not go
        together.
        """
        if self.quantizer == "lookup_free":
            compute_codebook_bits(self.codebook_size)
        if (self.quantizer == "fsq") != (self.levels is not None):
            raise ConfigError(
                "levels belong to quantizer=fsq, which needs them: write levels=[8,5,5,5] and "
                "codebook_size=1000, or leave both out"
            )
        if self.levels is not None:
            require_valid_levels(self.levels, self.codebook_size, "codebook_size")
        height, width = self.frame_size
        if height % self.patch_size or width % self.patch_size:
            raise ConfigError(
                f"patch_size {self.patch_size} does not divide image_size {height} x {width}: take a "
                "divisor of both sides, or other sides"
            )
        p = self.temporal_patch_size
        if surplus := (self.num_frames - 1) % p:
            fewer = self.num_frames - surplus
            raise ConfigError(
                f"num_frames {self.num_frames} is not 1 + a multiple of temporal_patch_size {p}: take "
                f"{fewer} or {fewer + p}"
            )
        require_suitable_picture_shape(self.perceptual, self.discriminator, self.frame_shape)
        return self

    @property
    def frame_size(self) -> tuple[int, int]:
        """Returns (height, width) of a frame, in pixels."""
        return (self.image_size, self.image_size) if isinstance(self.image_size, int) else self.image_size

    @property
    def frame_shape(self) -> tuple[int, int, int]:
        """Returns (channels, height, width) of a frame, in pixels."""
        return self.channels, *self.frame_size

    def make_network_arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments with which the network CViViT is built."""
        names = (
            "dim",
            "codebook_size",
            "image_size",
            "patch_size",
            "temporal_patch_size",
            "spatial_depth",
            "temporal_depth",
            "dim_head",
            "heads",
            "channels",
            "quantizer",
            "levels",
            "codebook_dim",
            "inv_temperature",
            "dropout",
        )
        return {name: getattr(self, name) for name in names}

    @classmethod
    def complete_section(cls, model: dict[str, Any], run: Run) -> dict[str, Any]:
        """Returns the section `model` with image_size, num_frames and channels of the data if it leaves them out."""
        width, height = run.data.image_size, run.data.height or run.data.image_size
        return {
            "image_size": width if height == width else [height, width],
            "num_frames": run.data.num_frames or 1,
            "channels": run.data.channels,
            **model,
        }

    def list_conflicts_among_ranks(self, ranks: int) -> list[str]:
        """Returns an error message for each number that cannot be divided by `ranks`, the ranks that would share a
        clip's tokens: rows of patches, heads and channels. [] if all can.
        """
        rows = self.frame_size[0] // self.patch_size
        return list_indivisible_counts(
            ranks,
            {"rows of a frame's patches": rows, "attention heads, heads": self.heads, "channels, dim": self.dim},
        )

    def list_conflicts_at_stage(self, stage: int) -> list[str]:
        """Returns [one error message] at ZeRO stage 3 if the penalty's form is exact, which needs whole weights; []
        otherwise.
        """
        penalty = self.discriminator and self.discriminator.penalty
        if stage < 3 or not penalty or penalty.form != "exact":
            return []
        return [
            f"model.discriminator.penalty.form=exact needs whole weights, ZeRO stage {stage} scatters them: write "
            "model.discriminator.penalty.form=approximate, or take stage 0 to 2, such as ds_configs/zero2.json"
        ]

    def list_conflicts(self, run: Run) -> list[str]:
        """Returns an error message for each conflict with the data: their channels, size or numbers of frames differ,
        or weights of the perceptual loss are missing. [] if there are none.
        """
        problems = self.list_unequal_fields(run, channels="channels") + describe_missing_perceptual_weights(
            self.perceptual, "model.perceptual"
        )
        height = run.data.height or run.data.image_size
        if self.frame_size != (height, run.data.image_size):
            problems.append(
                f"data.height={height}, data.image_size={run.data.image_size} (the width) and "
                f"model.image_size={list(self.frame_size)} differ: make both equal"
            )
        if self.num_frames != (frames := run.data.num_frames or 1):
            problems.append(f"data.num_frames={frames} and model.num_frames={self.num_frames} differ: make both equal")
        p = self.temporal_patch_size
        for frames in run.data.durations:
            if surplus := (frames - 1) % p:
                problems.append(
                    f"data.buckets: {frames} is not 1 + a multiple of model.temporal_patch_size {p}: take "
                    f"{frames - surplus} or {frames - surplus + p}"
                )
        return problems
