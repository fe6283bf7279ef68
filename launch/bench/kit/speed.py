"""How fast published recipes train on this machine, beside plain PyTorch and rivals, in one process and in turns.

Cases of the kit: samples a second, share of the matrix products' rate, peak memory, how long the GPU has nothing to do.
"""

import gc
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dstrain.distributed import group
from dstrain.engine.settings import read_precision as precision_of
from dstrain.engine.start import start_process_group
from dstrain.planning.synthetic import Repeated
from dstrain.recipe import ConfigError, Run
from dstrain.systems.base import System
from dstrain.tracking.flops import count_step_flops, measure_matmul_flops
from kit import jobs
from kit.report import Record
from kit.rivals import available, rivals
from kit.sides import DTYPES, Dstrain, Plain, system_of
from kit.timing import alternate

Step = Callable[[int], Any]

_KERNELS = 20  # of a profile that the JSON keeps
_MEMORY = 120e9  # bytes of a GPU, for which the cases' batches are chosen


def beside(
    record: Record,
    recipe: str,
    batch: int,
    sides: Sequence[str],
    overrides: Sequence[str] = (),
    stage: int = 1,
    precision: str = "bf16",
    zero: dict[str, Any] | None = None,
    accumulation: int = 1,
    rounds: int = 4,
    steps: int = 4,
    targets: dict[str, dict[str, float]] | None = None,
) -> None:
    """Times `sides` at that batch. `targets`: bounds of rows by name. A dry run has two samples in a micro-batch.

    Batches are an H200's: a GPU with less memory takes half, of which a row tells, without targets in samples a second.
    Overrides that the settings refuse, such as an optimizer whose library is missing, are left out with the reason.
    """
    device, targets = group.device(), targets or {}
    if device.type == "cuda" and torch.cuda.mem_get_info()[1] < _MEMORY and batch > accumulation:
        batch //= 2
        targets = {name: bounds for name, bounds in targets.items() if not name.endswith("samples/s")}
    if precision == "fp16" and device.type == "cpu":
        return record.left_out("fp16 needs a GPU")
    batch, rounds, steps = (2 * accumulation, 1, 1) if record.dry else (batch, rounds, steps)
    run = jobs.published(
        recipe, record.dry, [f"batch.global={batch}", f"batch.micro={batch // accumulation}", *overrides]
    )
    try:
        settings = jobs.settings(run, stage, precision, **(zero or {}))
    except ConfigError as error:
        if not overrides:  # what is published must be accepted
            raise
        return record.left_out(error.problems[0])
    start_process_group()
    system, first = system_of(run), run.steps // 2  # by then an adversary has joined
    batches = Repeated(system, settings["train_micro_batch_size_per_gpu"], settings["gradient_accumulation_steps"])
    flops = count_step_flops(system, run.batch.global_, first)
    built: dict[str, Step] = {}
    held: dict[str, int] = {}  # bytes of weights, moments and averages
    for side in sides:
        before = _allocated()
        if step := _side(record, side, run, settings, system, batches, first):
            built[side] = step
        held[side] = _allocated() - before
    times = alternate(built, device, first, rounds=rounds, steps=steps, warm_up=1 if record.dry else 3)
    peak = measure_matmul_flops(device, DTYPES[precision], 256 if record.dry else 0)
    least = {side: side_times.least("wall") for side, side_times in times.items()}

    def row(what: str, value: float, unit: str = "") -> None:
        record.speed(what, value, unit, **targets.get(what, {}))

    row("batch", batch)
    row("matmul", peak / 1e12, "TFLOP/s")
    row("FLOPs a sample", flops / batch / 1e9, "G")
    for side, step in built.items():
        row(f"{side}: samples/s", batch / least[side])
        row(f"{side}: spread of rounds", times[side].median("wall") / least[side] - 1)
        row(f"{side}: share of matmul", flops / least[side] / peak)
        row(f"{side}: idle share", profiled(record, side, step, first))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            step(first)
            others = sum(held.values()) - held[side]
            row(f"{side}: peak memory", (torch.cuda.max_memory_allocated() - others) / 1e9, "GB")
    for side in (side for side in built if side != "dstrain" and "dstrain" in built):
        row(f"dstrain / {side}", least[side] / least["dstrain"], "of its speed")


def _side(
    record: Record, side: str, run: Run, settings: dict[str, Any], system: System, batches: Repeated, first: int
) -> Step | None:
    """The step of a side that has taken number `first`: an optimizer makes its moments then. None: see _rival."""
    if side not in ("dstrain", "plain"):
        return _rival(record, side, run, settings, system, batches, first)
    step = (
        Dstrain(run, settings, system, batches)
        if side == "dstrain"
        else Plain(run, system, batches, DTYPES[precision_of(settings)])
    ).step
    step(first)
    return step


def _rival(
    record: Record, side: str, run: Run, settings: dict[str, Any], system: System, batches: Repeated, first: int
) -> Step | None:
    """A rival's step, once it has taken one; None, with a row that says so, where it fails: that ends no case."""
    if reason := available(side):
        record.left_out(reason)
        return None
    try:
        step = rivals(run, settings, system, batches, (side,))[side].step
        step(first)
    except Exception:
        record.detail(f"{side} failed", traceback.format_exc())
        step = None
    record.row(f"{side}: runs", step is not None, at_least=1)
    gc.collect()
    return step


def profiled(record: Record, side: str, step: Step, first: int, steps: int = 3) -> float:
    """The share of some steps in which the device has nothing to do, between its first and last kernel; without a GPU
    the share outside of operators. The kernels that take longest go into the JSON.
    """
    cuda = group.device().type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        for number in range(first, first + (1 if record.dry else steps)):
            step(number)
        if cuda:
            torch.cuda.synchronize()
    kind = torch.autograd.DeviceType.CUDA if cuda else torch.autograd.DeviceType.CPU
    events = [
        event
        for event in profiler.events()
        if event.device_type == kind and not getattr(event, "is_user_annotation", False)
    ]
    spent: dict[str, float] = {}
    for event in events:
        name = event.name.encode("ascii", "replace").decode()[:120]
        spent[name] = spent.get(name, 0.0) + event.time_range.elapsed_us()
    longest = sorted(spent.items(), key=lambda pair: -pair[1])[:_KERNELS]
    record.detail(f"{side}: longest kernels, us a step", {name: round(us / steps, 1) for name, us in longest})
    return idle_share([(event.time_range.start, event.time_range.end) for event in events])


def idle_share(spans: Sequence[tuple[float, float]]) -> float:
    """The share of the time from the first start to the last end in which no span runs; NaN without spans."""
    if not spans:
        return float("nan")
    covered, reached = 0.0, min(start for start, _ in spans)
    begun = reached
    for begin, end in sorted(spans):
        covered += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return 1 - covered / max(reached - begun, 1e-9)


def _allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
