"""Times a training step beside a plain PyTorch loop, stock DeepSpeed and accelerate, in one run.

    OMP_NUM_THREADS=1 python launch/bench/step.py [--recipe FILE] [--ds_config FILE] optimizer.name=adamw [KEY=VALUE]

The others take AdamW, so that another optimizer compares dstrain with something else.
Accumulation 1 and 4 of the recipe's micro-batch, each with clip 0 and 1. launch/bench/kit/compare.py says what is
measured; accelerate comes with `pip install -e '.[bench]'`. Attention: attention.py. GPU: docs/guides/gpu.md.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from dstrain.commands import cli
from dstrain.distributed import group
from dstrain.recipe import Run


def main() -> None:
    options = cli.job_arguments(
        "Times a training step beside a plain PyTorch loop and others, in one run.",
        "launch/bench/step.py",
        Path(__file__).resolve().parents[2],
    )
    job = cli.prepare(options)
    if options.print_config:
        print(cli.describe(job), end="")
    elif options.dry_run:
        print(cli.headline(job))
    else:
        from kit.compare import GRID, compare

        micro, world = job.settings["train_micro_batch_size_per_gpu"], group.place().world

        def jobs() -> Iterator[tuple[Run, dict[str, Any]]]:
            for accumulation, clip in GRID:
                words = f"batch.micro={micro}", f"batch.global={micro * accumulation * world}", f"optimizer.clip={clip}"
                own = cli.prepare(replace(options, overrides=(*options.overrides, *words)))
                yield own.run, own.settings

        compare(jobs())
        group.leave()


if __name__ == "__main__":
    cli.run_main(main)
