"""Times a training step against a plain PyTorch loop: python launch/bench.py [--recipe FILE] [--ds_config FILE] ..."""

from pathlib import Path

from dstrain.command import cli


def main() -> None:
    options = cli.job_arguments("Times a training step of a recipe against a plain PyTorch loop, in one run.",
                                "launch/bench.py", Path(__file__).resolve().parents[1])
    job = cli.prepare(options)
    if options.print_config:
        print(cli.describe(job), end="")
    elif not options.dry_run:
        from dstrain.bench import bench
        bench(job.run, job.settings)


if __name__ == "__main__":
    cli.run_main(main)
