"""Optimizer, averages and checkpoints against the bytes that they must move; and the README's first command.

Cases of the kit.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dstrain.distributed import group
from dstrain.engine.checkpoint import Checkpoints
from dstrain.engine.ema.shadow import EmaShadow
from dstrain.engine.masters import Masters
from dstrain.engine.start import start_process_group
from dstrain.engine.updates import Flag
from dstrain.planning.synthetic import Repeated
from dstrain.recipe import Ema, Save
from kit import jobs
from kit.report import Record
from kit.sides import Dstrain, system_of
from kit.timing import Times, copy_rate, measured

_STEP_BYTES = 42  # a weight: gradient, master, moments, average, compute weight
_ROUNDS = 5


def update(record: Record, stage: int) -> None:
    """What follows the backward pass of DiT-XL/2: check, optimizer, averages, publication; and an average alone."""
    trained, rate = _trained(record, stage)
    seconds = [_after_backward(trained, number) for number in range(1, _ROUNDS + 2)][1:]
    size = sum(flat.numel() for masters in trained.engines.masters.values() for flat in masters.flats)
    record.row("copy", rate / 1e12, "TB/s")
    record.row("weights", size / 1e6, "M")
    record.row("step and EMA after backward", 1e3 * min(seconds), "ms")
    record.speed("step and EMA / floor of 42 B a weight", min(seconds) * rate / size / _STEP_BYTES, at_most=1.3)
    times = ema_beside_copy(next(iter(trained.engines.masters.values())))
    least = {name: own.least("wall") for name, own in times.items()}
    record.row("EMA / copy of the same elements", least["EMA"] / least["copy"])
    record.speed("EMA / floor of 12 B a weight", least["EMA"] * rate / size / 12, at_most=1.3)


def stall(record: Record, stage: int) -> None:
    """What training waits for while a checkpoint of DiT-XL/2 is written, against a copy of its bytes to the host."""
    trained, _ = _trained(record, stage)
    trained.step(0)
    with tempfile.TemporaryDirectory(prefix="dstrain-kit-") as folder:
        lines: list[str] = []
        saves = Checkpoints(Path(folder), trained.engines, trained.ema, trained.system, Save(), lines.append)
        values = [value for entries in saves._collect_fragments_to_save().values() for _, _, value in entries]
        size = 4 * sum(value.numel() for value in values)
        target = torch.empty(max(value.numel() for value in values), pin_memory=group.device().type == "cuda")
        copy = min(
            measured(lambda: [target[: value.numel()].copy_(value) for value in values], group.device())[0]
            for _ in range(3)
        )
        waits = []
        for number in (1, 2):  # the first makes the buffers
            waits.append(measured(partial(saves.save, number), group.device())[0])
            began = time.perf_counter()
            saves.saver.wait_for_save()
            written = waits[-1] + time.perf_counter() - began
    record.detail("log", lines)
    record.row("checkpoint", size / 1e9, "GB")
    record.row("copy to the host", size / copy / 1e9, "GB/s")
    record.row("first stall", waits[0], "s")
    record.row("stall", waits[1], "s")
    record.speed("stall / copy", waits[1] / copy, at_most=1.3)
    record.row("whole save", size / written / 1e9, "GB/s")
    record.row("saved", saves.saver.newest, "steps", at_least=2)


def first_command(record: Record) -> None:
    """The README's first command; a dry run takes two steps of it."""
    with tempfile.TemporaryDirectory(prefix="dstrain-kit-") as folder:
        words = [
            sys.executable,
            "-m",
            "deepspeed.launcher.runner",
            "launch/train.py",
            "--ds_config",
            "ds_configs/zero2.json",
            f"folder={folder}/run",
            "track.wandb=disabled",
        ]
        words += ["steps=2", "every.evaluate=0", "samples.num=2", "samples.num_steps=2"] if record.dry else []
        began = time.perf_counter()
        done = subprocess.run(words, cwd=jobs.root(), capture_output=True, text=True, check=False)
        record.row("seconds", time.perf_counter() - began, "s")
        log = Path(folder) / "run" / "log.txt"
        record.detail("log", (log.read_text() if log.exists() else done.stdout + done.stderr).splitlines()[-40:])
        record.row("exit code", done.returncode, at_most=0)
        pictures = sorted((Path(folder) / "run" / "samples").glob("*.png"))
        record.row("grids of samples", len(pictures), at_least=1)
        for picture in pictures[-1:]:
            shutil.copyfile(picture, record.out / "first_command.png")


@dataclass
class Flats:
    """What an average asks of the masters that it follows."""

    flats: list[Tensor]


def ema_beside_copy(masters: Masters | Flats, elements: int = 2**24, rounds: int = 20) -> dict[str, Times]:
    """Times of one average's update and of a copy of the same elements, in turns of so many elements at least."""
    averages = EmaShadow({"part": masters}, Ema(), ("part",))
    live = [flat.detach() for flat in masters.flats]
    copies = [flat.clone() for flat in live]
    applied = {"part": Flag(torch.ones((), device=live[0].device))}
    works = {
        "EMA": lambda: averages.update_averages(1, applied),
        "copy": lambda: [copy.copy_(flat) for copy, flat in zip(copies, live)],
    }

    def repeat(work: Callable[[], Any], count: int) -> None:
        for _ in range(count):
            work()

    times = {name: Times() for name in works}
    calls = max(1, elements // max(sum(flat.numel() for flat in live), 1))
    for _ in range(rounds):
        for name, work in works.items():
            wall, cpu = measured(partial(repeat, work, calls), group.device())
            times[name].wall.append(wall / calls)
            times[name].cpu.append(cpu / calls)
    return times


def _trained(record: Record, stage: int) -> tuple[Dstrain, float]:
    """DiT-XL/2 on a small batch, and the rate of copies in bytes a second."""
    start_process_group()
    rate = copy_rate(group.device(), 2**20 if record.dry else 0)
    run = jobs.published("DiT-XL/2", record.dry, ["batch.global=4", "optimizer.clip=0"])
    system = system_of(run)
    return Dstrain(run, jobs.settings(run, stage, "bf16"), system, Repeated(system, 4, 1)), rate


def _after_backward(trained: Dstrain, number: int) -> float:
    """Seconds from the end of the backward pass to the end of the step."""
    engine, ended = next(iter(trained.engines.values())), [0.0]
    backward = engine.backward

    def timed(*args: Any, **kwargs: Any) -> Any:
        result = backward(*args, **kwargs)
        ended[0] = _now()
        return result

    engine.backward = timed
    try:
        trained.step(number)
        return _now() - ended[0]
    finally:
        del engine.backward  # uncovers the class's method


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
