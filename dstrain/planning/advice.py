"""What makes a run fit, or makes it faster: choices of micro-batch, recomputation, stage and offload, each one counted.

No choice changes what is learned: batch.global is kept, gradients are the same but for rounding.
"""

import copy
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dstrain.distributed.progress import phases
from dstrain.engine.settings import read_offload as where
from dstrain.engine.settings import read_stage as stage_of
from dstrain.engine.settings import resolve_settings
from dstrain.planning.count import count
from dstrain.planning.counts import Layout
from dstrain.planning.estimate import CONTEXT, Estimate
from dstrain.recipe import ConfigError, Run
from dstrain.tracking.hardware import Chip

LARGEST = 4096  # number of ranks that are counted
RECOMPUTE = ("none", "attention", "all")  # from the most memory to the least
_OFFLOADS = ((), ("offload_optimizer",), ("offload_optimizer", "offload_param"))
_TO_HOST = {"device": "cpu", "pin_memory": True}


@dataclass(frozen=True)
class Case:
    """A run, a DeepSpeed JSON as it was written, and where both shall stand."""

    run: Run
    ds_config: dict[str, Any]
    layout: Layout
    chip: Chip

    def estimate(self) -> Estimate:
        """ConfigError: the JSON does not suit the recipe or this number of ranks."""
        settings = resolve_settings(
            self.ds_config,
            self.layout.world,
            "cuda",
            batch=self.run.batch,
            optimizer=self.run.optimizer,
            faults=self.run.faults,
        )
        micro, recompute = settings["train_micro_batch_size_per_gpu"], self.run.model.get("recompute", "none")
        work = f"counting stage {stage_of(settings)}, micro-batch {micro}, recompute {recompute}"
        work += "".join(f", {name}" for name in _OFFLOADS[-1] if where(settings, name) != "none")
        print(f"{work} ...", file=sys.stderr, flush=True)
        phases().at(work)
        return Estimate(self.run, settings, self.layout, self.chip, count(self.run, settings, self.layout))

    def changed(
        self,
        *,
        micro: int | None = None,
        recompute: str | None = None,
        stage: int | None = None,
        offload: tuple[str, ...] = (),
    ) -> "Case":
        """The case with other choices; what is None or empty stays."""
        run, ds_config = self.run, copy.deepcopy(self.ds_config)
        if micro is not None:
            run = run.model_copy(update={"batch": run.batch.model_copy(update={"micro": micro})})
        if recompute is not None:
            run = run.model_copy(update={"model": {**run.model, "recompute": recompute}})
        zero = ds_config.setdefault("zero_optimization", {})
        zero |= {"stage": stage} if stage is not None else {}
        zero |= {name: dict(_TO_HOST) for name in offload}
        return replace(self, run=run, ds_config=ds_config)


def advice(estimate: Estimate, case: Case) -> Estimate | None:
    """The smallest change after which a run fits: the fewest choices changed, and of these the fastest by the model.

    Each is counted as the run itself is. None: there is none on this number of GPUs.
    """
    if case.chip.memory <= CONTEXT:
        return None
    choices, share = estimate.choices(), case.run.batch.global_ // case.layout.world
    now = RECOMPUTE.index(choices["model.recompute"]) if choices["model.recompute"] in RECOMPUTE else 0
    changes: dict[str, list[Any]] = {
        "recompute": [*RECOMPUTE[now + 1 :]] if "recompute" in case.run.model else [],
        "micro": [micro for micro in _halves(share) if micro < estimate.micro],
        "stage": [*range(choices["zero_optimization.stage"] + 1, 4)],
        "offload": [
            names for names in _OFFLOADS if any(choices[f"zero_optimization.{name}"] == "none" for name in names)
        ],
    }
    for size in range(1, len(changes) + 1):
        ways = [{name: changes[name] for name in names} for names in itertools.combinations(changes, size)]
        fitting = [tried for way in ways for tried in _fitting(case, way)]
        if fitting:
            return min(fitting, key=_cost)
    return None


