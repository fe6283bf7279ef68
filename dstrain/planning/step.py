"""Watches a few steps of training: what a rank holds and when, what it exchanges, what it computes again.

The steps are the loop's own, with the run's engines and averages, on real ranks or on fake ones.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

from torch._subclasses.fake_tensor import unset_fake_temporarily

from dstrain.engine.ema.shadow import EmaShadow
from dstrain.engine.engines import Engines
from dstrain.engine.planning.memory_kinds import (
    iterate_deepspeed_methods_that_allocate,
    iterate_gradients,
    iterate_secondary_weight_copies,
    iterate_tensors_kept_between_steps,
)
from dstrain.engine.settings import read_zero_stage
from dstrain.planning.counts import Collective
from dstrain.planning.synthetic import NoTracker, Repeated
from dstrain.planning.watch import ON_HOST, Done, Watch
from dstrain.recipe import Run
from dstrain.systems.base import System
from dstrain.train import build_engines, take_step

# Steps before the one that counts. The first one makes the moments, and from it ZeRO-3 learns the order of the weights,
# by which it fetches them ahead in the second.
_WARM = {0: 1, 1: 1, 2: 1, 3: 2}
_EVERY = 16  # A penalty that comes every 1, 2, 4, 8 or 16 steps falls on the step that counts.
_LATE = 4096  # the last steps of a run, among which the one that counts is chosen

MADE_IN_A_STEP = ("other", "activations", "working")  # kinds of tensors whose owner is not known yet


@dataclass(frozen=True)
class Measured:
    """Bytes by kind on this rank, and the rest of one optimizer step.

    kept        between steps
    passes      when most bytes are alive in the forward and backward passes
    update      when most are in the optimizer's steps
    moved       bytes that model.recompute=offload sends to the host; as many come back
    on_host     when most of these are there
    begun       what was done before each micro-batch
    """

    kept: dict[str, int]
    passes: dict[str, int]
    update: dict[str, int]
    collectives: tuple[Collective, ...]
    recomputed: float
    moved: int = 0
    on_host: int = 0
    begun: list[Done] = field(default_factory=list)


def run_and_measure_step(
    run: Run, settings: dict[str, Any], system: System, engines_class: type[Engines] = Engines
) -> tuple[Measured, Engines, EmaShadow]:
    """Builds DeepSpeed engines of class `engines_class` and EMA averages, takes a few steps, and measures the last one.
    Returns (measures, engines, averages).
    """
    with Watch() as watch:
        with watch.set_kind_of_new_storages("buckets"):  # what is made here and has no other owner
            engines = build_engines(run, settings, system, engine_class=engines_class)
        ema = EmaShadow(engines.masters, run.ema, system.averaged)
        with watch.set_kind_of_new_storages("inputs"), unset_fake_temporarily():  # captions are read
            batches = Repeated(
                system, settings["train_micro_batch_size_per_gpu"], settings["gradient_accumulation_steps"]
            )
        watch.set_storage_kind(
            (tensor for network in system.frozen() for tensor in (*network.parameters(), *network.buffers())), "frozen"
        )
        updates: list[int] = []  # where they begin and end, in turn
        begun: list[Done] = []
        _label_tensors_by_origin(watch, system, engines, updates, begun)
        last = choose_step_to_measure(run, system)
        for number in range(last - _WARM[read_zero_stage(settings)], last + 1):
            _label_states_and_reset_counts(watch, engines, ema)
            begun.clear()
            begin = watch.num_events
            with watch.set_kind_of_new_storages("activations"):
                take_step(max(0, number), run, system, engines, batches, NoTracker())
            updates.append(watch.num_events)
            with watch.set_kind_of_new_storages("working"):
                ema.update_averages(max(0, number), engines.collect_part_change_flags())
            updates.append(watch.num_events)
        moments = [begin, *updates, watch.num_events]
        spans = list(itertools.pairwise(moments))  # passes, update, passes, ..., averages, nothing
        result = Measured(
            dict(watch.sum_living_bytes_by_kind(begin)),
            dict(watch.find_peak_bytes_by_kind(spans[::2])),
            dict(watch.find_peak_bytes_by_kind(spans[1::2])),
            watch.pop_collectives(),
            watch.recomputed,
            watch.moved,
            watch.find_peak_bytes_on_host(),
            begun,
        )
    return result, engines, ema


def measure_bytes_of_states(
    run: Run, settings: dict[str, Any], system: System, engines_class: type[Engines]
) -> tuple[dict[str, int], Engines, EmaShadow]:
    """Builds DeepSpeed engines of class `engines_class` and EMA averages, without a step. Returns ({kind of tensor:
    bytes}, engines, averages), for the weights, optimizer states, averages and gradients.
    """
    with Watch() as watch:
        engines = build_engines(run, settings, system, engine_class=engines_class)
        ema = EmaShadow(engines.masters, run.ema, system.averaged)
        for masters in engines.masters.values():
            for moment in masters.moment_kinds:
                masters.get_moments_in_fp32(moment)
        for name, tensor in iterate_tensors_kept_between_steps(engines.masters, ema):
            watch.set_storage_kind([tensor], name, MADE_IN_A_STEP)
        watch.set_storage_kind(iterate_gradients(engines.masters), "gradients", MADE_IN_A_STEP)
        sizes = watch.sum_living_bytes_by_kind()
    return {kind: size for kind, size in sizes.items() if kind not in MADE_IN_A_STEP}, engines, ema


def _label_tensors_by_origin(
    watch: Watch,
    system: System,
    engines: Engines,
    updates: list[int],
    begun: list[Done],
) -> None:
    """Makes the watch label each new tensor from now on with a kind such as "inputs", by the code that makes it. Each
    later step also fills two lists:

    updates: the numbers of the watch's events at which each optimizer's step begins and ends
    begun: the watch's counts before each micro-batch
    """

    @contextmanager
    def label_tensors_of_encoding() -> Iterator[None]:
        """Records the watch's counts before a micro-batch, and gives the kind "inputs" to what its encoding makes."""
        begun.append(watch.get_counts_since_reset())
        with watch.set_kind_of_new_storages("inputs"):
            yield

    wrap_method_in_context(system, "encode", label_tensors_of_encoding)
    wrap_method_in_context(engines, "run_backward_and_step", lambda: watch.set_kind_of_new_storages("working"))
    wrap_method_in_context(engines.host, "send_to_host", lambda: watch.set_kind_of_new_storages(ON_HOST))
    system.observe = lambda rows: None  # it would read values

    @contextmanager
    def record_update_and_label_gradients() -> Iterator[None]:
        """Records the events at which an optimizer's step begins and ends. Before it, labels gradients and secondary
        weights.
        """
        watch.set_storage_kind(iterate_gradients(engines.masters), "gradients", MADE_IN_A_STEP)
        watch.set_storage_kind(iterate_secondary_weight_copies(engines.masters), "secondary")
        updates.append(watch.num_events)
        yield
        updates.append(watch.num_events)

    for masters in engines.masters.values():
        wrap_method_in_context(masters, "step", record_update_and_label_gradients)
        for owner, name, kind in iterate_deepspeed_methods_that_allocate(masters):
            wrap_method_in_context(owner, name, partial(watch.set_kind_of_new_storages, kind))


