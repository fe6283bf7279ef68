"""Finds choices with which a run fits or is faster: micro-batch, recomputation, stage and offload, each one counted.

No choice changes what is learned: batch.global stays, and gradients are the same but for rounding.
"""

import copy
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from dstrain import systems
from dstrain.distributed.progress import get_phases
from dstrain.engine.settings import read_offload_device, read_zero_stage, resolve_deepspeed_settings
from dstrain.planning.count import count_costs
from dstrain.planning.counts import Layout
from dstrain.planning.estimate import CONTEXT, EFFICIENCY, Estimate
from dstrain.recipe import ConfigError, Run
from dstrain.tracking.hardware import Chip

MAX_RANKS = 4096  # number of ranks that are counted
RECOMPUTE = ("none", "attention", "all", "offload")  # from the most memory to the least
_OFFLOADS = ((), ("offload_optimizer",), ("offload_optimizer", "offload_param"))
_TO_HOST = {"device": "cpu", "pin_memory": True}


@dataclass(frozen=True)
class Case:
    """A run, a DeepSpeed JSON as it was written, and the ranks and the chip to plan for."""

    run: Run
    ds_config: dict[str, Any]
    layout: Layout
    chip: Chip
    efficiency: float = EFFICIENCY

    def estimate_costs(self) -> Estimate:
        """Counts the costs of the case, and returns the estimate. Prints a line on stderr before, since a count takes
        seconds or minutes. Raises ConfigError if the JSON does not suit the recipe or this number of ranks.
        """
        settings = resolve_deepspeed_settings(
            self.ds_config,
            self.layout.world,
            "cuda",
            batch=self.run.batch,
            optimizer=self.run.optimizer,
            faults=self.run.faults,
            sequence=self.run.parallel.sequence,
        )
        micro, recompute = settings["train_micro_batch_size_per_gpu"], self.run.model.get("recompute", "none")
        work = f"counting stage {read_zero_stage(settings)}, micro-batch {micro}, recompute {recompute}"
        work += "".join(f", {name}" for name in _OFFLOADS[-1] if read_offload_device(settings, name) != "none")
        print(f"{work} ...", file=sys.stderr, flush=True)
        get_phases().enter_phase(work)
        counts = count_costs(self.run, settings, self.layout)
        return Estimate(self.run, settings, self.layout, self.chip, counts, self.efficiency)

    def copy_with(
        self,
        *,
        micro: int | None = None,
        recompute: str | None = None,
        stage: int | None = None,
        sequence: int | None = None,
        offload: tuple[str, ...] = (),
    ) -> "Case":
        """Returns a copy of the case with other choices. A choice that is None or () stays.

        micro: samples of one forward pass on a rank
        recompute: the value of model.recompute
        stage: the ZeRO stage
        sequence: the number of ranks that share a sample
        offload: sections of DeepSpeed's JSON, such as "offload_optimizer", whose states go to the host's memory
        """
        run, ds_config = self.run, copy.deepcopy(self.ds_config)
        if micro is not None:
            run = run.model_copy(update={"batch": run.batch.model_copy(update={"micro": micro})})
        if recompute is not None:
            run = run.model_copy(update={"model": {**run.model, "recompute": recompute}})
        if sequence is not None:
            run = run.model_copy(update={"parallel": run.parallel.model_copy(update={"sequence": sequence})})
        zero = ds_config["zero_optimization"] = ds_config.get("zero_optimization") or {}
        zero |= {"stage": stage} if stage is not None else {}
        zero |= {name: dict(_TO_HOST) for name in offload}
        return replace(self, run=run, ds_config=ds_config)


