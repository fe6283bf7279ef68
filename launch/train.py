"""Trains a system from a recipe: deepspeed launch/train.py [--recipe FILE] [--ds_config FILE] [key=value ...]"""

import sys
from contextlib import suppress
from pathlib import Path

# And nothing else: the first line, and stacks on request, come before other imports.
from dstrain.distributed.progress import greeting, phases
from dstrain.distributed.stacks import print_on_request

_BRIEF = {"--dry-run", "--print-config", "--help", "-h"}  # these print what they are asked for, and nothing else


def main() -> None:
    phases().at("importing torch")
    from dstrain.commands import cli

    options = cli.train_arguments(root=Path(__file__).resolve().parents[1])
    phases().at("checking recipe, data and folder")
    job = cli.prepare(options)
    if options.print_config:
        print(cli.describe(job), end="")
    elif options.dry_run:
        print(f"{job.run.name}: recipe, data, paths and DeepSpeed settings are in order", *job.remarks, sep="\n")
    else:
        phases().say(cli.headline(job), *filter(None, [job.memory]))
        phases().at("importing what trains")
        from dstrain.train import train

        raise SystemExit(train(job.run, job.settings, options))


if __name__ == "__main__":
    print_on_request()
    if not _BRIEF.intersection(sys.argv):
        with suppress(ValueError):  # of the launcher's variables, which run_main reports
            phases().say(greeting())
    from dstrain.commands.exits import run_main

    run_main(main)
