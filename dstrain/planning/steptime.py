"""A model of a step's time, from what was counted and what the makers state. No GPU has checked it yet.

    compute     operations of a step, those done again included, at _EFFICIENCY of the chip's rate; a micro-batch takes
                no less than _PASSES readings of the weights
    update      bytes of AdamW and of the averages on the weights that a rank owns, at _BANDWIDTH of the memory's;
                with offload, the same in the host's memory, and gradients and weights over the host's link
    network     the bytes that a ring of each group sends, at _LINKS of the slower of a machine's inner links and its
                network, which all its GPUs share; and _CALL seconds a call, _HOP more for each further machine
    exposed     the part of `network` that nothing hides. Gradients travel under the backward pass of the micro-batches
                that reduce them, two thirds of its time, and stage 3's weights under both passes; _LEFT of them shows
                even so. Gathers of updated weights (stages 1 and 2) hide nowhere. Without overlap_comm all of it shows.

A step takes compute + update + exposed. Not in it: reading data, frozen encoders, reports, pictures, evaluations, and
what Python and the launches of kernels take, which is most of a step below LAUNCHES.
"""

from dataclasses import dataclass
from typing import Any

from dstrain.engine.settings import offloads_optimizer, read_precision, read_stage
from dstrain.planning.counts import Collective, Counts, Layout
from dstrain.recipe import Run
from dstrain.tracking.hardware import Chip

# Of the rates on data sheets, what training reaches. Published runs of large transformers report 0.4 to 0.6.
_EFFICIENCY, _BANDWIDTH, _LINKS = 0.45, 0.8, 0.8
_PASSES = 3  # forward, and backward to the inputs and to the weights
_ADAMW, _AVERAGE = 30, 12  # bytes a weight: gradient 4, master and moments 12 read and written, weight 2
_HOST = 40e9  # bytes a second of the host's memory for each GPU
_CALL, _HOP = 20e-6, 5e-6  # seconds
LAUNCHES = 5e-3  # seconds below which Python and the launches of kernels take most of a step
_LEFT = 0.1
_DISK = 2e9  # bytes a second that a machine writes to the storage of checkpoints
_REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce", "all_to_all")


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step, by what takes them; `save` those of writing a checkpoint, `stall` of its copy."""

    compute: float
    update: float
    exposed: float
    network: float  # hidden or not
    save: float
    stall: float

    @property
    def total(self) -> float:
        return self.compute + self.update + self.exposed


def step_time(counts: Counts, run: Run, settings: dict[str, Any], layout: Layout, chip: Chip) -> StepTime:
    """The model of a chip whose rates are known."""
    accumulation, zero = settings["gradient_accumulation_steps"], read_stage(settings)
    weights = sum(number for part, number in counts.weights.items() if not part.startswith("frozen/"))
    width = 4 if read_precision(settings) == "fp32" else 2
    reading = _PASSES * width * weights * accumulation / (_BANDWIDTH * chip.bandwidth)
    compute = max((counts.flops + counts.recomputed) / (_EFFICIENCY * chip.rate(read_precision(settings))), reading)
    owned = weights / (layout.world if zero else 1)
    moved = (_ADAMW + _AVERAGE * len(run.ema.names)) * owned
    update = moved / (_BANDWIDTH * chip.bandwidth)
    if offloads_optimizer(settings):
        update = moved / _HOST + 2 * width * owned / (_LINKS * chip.host_link)
    reductions, others = (
        sum(_seconds(call, layout, chip) for call in counts.collectives if (call.operation in _REDUCTIONS) == reduces)
        for reduces in (True, False)
    )
    network = reductions + others
    if settings.get("zero_optimization", {}).get("overlap_comm", zero == 3):
        reductions = _beside(reductions, compute * 2 / 3 / (1 if zero >= 2 else accumulation))
        others = _beside(others, compute) if zero == 3 else others
    state = counts.checkpoint / layout.world
    nodes = -(-layout.world // layout.gpus_per_node)
    return StepTime(
        compute,
        update,
        reductions + others,
        network,
        counts.checkpoint / (nodes * _DISK),
        0.0 if offloads_optimizer(settings) else state / (_LINKS * chip.host_link),
    )


def _beside(seconds: float, work: float) -> float:
    """What shows of communication that runs beside `work` seconds of computing."""
    return max(seconds - work, _LEFT * seconds)


def _seconds(call: Collective, layout: Layout, chip: Chip) -> float:
    """Of all calls of a kind, each a ring over the group, which fills machine after machine."""
    if call.ranks < 2:
        return 0.0
    nodes = -(-call.ranks // layout.gpus_per_node)
    rate = min(chip.link, layout.gpus_per_node * chip.network) if nodes > 1 else chip.link
    rounds = 2 if call.operation == "all_reduce" else 1
    sent = rounds * call.bytes * (call.ranks - 1) / call.ranks
    return sent / (_LINKS * rate) + call.count * (_CALL + _HOP * (nodes - 1))
