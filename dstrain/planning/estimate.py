"""What a run takes of a GPU and its host, in bytes and in seconds, and whether it fits.

Seconds follow one rule. A step takes its operations, those done again included, over the chip's rate times an
efficiency; and after that the bytes that it sends over the rates of the links. Nothing hides behind anything else, and
neither data, frozen encoders, the optimizer nor the launches of kernels are in it.
"""

import json
from dataclasses import dataclass
from typing import Any

from dstrain.engine.settings import is_optimizer_offloaded, read_offload_device, read_precision, read_zero_stage
from dstrain.planning.counts import Collective, Counts, Layout
from dstrain.planning.states import count_weights_and_checkpoint_bytes, describe_memory_of_states
from dstrain.planning.step import choose_step_to_measure
from dstrain.recipe import Run
from dstrain.systems.base import System
from dstrain.tracking.flops import count_step_flops
from dstrain.tracking.hardware import GIB, Chip

# A GPU's memory also holds the driver and the CUDA context with its libraries, the buffers of NCCL's channels, and what
# the allocator loses, a share of what is counted.
CONTEXT, _NCCL, _ALLOCATOR = 2 * GIB, GIB, 0.05
_HOST = 0.9  # the share of a host's memory that ranks may take, since loaders need some
OPTIONAL = "offload_optimizer", "offload_param"
EFFICIENCY = 0.45  # of the rate on the data sheet; published runs of large transformers report 0.4 to 0.6
LAUNCHES = 5e-3  # seconds below which Python and the launches of kernels take most of a step


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step: of its operations, and of the bytes that go over links."""

    compute: float
    links: float

    @property
    def total(self) -> float:
        """Returns the seconds of the whole step."""
        return self.compute + self.links


@dataclass(frozen=True)
class Estimate:
    """The costs of a run under resolved settings. `time` is None where the chip's rates are unknown."""

    run: Run
    settings: dict[str, Any]
    layout: Layout
    chip: Chip
    counts: Counts
    efficiency: float = EFFICIENCY  # the share of the chip's rate that training reaches

    @property
    def device_bytes(self) -> int:
        """Returns the bytes of a GPU's memory that the counted tensors take at the peak of a step."""
        return sum(self.counts.device.values())

    @property
    def reserved_bytes(self) -> int:
        """Returns the bytes of a GPU's memory that are kept free for what is not counted: libraries, the allocator."""
        return int(CONTEXT + (_NCCL if self.layout.world > 1 else 0) + _ALLOCATOR * self.device_bytes)

    @property
    def host_bytes(self) -> int:
        """Returns the bytes of the host's memory that one rank takes."""
        return sum(self.counts.host.values())

    @property
    def fits(self) -> bool:
        """Returns whether the run fits into the GPU's memory, and, if its size is known, into the host's memory."""
        on_host = self.chip.host is None or self.host_bytes <= _HOST * self.chip.host
        return self.device_bytes + self.reserved_bytes <= self.chip.memory and on_host

    @property
    def time(self) -> StepTime | None:
        """Returns the estimated seconds of an optimizer step; None if the chip's rates are unknown."""
        if self.chip.name is None:
            return None
        rate = self.efficiency * self.chip.get_peak_flops(read_precision(self.settings))
        sent = sum(_estimate_collective_seconds(call, self.layout, self.chip) for call in self.counts.collectives)
        if is_optimizer_offloaded(self.settings):  # gradients go to the host, and weights come back
            width = 4 if read_precision(self.settings) == "fp32" else 2
            owned = self.counts.trained_weights / (self.layout.world if read_zero_stage(self.settings) else 1)
            sent += 2 * width * owned / self.chip.host_link
        sent += 2 * self.counts.moved / self.chip.host_link
        return StepTime((self.counts.flops + self.counts.recomputed) / rate, sent)

    @property
    def micro_batch(self) -> int:
        """Returns the number of samples that a rank takes in one forward pass."""
        return self.settings["train_micro_batch_size_per_gpu"]

    def collect_choices(self) -> dict[str, Any]:
        """Returns {key as a user writes it: value} of the choices that `dstrain plan` may change so that a run fits."""
        zero = {"stage": read_zero_stage(self.settings)} | {
            name: read_offload_device(self.settings, name) for name in OPTIONAL
        }
        return {
            "batch.micro": self.micro_batch,
            "model.recompute": self.run.model.get("recompute", "none"),
            "parallel.sequence": self.run.parallel.sequence,
        } | {f"zero_optimization.{name}": value for name, value in zero.items()}

    def collect_cost_figures(self) -> dict[str, Any]:
        """Returns all costs by name, as values for JSON: seconds, bytes, operations, kilowatt-hours."""
        counts, time = self.counts, self.time
        values: dict[str, Any] = {
            "name": self.run.name,
            "world": self.layout.world,
            "gpus_per_node": self.layout.gpus_per_node,
            "precision": read_precision(self.settings),
            "batch": self.run.batch.global_,
            "accumulation": self.settings["gradient_accumulation_steps"],
            "choices": self.collect_choices(),
            "weights": counts.weights,
            "device": counts.device,
            "device_bytes": self.device_bytes,
            "reserve_bytes": self.reserved_bytes,
            "memory_bytes": self.chip.memory,
            "fits": self.fits,
            "elsewhen": counts.elsewhen,
            "host": counts.host,
            "host_bytes": self.host_bytes,
            "collectives": [vars(call) for call in counts.collectives],
            "flops": counts.flops,
            "recomputed_flops": counts.recomputed,
            "moved_bytes": counts.moved,
            "checkpoint_bytes": counts.checkpoint,
        }
        if time:
            hours = time.total * self.run.steps / 3600
            values |= {
                "seconds": {**vars(time), "total": time.total},
                "samples_per_second": self.run.batch.global_ / time.total,
                "mfu": counts.flops / time.total / self.chip.get_peak_flops(read_precision(self.settings)),
                "days": hours / 24,
                "kwh": hours * self.layout.world * self.chip.watts / 1000,
            }
        return values


