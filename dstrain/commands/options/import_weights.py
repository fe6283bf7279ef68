"""Options of `dstrain import`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dstrain.commands.options.command import make_argument_field, make_option_field, make_remaining_words_field
from dstrain.commands.options.shared import Trusting


@dataclass(frozen=True)
class ImportOptions(Trusting):
    """Makes a run's folder of weights from elsewhere, which is then drawn from, evaluated, encoded with or exported as
    one that was trained here; to train on from such weights, give them as init_from= instead.

    It says how many tensors were loaded, replaced and left. Weights of another shape than the recipe's are refused,
    with the entries that decide it.
    """

    usage: ClassVar[str] = "dstrain import WEIGHTS --recipe RECIPE --out RUN [key=value ...]"
    examples: ClassVar[str] = """
        dstrain import DiT-XL-2-256x256.pt --recipe dit-xl2-imagenet256 --out runs/published
        dstrain generate runs/published --labels 207,360 --num-samples 8
        dstrain import vae.pt --recipe dvae-dalle-pytorch --out runs/dvae
        dstrain encode runs/dvae --data /data/images --out tokens
    """

    weights: str = make_argument_field(
        "WEIGHTS",
        "an official DiT or IDDPM file, a DALLE-pytorch VAE, a folder of diffusers (DiT, UNet2DModel, AutoencoderKL, "
        "PriorTransformer), what `dstrain consolidate` or `dstrain export` has written",
        missing="name the file or folder of weights; --help shows how",
    )
    overrides: tuple[str, ...] = make_remaining_words_field("key=value", "entries of the recipe")
    recipe: Path = make_option_field(
        None,
        "what they are weights of: YAML, or the name of a recipe that is shipped; its data need not be here",
        Path,
        metavar="RECIPE",
        missing="name the recipe: --recipe RECIPE; --help shows how",
    )
    out: Path = make_option_field(
        None, "a new folder", Path, metavar="RUN", missing="name the folder to write: --out RUN; --help shows how"
    )
