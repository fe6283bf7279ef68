"""Counts as rank 0 of any number of ranks, in the process that count.py starts."""

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from dstrain import systems
from dstrain.engine.planning.activations import Fused
from dstrain.engine.planning.fake_ranks import FakeEngines, use_fake_ranks_and_tensors
from dstrain.engine.planning.memory_kinds import OFFLOADED, count_checkpoint_bytes
from dstrain.engine.settings import read_offload_device, read_zero_stage
from dstrain.planning.counts import Collective, Counts, Layout
from dstrain.planning.states import count_state_bytes_by_kind, count_weights_and_checkpoint_bytes
from dstrain.planning.step import Measured, choose_step_to_measure, measure_bytes_of_states, run_and_measure_step
from dstrain.recipe import ConfigError, Run
from dstrain.systems.base import System
from dstrain.tracking.flops import count_step_flops

# At stage 3 DeepSpeed cuts each weight into as many tensors as there are ranks, in Python: a step of 1,024 ranks would
# take minutes. With more ranks than this, so many take a step, and what a rank keeps is counted at the true number.
_MAX_FAKE_RANKS = 8
_MICRO_BATCHES = 3  # A step of more is counted from so many: each further one does what the second does.


def count_costs_of_rank_0(run: Run, settings: dict[str, Any], layout: Layout) -> Counts:
    """Returns the costs on rank 0, see count.count_costs. Call it only in the process that count.py starts. Raises
    ConfigError if weights or gradients are quantized.
    """
    _require_no_quantization(settings)
    run = run.model_copy(update={"compile": "off"})
    system = systems.build(run.system, run.model)
    flops = (
        count_step_flops(system, run.batch.global_, choose_step_to_measure(run, system), run.train_only) / layout.world
    )
    weights, checkpoint = count_weights_and_checkpoint_bytes(run, system)
    measured, own = measure_simulated_rank_0_step(run, settings, system, layout.world, "cuda")
    peak = max((measured.passes, measured.update), key=lambda kinds: sum(kinds.values()))
    moved = [
        kind for entry, kinds in OFFLOADED.items() if read_offload_device(settings, entry) != "none" for kind in kinds
    ]
    host = {kind: measured.kept[kind] for kind in moved if measured.kept.get(kind)}
    on_device = {kind: size - host.get(kind, 0) for kind, size in peak.items() if size > host.get(kind, 0)}
    if run.save.asynchronous and run.save.format != "deepspeed":
        host["snapshot"] = own
    if measured.on_host:
        host["activations"] = measured.on_host
    elsewhen = {
        kind: size
        for kind, size in count_state_bytes_by_kind(run, system, settings, layout.world).items()
        if kind not in {**on_device, **host}
    }
    return Counts(
        weights,
        on_device,
        elsewhen,
        host,
        measured.collectives,
        flops,
        measured.recomputed,
        checkpoint,
        measured.moved,
    )