def wrap_method_in_context(owner: Any, name: str, context: Callable[[], AbstractContextManager]) -> None:
    """Replaces a method of `owner` by one that enters a new `context()` around each call."""
    method = getattr(owner, name)

    @wraps(method)
    def call_in_context(*args: Any, **kwargs: Any) -> Any:
        """Calls the method within a new context."""
        with context():
            return method(*args, **kwargs)

    setattr(owner, name, call_in_context)


def _label_states_and_reset_counts(watch: Watch, engines: Engines, ema: EmaShadow) -> None:
    """Labels the tensors that live between two steps by their kind: weights, masters, moments, averages or gradients,
    and "other" for the rest that a step has made. Resets the watch's counts of collectives, recomputed operations and
    bytes moved to the host.
    """
    for kind, tensor in iterate_tensors_kept_between_steps(engines.masters, ema):
        watch.set_storage_kind([tensor], kind, (*MADE_IN_A_STEP, "buckets"))
    watch.set_storage_kind(iterate_gradients(engines.masters), "gradients", (*MADE_IN_A_STEP, "buckets"))
    watch.replace_storage_kinds("other", MADE_IN_A_STEP)
    watch.pop_collectives()
    watch.recomputed, watch.moved = 0.0, 0


def choose_step_to_measure(run: Run, system: System) -> int:
    """Returns the number of the step to measure: among the first step and the last 4096, one in which the system does
    most work. Prefers a multiple of 16 among equals, since a loss term that comes every 16 steps falls on it.
    """
    late = range(run.steps - 1, max(run.steps - 1 - _LATE, -1), -1)
    return max((*late, 0), key=lambda step: (system.measure_workload(step), step % _EVERY == 0))
