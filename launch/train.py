"""Trains a system from a recipe: deepspeed launch/train.py [--recipe FILE] [--ds_config FILE] [key=value ...]"""

from pathlib import Path

from dstrain.command import cli


def main() -> None:
    options = cli.train_arguments(root=Path(__file__).resolve().parents[1])
    job = cli.prepare(options)
    if options.print_config:
        print(cli.describe(job), end="")
    elif options.dry_run:
        print(f"{job.run.name}: recipe, data, paths and DeepSpeed settings are in order", *job.remarks, sep="\n")
    else:
        from dstrain.train import train
        raise SystemExit(train(job.run, job.settings, options))


if __name__ == "__main__":
    cli.run_main(main)
