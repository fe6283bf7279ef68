"""Options of `dstrain reconstruct`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dstrain.commands.options.arguments import parse_ema_widths, parse_nonnegative_integer, parse_positive_integer
from dstrain.commands.options.command import make_argument_field, make_option_field
from dstrain.commands.options.shared import Trusting
from dstrain.recipe import ConfigError


@dataclass(frozen=True)
class ReconstructOptions(Trusting):
    """Makes averages (EMAs) of a length that is chosen when training is over, from a run's snapshots.

    Each is written to RUN/reconstructed/WIDTH/step_N, and every other command takes it as --ema WIDTH. Memory holds a
    chunk of a tensor at a time; all hashes are verified first. docs/guides/reconstruct.md says what a width is, and
    which can be made.
    """

    usage: ClassVar[str] = "dstrain reconstruct RUN --ema WIDTHS [options]"
    examples: ClassVar[str] = """
        dstrain reconstruct runs/dit-small --ema 0.05,0.10,0.15
        dstrain generate runs/dit-small --ema 0.10
        deepspeed --module dstrain reconstruct runs/dit-small --sweep --metric fd --num-samples 1000
    """

    folder: Path = make_argument_field(
        "RUN",
        "a run's folder, trained with ema.profiles=[0.05,0.10] ema.snapshots=N",
        Path,
        missing="name the folder of a run; --help shows how",
    )
    widths: tuple[float, ...] | None = make_option_field(
        None,
        "relative widths: the standard deviation of the weights' ages, as a share of the training, such as "
        "0.05,0.10,0.15 (with --sweep: a dozen from 0.01 to 0.25, as far as the snapshots make them)",
        parse_ema_widths,
        name="ema",
        metavar="WIDTHS",
    )
    step: int | None = make_option_field(
        None,
        "the snapshot to make them of, with all before it (the newest)",
        parse_nonnegative_integer,
        metavar="N",
        aliases=("--checkpoint",),
    )
    sweep: bool = make_option_field(
        False, "also measures the held-out loss of each, as JSON and a curve in RUN/reconstructed"
    )
    metric: str | None = make_option_field(
        None,
        "for it, a metric of `dstrain evaluate` instead: fd for the built-in data, or fid with --features "
        "inception:FILE and --reference FILE",
        metavar="NAME",
    )
    features: tuple[str, ...] = make_option_field((), "networks of the metric", metavar="KIND:PATH", again=True)
    reference: Path | None = make_option_field(None, "what the metric compares with", Path, metavar="FILE")
    num: int | None = make_option_field(
        None,
        "held-out samples, evenly spaced (all), or pictures to draw (50,000)",
        parse_positive_integer,
        name="num-samples",
        metavar="N",
    )
    batch: int = make_option_field(32, "samples of one rank at a time", parse_positive_integer, metavar="N")

    def check_options(self) -> None:
        """Raises ConfigError if neither --ema nor --sweep is given, or if an option is given without the one that it
        belongs to, such as --metric without --sweep.
        """
        if self.widths is None and not self.sweep:
            raise ConfigError("name the widths to make: --ema 0.05,0.10; --help shows how")
        for option_name, value, needed, given in (
            ("num-samples", self.num, "sweep", self.sweep),
            ("metric", self.metric, "sweep", self.sweep),
            ("features", self.features, "metric", self.metric),
            ("reference", self.reference, "metric", self.metric),
        ):
            if value and not given:
                raise ConfigError(f"--{option_name} is of --{needed}: give it, too, or leave both out")
