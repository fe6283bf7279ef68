"""Options of `dstrain evaluate`."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dstrain.commands.options.arguments import (
    parse_labels,
    parse_nonnegative_integer,
    parse_positive_integer,
    read_nonempty_lines,
    split_at_commas,
)
from dstrain.commands.options.command import make_argument_field, make_option_field
from dstrain.commands.options.shared import PRECISIONS, Precision, Sampling, Weights
from dstrain.recipe import ConfigError

_PICTURES = "of pictures"
_DRAWN = "of pictures that RUN draws, as in dstrain generate"
_SAMPLING = (*Sampling.__annotations__, "labels", "prompts", "seed", "prime_frames")
_METRICS = ("features", "reference", "images", "against", "write_reference", "kept", *_SAMPLING)  # need --metrics
_DRAWING = ("num_steps", "ema", "raw", "step", *_SAMPLING)  # a run that draws
_NAMES = {"num": "num-samples", "num_steps": "steps", "step": "checkpoint"}  # of options that are named otherwise


@dataclass(frozen=True)
class EvaluateOptions(Weights, Sampling):
    """Measures a trained run on held-out data: bits/dim and the bound by timestep, as JSON and a plot. With --metrics
    it measures the pictures that a run draws, or two sets of images, by FID and its like (docs/guides/metrics.md).

    The same question again replaces its own files. A chain of T timesteps calls the network T times for each image.
    """

    usage: ClassVar[str] = """
        dstrain evaluate RUN [options]
        dstrain evaluate RUN --metrics NAMES [--features KIND:PATH ...] [--reference PATH] [options]
        dstrain evaluate --images A --against B --metrics NAMES --features KIND:PATH [options]
    """
    examples: ClassVar[str] = r"""
        dstrain evaluate runs/dit-small --num-samples 100 --steps 100
        deepspeed --module dstrain evaluate runs/dit-xl2 --metrics fid,kid,pr,is \
            --features inception:pt_inception.pth --reference VIRTUAL_imagenet256_labeled.npz --guidance-scale 1.5
    """

    folder: Path | None = make_argument_field("RUN", "a run's folder, for example runs/dit-small", Path)
    split: str | None = make_option_field(
        None,
        "held_out, train, or test, which embedding pairs have (held_out; of metrics' reference: train)",
        metavar="NAME",
        choices=("held_out", "train", "test"),
    )
    data: str | None = make_option_field(
        None,
        "all images (videos) of another folder instead, with class folders named as in training",
        metavar="PATH",
    )
    num: int | None = make_option_field(
        None,
        "as many samples, evenly spaced over the split (all); with --metrics: to draw (50000)",
        parse_positive_integer,
        name="num-samples",
        metavar="N",
    )
    num_steps: int | None = make_option_field(
        None,
        "evenly spaced timesteps, a shortened chain with a looser bound (the whole chain); with --metrics: network "
        "evaluations for each picture (the run's samples.num_steps)",
        parse_positive_integer,
        name="steps",
        metavar="N",
    )
    batch: int = make_option_field(
        32, "images of one rank at a time; changes figures by rounding alone", parse_positive_integer, metavar="N"
    )
    precision: Precision = make_option_field(
        "fp32",
        "fp32, tf32 or bf16: faster on a GPU, slightly other figures; features are always fp32",
        metavar="NAME",
        choices=PRECISIONS,
    )
    out: Path | None = make_option_field(None, "where to write (RUN/evaluation)", Path, metavar="DIR")
    metrics: tuple[str, ...] | None = make_option_field(
        None,
        "fid, sfid, kid, is, pr, dc, fd_dinov2, fd_clip, clip_score, fvd; fd, accuracy of built-in data; retrieval, "
        "of pictures with captions (--features clip:FOLDER; of built-in emoji none); or scenes: random stories of "
        "four scenes (250), of a run on the built-in clips (docs/guides/scenes.md)",
        split_at_commas,
        metavar="NAMES",
        heading=_PICTURES,
    )
    features: tuple[str, ...] = make_option_field(
        (),
        "inception, pytorch-fid, clean-fid, torchscript, i3d (a file), dinov2, clip, videomae (a folder); may be given "
        "again",
        metavar="KIND:PATH",
        again=True,
        heading=_PICTURES,
    )
    reference: Path | None = make_option_field(
        None,
        "statistics (.npz of ADM, EDM, clean-fid or --write-reference; .pkl of EDM2) or images: a folder, .zip or "
        ".npz (the run's own data)",
        Path,
        metavar="PATH",
        heading=_PICTURES,
    )
    images: Path | None = make_option_field(
        None, "images that are measured instead of a run's", Path, metavar="A", heading=_PICTURES
    )
    against: Path | None = make_option_field(
        None, "with --images: what they are compared with, images or statistics", Path, metavar="B", heading=_PICTURES
    )
    write_reference: Path | None = make_option_field(
        None,
        "only writes the statistics of RUN's data, or of --images A",
        Path,
        metavar="OUT.npz",
        heading=_PICTURES,
    )
    kept: int | None = make_option_field(
        None,
        "features of each set that kid, pr and dc compare (10000)",
        parse_positive_integer,
        metavar="N",
        heading=_PICTURES,
    )
    labels: tuple[int, ...] | None = make_option_field(
        None, "classes, repeated, such as 3,5,5", parse_labels, metavar="N,N,...", heading=_DRAWN
    )
    prompts: tuple[str, ...] | None = make_option_field(
        None, "texts, one a line, repeated", read_nonempty_lines, metavar="FILE", heading=_DRAWN
    )
    seed: int | None = make_option_field(
        None, "picture i is a function of S + i (0)", parse_nonnegative_integer, metavar="S", heading=_DRAWN
    )
    prime_frames: int | None = make_option_field(
        None, "that a scene takes over from the one before (1)", parse_positive_integer, metavar="K", heading=_DRAWN
    )

    def check_options(self) -> None:
        """Raises ConfigError if nothing is named that can be measured, or if options do not go together."""
        if self.folder is None and self.images is None:
            raise ConfigError("name the folder of a run, for example: dstrain evaluate runs/dit-small")
        if self.metrics is None:
            for name in self._list_given_options(_METRICS):
                raise ConfigError(f"{_format_option_name(name)} is for metrics: name some, as --metrics fid")
            return
        if self.data is not None:
            raise ConfigError("--data is for bits/dim: with --metrics, name other images as --reference")
        if (self.folder is None) == (self.images is None):
            raise ConfigError("--metrics measures what a run draws or --images A: name one of the two")
        if self.against is not None and (self.reference is not None or self.images is None):
            raise ConfigError("--against B goes with --images A, and is another word for --reference: give one")
        self._refuse_unused_options()
        self._refuse_options_unfit_for_scenes(self.metrics)

    @property
    def run_folder(self) -> Path:
        """Returns the folder of the run that is measured. Call it only if `folder` is not None."""
        assert self.folder is not None
        return self.folder

    def _list_given_options(self, names: Iterable[str]) -> list[str]:
        """Lists those of the options' `names` that were typed."""
        found = ((name, getattr(self, name)) for name in names)
        return [name for name, value in found if value is not None and value is not False and value != ()]

    def _refuse_unused_options(self) -> None:
        """Raises ConfigError for an option that has no effect beside --images, --write-reference or --reference."""
        for present, unused in (
            ("images", (*_DRAWING, "split", "num")),
            ("write_reference", (*_DRAWING, "reference", "against", "out")),
            ("reference", ("split",)),
        ):
            for name in self._list_given_options(unused) if self._list_given_options([present]) else ():
                raise ConfigError(
                    f"{_format_option_name(name)} changes nothing beside {_format_option_name(present)}: leave it out"
                )
        if self.precision != "fp32" and (self.images or self.write_reference):
            raise ConfigError(f"--precision {self.precision} is of a run that draws: leave it out")

    def _refuse_options_unfit_for_scenes(self, metrics: tuple[str, ...]) -> None:
        """Raises ConfigError for an option or a metric that does not go with --metrics scenes, and for --prime-frames
        without it.
        """
        if "scenes" not in metrics:
            if self.prime_frames is not None:
                raise ConfigError("--prime-frames is of --metrics scenes: leave it out")
            return
        if len(metrics) > 1:
            raise ConfigError(
                "--metrics scenes draws stories, and all other metrics are of single clips or pictures: ask for it "
                "alone"
            )
        unused = ("images", "write_reference", "reference", "split", "features", "kept", "labels", "prompts")
        for name in self._list_given_options(unused):
            raise ConfigError(
                f"{_format_option_name(name)} changes nothing beside --metrics scenes, which tells its own stories by "
                "a run: leave it out"
            )


def _format_option_name(name: str) -> str:
    """Returns the option of a field as it is typed, such as "--num-samples"."""
    return f"--{_NAMES.get(name, name.replace('_', '-'))}"
