"""Makes averages of any length from a trained run's snapshots: python launch/reconstruct.py RUN --ema 0.05,0.10,0.15"""

from dataclasses import replace
from pathlib import Path

from dstrain.commands import arguments
from dstrain.commands.exits import run_main
from dstrain.recipe import ConfigError

_HELP = """\
Makes averages (EMAs) of a length that is chosen when training is over, from a run's snapshots.

usage:  [deepspeed] launch/reconstruct.py RUN --ema WIDTHS [options]

  RUN                   a run's folder, trained with ema.profiles=[0.05,0.10] ema.snapshots=N
  --ema 0.05,0.10,0.15  relative widths: the standard deviation of the weights' ages, as a share of the training
                        (with --sweep: a dozen from 0.01 to 0.25, as far as the snapshots make them)
  --step N              the snapshot to make them of, with all before it (the newest)
  --sweep               also measures the held-out loss of each, as JSON and a curve in RUN/reconstructed
  --metric NAME         for it, a metric of launch/evaluate.py instead: fd for the built-in data, or fid with
                        --features inception:FILE and --reference FILE
  --num-samples N       held-out samples, evenly spaced (all), or pictures to draw (50,000); --batch N of one rank (32)

Each is written to RUN/reconstructed/WIDTH/step_N, and every other command takes it as --ema WIDTH. Memory holds a chunk
of a tensor at a time; all hashes are verified first. docs/guides/reconstruct.md says what a width is, and which fit.

examples:
  python launch/reconstruct.py runs/dit-small --ema 0.05,0.10,0.15
  python launch/generate.py runs/dit-small --ema 0.10
  deepspeed launch/reconstruct.py runs/dit-small --sweep --metric fd --num-samples 1000
"""


def _options(argv: list[str] | None = None):
    parser = arguments.Parser(_HELP)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--ema", type=arguments.widths, dest="widths")
    parser.add_argument("--step", "--checkpoint", type=arguments.count)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--metric")
    parser.add_argument("--features", action="append", default=[])
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--num-samples", "--num_samples", type=arguments.positive, dest="num")
    parser.add_argument("--batch", type=arguments.positive, default=32)
    words = parser.words(argv)
    for name, option in (("folder", "the folder of a run"), ("widths", "the widths to make: --ema 0.05,0.10")):
        if words[name] is None and not (name == "widths" and words["sweep"]):
            raise ConfigError(f"name {option}; --help shows how")
    for option, value, of in (
        ("num-samples", words["num"], "sweep"),
        ("metric", words["metric"], "sweep"),
        ("features", words["features"], "metric"),
        ("reference", words["reference"], "metric"),
    ):
        if value and not words[of]:
            raise ConfigError(f"--{option} is of --{of}: give it, too, or leave both out")
    return words


def main() -> None:
    words = _options()
    from dstrain.commands.reconstruct import ReconstructOptions, reconstruct, report
    from dstrain.distributed import group
    from dstrain.engine.start import start_group

    if group.place().world > 1:
        start_group()
    options = None
    if words["sweep"]:
        from dstrain.commands import sweep
        from dstrain.commands.quality import QualityOptions

        options = words["metric"] and QualityOptions(
            (words["metric"],),
            tuple(words["features"]),
            words["folder"],
            reference=words["reference"],
            num=words["num"],
            batch=words["batch"],
        )
        sweep.require_sweep(words["folder"], options)
    made = reconstruct(ReconstructOptions(words["folder"], words["widths"], words["step"]))
    if group.rank() == 0:
        print(report(made))
    if words["sweep"]:
        step, widths = int(made[0].path.name.removeprefix("step_")), [one.width for one in made]
        if options:
            path, result = sweep.sweep_metric(replace(options, step=step), widths)
        else:
            path, result = sweep.sweep(words["folder"], step, widths, words["num"], words["batch"])
        if group.rank() == 0:
            print(sweep.report(path, result))
    group.leave()


if __name__ == "__main__":
    run_main(main)
