"""Decides what `dstrain encode` does: the images or videos, and their encoding, on which its bytes depend."""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from dstrain.commands.options.encode import EncodeOptions
from dstrain.data.cached.shards import read_encoding_json_or_index
from dstrain.data.decode.crops import Crop
from dstrain.data.decode.pixels import SUFFIXES
from dstrain.data.formats.base import Request
from dstrain.data.index.build import run_on_rank_0
from dstrain.data.open import BuiltinData, CodesData, make_listing_request, open_sources
from dstrain.data.source import Source, read_items_or_substitutes
from dstrain.data.sources.images import open_images
from dstrain.data.views import Windows
from dstrain.distributed import group
from dstrain.encoders.joined_text import open_text_encoder
from dstrain.encoders.precision import require_supported_precision
from dstrain.encoders.text import TextEncoder
from dstrain.recipe import ConfigError, Data, reword_errors
from dstrain.runs import first_stage
from dstrain.runs.first_stage import FirstStage


@dataclass(frozen=True)
class Plan:
    """Holds the opened first stage, text encoder and source, and the encoding that they will make."""

    stage: FirstStage
    texts: TextEncoder | None  # None: captions are not encoded
    source: Source
    encoding: dict[str, Any]  # JSON, see data/cached/shards.py


def plan_encoding(options: EncodeOptions) -> Plan:
    """Opens the first stage, the text encoder and the data that the options name. Returns them with a description of
    the encoding, which is the same on all ranks. Raises ConfigError if options do not go together or do not suit the
    data.
    """
    require_supported_precision(options.precision)
    if options.run is not None:
        stage = first_stage.open_run_as_first_stage(
            options.run, options.ema, options.raw, options.step, options.precision
        )
    else:
        assert options.first_stage is not None
        stage = first_stage.open_diffusers_autoencoder(options.first_stage, options.image_size, options.precision)
    if options.crops is None and options.crop != "random":
        raise ConfigError(f"--crop {options.crop}: say how many of each image, such as --crops 4")
    if _encodes_videos(stage) and options.crops is not None:
        raise ConfigError("--crops is for images, and videos are cut at their centre: leave it out")
    for name in () if _encodes_videos(stage) else ("clips", "captions"):
        if getattr(options, name) is not None:
            raise ConfigError(
                f"--{name} is for videos, and {stage.name} encodes images: leave it out, or name a run "
                "that learned from videos"
            )
    if _encodes_videos(stage) and options.num_captions is not None:
        raise ConfigError("--num-captions is for images, and each video has one caption: leave it out")
    options = replace(options, upright=_should_turn_pictures_upright(options, stage))
    texts = _open_text_encoder(options)
    return Plan(stage, texts, *_open_source_and_describe_encoding(options, stage, texts))


def _encodes_videos(stage: FirstStage) -> bool:
    """Returns whether the first stage encodes videos, and not images."""
    return stage.data is not None and stage.data.num_frames is not None


def _should_turn_pictures_upright(options: EncodeOptions, stage: FirstStage) -> bool:
    """Returns whether pictures are turned as their EXIF orientation says. This is so if the options, the run and the
    encoding that the folder already holds all say so.
    """
    earlier = None
    with suppress(OSError):  # reported when the folder is prepared
        earlier = run_on_rank_0(lambda: read_encoding_json_or_index(options.out))
    older = earlier is not None and "upright" not in earlier["encoding"]
    return options.upright and not older and (stage.data is None or stage.data.upright)


def _open_text_encoder(options: EncodeOptions) -> TextEncoder | None:
    """Opens the text encoder that --text-encoder names, on the rank's device. Returns None without that option. Raises
    ConfigError if --max-text-len is given without it, or if the encoder cannot be opened.
    """
    if options.text_encoder is None:
        if options.max_text_len is not None:
            raise ConfigError("--max-text-len counts the tokens of --text-encoder: name one, or leave it out")
        return None
    with reword_errors(options={"model.text_encoder:": "--text-encoder:", "max_text_len:": "--max-text-len:"}):
        return open_text_encoder(options.text_encoder, options.max_text_len).to(group.device())


def _open_source_and_describe_encoding(
    options: EncodeOptions, stage: FirstStage, text_encoder: TextEncoder | None
) -> tuple[Source, dict[str, Any]]:
    """Opens the data, and encodes one sample to learn the shapes. Returns the data, and a dict of all settings that
    determine the codes (Plan.encoding). Raises ConfigError if a text encoder is given and the data have no captions.
    """
    source, size = _open_source_and_choose_width(options, stage)
    (first,), _ = read_items_or_substitutes(source, [0])
    if text_encoder is not None and "caption" not in first:
        raise ConfigError(
            f"--text-encoder {options.text_encoder}: the videos have no captions to encode; write X.txt "
            "beside each X.mp4, name a --captions file, or leave it out"
        )
    row = {name: torch.as_tensor(first[name]) for name in ("image", "video", "frames") if name in first}
    probe = stage.codes({name: torch.stack([value] * options.batch).to(group.device()) for name, value in row.items()})
    tokens = probe.dtype.kind == "i"
    encoding = {
        "kind": "tokens" if tokens else "latents",
        "shape": list(probe.shape[1:] if tokens else probe.shape[2:]),
        "dtype": "int32" if tokens else options.dtype,
        "number": len(source),
        "flips": 2 if options.flip and not _encodes_videos(stage) else 1,
        "image_size": size,
        "channels": stage.channels,
        "shard_size": options.shard_size,
        "batch": options.batch,
        "first_stage": stage.fingerprint,
        # All files will be read: their sizes cost little and tell of a changed one.
        "data": group.broadcast_from_first(source.compute_full_fingerprint() if group.rank() == 0 else None),
    }
    if options.upright:  # folders of earlier versions do not have the key
        encoding["upright"] = True
    if options.precision != "fp32":  # folders of earlier versions do not have the key
        encoding["precision"] = options.precision
    if options.crops is not None:
        encoding |= {"crops": options.crops, "crop": options.crop}
    if tokens:
        encoding["codebook_size"] = stage.codebook_size
    text = text_encoder and {
        "encoder": text_encoder.compute_fingerprint(),
        "shape": [text_encoder.max_length, text_encoder.encodings_dim],
        "dtype": options.dtype,
    }
    if stage.data is not None and _encodes_videos(stage):
        encoding |= {
            "num_frames": stage.data.num_frames,
            "frame_stride": stage.data.frame_stride,
            "height": stage.data.height or size,
            "captions": "caption" in first,
            "text": text,
        }
    elif "caption" in first:
        index = getattr(source, "index", None)  # of images in a form of formats/; the built-in have one caption each
        encoding |= {
            "captions": True,
            "text": text,
            "num_captions": min(index.most_captions if index else 1, options.num_captions or 1),
        }
    return source, encoding


