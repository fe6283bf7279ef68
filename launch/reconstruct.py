"""Makes averages of any length from a trained run's snapshots: python launch/reconstruct.py RUN --ema 0.05,0.10,0.15"""

from pathlib import Path

from dstrain.command import arguments, cli

_HELP = """\
Makes averages (EMAs) of a length that is chosen when training is over, from a run's snapshots.

usage:  python launch/reconstruct.py RUN --ema WIDTHS [options]

  RUN                   a run's folder, trained with ema.profiles=[0.05,0.10] ema.snapshots=N
  --ema 0.05,0.10,0.15  relative widths: the standard deviation of the weights' ages, as a share of the training
  --step N              the snapshot to make them of, with all before it (the newest)

Each is written to RUN/reconstructed/WIDTH/step_N, and every other command takes it as --ema WIDTH. Memory holds a chunk
of a tensor at a time; all hashes are verified first. launch/reconstruct.md says what a width is, and which can be made.

examples:
  python launch/reconstruct.py runs/dit-small --ema 0.05,0.10,0.15
  python launch/generate.py runs/dit-small --ema 0.10
"""


def _options(argv: list[str] | None = None):
    parser = arguments.Parser(_HELP)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--ema", type=arguments.widths, dest="widths")
    parser.add_argument("--step", "--checkpoint", type=arguments.count)
    words = parser.words(argv)
    for name, option in (("folder", "the folder of a run"), ("widths", "the widths to make: --ema 0.05,0.10")):
        if words[name] is None:
            raise cli.ConfigError(f"name {option}; --help shows how")
    from dstrain.reconstruct import ReconstructOptions
    return ReconstructOptions(**words)


def main() -> None:
    options = _options()
    from dstrain import reconstruct
    print(reconstruct.report(reconstruct.reconstruct(options)))


if __name__ == "__main__":
    cli.run_main(main)
