"""Trains as a command: checks the job, then trains it, prints it, or says that it is in order."""

import json
import os
import signal

from dstrain.commands.job import Job, prepare_job
from dstrain.commands.options.train import TrainOptions
from dstrain.distributed.launcher import read_rank_and_world
from dstrain.distributed.progress import get_phases
from dstrain.distributed.stops import get_stops
from dstrain.engine import settings
from dstrain.engine.start import open_launch_store
from dstrain.recipe import dump_run


def run_verb(options: TrainOptions) -> None:
    """Trains, and raises SystemExit with the exit code of training. With --print-config or --dry-run only checks the
    job, and prints it or that it is in order.
    """
    get_stops().install_signal_handlers(signal.SIGINT)
    trains, place = not (options.print_config or options.dry_run), read_rank_and_world()
    if trains and place.rank == 0 and place.world > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        open_launch_store()  # the other ranks come there, while this one lists data
    get_phases().enter_phase("checking recipe, data and folder")
    job = prepare_job(options)
    if options.print_config:
        print(format_job_settings(job), end="")
    elif options.dry_run:
        print(f"{job.run.name}: recipe, data, paths and DeepSpeed settings are in order", *job.remarks, sep="\n")
    else:
        get_phases().print_lines(summarize_job(job), *job.notes)
        get_phases().enter_phase("importing what trains")
        from dstrain.train import train

        raise SystemExit(train(job.run, job.settings, options))


def format_job_settings(job: Job) -> str:
    """Returns the whole recipe as YAML and the DeepSpeed settings as JSON, in one text."""
    return f"# recipe\n{dump_run(job.run)}\n# DeepSpeed settings\n{json.dumps(job.settings, indent=2)}\n"


def summarize_job(job: Job) -> str:
    """Returns a line about what is going to be trained."""
    run, micro = job.run, job.settings["train_micro_batch_size_per_gpu"]
    sharding = f"ZeRO stage {settings.read_zero_stage(job.settings)}, {settings.read_precision(job.settings)}"
    place = "a rank" if run.parallel.sequence == 1 else f"{run.parallel.sequence} ranks"
    return (
        f"{run.name}: {run.system}, {run.steps:,} steps of {run.batch.global_:,} samples, {micro} on {place} at a "
        f"time; {sharding}; folder {run.directory}"
    )
