"""Makes a run's folder of weights from elsewhere: python launch/import.py FILE --recipe RECIPE --out RUN [key=value]"""

import os
from pathlib import Path

from dstrain.commands import arguments
from dstrain.commands.exits import run_main
from dstrain.recipe import ConfigError

_HELP = """\
Makes a run's folder of weights from elsewhere, which is then drawn from, evaluated, encoded with or exported as one
that was trained here; to train on from such weights, give them as init_from= instead.

usage:  python launch/import.py WEIGHTS --recipe RECIPE --out RUN [key=value ...]

  WEIGHTS               an official DiT or IDDPM file, a DALLE-pytorch VAE, a folder of diffusers (DiT, UNet2DModel,
                        AutoencoderKL, PriorTransformer), what launch/consolidate.py or export.py has written
  --recipe RECIPE       what they are weights of: YAML; its data need not be here
  --out RUN             a new folder

It says how many tensors were loaded, replaced and left. Weights of another shape than the recipe's are refused, with
the entries that decide it.

examples:
  python launch/import.py DiT-XL-2-256x256.pt --recipe launch/recipes/dit-xl2-imagenet256.yaml --out runs/published
  python launch/generate.py runs/published --labels 207,360 --num-samples 8
  python launch/import.py vae.pt --recipe launch/recipes/dvae-dalle-pytorch.yaml --out runs/dvae
  python launch/encode.py runs/dvae --data /data/images --out tokens
"""


def _options(argv: list[str] | None = None):
    parser = arguments.Parser(_HELP)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--recipe", type=Path)
    parser.add_argument("--out", type=Path)
    words = parser.values(parser.parse_intermixed_args(argv))
    weights, *overrides = words["words"] or [None]
    for value, option in (
        (weights, "the file or folder of weights"),
        (words["recipe"], "the recipe: --recipe RECIPE"),
        (words["out"], "the folder to write: --out RUN"),
    ):
        if value is None:
            raise ConfigError(f"name {option}; --help shows how")
    from dstrain.commands import cli

    run = cli.load_recipe(words["recipe"], Path(__file__).resolve().parents[1], overrides)
    from dstrain.commands.import_weights import AdoptOptions

    return AdoptOptions(Path(os.path.expanduser(weights)), run, words["out"])


def main() -> None:
    options = _options()
    from dstrain.commands.import_weights import adopt

    for note in adopt(options):
        print(note)
    print(f"{options.run.name} of these weights in {options.out}")


if __name__ == "__main__":
    run_main(main)
