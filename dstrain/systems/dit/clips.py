"""Clips in place of images: the number of their frames, and first frames that may be given.

B samples, T frames of C channels and H x W pixels (or their latents, frame by frame), (B, C, T, H, W) in the network.
"""

from collections.abc import Callable
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor

from dstrain import rng
from dstrain.encoders.autoencoder import Autoencoder
from dstrain.recipe import ConfigError, Run, Section
from dstrain.recipe.shapes import Shape
from dstrain.systems.base import Example, Request
from dstrain.systems.beginnings import choose_last_kept_latent_frame, require_valid_cut_shares
from dstrain.systems.dit.conditions import Condition, ForwardArguments

PRIME = "prime"  # given frames in a request's conditions, uint8 (N, K, C, H, W)


class Video(Section):
    frames: int = Field(ge=1)
    """Frames of the longest clip, 1 + k x patch_frames; filled in from data.num_frames."""
    height: int | None = Field(None, ge=1)
    """Height of a clip in pixels, filled in from data.height; None: image_size, its width."""
    patch_frames: int = Field(1, ge=1)
    """Frames of a patch. The first frame is a patch of its own."""
    given: int = Field(0, ge=0)
    """How many first frames may be given at most, 1 + m x patch_frames: channels beside the noised ones hold them (as
    in Wan and Open-Sora 2). 0: none, clips are drawn from texts or labels alone."""
    given_share: float = Field(0.5, gt=0, le=1)
    """Share of training clips whose first frames are given, 1, 1 + patch_frames, ... or `given` of them. The others
    have none, so that clips can be drawn from texts alone."""
    beginnings: tuple[float, ...] = ()
    """Shares of the steps whose clips end with the first, the second, ... patch of frames (clips of 9 frames have 5 of
    patch_frames 2). Such steps cost less, and the first share is of images, from which a model learns how things look
    (trainers of videos mix images in for that). The other steps see whole clips."""

    @model_validator(mode="after")
    def _require_consistent_fields(self) -> "Video":
        """Raises ConfigError if a number of frames does not divide into patches, if no frame is left to draw, or if
        `beginnings` are no valid shares. Returns the section unchanged, as pydantic asks.
        """
        self.require_valid_frame_count("video.frames", self.frames)
        if self.given:
            self.require_valid_frame_count("video.given", self.given)
        if self.given >= self.frames:
            raise ConfigError(f"video.given: {self.given} frames leave none of {self.frames} to draw; give fewer")
        require_valid_cut_shares("video.beginnings", self.beginnings, self.count_temporal_patches(self.frames))
        return self

    def count_temporal_patches(self, frames: int) -> int:
        """Returns the number of patches along time in a clip of `frames` frames. The first frame is a patch of
        its own.
        """
        return 1 + (frames - 1) // self.patch_frames

    def count_frames_at_step(self, step: int) -> int:
        """Returns how many frames of each clip are used in training step `step`, counted from the first. `beginnings`
        gives the shares of steps that use only the first frames; all other steps use whole clips.
        """
        cut = choose_last_kept_latent_frame(self.beginnings, step)
        return self.frames if cut is None else 1 + cut * self.patch_frames

    def require_valid_frame_count(self, key: str, frames: int) -> None:
        """Raises ConfigError if a clip of `frames` frames does not divide into patches (1 + a multiple of
        patch_frames), or is longer than the longest clip. key: the recipe's key, or option, that gives the number, for
        the message.
        """
        step = self.patch_frames
        if frames < 1 or (frames - 1) % step:
            below = 1 + max((frames - 1) // step, 0) * step
            raise ConfigError(
                f"{key}: {frames} frames are no 1 + k x {step}, which patches of model.video.patch_frames={step} "
                f"need; take {below} or {below + step}"
            )
        if frames > self.frames:
            raise ConfigError(f"{key}: {frames} frames, and clips of this model have {self.frames} at most")

    def require_clip_compatible_choices(
        self, patch_side: int, aligned_to_encoder: bool, cached_latents: bool, embedding_dim: int
    ) -> None:
        """Raises ConfigError if another choice of the model does not go with clips, or if patches do not divide the
        clips' height.

        patch_side          side of a patch, in pixels of the clip.
        aligned_to_encoder  whether align.kind=repa is set.
        cached_latents      whether the data are cached latents.
        embedding_dim       width of the image embeddings that the model is conditioned on; 0: none.
        """
        if self.height and self.height % patch_side:
            raise ConfigError(f"video.height: {self.height} is no multiple of {patch_side}, patch_size x factor")
        for name, given, why in (
            ("align.kind=repa", aligned_to_encoder, "it aligns tokens to those of images; take layersync"),
            ("codes", cached_latents, "cached latents are of images; give the clips themselves as data.path"),
            ("embedding_dim", embedding_dim, "image embeddings come with images alone; set it to 0"),
        ):
            if given:
                raise ConfigError(f"video: {name} does not go with clips: {why}, or leave out model.video")

    @classmethod
    def fill_in_clip_shape(cls, section: dict[str, Any], run: Run) -> dict[str, Any]:
        """Returns the recipe's section `video` with `frames` and `height` filled in from the data, where the section
        leaves them out and the data give them.
        """
        of_data = {"frames": run.data.num_frames, "height": run.data.height}
        return {name: value for name, value in of_data.items() if value is not None} | section


def list_clip_conflicts(video: Video | None, run: Run, image_size: int) -> list[str]:
    """Returns the reasons, one message each, why the model cannot learn from the recipe's data; [] if it can. A model
    of clips needs clips with its own number of frames and height. A model of images (`video` is None) needs data
    without frames. image_size: width of the model's clips; also their height if video.height is None.
    """
    data, problems = run.data, []
    if video is None:
        if data.num_frames is not None:
            problems.append(
                f"data.num_frames={data.num_frames}: clips need model.video, such as model.video.patch_frames=2: give "
                "it, or leave data.num_frames out"
            )
        return problems
    if data.num_frames != video.frames:
        problems.append(f"data.num_frames={data.num_frames} and model.video.frames={video.frames}: make both equal")
    height, own = data.height or data.image_size, video.height or image_size
    if height != own:
        problems.append(f"data.height={height} and model.video.height={own} differ: make both equal")
    for frames in data.durations:
        if surplus := (frames - 1) % video.patch_frames:
            problems.append(
                f"data.buckets: {frames} is not 1 + a multiple of model.video.patch_frames {video.patch_frames}: take "
                f"{frames - surplus} or {frames - surplus + video.patch_frames}"
            )
    return problems


class GivenFrames(Condition):
    """The first frames of a clip that are given, (B, C + 1, T, H, W): the frames and, as the last channel, 1 in these
    frames. All else is zero.
    """

    name, argument = PRIME, "given"

    def __init__(self, video: Video, get_input_shape: Callable[[Shape | None, int | None], tuple[int, ...]]) -> None:
        self.video, self.get_input_shape = video, get_input_shape

    def make_arguments_from_example(self, example: Example) -> ForwardArguments:
        """Returns {"given": (B, C + 1, T, H, W)}: x_start with zeros in all frames but the given ones, and a last
        channel that is 1 in the given frames.

        The number of given frames is drawn from each sample's key. A share `given_share` of the clips gets 1, 1 +
        patch_frames, ... or `given` first frames, but never the whole clip. The other clips get none.
        """
        x_start, key, step = example["x_start"], example["key"], self.video.patch_frames
        choices = self.video.count_temporal_patches(min(self.video.given, x_start.shape[2] - step))
        if choices < 1:  # an image, or a clip that a step has cut to one
            return {"given": _zero_later_frames_append_mask(x_start, torch.zeros_like(key))}
        count = 1 + step * rng.integers(key, "given", choices)
        share = rng.uniform(key, "given_share")
        return {"given": _zero_later_frames_append_mask(x_start, torch.where(share < self.video.given_share, count, 0))}

    def make_arguments_from_request(self, request: Request) -> ForwardArguments:
        """Returns {"given": (N, C + 1, T, H, W)} as DiTSystem.sample has put it into the request; zeros, which mean
        that no frame is given, if the request has none.
        """
        if "given" in request.conditions:
            return {"given": request.conditions["given"]}
        channels, *sides = self.get_input_shape(request.size, request.num_frames)
        return {"given": torch.zeros(len(request.seeds), channels + 1, *sides, device=request.seeds.device)}

    def make_conditions_from_images(self, images: Tensor) -> dict[str, Tensor]:
        """Returns {"prime": uint8 (N, K, C, H, W)}, the first frames of the clips to draw. images: first frames of that
        shape, or pictures (N, C, H, W), which are one frame each. Raises ConfigError for more frames than `given`, or
        if they do not divide into patches.
        """
        clips = images if images.ndim == 5 else images[:, None]
        count = clips.shape[1]
        self.video.require_valid_frame_count(PRIME, count)
        if count > self.video.given:
            raise ConfigError(
                f"{PRIME}: {count} frames are given, and the model learned from {self.video.given} at most "
                f"(model.video.given): give fewer, --prime-frames {self.video.given}"
            )
        return {PRIME: clips}

    def draw_synthetic_tensors(self, key: Tensor, size: Shape) -> dict[str, Tensor]:
        """Returns {}, since `make_arguments_from_example` takes the given frames from the batch's own clips."""
        return {}

    def pad_frames_to_clips(self, given: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Turns first frames (N, C, K, H, W) into the network's input `given`, (N, C + 1, T, H, W): zeros follow the K
        frames, and a last channel is 1 in the K frames. shape: (C, T, H, W) of a clip. Raises ConfigError unless K < T,
        and if height or width differ.
        """
        clips = given.new_zeros(len(given), *shape)
        if given.shape[2] >= shape[1] or given.shape[3:] != clips.shape[3:]:
            raise ConfigError(
                f"{PRIME}: {given.shape[2]} frames, {given.shape[4]} wide and {given.shape[3]} high, do not begin a "
                f"clip of {shape[1]} frames, {shape[3]} wide and {shape[2]} high (in the network's input): give fewer "
                "frames, of the clip's size"
            )
        clips[:, :, : given.shape[2]] = given
        return _zero_later_frames_append_mask(clips, torch.full((len(given),), given.shape[2], device=given.device))


def _zero_later_frames_append_mask(clips: Tensor, given_count: Tensor) -> Tensor:
    """Turns clips (B, C, T, H, W) into the network's input `given`, (B, C + 1, T, H, W): sets all frames after the
    first `given_count`, int64 (B,), to zero, and adds a last channel that is 1 in the first `given_count` frames.
    """
    is_given = torch.arange(clips.shape[2], device=clips.device) < given_count[:, None]  # (B, T)
    mark = is_given[:, None, :, None, None].to(clips.dtype).expand(-1, 1, -1, *clips.shape[3:])
    return torch.cat((clips * mark, mark), dim=1)


def encode_clips(pixels: Tensor, key: Tensor, first_stage: Autoencoder | None) -> Tensor:
    """Encodes clips (B, T, C, H, W) in [-1, 1] frame by frame, and returns the latents as x_start (B, c, T, h, w).
    Returns the pixels as (B, C, T, H, W) if first_stage is None. key int64 (B,): each clip's seed, from which the noise
    of its frames is drawn.
    """
    if first_stage is None:
        return pixels.transpose(1, 2)
    keys = rng.integers(key, "frames", 1 << 31, (pixels.shape[1],))  # (B, T)
    return torch.stack([first_stage.encode(*clip) for clip in zip(pixels, keys, strict=True)]).transpose(1, 2)


def decode_clips(x_start: Tensor, first_stage: Autoencoder | None) -> Tensor:
    """Decodes x_start (B, c, T, h, w) to clips (B, T, C, H, W), one clip at a time, to save memory. Only swaps the axes
    if first_stage is None.
    """
    clips = x_start.transpose(1, 2)
    return clips if first_stage is None else torch.stack([first_stage.decode(clip) for clip in clips])
