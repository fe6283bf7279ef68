"""Trains a system from a recipe: deepspeed launch/train.py [--recipe FILE] [--ds_config FILE] [key=value ...]"""

import sys
from pathlib import Path

from dstrain.command.ending import run_main        # not cli, which imports torch: the first line comes before that
from dstrain.ranks.phases import greeting, phases

_BRIEF = {"--dry-run", "--print-config", "--help", "-h"}      # these print what they are asked for, and nothing else


def main() -> None:
    with phases():
        if not _BRIEF.intersection(sys.argv):
            phases().say(greeting())
        _main()


def _main() -> None:
    phases().at("importing torch")
    from dstrain.command import cli
    options = cli.train_arguments(root=Path(__file__).resolve().parents[1])
    phases().at("checking recipe, data and folder")
    job = cli.prepare(options)
    if options.print_config:
        print(cli.describe(job), end="")
    elif options.dry_run:
        print(f"{job.run.name}: recipe, data, paths and DeepSpeed settings are in order", *job.remarks, sep="\n")
    else:
        phases().say(cli.headline(job))
        phases().at("importing what trains")
        from dstrain.train import train
        raise SystemExit(train(job.run, job.settings, options))


if __name__ == "__main__":
    run_main(main)