def measure_simulated_rank_0_step(
    run: Run, settings: dict[str, Any], system: System, world: int, device: str
) -> tuple[Measured, int]:
    """Measures one step of rank 0 of `world` ranks; the other ranks are only simulated. Returns the measures, and the
    bytes that this rank writes into a checkpoint. Extrapolates a step of more than 3 micro-batches from one of 3, and
    at stage 3 a step on more than about 8 ranks from one on about 8.
    """
    accumulation = settings["gradient_accumulation_steps"]
    if accumulation > _MICRO_BATCHES:
        fewer = {**settings, "gradient_accumulation_steps": _MICRO_BATCHES}
        measured, own = measure_simulated_rank_0_step(run, fewer, system, world, device)
        return _extrapolate_to_more_micro_batches(measured, accumulation - _MICRO_BATCHES), own
    # At least two whole groups of ranks that share a second copy of the weights, and of those that share samples.
    copies = settings.get("zero_optimization", {}).get("zero_hpz_partition_size", 1)
    sharing = math.lcm(copies, run.parallel.sequence)
    few = min(world, sharing * max(2, _MAX_FAKE_RANKS // sharing)) if read_zero_stage(settings) == 3 else world
    with use_fake_ranks_and_tensors(few), Fused() if device == "cuda" else nullcontext():
        measured, engines, ema = run_and_measure_step(run, settings, system, FakeEngines)
        own = count_checkpoint_bytes(engines.masters, ema)
    if few < world:
        with use_fake_ranks_and_tensors(world):
            kept, engines, ema = measure_bytes_of_states(run, settings, system, FakeEngines)
            own = count_checkpoint_bytes(engines.masters, ema)
        measured = _scale_measures_to_world(measured, kept, few, world)
    return measured, own


def _extrapolate_to_more_micro_batches(measured: Measured, num_more: int) -> Measured:
    """Returns the measures of a step with `num_more` micro-batches added. Each of these costs as much as the last but
    one of the measured micro-batches. The peaks of memory stay.
    """
    before, after = measured.begun[-2:]
    known = {(each.operation, each.ranks): each for each in before.collectives}
    middle = {(each.operation, each.ranks): each for each in after.collectives}
    collectives = []
    for each in measured.collectives:
        none = replace(each, count=0, bytes=0)
        first, second = (side.get((each.operation, each.ranks), none) for side in (known, middle))
        collectives.append(
            replace(
                each,
                count=each.count + num_more * (second.count - first.count),
                bytes=each.bytes + num_more * (second.bytes - first.bytes),
            )
        )
    return replace(
        measured,
        collectives=tuple(collectives),
        recomputed=measured.recomputed + num_more * (after.recomputed - before.recomputed),
        moved=measured.moved + num_more * (after.moved - before.moved),
    )


def _require_no_quantization(settings: dict[str, Any]) -> None:
    """Raises ConfigError if weights or gradients are quantized, which needs the kernels of a GPU."""
    for key in ("zero_quantized_weights", "zero_quantized_gradients"):
        if settings.get("zero_optimization", {}).get(key):
            raise ConfigError(
                f'"zero_optimization.{key}" needs the kernels of a GPU, so nothing is counted: '
                "without it a rank keeps as much, and sends more"
            )


def _scale_measures_to_world(measured: Measured, kept: dict[str, int], measured_world: int, world: int) -> Measured:
    """Converts `measured`, the measures of a step on `measured_world` ranks, to a step on `world` ranks. `kept` has the
    bytes, by kind, that one of `world` ranks keeps between steps.

    What all ranks share becomes smaller: what a rank keeps, and what its optimizer works on. Whole weights, samples and
    the groups of fewer ranks stay as they are.
    """
    smaller = kept["masters"] / measured.kept["masters"]
    padded = smaller * world / measured_world

    def scale_bytes_to_world(bytes_by_kind: dict[str, int], working_factor: float) -> dict[str, int]:
        """Converts bytes by kind from `measured_world` to `world` ranks. Multiplies those of the kind "working" by
        `working_factor`.
        """
        sizes = {
            kind: size + kept.get(kind, 0) - measured.kept.get(kind, 0) if kind in kept else size
            for kind, size in bytes_by_kind.items()
        }
        return {kind: round(size * working_factor) if kind == "working" else size for kind, size in sizes.items()}

    def scale_collectives_to_world(collectives: tuple[Collective, ...]) -> tuple[Collective, ...]:
        """Converts the collectives among all `measured_world` ranks to those among `world` ranks. Those of smaller
        groups stay.
        """
        # Muon's all_to_all exchanges what a rank owns; other collectives exchange whole weights.
        return tuple(
            replace(
                each, bytes=round(each.bytes * (smaller if each.operation == "all_to_all" else padded)), ranks=world
            )
            if each.ranks == measured_world
            else each
            for each in collectives
        )

    return replace(
        measured,
        kept=scale_bytes_to_world(measured.kept, 1),
        passes=scale_bytes_to_world(measured.passes, 1),
        update=scale_bytes_to_world(measured.update, smaller),
        collectives=scale_collectives_to_world(measured.collectives),
        begun=[done._replace(collectives=scale_collectives_to_world(done.collectives)) for done in measured.begun],
    )
