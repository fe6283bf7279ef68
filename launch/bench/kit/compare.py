"""A training step of dstrain beside a plain PyTorch loop and what others use, in one run; and the EMA beside a copy.

The EMA is timed over the recipe's weights, which a CPU's cache may hold, and over so many that none does.

The sides (sides.py, rivals.py) get the same synthetic batches, so that no loader is timed. They take turns, A B A B;
the least and the median time of a step are reported. The clock is the wall's on a GPU and on a quiet machine; where
other programs take cores, it is the CPU time of all threads, and the first line says so. The rivals are one process
each: on several ranks dstrain runs alone.
"""

import gc
from collections.abc import Iterable
from typing import Any

import torch

from dstrain.distributed import group
from dstrain.distributed.progress import get_phases
from dstrain.engine.settings import read_precision
from dstrain.engine.start import start_process_group
from dstrain.planning.synthetic import Repeated
from dstrain.recipe import Run
from dstrain.tracking.flops import count_step_flops, measure_matmul_flops
from kit.floors import Flats, ema_beside_copy
from kit.rivals import available, rivals
from kit.sides import DTYPES, Dstrain, Plain, system_of
from kit.timing import Machine, Times, alternate, keep_memory

ROUNDS, STEPS, WARM_UP = 6, 8, 4  # steps of a round at accumulation 1, of as many micro-batches at others
GRID = tuple((accumulation, clip) for accumulation in (1, 4) for clip in (0.0, 1.0))
RIVALS = ("stock", "accelerate")
WEIGHTS = 130_000_000  # those of a DiT-B

Figures = dict[str, float]


def compare(jobs: Iterable[tuple[Run, dict[str, Any]]]) -> list[Figures]:
    """Times all sides under each pair of a recipe and resolved settings; prints and returns the figures by name."""
    start_process_group()
    keep_memory()
    figures = []
    for run, settings in jobs:
        machine = Machine(group.device())
        times, averaging, own = one(run, settings)
        clock = machine.clock()
        own |= {
            f"{side} {kind} s": getattr(side_times, kind)(clock)
            for side, side_times in times.items()
            for kind in ("least", "median")
        }
        own |= {
            f"{side} / plain": own[f"{side} least s"] / own["plain least s"]
            for side in times
            if "plain" in times and side != "plain"
        }
        own["EMA / copy"] = _ratio(averaging, clock)
        figures.append(own)
        if group.rank() == 0:
            _print(run, settings, machine, own)
        gc.collect()  # engines hold circles
    machine = Machine(group.device())
    averaging = ema_beside_copy(Flats([torch.ones(WEIGHTS, device=group.device())]))
    if group.rank() == 0:
        print(
            f"EMA / copy of {WEIGHTS / 1e6:.0f}M weights: {_ratio(averaging, machine.clock()):.4g}; "
            f"{machine.described()}"
        )
    return figures


def one(run: Run, settings: dict[str, Any]) -> tuple[dict[str, Times], dict[str, Times], Figures]:
    """Times of a step by side; those of an average and of a copy; rates, and the share of the matrix products' rate."""
    get_phases().enter_phase("timing steps")
    device, dtype = group.device(), DTYPES[read_precision(settings)]
    system = system_of(run)
    batches = Repeated(system, settings["train_micro_batch_size_per_gpu"], settings["gradient_accumulation_steps"])
    ours, first, figures = Dstrain(run, settings, system, batches), run.steps // 2, {}  # an adversary has joined
    sides = {"dstrain": ours.step}
    if group.world() == 1:
        sides |= {"plain": Plain(run, system, batches, dtype).step}
        chosen = tuple(name for name in RIVALS if len(system.parts) == 1 and available(name) is None)
        others = rivals(run, settings, system, batches, chosen) if chosen else {}
        sides |= {name: rival.step for name, rival in others.items()}
    steps = max(STEPS // batches.accumulation, 1)
    times = alternate(sides, device, first, rounds=ROUNDS, steps=steps, warm_up=max(WARM_UP // batches.accumulation, 1))
    if "plain" in sides:
        peak = measure_matmul_flops(device, dtype)
        figures |= {
            "samples/s": run.batch.global_ / times["dstrain"].least("wall"),
            "matmul TFLOP/s": peak / 1e12,
            "dstrain share of matmul": count_step_flops(system, run.batch.global_, first)
            / times["dstrain"].least("wall")
            / peak,
        }
    if device.type == "cuda":
        figures["peak memory of all GB"] = torch.cuda.max_memory_allocated() / 1e9
    return times, ema_beside_copy(ours.engines.masters[system.averaged[0]]), figures


def _ratio(averaging: dict[str, Times], clock: str) -> float:
    return averaging["EMA"].least(clock) / averaging["copy"].least(clock)


def _print(run: Run, settings: dict[str, Any], machine: Machine, figures: Figures) -> None:
    accumulation = settings["gradient_accumulation_steps"]
    print(
        f"{run.name}, {read_precision(settings)}, batch {run.batch.global_} in {accumulation} micro-batches, clip "
        f"{run.optimizer.clip:g}, {group.world()} ranks of {machine.device.type}; {machine.described()}"
    )
    if run.optimizer.name != "adamw" and group.world() == 1:
        print(f"  dstrain takes {run.optimizer.name}, the others AdamW: optimizer.name=adamw compares like with like")
    print("\n".join(f"  {name:28} {value:.4g}" for name, value in figures.items()))
    for name in RIVALS:
        if group.world() == 1 and f"{name} / plain" not in figures:
            print(f"  {name:28} left out: {available(name) or 'it trains one network, the system has several'}")