def _estimate_collective_seconds(call: Collective, layout: Layout, chip: Chip) -> float:
    """Returns the seconds that all calls of one collective operation take. Assumes that data go round a ring of the
    ranks, and that the ranks fill one machine after another.
    """
    rate = chip.link
    if call.ranks > layout.gpus_per_node:
        rate = min(chip.link, layout.gpus_per_node * chip.network)
    rounds = 2 if call.operation == "all_reduce" else 1
    return rounds * call.bytes * (call.ranks - 1) / call.ranks / rate


def describe_memory(estimate: Estimate) -> str:
    """Returns a text on how many GB of a GPU's memory a run would take. If the host has too little memory, also says
    so.
    """
    chip, total = estimate.chip, estimate.device_bytes + estimate.reserved_bytes
    text = f"{total / 1e9:.2f} GB of the {chip.memory / 1e9:.1f} GB of a GPU"
    if chip.host is not None and estimate.host_bytes > _HOST * chip.host:
        text += (
            f", {estimate.host_bytes / 1e9:.0f} GB of the {_HOST * chip.host / 1e9:.0f} GB that a rank may take of the "
            "host's memory"
        )
    return text


def find_changed_choices(before: Estimate, after: Estimate) -> dict[str, Any]:
    """Returns {key: value of `after`} for the choices in which two estimates differ, and "world": the new number of
    GPUs, if that differs.
    """
    choices = before.collect_choices()
    more = {"world": after.layout.world} if after.layout.world != before.layout.world else {}
    return more | {name: value for name, value in after.collect_choices().items() if value != choices[name]}


def describe_costs(run: Run, system: System, settings: dict[str, Any], world: int) -> str:
    """Returns a text with the costs that take less than a second to count: the number of weights of each part, the
    TFLOP of one step on a rank, and the bytes that a rank keeps between steps. Leaves the TFLOP out if the system's
    code needs the values of tensors, which the meta device lacks.
    """
    numbers, _ = count_weights_and_checkpoint_bytes(run, system)
    try:
        largest = " of the largest bucket" if run.data.buckets else ""
        work = (
            count_step_flops(system, run.batch.global_, choose_step_to_measure(run, system), run.train_only)
            / world
            / 1e12
        )
        work = f"; a step{largest} is {work:.3g} TFLOP a rank"
    except (RuntimeError, TypeError, ValueError):  # Code on the meta device asks for values.
        work = ""
    weights = ", ".join(f"{part} {number / 1e6:,.1f} M" for part, number in numbers.items())
    kept = describe_memory_of_states(run, system, settings, world)
    return f"weights: {weights}{work}\n{kept}; `dstrain plan` counts all that a step takes"


def format_json(values: Any) -> str:
    """Returns values as indented JSON."""
    return json.dumps(values, indent=1)
