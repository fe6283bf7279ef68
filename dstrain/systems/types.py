"""Types of the values that a system and its callers exchange. B samples of a batch, N samples of a request."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

# Kinds of data that a system can learn from. Latents are those of images.
Kind = Literal["images", "clips", "latents", "image_tokens", "clip_tokens", "pairs"]

Batch = dict[str, Tensor]  # from data, on the device: image uint8 (B, C, H, W), label int64 (B,), ..., and of each
# sample key, position in the global batch and (in training) step, int64 (B,)
Example = dict[str, Tensor]  # what a loss reads: x_start float32 (B, C, ...), conditions, key int64 (B,)
Terms = dict[str, Tensor]  # "loss", the scalar to descend; all others detached, a scalar or one value a sample (B,):
# loss_each, the loss by sample; quartile, int64 0..3, by which these are split, too
Nets = Mapping[str, Callable[..., Tensor]]  # part -> its engine, or its bare network
Loss = Callable[[Nets, Example], Terms]  # may leave in the example what a later turn of the micro-batch reads
Progress = Callable[[Iterable[int]], Iterable[int]]  # tqdm and the like; `iter` shows nothing


@dataclass(frozen=True)
class Request:
    """What to draw: one sample for each seed."""

    seeds: Tensor  # (N,) int64; a sample is a function of its seed
    conditions: dict[str, Tensor] = field(default_factory=dict)  # for example label (N,) int64
    num_steps: int = 50  # network evaluations for each sample
    sampler: str | None = None  # None: the system's usual one
    guidance_scale: float = 1.0  # 1 is none
    guidance_rescale: float = 0.0  # share, see samplers.make_guided_network
    guidance_interval: tuple[float, float] | None = None  # of noise, sigma / alpha; None: everywhere
    spacing: str | None = None  # of timesteps; None: the sampler's usual
    eta: float | None = None  # amount of noise; None: the sampler's usual
    num_frames: int | None = None  # of videos; None: the model's
    size: tuple[int, int] | None = None  # width and height, pixels; None: the model's
