"""Writes a trained run as a folder that others load: python launch/export.py RUN --out DIR [...]"""

from pathlib import Path

from dstrain.commands import arguments
from dstrain.commands.exits import run_main
from dstrain.recipe import ConfigError

_HELP = """\
Writes a trained run as a folder that others load, and compares it with the trained network.

usage:  python launch/export.py RUN --out DIR [options]

  RUN                   a run's folder, for example runs/vae-small
  --out DIR             a new folder
  --format NAME         diffusers (unless given): a KL autoencoder becomes an AutoencoderKL, a DiT, an IDDPM or a prior
                        a pipeline: diffusers' own where it can draw from it, else with a pipeline.py. The model card,
                        README.md, shows how; its code was run on the folder;
                        safetensors: of any run PART.safetensors and recipe.yaml.
                        init_from= takes either folder back
  --ema NUMBER | --raw  weights: the average of this decay or width, or the training weights (its first average)
  --checkpoint STEP     the step to load (the newest whole one)
  --statistics DIR      an autoencoder's scaling_factor from what launch/encode.py has written there;
                        without, it is measured over the run's data
  --num-samples N       samples to measure over, in the order of training (1000)

example:
  python launch/export.py runs/vae-small --out runs/first_stage
  python launch/export.py runs/dit-small-latents --out pipeline
  python launch/export.py runs/dit-small --out weights --format safetensors --ema 0.9999
"""


def _options(argv: list[str] | None = None):
    parser = arguments.Parser(_HELP)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--format", choices=("diffusers", "safetensors"), default="diffusers")
    parser.add_weights()
    parser.add_argument("--statistics", type=Path)
    parser.add_argument("--num-samples", "--num_samples", type=arguments.positive, default=1000, dest="num")
    words = parser.words(argv)
    for name, option in (("run", "the folder of a run"), ("out", "the folder to write: --out DIR")):
        if words[name] is None:
            raise ConfigError(f"name {option}; --help shows how")
    from dstrain.commands.export import ExportOptions

    return ExportOptions(**words)


def main() -> None:
    options = _options()
    from dstrain.commands.export import export

    exported = export(options)
    errors = ", ".join(f"{name} {error:.1e}" for name, error in exported.errors.items())
    scale = f", scaling_factor {exported.statistics['scaling_factor']:.5f}" if exported.statistics else ""
    print(
        f"{exported.name} in {options.out}{scale}; relative difference from the trained network: {errors}"
        + (f"\n{exported.note}" if exported.note else "")
    )


if __name__ == "__main__":
    run_main(main)