def find_smallest_fitting_change(estimate: Estimate, case: Case) -> Estimate | None:
    """Returns the estimate of the case after the smallest change with which the run fits: the one that changes the
    fewest choices, and of several the fastest. `estimate` is that of the unchanged case. Returns None if no change on
    this number of GPUs makes the run fit.
    """
    if case.chip.memory <= CONTEXT:
        return None
    choices, share = estimate.collect_choices(), _count_samples_per_rank(case)
    now = RECOMPUTE.index(choices["model.recompute"]) if choices["model.recompute"] in RECOMPUTE else 0
    changes: dict[str, list[Any]] = {
        "recompute": [*RECOMPUTE[now + 1 :]] if "recompute" in case.run.model else [],
        "micro": [micro for micro in _list_micro_batches(share) if micro < estimate.micro_batch],
        "stage": [*range(choices["zero_optimization.stage"] + 1, 4)],
        "offload": [
            names for names in _OFFLOADS if any(choices[f"zero_optimization.{name}"] == "none" for name in names)
        ],
    }
    for size in range(1, len(changes) + 1):
        ways = [{name: changes[name] for name in names} for names in itertools.combinations(changes, size)]
        fitting = [tried for way in ways for tried in _iterate_fitting_estimates(case, way)]
        if fitting:
            return min(fitting, key=_make_cost_sort_key)
    return None


def find_fit_with_shared_samples(case: Case) -> Estimate | None:
    """Returns the estimate of the case with more ranks for each sample: the smallest number of ranks with which the run
    fits. All other choices save memory: stage 3, micro-batches of one sample, and recompute=all or offload. Returns
    None if the run fits with no such number.
    """
    for ranks in _list_possible_ranks_per_sample(case)[1:] if case.chip.memory > CONTEXT else ():
        if fitting := _find_fit_at_stage_3(case.copy_with(sequence=ranks)):
            return fitting
    return None


def find_fit_with_more_gpus(case: Case) -> Estimate | None:
    """Returns the estimate of the case on 2, 4, 8, ... times as many GPUs: the smallest number on which the run fits.
    All other choices save memory: stage 3, micro-batches of one sample, and recompute=all or offload.

    Tries numbers up to 4096 ranks, as long as they divide batch.global. Returns None if the run fits on none of them.
    """
    world = 2 * case.layout.world
    while world <= MAX_RANKS and case.run.batch.global_ % world == 0 and case.chip.memory > CONTEXT:
        if fitting := _find_fit_at_stage_3(replace(case, layout=replace(case.layout, world=world))):
            return fitting
        world *= 2
    return None


def _find_fit_at_stage_3(case: Case) -> Estimate | None:
    """Returns the estimate at stage 3, with micro-batches of one sample and recompute=all or, if that does not fit,
    recompute=offload; None if neither fits.
    """
    for recompute in RECOMPUTE[-2:] if "recompute" in case.run.model else (None,):
        tried = _estimate_or_none(case.copy_with(stage=3, recompute=recompute, micro=1))
        if tried and tried.fits:
            return tried
    return None


def _iterate_fitting_estimates(case: Case, changes: dict[str, list[Any]]) -> Iterator[Estimate]:
    """Yields for each combination of the values in `changes`, "micro" left aside, the estimate with the largest
    micro-batch that fits the memory; nothing for a combination where none fits.

    changes: {choice: values to try}. The values of "micro" fall; without them a case keeps its own micro-batch.
    """
    others = [[(name, value) for value in values] for name, values in changes.items() if name != "micro"]
    for way in itertools.product(*others):
        other = case.copy_with(**dict(way))
        sizes = [{"micro": micro} for micro in changes["micro"]] if "micro" in changes else [{}]
        if tried := _find_first_fitting_estimate(other, sizes):
            yield tried


def _find_first_fitting_estimate(case: Case, sizes: list[dict[str, int]]) -> Estimate | None:
    """Returns the estimate of a case with the first of `sizes` that fits, None if none fits. A size is the case's
    micro-batch, {"micro": n}, or {} for its own. Searches by bisection: later sizes must take less memory.
    """
    fitting, low, high = None, 0, len(sizes) - 1
    middle = high  # The last one is tried first, since most ways fail even with it.
    while low <= high:
        tried = _estimate_or_none(case.copy_with(**sizes[middle]))
        if tried and tried.fits:
            fitting, high = tried, middle - 1
        else:
            low = middle + 1
        middle = (low + high) // 2
    return fitting


