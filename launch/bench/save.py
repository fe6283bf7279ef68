"""Seconds that training waits for a checkpoint, against a copy, a raw write and torch.save of the same values.

    python launch/bench/save.py [--recipe FILE] [--ds_config FILE] [key=value ...]

copy          a memcpy of as many bytes in the host's memory; on a GPU, `.cpu()` of each value
raw write     as many bytes into one file, and fsync
torch.save    the rival: masters, moments and averages, pickled into one file, and fsync; no hash, no manifest
save          Checkpoints.save with save.asynchronous=false: fragments, hashed meanwhile, fsync, manifest, rename, fsync
stall         Checkpoints.save as training calls it: what it waits for, once the copy's buffers are there
beside        from that call to the moment when the checkpoint is whole, while steps of training go on
step          a step of training alone, and while a save is under way

Files are written below `folder`, where the run's checkpoints would be, and removed. Each is the least of three rounds.

2026-11-22, two cores that another program shared, DiT of 39 M weights with one average (0.62 GB), stage 1, one rank:
stall 0.046 s (the first 0.5 s), copy 0.041, raw write 0.44, torch.save 0.62, save 1.8. Training waits 1.1 times a copy
and 0.07 times torch.save. The save itself took 4 times a raw write while it read every file again for its hash; since
it hashes what it writes, it has not been timed on a quiet machine.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from dstrain.commands.exits import run_main_with_exit_code
from dstrain.commands.job import Job, prepare_job
from dstrain.commands.options.command import parse_options
from dstrain.commands.options.train import JobOptions
from dstrain.commands.train import format_job_settings, summarize_job
from dstrain.distributed import group

ROUNDS = 3


@dataclass(frozen=True)
class BenchOptions(JobOptions):
    """Times the saving of a recipe's checkpoint against raw writes and torch.save."""

    usage: ClassVar[str] = "[deepspeed] launch/bench/save.py [options] [key=value ...]"


def main() -> None:
    """Parses the command line, measures and prints."""
    options = parse_options(BenchOptions, sys.argv[1:])
    options = replace(options, overrides=("folder=runs/bench", *options.overrides))  # It goes on with no run.
    job = prepare_job(options)
    if options.print_config:
        print(format_job_settings(job), end="")
    elif options.dry_run:
        print(summarize_job(job))
    else:
        from dstrain.engine.start import start_process_group

        start_process_group()
        beside = job.run.directory.parent
        beside.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=beside) if group.rank() == 0 else nullcontext() as folder:
            report(measure(job, Path(group.broadcast_from_first(folder))))
            group.barrier()
        group.leave_process_group()


def measure(job: Job, folder: Path) -> dict[str, float]:
    """Seconds by name, and the gigabytes that this rank writes."""
    from dstrain import systems
    from dstrain.engine.checkpoint import Checkpoints
    from dstrain.planning.synthetic import Repeated
    from dstrain.recipe import ConfigError, Save
    from kit.sides import Dstrain

    run, settings = job.run, job.settings
    system = systems.build(run.system, run.model)
    micro, accumulation = settings["train_micro_batch_size_per_gpu"], settings["gradient_accumulation_steps"]
    trained = Dstrain(run, settings, system, Repeated(system, micro, accumulation))
    engines, ema, step = trained.engines, trained.ema, trained.step
    step(0)
    values = [
        flat.detach()
        for part, masters in engines.masters.items()
        for flats in (
            masters.flats,
            *map(masters.get_moments_in_fp32, masters.moment_kinds),
            *ema.flats.get(part, {}).values(),
        )
        for flat in flats
    ]
    size = sum(flat.numel() for flat in values)
    figures = {"GB": 4 * size / 1e9}

    def least(name: str, timed: Callable[[int], object]) -> None:
        seconds = []
        for number in range(ROUNDS):
            wait()
            begun = time.perf_counter()
            timed(number)
            wait()
            seconds.append(time.perf_counter() - begun)
        figures[name] = min(seconds)

    least("copy", copier(values, size))
    least(
        "raw write",
        lambda number: written(
            folder / f"raw{group.rank()}", lambda file: [file.write(flat.cpu().numpy().data) for flat in values]
        ),
    )
    least(
        "torch.save", lambda number: written(folder / f"pickled{group.rank()}", lambda file: torch.save(values, file))
    )
    lines: list[str] = []
    plain = Checkpoints(folder / "plain", engines, ema, system, Save(asynchronous=False), lines.append)
    least("save", lambda number: plain.save(1 + number))
    beside = Checkpoints(folder / "beside", engines, ema, system, Save(), lines.append)
    least("step", step)
    figures |= beside_training(beside, step)
    if (plain.saver.newest, beside.saver.newest) != (ROUNDS, ROUNDS + 1):
        raise ConfigError(f"folder={job.run.directory}: not every save succeeded", *lines)
    return figures


def beside_training(checkpoints: Any, step: Callable[[int], object]) -> dict[str, float]:
    """Seconds of saves while steps go on: what training waits for, the whole save, and a step meanwhile."""
    stalls, wholes, steps = [], [], []
    for number in range(ROUNDS + 1):  # the first makes the buffers
        wait()
        begun = time.perf_counter()
        checkpoints.save(1 + number)
        stalls.append(time.perf_counter() - begun)
        is_writing = True
        while is_writing:
            step_begun = time.perf_counter()
            step(number)
            wait()
            steps.append(time.perf_counter() - step_begun)
            is_writing = group.is_true_on_any_rank(checkpoints.saver.is_writing)
        checkpoints.saver.wait_for_save()
        wholes.append(time.perf_counter() - begun)
    return {"first stall": stalls[0], "stall": min(stalls[1:]), "beside": min(wholes), "step beside": min(steps)}


def copier(values: list[torch.Tensor], size: int) -> Callable[[int], object]:
    """A copy of the values' bytes by plain means."""
    if values[0].device.type != "cpu":
        return lambda number: [flat.cpu() for flat in values]
    source, target = torch.ones(size), torch.ones(size)
    return lambda number: target.copy_(source)


def written(path: Path, fill: Callable) -> None:
    """One file, filled and forced to the disk, then removed."""
    with open(path, "wb") as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())
    path.unlink()


def wait() -> None:
    """For the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def report(figures: dict[str, float]) -> None:
    """Prints seconds and ratios, on rank 0."""
    if group.rank():
        return
    print("\n".join(f"  {name:22} {value:.4g}" for name, value in figures.items()))
    for over, under in (
        ("stall", "copy"),
        ("stall", "torch.save"),
        ("save", "torch.save"),
        ("save", "raw write"),
        ("step beside", "step"),
    ):
        print(f"  {over + ' / ' + under:22} {figures[over] / figures[under]:.3f}")


if __name__ == "__main__":
    run_main_with_exit_code(main)
