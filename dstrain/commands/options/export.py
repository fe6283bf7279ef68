"""Options of `dstrain export`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dstrain.commands.options.arguments import parse_positive_integer
from dstrain.commands.options.command import make_argument_field, make_option_field
from dstrain.commands.options.shared import Weights

ADAPTER_FORMATS = ("peft", "diffusers-lora")
"""What holds the adapters of a run alone."""


@dataclass(frozen=True)
class ExportOptions(Weights):
    """Writes a trained run as a folder that others load, and compares it with the trained network.

    With --format diffusers a KL autoencoder becomes an AutoencoderKL, a DiT, an IDDPM or a prior a pipeline:
    diffusers' own where it can draw from it, else with a pipeline.py. The model card, README.md, shows how; its
    code was run on the folder. With safetensors any run becomes PART.safetensors and recipe.yaml.
    init_from= takes either folder back.
    """

    usage: ClassVar[str] = "dstrain export RUN --out DIR [options]"
    examples: ClassVar[str] = """
        dstrain export runs/vae-small --out runs/first_stage
        dstrain export runs/dit-small-latents --out pipeline
        dstrain export runs/dit-small --out weights --format safetensors --ema 0.97
    """

    run: Path = make_argument_field(
        "RUN",
        "a run's folder, for example runs/vae-small",
        Path,
        missing="name the folder of a run; --help shows how",
    )
    out: Path = make_option_field(
        None, "a new folder", Path, metavar="DIR", missing="name the folder to write: --out DIR; --help shows how"
    )
    format: str = make_option_field(
        "diffusers",
        "diffusers, safetensors; or the adapters of model.lora alone, which these two merge into the weights: peft, by "
        "our names, or diffusers-lora, by those of diffusers' SD3 or PixArt transformer",
        metavar="NAME",
        choices=("diffusers", "safetensors", *ADAPTER_FORMATS),
    )
    statistics: Path | None = make_option_field(
        None,
        "an autoencoder's scaling_factor from what `dstrain encode` has written there; without, it is measured over "
        "the run's data",
        Path,
        metavar="DIR",
    )
    num: int = make_option_field(
        1000,
        "samples to measure over, in the order of training",
        parse_positive_integer,
        name="num-samples",
        metavar="N",
    )