def search_fitting_estimates(case: Case, report: Callable[[Estimate], None]) -> list[Estimate]:
    """Estimates every combination of stage, micro-batch and recomputation. Returns the estimates that fit, the fastest
    first. Calls `report` with each estimate, also with those that do not fit. If one sample does not fit on a rank,
    several ranks share each sample.

    If the chip's rates are unknown, the estimates are sorted by host memory, recomputed operations and exchanged bytes.
    """
    fitting: list[Estimate] = []
    if case.chip.memory <= CONTEXT:
        return fitting
    recompute = RECOMPUTE if "recompute" in case.run.model else (None,)
    for stage, choice in itertools.product((1, 2, 3), recompute):
        for ranks in _list_possible_ranks_per_sample(case):
            if found := _search_fitting_micro_batches(
                case.copy_with(stage=stage, recompute=choice, sequence=ranks), report
            ):
                fitting += found
                break
    return sorted(fitting, key=_make_cost_sort_key)


def _search_fitting_micro_batches(case: Case, report: Callable[[Estimate], None]) -> list[Estimate]:
    """Estimates the case with larger and larger micro-batches, until one does not fit; then only the largest, a step
    without accumulation. Calls `report` with each estimate, and returns those that fit.
    """
    share, full, fitting = _count_samples_per_rank(case), False, []
    for micro in reversed(_list_micro_batches(share)):
        if full and micro < share:  # more samples take more; a whole share sums no gradients
            continue
        tried = _estimate_or_none(case.copy_with(micro=micro))
        full = tried is not None and not tried.fits
        if tried:
            report(tried)
            fitting += [tried] if tried.fits else []
    return fitting


def _count_samples_per_rank(case: Case) -> int:
    """Returns the number of samples in a step for each rank, or for each group of ranks that share samples."""
    return case.run.batch.global_ * case.run.parallel.sequence // case.layout.world


def _list_possible_ranks_per_sample(case: Case) -> list[int]:
    """Returns the numbers of ranks that may share a sample: the recipe's number, and its doubles as long as they divide
    both the GPUs of a machine and all GPUs, and the system allows them.
    """
    ranks, layout = [case.run.parallel.sequence], case.layout
    config = systems.build_config(case.run.system, case.run.model)
    most = math.gcd(layout.world, layout.gpus_per_node)
    while most % (2 * ranks[-1]) == 0 and not config.list_conflicts_among_ranks(2 * ranks[-1]):
        ranks.append(2 * ranks[-1])
    return ranks


def _estimate_or_none(case: Case) -> Estimate | None:
    """Returns the estimate of a case, or None if estimating it raises ConfigError, such as for choices that do not go
    together.
    """
    try:
        return case.estimate_costs()
    except ConfigError:
        return None


def _make_cost_sort_key(estimate: Estimate) -> tuple[float, ...]:
    """Returns a key by which estimates are sorted, the cheapest first: by time, or, if the chip's rates are unknown, by
    host memory, recomputed operations and exchanged bytes.
    """
    if estimate.time is None:
        exchanged = sum(call.bytes for call in estimate.counts.collectives)
        return estimate.host_bytes, estimate.counts.recomputed, exchanged, -estimate.micro_batch, estimate.device_bytes
    # The rule of time leaves out the launches of kernels: of equal times, fewer micro-batches are faster.
    return estimate.time.total, estimate.host_bytes, -estimate.micro_batch


def _list_micro_batches(samples_per_rank: int) -> list[int]:
    """Returns the micro-batches to try, the largest first: `samples_per_rank`, the samples of a rank in a step,
    then half of it, a quarter and so on as long as these are whole numbers, and 1.
    """
    sizes = [samples_per_rank]
    while sizes[-1] % 2 == 0:
        sizes.append(sizes[-1] // 2)
    return sizes if sizes[-1] == 1 else [*sizes, 1]
