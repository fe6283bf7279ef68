"""What a run takes of a GPU and its host, in bytes and in seconds, and whether it fits."""

import json
from dataclasses import dataclass
from typing import Any

from dstrain.engine.settings import read_offload, read_precision, read_stage
from dstrain.planning.counts import Counts, Layout
from dstrain.planning.states import keeps, whole
from dstrain.planning.step import counted_step
from dstrain.planning.steptime import StepTime, step_time
from dstrain.recipe import Run
from dstrain.systems.base import System
from dstrain.tracking.flops import step_flops
from dstrain.tracking.hardware import GIB, Chip

# Of a GPU's memory, beside what is counted: the driver's own and the CUDA context with its libraries; the buffers of
# NCCL's channels; and the allocator's loss, a share of what is counted.
CONTEXT, _NCCL, _ALLOCATOR = 2 * GIB, GIB, 0.05
_HOST = 0.9  # of the memory of a host, what ranks may take; loaders need some
OPTIONAL = "offload_optimizer", "offload_param"


@dataclass(frozen=True)
class Estimate:
    """A run under resolved settings, somewhere: what it takes. `time` is None where the chip's rates are unknown."""

    run: Run
    settings: dict[str, Any]
    layout: Layout
    chip: Chip
    counts: Counts

    @property
    def needed(self) -> int:
        """Bytes of a GPU's memory that are counted."""
        return sum(self.counts.device.values())

    @property
    def reserve(self) -> int:
        """Bytes of a GPU's memory beside them."""
        return int(CONTEXT + (_NCCL if self.layout.world > 1 else 0) + _ALLOCATOR * self.needed)

    @property
    def host(self) -> int:
        """Bytes of the host's memory that one rank takes."""
        return sum(self.counts.host.values())

    @property
    def fits(self) -> bool:
        on_host = self.chip.host is None or self.host <= _HOST * self.chip.host
        return self.needed + self.reserve <= self.chip.memory and on_host

    @property
    def time(self) -> StepTime | None:
        return step_time(self.counts, self.run, self.settings, self.layout, self.chip) if self.chip.name else None

    @property
    def micro(self) -> int:
        return self.settings["train_micro_batch_size_per_gpu"]

    def choices(self) -> dict[str, Any]:
        """What may be changed so that a run fits, each by the name that a user writes."""
        zero = {"stage": read_stage(self.settings)} | {name: read_offload(self.settings, name) for name in OPTIONAL}
        return {"batch.micro": self.micro, "model.recompute": self.run.model.get("recompute", "none")} | {
            f"zero_optimization.{name}": value for name, value in zero.items()
        }

    def figures(self) -> dict[str, Any]:
        """All of it as plain values: seconds, bytes, operations, watt-hours."""
        counts, time = self.counts, self.time
        values: dict[str, Any] = {
            "name": self.run.name,
            "world": self.layout.world,
            "gpus_per_node": self.layout.gpus_per_node,
            "precision": read_precision(self.settings),
            "batch": self.run.batch.global_,
            "accumulation": self.settings["gradient_accumulation_steps"],
            "choices": self.choices(),
            "weights": counts.weights,
            "device": counts.device,
            "device_bytes": self.needed,
            "reserve_bytes": self.reserve,
            "memory_bytes": self.chip.memory,
            "fits": self.fits,
            "elsewhen": counts.elsewhen,
            "host": counts.host,
            "host_bytes": self.host,
            "collectives": [vars(call) for call in counts.collectives],
            "flops": counts.flops,
            "recomputed_flops": counts.recomputed,
            "checkpoint_bytes": counts.checkpoint,
        }
        if time:
            hours = time.total * self.run.steps / 3600
            values |= {
                "seconds": {**vars(time), "total": time.total},
                "samples_per_second": self.run.batch.global_ / time.total,
                "mfu": counts.flops / time.total / self.chip.rate(read_precision(self.settings)),
                "days": hours / 24,
                "kwh": hours * self.layout.world * self.chip.watts / 1000,
            }
        return values


def held(estimate: Estimate) -> str:
    """What of a GPU's memory, and of the host's, would be taken."""
    chip, total = estimate.chip, estimate.needed + estimate.reserve
    text = f"{total / 1e9:.2f} GB of the {chip.memory / 1e9:.1f} GB of a GPU"
    if chip.host is not None and estimate.host > _HOST * chip.host:
        text += (
            f", {estimate.host / 1e9:.0f} GB of the {_HOST * chip.host / 1e9:.0f} GB that a rank may take of the "
            "host's memory"
        )
    return text


def changes(before: Estimate, after: Estimate) -> dict[str, Any]:
    """The choices that differ, with their values after; and the GPUs, where these are more."""
    choices = before.choices()
    more = {"world": after.layout.world} if after.layout.world != before.layout.world else {}
    return more | {name: value for name, value in after.choices().items() if value != choices[name]}


def brief(run: Run, system: System, settings: dict[str, Any], world: int) -> str:
    """What can be said of a run's costs within a second: weights, operations, and what a rank keeps between steps."""
    numbers, _ = whole(run, system)
    try:
        largest = " of the largest bucket" if run.data.buckets else ""
        work = step_flops(system, run.batch.global_, counted_step(run, system)) / world / 1e12
        work = f"; a step{largest} is {work:.3g} TFLOP a rank"
    except (RuntimeError, TypeError, ValueError):  # as commands/probe.py meets them on the meta device
        work = ""
    weights = ", ".join(f"{part} {number / 1e6:,.1f} M" for part, number in numbers.items())
    return (
        f"weights: {weights}{work}\n{keeps(run, system, settings, world)}; launch/plan.py counts all that a step takes"
    )


def as_json(values: Any) -> str:
    return json.dumps(values, indent=1)