def more_gpus(case: Case) -> Estimate | None:
    """The run on the smallest of 2, 4, 8, ... times as many GPUs where it fits with all that saves memory on a GPU.

    None: on none that divides batch.global and can be counted, or so little memory that no number helps.
    """
    recompute, world = RECOMPUTE[-1] if "recompute" in case.run.model else None, 2 * case.layout.world
    while world <= LARGEST and case.run.batch.global_ % world == 0 and case.chip.memory > CONTEXT:
        larger = replace(case, layout=replace(case.layout, world=world))
        tried = _tried(larger.changed(stage=3, recompute=recompute, micro=1))
        if tried and tried.fits:
            return tried
        world *= 2
    return None


def _fitting(case: Case, changes: dict[str, list[Any]]) -> Iterator[Estimate]:
    """One estimate that fits for each way to change exactly these choices: of micro-batches, with the largest."""
    others = [[(name, value) for value in values] for name, values in changes.items() if name != "micro"]
    for way in itertools.product(*others):
        other = case.changed(**dict(way))
        sizes = [{"micro": micro} for micro in changes["micro"]] if "micro" in changes else [{}]
        if tried := _first(partial(_try_size, other), sizes):
            yield tried


def _try_size(case: Case, size: dict[str, int]) -> Estimate | None:
    """Returns the estimate of a case with another micro-batch."""
    return _tried(case.changed(**size))


def _first(try_: Callable[[dict[str, int]], Estimate | None], sizes: list[dict[str, int]]) -> Estimate | None:
    """The estimate of the first of some sizes that fits, where the last ones take the least memory; by halving."""
    fitting, low, high = None, 0, len(sizes) - 1
    middle = high  # most ways fail even with the last: it is tried first
    while low <= high:
        tried = try_(sizes[middle])
        if tried and tried.fits:
            fitting, high = tried, middle - 1
        else:
            low = middle + 1
        middle = (low + high) // 2
    return fitting


def search(case: Case, report: Callable[[Estimate], None]) -> list[Estimate]:
    """The table of stage x micro-batch x recomputation on a number of GPUs: what fits, the fastest first.

    Where the chip's rates are unknown, what computes and exchanges least comes first. `report` gets each as it is
    counted, those that do not fit as well.
    """
    share, fitting = case.run.batch.global_ // case.layout.world, []
    if case.chip.memory <= CONTEXT:
        return fitting
    recompute = RECOMPUTE if "recompute" in case.run.model else (None,)
    for stage, choice in itertools.product((1, 2, 3), recompute):
        full = False
        for micro in reversed(_halves(share)):
            if full and micro < share:  # more samples take more; a whole share sums no gradients
                continue
            tried = _tried(case.changed(stage=stage, recompute=choice, micro=micro))
            full = tried is not None and not tried.fits
            if tried:
                report(tried)
                fitting += [tried] if tried.fits else []
    return sorted(fitting, key=_cost)


def _tried(case: Case) -> Estimate | None:
    """None: settings refuse these choices together."""
    try:
        return case.estimate()
    except ConfigError:
        return None


def _cost(estimate: Estimate) -> tuple[float, ...]:
    if estimate.time is None:  # what goes to the host, is computed again, and is exchanged
        exchanged = sum(call.bytes for call in estimate.counts.collectives)
        return estimate.host, estimate.counts.recomputed, exchanged, -estimate.micro, estimate.needed
    # The model of time does not know what it costs to launch kernels: of equal times, fewer micro-batches are faster.
    return estimate.time.total, estimate.host, -estimate.micro


def _halves(share: int) -> list[int]:
    """A rank's samples of a step and what divides them by 2, 4, ...: the micro-batches to try, from the largest."""
    sizes = [share]
    while sizes[-1] % 2 == 0:
        sizes.append(sizes[-1] // 2)
    return sizes if sizes[-1] == 1 else [*sizes, 1]
