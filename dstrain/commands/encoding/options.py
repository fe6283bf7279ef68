"""The options of launch/encode.py, and what they name, opened."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.data.source import Source
from dstrain.encoders.precision import Precision
from dstrain.encoders.text import TextEncoder
from dstrain.runs.first_stage import FirstStage


@dataclass(frozen=True)
class EncodeOptions:
    """What to encode, and with what."""

    out: Path  # folder of the shards
    run: Path | None = None  # of a system that encodes, or its export as safetensors; or
    first_stage: str | None = None  # a diffusers AutoencoderKL: folder, or name on the hub; of latents of
    # others also name:NAME, of an encoder that is not read here
    data: str | None = None  # folder of images or videos, or builtin:...; None: the run's
    split: str = "train"  # train, held_out or all
    held_out: float | None = None  # share of the folder that is held out; None: the run's
    captions: str | None = None  # of videos: a captions file; None: the run's, for the run's data
    clips: int | None = None  # of videos: windows of each, evenly spaced; None: one
    num_captions: int | None = None  # of images: captions of each that are kept; None: none, or as videos
    image_size: int | None = None  # pixels; None: the run's
    batch: int = 32  # samples of one call of the first stage
    shard_size: int = 4096  # samples
    dtype: str = "float16"  # of latents and texts on the disk: float16 or float32
    crops: int | None = None  # of images: random crops of each; None: the centre
    crop: str = "random"  # these, as data.crop names them
    flip: bool = True  # encode the mirrored images, too; never videos: captions name directions
    text_encoder: str | None = None  # of captions: a folder, or name on the hub
    max_text_len: int | None = None  # text tokens; None: what the encoder takes
    ema: float | None = None  # of a run: decay; None: its choice
    raw: bool = False  # of a run: the training weights instead of an average
    step: int | None = None  # of a run: checkpoint; None: the newest whole one
    part: tuple[int, int] | None = None  # (3, 16): the third of 16 equal ranges of shards; None: all
    max_bad_fraction: float = 0.01  # of the samples, replaced where unreadable
    precision: Precision = "fp32"  # of the first stage


@dataclass(frozen=True)
class Plan:
    """What the options name, opened."""

    stage: FirstStage
    texts: TextEncoder | None  # None: captions are not encoded
    source: Source
    encoding: dict[str, Any]  # JSON, see data/cached/shards.py
