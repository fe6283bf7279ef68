"""Options that several verbs have."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dstrain.commands.options.arguments import (
    parse_fraction,
    parse_guiding_run,
    parse_interval,
    parse_nonnegative_integer,
    parse_nonnegative_number,
)
from dstrain.commands.options.command import Command, make_option_field

Precision = Literal["fp32", "tf32", "bf16"]
PRECISIONS = ("fp32", "tf32", "bf16")
GUIDANCE = "of diffusion and flow matching, explained in docs/guides/samplers.md"


@dataclass(frozen=True, kw_only=True)
class Trusting(Command):
    """Is the base of options whose folders may name a package from outside as their system."""

    trust_system: tuple[str, ...] = make_option_field(
        (),
        "import this package as a system, though only a folder names it; dstrain's own systems and installed entry "
        "points need no such word",
        metavar="PACKAGE",
        again=True,
    )


@dataclass(frozen=True, kw_only=True)
class Weights(Trusting):
    """Holds the options that choose among the weights of a run."""

    ema: float | None = make_option_field(
        None,
        "weights: the average of this decay or width (the run's first average)",
        float,
        metavar="NUMBER",
        rivals="weights",
    )
    raw: bool = make_option_field(False, "weights: the training weights instead of an average", rivals="weights")
    step: int | None = make_option_field(
        None,
        "the step to load (the newest whole one)",
        parse_nonnegative_integer,
        name="checkpoint",
        metavar="STEP",
        elsewhere=("--step", "--ckpt"),
    )


@dataclass(frozen=True, kw_only=True)
class Sampling(Command):
    """Holds the options that say how samples are drawn, as a recipe's `samples` section does."""

    sampler: str | None = make_option_field(
        None,
        "ddim, ddpm, dpm++, dpm++sde, unipc, heun or edm; for flow matching these but ddim and ddpm, and euler, "
        "sde or sde-heun; confidence or critic for videos (the run's)",
        metavar="NAME",
    )
    guidance_scale: float | None = make_option_field(
        None, "classifier-free guidance, 1 is none (the run's)", parse_nonnegative_number, metavar="S"
    )
    spacing: str | None = make_option_field(
        None,
        "of timesteps: leading, trailing, linspace or karras (the sampler's)",
        metavar="NAME",
        choices=("leading", "trailing", "linspace", "karras"),
        heading=GUIDANCE,
    )
    eta: float | None = make_option_field(
        None, "the noise of the sampler (its own)", parse_nonnegative_number, metavar="E", heading=GUIDANCE
    )
    guidance_interval: tuple[float, float] | None = make_option_field(
        None,
        "where guidance acts: noise levels sigma / alpha (all)",
        parse_interval,
        metavar="LO,HI",
        heading=GUIDANCE,
    )
    guidance_rescale: float | None = make_option_field(
        None, "share of guidance that is rescaled (0)", parse_fraction, metavar="F", heading=GUIDANCE
    )
    guide: tuple[Path, float | str | None, int | None] | None = make_option_field(
        None,
        "a weaker run, or an earlier checkpoint of RUN, that guides instead of the missing label, by its average of "
        "decay or width EMA, or raw",
        parse_guiding_run,
        metavar="RUN[@STEP][:EMA]",
        heading=GUIDANCE,
    )