def _open_source_and_choose_width(options: EncodeOptions, stage: FirstStage) -> tuple[Source, int]:
    """Opens the images or videos to encode. Returns them, and the side of images or the width of videos in pixels.
    Raises ConfigError if the options name nothing to open, or if it cannot be opened.
    """
    path, size, share, held_out_path = options.data, options.image_size, options.held_out or 0.0, None
    if (run_data := stage.data) is not None:
        size = size or run_data.image_size
        if path is None and run_data.mixture:
            raise ConfigError(
                "the run learned from a mixture: name one of its sources with --data, and encode each "
                "into a folder of its own; data.mixture=[{path: ...}, ...] then mixes the codes"
            )
        if path is None:
            path, held_out_path = run_data.path, run_data.held_out_path
            share = run_data.held_out if options.held_out is None else options.held_out
    if path is None or size is None:
        raise ConfigError("name the images: --data FOLDER (or builtin:fashion) and --image-size PIXELS")
    named = Data(path=path)
    if BuiltinData.recognises(named) and options.held_out:
        raise ConfigError(f"--held-out {options.held_out}: {path} holds out images itself: leave it out")
    if CodesData.recognises(named):
        raise ConfigError(f"--data {path} holds cached codes already: name a folder of images")
    with reword_errors(
        options={
            ", and for evaluation data.held_out_path=": " or --data ",
            "data.path=": "--data ",
            "data.held_out": "--held-out",
            "data.captions=": "--captions ",
            "data.crop=": "--crop ",
        }
    ):
        if run_data is not None and _encodes_videos(stage):
            return _open_clips(options, run_data, path, share, held_out_path), size
        return _open_images(options, stage, path, size, share, held_out_path), size


def _open_images(
    options: EncodeOptions, stage: FirstStage, path: str, size: int, held_out_share: float, held_out_path: str | None
) -> Source:
    """Opens the split options.split of the images at `path`, cropped to `size` pixels. `held_out_share` of them are
    held out, or `held_out_path` names the held-out images. Raises ConfigError if captions are asked for and there are
    none.
    """
    own = stage.data if options.data is None else None
    captions = options.num_captions is not None or options.text_encoder is not None
    request = replace(
        make_listing_request(own) if own is not None else Request(SUFFIXES),
        captions=captions,
        upright=options.upright,
    )
    images = open_images(
        path,
        size,
        channels=stage.channels,
        split=options.split,
        held_out=held_out_share,
        held_out_path=held_out_path,
        request=request,
        crop=Crop() if options.crops is None else Crop(options.crop),
    )
    if captions and not images.captioned:
        option = "--num-captions" if options.num_captions else "--text-encoder"
        raise ConfigError(
            f"{option}: the images of {path} have no captions: write X.txt beside each X.png, or leave it out"
        )
    return images


def _open_clips(
    options: EncodeOptions, run_data: Data, path: str, held_out_share: float, held_out_path: str | None
) -> Source:
    """Opens videos, and cuts them into clips as the run that trained the first stage does. Without --data, opens the
    data of that run, with the images that it mixes into them. Raises ConfigError if the split does not exist, or if
    --clips does not suit it.
    """
    changes = {
        "path": path,
        "mixture": None,
        "held_out": held_out_share,
        "held_out_path": held_out_path,
        "flip": False,
        "codes": None,
        "buckets": None,
        "upright": options.upright,
        "leave_out": (),
    }  # codes have one shape: shorter clips are filled up
    if options.data is not None:
        changes |= {"images": None, "captions": None}
    changes |= {name: value for name in ("image_size", "captions") if (value := getattr(options, name)) is not None}
    if options.split == "all":
        changes |= {"held_out": 0.0, "held_out_path": None}
    train, held_out = open_sources(run_data.model_copy(update=changes))
    source = held_out if options.split == "held_out" else train
    if source is None:
        raise ConfigError("no videos are held out: set data.held_out (a fraction)")
    if options.split == "all" and held_out is not None:
        raise ConfigError(f"--split all: {path} holds out clips itself: take train and held_out, each into a folder")
    if options.clips is None:
        return source
    if source.chance_name is None:
        raise ConfigError(f"--clips {options.clips}: the videos of {path} are as long as a clip: leave it out")
    return Windows(source, options.clips)
