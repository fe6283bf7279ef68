"""What determines a tokenizer: one line for each field."""

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from dstrain.nn.lookup_free import bits_of
from dstrain.nn.picture_loss import Discriminator, Penalty, Perceptual, missing_weights, require_pictures
from dstrain.recipe import MAY_CHANGE, ConfigError, Run
from dstrain.systems.base import SystemConfig
from dstrain.systems.phenaki.tokenizer.network import QUANTIZERS


class FrameDiscriminator(Discriminator):
    weight: float = Field(0.1, ge=0)
    """Length of the adversarial gradient with respect to the judged frame / length of the reconstruction's."""
    penalty: Penalty | None = Penalty()
    """Of its slope at real frames; None: without."""


class Config(SystemConfig):
    learns_from = ("clips", "images")

    image_size: PositiveInt | tuple[PositiveInt, PositiveInt] = 128
    """Pixels: one number, or [height, width]; patch_size divides each."""
    num_frames: int = Field(11, ge=1)
    """Frames of the clips it learns from, 1 + a multiple of temporal_patch_size; 1 for images alone."""
    channels: Literal[1, 3, 4] = 3
    """Of a frame: 1 grey, 3 RGB, 4 RGBA."""
    dim: int = Field(512, ge=1)
    """Width of the transformers."""
    codebook_size: int = Field(8192, ge=2)
    """Number of tokens; a power of two for lookup_free."""
    patch_size: int = Field(8, ge=1)
    """Side of a patch in pixels."""
    temporal_patch_size: int = Field(2, ge=1)
    """Frames of a patch behind the first frame."""
    spatial_depth: int = Field(4, ge=1)
    """Blocks that look about within a latent frame, in the encoder and in the decoder."""
    temporal_depth: int = Field(4, ge=1)
    """Blocks that look back in time, in the encoder and in the decoder."""
    dim_head: int = Field(64, ge=1)
    """Width of a head of attention."""
    heads: int = Field(8, ge=1)
    """Heads of attention."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of values dropped in attention and in feed-forwards."""
    recompute: Annotated[bool, MAY_CHANGE] = False
    """Keep no activations inside blocks, compute them again in backward."""
    quantizer: Literal[QUANTIZERS] = "lookup_free"
    """lookup_free: signs of log2(codebook_size) numbers. cosine: the nearest of codebook_size learned unit vectors."""
    codebook_dim: int = Field(32, ge=1)
    """cosine: width of an entry."""
    commitment_weight: float = Field(0.25, ge=0)
    """Of the square between what is quantized and its code: a mean over bits, or a sum over a unit vector."""
    codebook_weight: float = Field(1.0, ge=0)
    """cosine: of the same, as a loss of the codebook."""
    entropy_weight: float = Field(0.1, ge=0)
    """lookup_free: of a token's entropy in nats, less diversity_gamma times that of the mean over tokens."""
    diversity_gamma: float = Field(1.0, ge=0)
    """lookup_free: how much more an even use of all codes counts than certainty about each."""
    inv_temperature: float = Field(1.0, gt=0)
    """lookup_free: sharpness of the distribution whose entropies these are; a bit's logit is 4 times this times z."""
    usage_decay: float = Field(0.9, ge=0, lt=1)
    """lookup_free: of the running share of each code over global batches, by step."""
    perceptual: Perceptual | None = None
    """LPIPS beside the reconstruction; None: without."""
    discriminator: FrameDiscriminator | None = None
    """An adversary of patches of single frames, as a network of its own; None: without."""

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        if self.quantizer == "lookup_free":
            bits_of(self.codebook_size)
        height, width = self.size
        if height % self.patch_size or width % self.patch_size:
            raise ConfigError(f"patch_size {self.patch_size} does not divide image_size {height} x {width}: take a "
                              "divisor of both sides, or other sides")
        p = self.temporal_patch_size
        if (self.num_frames - 1) % p:
            least = self.num_frames - (self.num_frames - 1) % p
            raise ConfigError(f"num_frames {self.num_frames} is not 1 + a multiple of temporal_patch_size {p}: take "
                              f"{least} or {least + p}")
        require_pictures(self.perceptual, self.discriminator, self.shape)
        return self

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of a frame in pixels."""
        return (self.image_size, self.image_size) if isinstance(self.image_size, int) else self.image_size

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of a frame: channels, height, width."""
        return self.channels, *self.size

    def network_arguments(self) -> dict[str, Any]:
        """CViViT's."""
        names = ("dim", "codebook_size", "image_size", "patch_size", "temporal_patch_size", "spatial_depth",
                 "temporal_depth", "dim_head", "heads", "channels", "quantizer", "codebook_dim", "inv_temperature",
                 "dropout", "recompute")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def completed(cls, model: dict[str, Any], run: Run) -> dict[str, Any]:
        """The section with what the data say where it is silent."""
        height, width = run.data.height or run.data.image_size, run.data.image_size
        return {"image_size": width if height == width else [height, width], "num_frames": run.data.num_frames or 1,
                "channels": run.data.channels, **model}

    def conflicts_at(self, stage: int) -> list[str]:
        penalty = self.discriminator and self.discriminator.penalty
        if stage < 3 or not penalty or penalty.form != "exact":
            return []
        return [f"model.discriminator.penalty.form=exact needs whole weights, ZeRO stage {stage} scatters them: write "
                "model.discriminator.penalty.form=approximate, or take stage 0 to 2, such as ds_configs/zero2.json"]

    def conflicts(self, run: Run) -> list[str]:
        problems = self.unequal(run, channels="channels") + missing_weights(self.perceptual, "model.perceptual")
        height = run.data.height or run.data.image_size
        if self.size != (height, run.data.image_size):
            problems.append(f"data.height={height}, data.image_size={run.data.image_size} (the width) and "
                            f"model.image_size={list(self.size)} differ: make both equal")
        if self.num_frames != (run.data.num_frames or 1):
            problems.append(f"data.num_frames={run.data.num_frames or 1} and model.num_frames={self.num_frames} differ"
                            ": make both equal")
        return problems
