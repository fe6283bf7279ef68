"""Counts as rank 0 of any number of ranks: the work of a process of its own, see count.py."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from dstrain import systems
from dstrain.engine.planning.activations import Fused
from dstrain.engine.planning.fake_ranks import PretendedEngines, first_of
from dstrain.engine.planning.memory_kinds import OFFLOADED, saved
from dstrain.engine.settings import read_offload, read_stage
from dstrain.planning.counts import Collective, Counts, Layout
from dstrain.planning.states import states, whole
from dstrain.planning.step import Measured, build, counted_step, measure
from dstrain.recipe import ConfigError, Run
from dstrain.systems.base import System
from dstrain.tracking.flops import step_flops

# At stage 3 DeepSpeed cuts each weight into as many tensors as there are ranks, in Python: a step of 1,024 ranks would
# take minutes. Above this many a step is taken by so few, and what a rank keeps is counted at the true number.
_RANKS = 8
_MICRO_BATCHES = 3  # of a step that is taken whole; with more, each further one does what the second does


def count_here(run: Run, settings: dict[str, Any], layout: Layout, device: str) -> Counts:
    """See count.count."""
    _require_countable(settings)
    run = run.model_copy(update={"compile": "off"})
    system = systems.build(run.system, run.model)
    flops = step_flops(system, run.batch.global_, counted_step(run, system)) / layout.world
    weights, checkpoint = whole(run, system)
    measured, own = pretended(run, settings, system, layout.world, device)
    peak = max((measured.passes, measured.update), key=lambda kinds: sum(kinds.values()))
    moved = [kind for entry, kinds in OFFLOADED.items() if read_offload(settings, entry) != "none" for kind in kinds]
    host = {kind: measured.kept[kind] for kind in moved if measured.kept.get(kind)}
    on_device = {kind: size - host.get(kind, 0) for kind, size in peak.items() if size > host.get(kind, 0)}
    if run.save.asynchronous and run.save.format != "deepspeed":
        host["snapshot"] = own
    elsewhen = {
        kind: size
        for kind, size in states(run, system, settings, layout.world).items()
        if kind not in {**on_device, **host}
    }
    return Counts(weights, on_device, elsewhen, host, measured.collectives, flops, measured.recomputed, checkpoint)


def pretended(run: Run, settings: dict[str, Any], system: System, world: int, device: str) -> tuple[Measured, int]:
    """A step of rank 0 of `world`, and the bytes that it writes into a checkpoint's fragments."""
    accumulation = settings["gradient_accumulation_steps"]
    if accumulation > _MICRO_BATCHES:
        measured, own = pretended(run, _accumulating(settings, _MICRO_BATCHES), system, world, device)
        return _extended(measured, accumulation - _MICRO_BATCHES), own
    # Whole groups that share a second copy of the weights, and two at least.
    sharing = settings.get("zero_optimization", {}).get("zero_hpz_partition_size", 1)
    few = min(world, sharing * max(2, _RANKS // sharing)) if read_stage(settings) == 3 else world
    batch = settings["train_batch_size"] * few // world
    with first_of(few), Fused() if device == "cuda" else nullcontext():
        measured, engines, ema = measure(run, {**settings, "train_batch_size": batch}, system, PretendedEngines)
        own = saved(engines.masters, ema)
    if few < world:
        with first_of(world):
            kept, engines, ema = build(run, settings, system, PretendedEngines)
            own = saved(engines.masters, ema)
        measured = _spread(measured, kept, few, world)
    return measured, own


def _accumulating(settings: dict[str, Any], number: int) -> dict[str, Any]:
    """The settings with a step of so many micro-batches."""
    share = settings["train_batch_size"] // settings["gradient_accumulation_steps"]
    return {**settings, "gradient_accumulation_steps": number, "train_batch_size": share * number}


def _extended(measured: Measured, more: int) -> Measured:
    """A step of `more` micro-batches more, each as the last but one. Peaks stay."""
    (before, again), (after, again_after) = measured.begun[-2:]
    known = {(each.operation, each.ranks): each for each in before}
    middle = {(each.operation, each.ranks): each for each in after}
    collectives = []
    for each in measured.collectives:
        none = replace(each, count=0, bytes=0)
        first, second = (side.get((each.operation, each.ranks), none) for side in (known, middle))
        collectives.append(
            replace(
                each,
                count=each.count + more * (second.count - first.count),
                bytes=each.bytes + more * (second.bytes - first.bytes),
            )
        )
    recomputed = measured.recomputed + more * (again_after - again)
    return replace(measured, collectives=tuple(collectives), recomputed=recomputed)


def _require_countable(settings: dict[str, Any]) -> None:
    """ConfigError: what quantizes needs the kernels of a GPU, and takes some sizes of shares alone."""
    for key in ("zero_quantized_weights", "zero_quantized_gradients"):
        if settings.get("zero_optimization", {}).get(key):
            raise ConfigError(
                f'"zero_optimization.{key}" needs the kernels of a GPU, so nothing is counted: '
                "without it a rank keeps as much, and sends more"
            )


def _spread(measured: Measured, kept: dict[str, int], few: int, world: int) -> Measured:
    """A step of `few` ranks as one of `world`: with their shares `kept`, all else being of whole weights or samples.
    Groups of fewer ranks, those that share ZeRO++'s second copy, stay what they are.

    The optimizer's step works on shares alone. Weights are padded to a multiple of the ranks where they are exchanged.
    """
    smaller = kept["masters"] / measured.kept["masters"]
    padded = smaller * world / few

    def shared(kinds: dict[str, int], working: float) -> dict[str, int]:
        sizes = {
            kind: size + kept.get(kind, 0) - measured.kept.get(kind, 0) if kind in kept else size
            for kind, size in kinds.items()
        }
        return {kind: round(size * working) if kind == "working" else size for kind, size in sizes.items()}

    def sent(collectives: tuple[Collective, ...]) -> tuple[Collective, ...]:
        # Muon's all_to_all hands on what a rank owns; others exchange the whole.
        return tuple(
            replace(
                each, bytes=round(each.bytes * (smaller if each.operation == "all_to_all" else padded)), ranks=world
            )
            if each.ranks == few
            else each
            for each in collectives
        )

    return Measured(
        shared(measured.kept, 1),
        shared(measured.passes, 1),
        shared(measured.update, smaller),
        sent(measured.collectives),
        measured.recomputed,
        [(sent(collectives), again) for collectives, again in measured.begun],
    )
