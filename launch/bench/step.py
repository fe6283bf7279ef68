"""Times a training step beside a plain PyTorch loop, stock DeepSpeed and accelerate, in one run.

    OMP_NUM_THREADS=1 python launch/bench/step.py [--recipe FILE] [--ds_config FILE] optimizer.name=adamw [KEY=VALUE]

The others take AdamW, so that another optimizer compares dstrain with something else.
Accumulation 1 and 4 of the recipe's micro-batch, each with clip 0 and 1. launch/bench/kit/compare.py says what is
measured; accelerate comes with `pip install -e '.[bench]'`. Attention: attention.py. GPU: docs/guides/gpu.md.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from dstrain.commands.exits import run_main_with_exit_code
from dstrain.commands.job import prepare_job
from dstrain.commands.options.command import parse_options
from dstrain.commands.options.train import JobOptions
from dstrain.commands.train import format_job_settings, summarize_job
from dstrain.distributed import group
from dstrain.recipe import Run


@dataclass(frozen=True)
class BenchOptions(JobOptions):
    """Times a training step beside a plain PyTorch loop and others, in one run."""

    usage: ClassVar[str] = "[deepspeed] launch/bench/step.py [options] [key=value ...]"


def main() -> None:
    options = parse_options(BenchOptions, sys.argv[1:])
    options = replace(options, overrides=("folder=runs/bench", *options.overrides))  # It goes on with no run.
    job = prepare_job(options)
    if options.print_config:
        print(format_job_settings(job), end="")
    elif options.dry_run:
        print(summarize_job(job))
    else:
        from kit.compare import GRID, compare

        micro, world = job.settings["train_micro_batch_size_per_gpu"], group.read_rank_and_world().world

        def jobs() -> Iterator[tuple[Run, dict[str, Any]]]:
            for accumulation, clip in GRID:
                words = f"batch.micro={micro}", f"batch.global={micro * accumulation * world}", f"optimizer.clip={clip}"
                own = prepare_job(replace(options, overrides=(*options.overrides, *words)))
                yield own.run, own.settings

        compare(jobs())
        group.leave_process_group()


if __name__ == "__main__":
    run_main_with_exit_code(main)
