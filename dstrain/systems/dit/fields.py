"""The fields of a DiT's model section, and what follows from them alone, such as the shape of the network's input."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from dstrain.diffusion.process import Flow
from dstrain.encoders import autoencoder
from dstrain.encoders.reader import ReadsTexts
from dstrain.nn.lora import Lora
from dstrain.recipe import MAY_CHANGE, ConfigError, mark_fixed_on_resume, mark_fixed_once_set
from dstrain.recipe.shapes import Shape
from dstrain.systems.base import SystemConfig
from dstrain.systems.dit.align import Align, Routing
from dstrain.systems.dit.choices import BlockChoices, Diffusion, Internal, Tokens, Wide
from dstrain.systems.dit.clips import Video
from dstrain.systems.dit.first_stage import Codes, FirstStage, Latents
from dstrain.systems.dit.layouts import LAYOUTS
from dstrain.systems.dit.presets import PRESETS, SHAPE


class Fields(SystemConfig, ReadsTexts):
    learns_from = ("images", "latents", "clips")
    learns_durations = True
    without_labels = "model.num_classes=1"
    null_field = "class_dropout_prob"
    adapters_field = "lora"
    no_captions = "write X.txt beside X.png, or encode with --text-encoder, or set model.condition=label"

    size: Literal[tuple(PRESETS)] | None = None
    """A published size such as DiT-XL/2 or LightningDiT-XL/1, with its choices of blocks where it has any; None takes
    patch_size, hidden_size, depth and num_heads."""
    patch_size: int | None = Field(None, ge=1)
    """Side of a patch, in the network's input pixels."""
    hidden_size: int | None = Field(None, ge=4)
    """Width of a token; a multiple of 4 and of num_heads."""
    depth: int | None = Field(None, ge=1)
    """Number of blocks."""
    num_heads: int | None = Field(None, ge=1)
    """Attention heads of a block."""
    mlp_ratio: float = Field(4.0, gt=0)
    """Hidden width of a block's MLP / hidden_size."""
    image_size: int = Field(256, ge=1)
    """Side of the images in pixels; with a first stage the network's input is this / first_stage.factor."""
    in_channels: int = Field(4, ge=1)
    """Channels of the network's input: 4 for Stable Diffusion's latents, 3 or 1 for pixels."""
    latents: Latents = Latents()
    """How latents are brought to unit variance."""
    condition: Literal["label", "text"] = "label"
    """What pictures are drawn from: a label, or a text. Texts come with the images as captions, or encoded in
    data.path."""
    cross_attention: bool = False
    """Whether blocks read a text by cross-attention behind their own (PixArt); else its tokens are condition tokens,
    beside those of the image."""
    text_projection: Literal["linear", "mlp", "plain"] = "linear"
    """How states of a text encoder become tokens: by one layer behind a norm, by two layers (PixArt), or by one alone
    (SD3)."""
    text_pooled_dim: int = Field(0, ge=0)
    """Values of a text's pooled vector, which adds to the condition; 0: there is none. It stands before the states of
    text_encoder (2048 of SD3's encoders); of hashed words it is the mean of their rows in a second learned table."""
    null_text: Literal["learned", "encoder"] = "learned"
    """What is read where a text is dropped, and of an empty prompt: a learned token, or the states of text_encoder for
    an empty text (PixArt), which is loaded when training starts."""
    num_classes: int = Field(1000, ge=1)
    """Number of labels; 1 for an unconditional model, whose data need none. Not read with condition=text."""
    class_dropout_prob: float = Field(0.1, ge=0, le=1)
    """Share of training samples without label or text, and embedding; 0 leaves out the null row or text, and with it
    guidance."""
    embedding_dim: int = Field(0, ge=0)
    """Width of the image embedding that pictures are drawn from, as DALL-E 2's decoder does; 0: from none. Images come
    with theirs by data.embeddings."""
    lora: Lora | None = None
    """Adapters that learn in the place of the weights of init_from; None: all weights learn."""
    learn_sigma: bool = True
    """Whether the network also predicts variances, by twice as many output channels."""
    objective: Literal["diffusion", "flow"] = "diffusion"
    """Discrete-time diffusion, or flow matching (with learn_sigma its second half of channels is unused)."""
    diffusion: Diffusion = Diffusion()
    """Read where objective is diffusion."""
    flow: Flow = Flow()
    """Read where objective is flow."""
    time_freq: Literal["official", "diffusers", "fourier"] = "official"
    """Spacing of the timestep sinusoids: of the published weights, of diffusers' DiTPipeline, or fixed random
    frequencies (RAE)."""
    block: BlockChoices = BlockChoices()
    """What every block is made of."""
    sines: bool = True
    """Whether fixed sines of the position are added to tokens; with block.rope they may be left out."""
    sines_within: tuple[PositiveInt, PositiveInt] | None = None
    """[N, R]: patches lie in the middle of a square of N x N, whose sides run over positions of 0 to R, whatever the
    size of an image (SD3: [192, 64]); None: all sizes run over the range of image_size."""
    tokens: Tokens = Tokens()
    """Condition tokens beside the image's."""
    patch_bottleneck: int = Field(0, ge=0)
    """Channels between a map of the patch's pixels and one to the width (JiT, of pixels); 0: one map."""
    wide: Wide | None = None
    """A second, wider trunk as the head, on the input's own patches under a condition for each (RAE)."""
    layout: Annotated[Literal[tuple(LAYOUTS)] | None, MAY_CHANGE] = None
    """Whose names and time the weights of init_from have, where the names do not tell it: sit for files of SiT. None:
    recognised by their names, else ours."""
    internal: Internal | None = None
    """A second head in the middle, for internal guidance; flows alone."""
    align: Align | None = None
    """An alignment of tokens in the middle, which makes training shorter: LayerSync, REPA."""
    routing: Routing | None = None
    """A share of the tokens passes blocks by in training (TREAD); it pays from about 1,000 tokens on."""
    video: Video | None = None
    """Clips in place of images, by patches over frames, too; with data.num_frames. None: images."""
    guidance_channels: Annotated[int | None, MAY_CHANGE] = Field(None, ge=1)
    """Leading channels that are guided; None means all; 3 is what the published samples did."""
    first_stage: FirstStage | None = None
    """Autoencoder whose latents are modelled; None models what the data hold."""
    sizes: Annotated[tuple[Shape, ...] | None, mark_fixed_on_resume("give the earlier data.buckets")] = None
    """Widths and heights of the images that it learns from, filled in from data.buckets; None: image_size squared.
    Positions of any size run over the range of image_size: leave that as it was where init_from is given."""
    size_conditions: Annotated[bool, mark_fixed_once_set()] = False
    """Whether the original size of an image and its crop are conditions, filled in from data.size_conditions."""
    size_embedding: Literal["sdxl", "pixart"] = "sdxl"
    """How these become a vector: all six numbers together (SDXL), or the original height and width and the crop's
    height / width apart, a third of hidden_size each (PixArt's network of 1,024 pixels)."""
    interpolation_scale: int = Field(1, ge=1)
    """What places of patches are divided by before their sines are taken: 2 in PixArt's networks of 1,024 pixels."""
    codes: Annotated[Codes | None, mark_fixed_on_resume("give the data.path of the earlier latents")] = None
    """Latents that data.path holds ready, filled in from its index; the first stage then only decodes."""

    def get_routed_block_range(self) -> tuple[int, int]:
        """Returns the numbers, counted from 1, of the first and the last block that tokens may skip; (0, 0) without
        routing.
        """
        if self.routing is None:
            return 0, 0
        end = self.get_network_shape()["depth"] - 1 if self.routing.end is None else self.routing.end
        return self.routing.start, end

    def get_latent_scale_and_shift(self) -> tuple[autoencoder.Values, autoencoder.Values]:
        """Returns (scale, shift), by which latents become the network's input: (latents - shift) * scale. Each is one
        number, or a list with one for each channel.
        """
        if self.latents.normalize == "channels":
            return [1 / value for value in self.latents.std], self.latents.mean
        if self.first_stage is not None:
            return self.first_stage.scaling_factor, self.first_stage.shift
        return (self.codes.scaling_factor if self.codes else 1.0), 0.0

    @property
    def num_labels(self) -> int | None:
        """Returns the number of classes; None if samples are conditioned on texts."""
        return None if self.reads_texts else self.num_classes

    @property
    def reads_texts(self) -> bool:
        """Returns whether samples are conditioned on texts, and not on labels."""
        return self.condition == "text"

    @property
    def reads_text_padding(self) -> bool:
        """Returns whether the network reads all tokens of every text, padding included, as in SD3. It then needs no
        mask.
        """
        return self.reads_texts and self.block.joint and self.text_pooled_dim > 0 and self.null_text == "encoder"

    @property
    def learns_null_text(self) -> bool:
        """Returns whether the null text, the input for no text, is a learned token rather than the encoding of an empty
        text.
        """
        return self.has_null_text and self.null_text == "learned"

    def get_network_shape(self) -> dict[str, int]:
        """Returns patch_size, hidden_size, depth and num_heads by name: those of the preset that `size` names, or else
        the fields of these names.
        """
        return (
            self.model_dump(include=set(SHAPE))
            if self.size is None
            else {name: PRESETS[self.size][name] for name in SHAPE}
        )

    @property
    def input_size(self) -> int:
        """Returns the side of the network's square input: in values of the latents, or in pixels if the network learns
        these.
        """
        if self.first_stage is None:
            return self.image_size if self.codes is None else self.codes.shape[1]
        return self.image_size // self.first_stage.factor

    def get_input_shape(self, size: Shape | None = None, frames: int | None = None) -> tuple[int, ...]:
        """Returns the shape of the network's input, (C, h, w), for images of `size` = (width, height) pixels; None:
        squares of image_size. For a model of clips returns (C, T, h, w). frames: T; None: that of the longest clip.

        Raises ConfigError if patches do not divide a side, or if `frames` is too large or does not divide into patches.
        """
        if self.video is not None:
            frames = self.video.frames if frames is None else frames
            self.video.require_valid_frame_count("num_frames", frames)
            size = size or (self.image_size, self.video.height or self.image_size)
        if size is None:
            return self.in_channels, self.input_size, self.input_size
        factor, patch = self.image_size // self.input_size, self.get_network_shape()["patch_size"]
        wide, high = size
        if wide % (factor * patch) or high % (factor * patch):
            raise ConfigError(f"{wide} x {high}: both sides must be multiples of {factor * patch}")
        times = () if self.video is None else (frames,)
        return self.in_channels, *times, high // factor, wide // factor

    def count_tokens(self, input_shape: tuple[int, ...]) -> int:
        """Returns the number of patches in a network input of `input_shape` = (C, h, w), or (C, T, h, w) for clips."""
        count = input_shape[-2] * input_shape[-1] // self.get_network_shape()["patch_size"] ** 2
        return count if self.video is None else count * self.video.count_temporal_patches(input_shape[1])

    @property
    def learns_pixels(self) -> bool:
        """Returns whether the network learns pixels, of 1 or 3 channels, rather than latents. Pixels lie in [-1, 1], so
        that a predicted x_start may be clipped.
        """
        return not (self.first_stage or self.codes) and self.in_channels in (1, 3)
