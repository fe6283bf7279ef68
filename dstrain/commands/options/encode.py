"""Options of `dstrain encode`."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from dstrain.commands.options.arguments import (
    parse_fraction_below_1,
    parse_part_number_and_count,
    parse_positive_integer,
)
from dstrain.commands.options.command import make_argument_field, make_option_field
from dstrain.commands.options.shared import PRECISIONS, Precision, Weights
from dstrain.recipe import ConfigError

_CAPTIONS = "of videos, whose captions are kept, too, and of images with captions"
_PAIRS = "for a prior, pairs of embeddings of captioned images (X.png and X.txt, or tar shards)"
_OF_PAIRS = (
    "out",
    "data",
    "batch",
    "dtype",
    "shard_size",
    "max_bad_fraction",
    "image_encoder",
    "text_encoder",
    "max_text_len",
    "text_encodings",
    "upright",
)


@dataclass(frozen=True)
class EncodeOptions(Weights):
    """Encodes a data set with a trained first stage: latents or token ids as shards, which data.path=DIR then trains
    on. docs/guides/encode.md tells more.
    """

    usage: ClassVar[str] = "dstrain encode RUN | --first-stage PATH  --out DIR [options]"
    examples: ClassVar[str] = r"""
        dstrain encode runs/vae-small --out latents/fashion
        deepspeed --module dstrain encode --first-stage stabilityai/sd-vae-ft-mse --data /data/imagenet/train \
            --image-size 256 --out latents/imagenet256
        deepspeed --module dstrain encode runs/phenaki-tokenizer-small --out tokens/moving
    """

    out: Path = make_option_field(
        None, "where to write; the same command again makes what is missing or damaged", Path, metavar="DIR"
    )
    run: Path | None = make_argument_field(
        "RUN",
        "a run of an autoencoder or of a video tokenizer, for example runs/vae-small, or what `dstrain export RUN "
        "--format safetensors` has made of it",
        Path,
    )
    first_stage: str | None = make_option_field(
        None, "instead: a diffusers AutoencoderKL or AutoencoderRAE, a folder or a name on the hub", metavar="PATH"
    )
    data: str | None = make_option_field(
        None,
        "a folder of images, of videos for a run that learned from videos, or builtin:... (the run's)",
        metavar="PATH",
    )
    split: str = make_option_field(
        "train", "train, held_out or all", metavar="NAME", choices=("train", "held_out", "all")
    )
    held_out: float | None = make_option_field(
        None, "share of the folder that is held out (the run's, or 0)", parse_fraction_below_1, metavar="FRACTION"
    )
    captions: str | None = make_option_field(
        None,
        "of videos: lines of NAME<TAB>CAPTION for --data, where no X.txt stands beside X.mp4",
        metavar="FILE",
        heading=_CAPTIONS,
    )
    clips: int | None = make_option_field(
        None,
        "of videos: so many windows of each, evenly spaced (one, of the middle)",
        parse_positive_integer,
        metavar="N",
        heading=_CAPTIONS,
    )
    num_captions: int | None = make_option_field(
        None,
        "of images with X.txt: keep at most so many captions (lines) of each, of which a step draws one (none, or 1 "
        "with --text-encoder)",
        parse_positive_integer,
        metavar="N",
        heading=_CAPTIONS,
    )
    image_size: int | None = make_option_field(None, "pixels (the run's)", parse_positive_integer, metavar="N")
    batch: int = make_option_field(
        32, "images or clips of one call of the first stage", parse_positive_integer, metavar="N"
    )
    shard_size: int = make_option_field(4096, "samples of a file", parse_positive_integer, metavar="N")
    dtype: str = make_option_field(
        "float16",
        "of latents and texts: float16 or float32",
        metavar="NAME",
        choices=("float16", "float32"),
    )
    crops: int | None = make_option_field(
        None,
        "of images: so many random crops of each, of which a step takes one (the centre)",
        parse_positive_integer,
        metavar="N",
    )
    crop: str = make_option_field(
        "random",
        "these, as data.crop: random (ADM's), random_resized or dalle",
        metavar="NAME",
        choices=("random", "random_resized", "dalle"),
    )
    flip: bool = make_option_field(
        True,
        "without the mirrored images: half the size, and no data.flip; videos are never mirrored",
        name="no-flip",
    )
    upright: bool = make_option_field(
        True,
        "pictures as they lie in their files, not turned as EXIF says: so ADM and DiT read ImageNet",
        name="no-upright",
    )
    text_encoder: str | None = make_option_field(
        None,
        "what encodes the captions, such as a T5 encoder: a folder or a name on the hub (none)",
        metavar="PATH",
        heading=_CAPTIONS,
    )
    max_text_len: int | None = make_option_field(
        None, "text tokens (what the encoder takes)", parse_positive_integer, metavar="N", heading=_CAPTIONS
    )
    part: tuple[int, int] | None = make_option_field(
        None,
        "the Kth of N ranges of shards, for machines without a launcher: each gives the same command with a K of its "
        "own and the same --out (or puts the shards together); the last one writes the index",
        parse_part_number_and_count,
        metavar="K/N",
    )
    max_bad_fraction: float = make_option_field(
        0.01, "unreadable files that are replaced before it ends", parse_fraction_below_1, metavar="F"
    )
    precision: Precision = make_option_field(
        "fp32", "of the first stage: fp32, tf32 or bf16", metavar="NAME", choices=PRECISIONS
    )
    image_encoder: str | None = make_option_field(
        None,
        "a CLIP model: a folder or a name on the hub; with --data, --batch, --dtype, --shard-size as above, and "
        "--text-encoder: the same, or a sentence encoder",
        metavar="PATH",
        heading=_PAIRS,
    )
    text_encodings: bool = make_option_field(False, "a vector for each text token, too", heading=_PAIRS)

    @property
    def makes_embedding_pairs(self) -> bool:
        """Returns whether the options ask for embedding pairs, and not for latents or tokens: by an image encoder, by
        --text-encodings, or by options of texts without a run or a first stage.
        """
        alone = not (self.run or self.first_stage)
        return bool(self.image_encoder or self.text_encodings or (alone and (self.text_encoder or self.max_text_len)))

    def check_options(self) -> None:
        """Raises ConfigError if options do not go together, if --out is missing, or if not exactly one first stage is
        named (embedding pairs need none).
        """
        if self.makes_embedding_pairs:
            self._check_embedding_pair_options()
            return
        if (self.run is None) == (self.first_stage is None):
            raise ConfigError("name one first stage: the folder of a run, or --first-stage PATH; --help shows how")
        if self.out is None:
            raise ConfigError("name the folder to write into: --out DIR")
        if self.first_stage is not None and (self.ema is not None or self.raw or self.step is not None):
            raise ConfigError(
                "--ema, --raw and --checkpoint choose among a run's weights; leave them out with --first-stage"
            )

    def _check_embedding_pair_options(self) -> None:
        """Raises ConfigError if an option that embedding pairs need is missing, or if one is given that they do not
        use.
        """
        for name in ("out", "data"):
            if getattr(self, name) is None:
                raise ConfigError(f"embedding pairs need --{name}: --help shows how")
        for name in ("image_encoder", "text_encoder"):
            if getattr(self, name) is None:
                raise ConfigError(f"embedding pairs need both towers: give --{name.replace('_', '-')}, too")
        other = [
            entry.name
            for entry in fields(self)
            if entry.name not in _OF_PAIRS and getattr(self, entry.name) != entry.default
        ]
        if other:
            raise ConfigError(f"{', '.join(other)}: not for embedding pairs; leave it out")
