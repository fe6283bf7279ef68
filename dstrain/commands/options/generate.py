"""Options of `dstrain generate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dstrain.commands.options.arguments import (
    make_known_words_parser,
    parse_labels,
    parse_nonnegative_integer,
    parse_positive_integer,
    parse_width_and_height,
    read_nonempty_lines,
)
from dstrain.commands.options.command import make_argument_field, make_option_field
from dstrain.commands.options.shared import GUIDANCE, PRECISIONS, Precision, Sampling, Weights

_VIDEOS = "of videos"


@dataclass(frozen=True)
class GenerateOptions(Weights, Sampling):
    """Draws from a trained run: PNGs (videos: GIF and MP4) in DIR/samples, beside it a grid and an ADM-style .npz
    (embeddings: one .npy).
    """

    usage: ClassVar[str] = "dstrain generate RUN [options]"
    examples: ClassVar[str] = """
        dstrain generate runs/dit-small --num-samples 40 --guidance-scale 4
        dstrain generate runs/phenaki-small --scenes story.txt --num-samples 4
        dstrain generate runs/iddpm-small-14 --then runs/iddpm-small-upsampler
        dstrain generate runs/prior-small --prompts texts.txt --then runs/decoder-small
        deepspeed --module dstrain generate runs/dit-small --num-samples 50000 --no-pngs --batch 64
    """

    folder: Path = make_argument_field(
        "RUN",
        "a run's folder, for example runs/dit-small",
        Path,
        missing="name the folder of a run, for example: dstrain generate runs/dit-small",
    )
    # Not `--num` alone: the deepspeed launcher takes that for the beginning of an option of its own.
    num: int = make_option_field(
        16, "pictures", parse_positive_integer, name="num-samples", metavar="N", aliases=("--num",)
    )
    labels: tuple[int, ...] | None = make_option_field(
        None, "classes, repeated to as many, such as 3,5,5 (every class in turn)", parse_labels, metavar="N,N,..."
    )
    prompts: tuple[str, ...] | None = make_option_field(
        None, "texts, one a line, repeated to as many, for a run that takes them", read_nonempty_lines, metavar="FILE"
    )
    negative_prompt: str | None = make_option_field(
        None,
        "a text that guidance leads away from, instead of the null text (the run's samples.negative_prompt)",
        metavar="TEXT",
    )
    text_encoder: str | None = make_option_field(
        None, "what encodes them, a folder or a name on the hub (the recipe's)", metavar="PATH"
    )
    then: tuple[Path, ...] = make_option_field(
        (),
        "go on from the pictures with another run, such as super-resolution, or from a prior's embeddings with its "
        "decoder; may be given again",
        Path,
        metavar="RUN",
        again=True,
    )
    low_res: Path | None = make_option_field(
        None, "pictures that RUN itself begins from: a folder, or the .npz of an earlier one", Path, metavar="PATH"
    )
    embeddings: Path | None = make_option_field(
        None, "image embeddings that RUN itself begins from, a .npy (N, D)", Path, metavar="FILE"
    )
    seed: int = make_option_field(
        0, "picture i is a function of S + i, on any number of ranks", parse_nonnegative_integer, metavar="S"
    )
    size: tuple[int, int] | None = make_option_field(
        None,
        "width and height of pictures, such as 320x192, for a run of system dit (the run's samples.size)",
        parse_width_and_height,
        metavar="WxH",
    )
    num_steps: int | None = make_option_field(
        None,
        "network evaluations for each picture (the run's samples.num_steps); with model.decoding.order=frames for "
        "each latent frame of a clip",
        parse_positive_integer,
        name="steps",
        metavar="N",
    )
    precision: Precision = make_option_field(
        "fp32",
        "fp32, tf32 (products in TF32) or bf16 (weights and activations)",
        metavar="NAME",
        choices=PRECISIONS,
    )
    batch: int = make_option_field(16, "pictures of one rank at a time", parse_positive_integer, metavar="N")
    out: Path | None = make_option_field(None, "where to write (RUN/generated, generated_2, ...)", Path, metavar="DIR")
    pngs: bool = make_option_field(True, "only the grid and the .npz", name="no-pngs")
    invert: Path | None = make_option_field(
        None,
        "pictures to carry to noise and draw again: a folder or an .npz, repeated to N",
        Path,
        metavar="PATH",
        heading=GUIDANCE,
    )
    tokenizer: str | None = make_option_field(
        None, "what decodes their tokens, a folder (the recipe's)", metavar="FOLDER", heading=_VIDEOS
    )
    num_frames: int | None = make_option_field(
        None,
        "of a clip, or of a scene, those included that are given (the run's samples.num_frames)",
        parse_positive_integer,
        metavar="N",
        heading=_VIDEOS,
    )
    scenes: tuple[str, ...] | None = make_option_field(
        None,
        "texts, one a line: one long clip for each sample, scene after scene",
        read_nonempty_lines,
        metavar="FILE",
        heading=_VIDEOS,
    )
    prime: Path | None = make_option_field(
        None,
        "clips or pictures to go on from: a file, a folder, or the .npz of an earlier one",
        Path,
        metavar="PATH",
        heading=_VIDEOS,
    )
    prime_frames: int | None = make_option_field(
        None,
        "that are given (1 + temporal patch), or that a scene takes over from the one before (1)",
        parse_positive_integer,
        metavar="K",
        heading=_VIDEOS,
    )
    formats: tuple[str, ...] | None = make_option_field(
        None,
        "of the files: gif,mp4 (both)",
        make_known_words_parser("gif", "mp4"),
        name="format",
        metavar="NAMES",
        heading=_VIDEOS,
    )
    fps: int = make_option_field(10, "frames a second", parse_positive_integer, metavar="N", heading=_VIDEOS)
