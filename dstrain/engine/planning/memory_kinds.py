"""What engines and averages hold between calls, by kind. It reads DeepSpeed's internals: see patches.py.

weights      what the networks compute with, and their buffers: at stage 3 this rank's shares
persistent   at stage 3, small weights that stay whole
masters      fp32 weights; at stage 0 and in fp32 the weights may be these
moments      the optimizer's state
gradients    sums of the micro-batches, and reduced gradients
average      averages of the masters
secondary    of ZeRO++, from the first pass to the update: shares of the weights among the ranks of a machine
gathered     at stage 3, weights that are whole for a while
staging      of an offloaded optimizer at stages 1 and 2, what passes between the host and the GPU: on the host
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from dstrain.engine.ema.shadow import EmaShadow
from dstrain.engine.masters import Masters

# What lies in the host's memory between steps, by entry of the JSON.
OFFLOADED = {
    "offload_optimizer": ("masters", "moments", "gradients", "average", "staging"),
    "offload_param": ("weights",),
}


def count_checkpoint_bytes(masters: Mapping[str, Masters], ema: EmaShadow) -> int:
    """Returns the number of bytes of the tensors that this rank writes into a checkpoint: masters, moments, averages
    and frozen weights.
    """
    kinds = [
        (own, [own.flats, *map(own.get_moments_in_fp32, own.moment_kinds), *ema.flats.get(part, {}).values()])
        for part, own in masters.items()
    ]
    total = sum(
        view.nbytes
        for own, layouts in kinds
        for flats in layouts
        for _, view in own.iterate_fragment_views_to_save(flats)
    )
    for own in masters.values():
        total += sum(codes.nbytes for *_, codes in own.iterate_8bit_moments_to_save())
        total += sum(4 * values.numel() for _, values in own.iterate_frozen_weights_to_save())
    return total


def iterate_tensors_kept_between_steps(masters: Mapping[str, Masters], ema: EmaShadow) -> Iterator[tuple[str, Tensor]]:
    """Yields (kind, tensor) of the tensors that stay in memory from step to step. If several tensors share a storage,
    the kind of the first counts.

    weights      weights that the network computes with, and buffers; at stage 3 this rank's share
    persistent   small weights that stay whole on each rank at stage 3
    gathered     other weights, as stage 3 gathers them
    masters      fp32 weights that the optimizer updates
    moments      state of the optimizer
    staging      DeepSpeed's buffers for offloading
    average      averages of the weights
    """
    for own in masters.values():
        module = own.engine.module
        for weight in module.parameters():
            if hasattr(weight, "ds_tensor"):
                yield "weights", weight.ds_tensor
                yield "persistent" if weight.ds_persist else "gathered", weight.data
            else:
                yield "weights", weight.data
        yield from (("weights", buffer) for buffer in module.buffers())
        yield from (("masters", flat) for flat in own.flats)
        yield from (
            ("moments", value) for value in tree_leaves(own.list_optimizer_state()) if isinstance(value, Tensor)
        )
        zero = own.engine.optimizer
        for buffer in (
            *getattr(zero, "param_buffer_of_bit16_for_cpu_offload_groups", ()),
            *getattr(zero, "accumulated_grads_in_cpu", {}).values(),
        ):
            yield "staging", buffer
        if hasattr(zero, "temp_grad_buffer_for_cpu_offload"):
            yield "staging", zero.temp_grad_buffer_for_cpu_offload
    yield from (("average", flat) for flat in tree_leaves(ema.flats))


def iterate_deepspeed_methods_that_allocate(masters: Masters) -> Iterator[tuple[Any, str, str]]:
    """Yields (object, name of its method, kind) for the methods of DeepSpeed that allocate tensors of one kind: weights
    gathered at stage 3 (gathered), or else buffers in which gradients are reduced (buckets).
    """
    zero = masters.engine.optimizer
    if hasattr(zero, "parameter_offload"):
        yield zero.parameter_offload.get_param_coordinator(), "fetch_sub_module", "gathered"
    elif hasattr(zero, "setup_buckets"):
        yield zero, "setup_buckets", "buckets"


def iterate_gradients(masters: Mapping[str, Masters]) -> Iterator[Tensor]:
    """Yields the tensors that hold gradients until the optimizer's step or the next micro-batch."""
    for own in masters.values():
        zero, engine = own.engine.optimizer, own.engine
        held: list[Any] = [getattr(zero, name, None) for name in ("all_grad_tensors", "grad_partitions_flat_buffer")]
        held += [list(pieces) for pieces in getattr(zero, "averaged_gradients", {}).values() if pieces is not None]
        held += [weight.grad for weight in chain(engine.module.parameters(), own.flats)]
        held += [list(engine.wide_sums.get_sums())] if getattr(engine, "wide_sums", None) else []
        yield from (value for value in tree_leaves(held) if isinstance(value, Tensor))


def iterate_secondary_weight_copies(masters: Mapping[str, Masters]) -> Iterator[Tensor]:
    """Returns an iterator over the second copies of weights that ZeRO++ keeps. It is empty where ZeRO++ is not used."""
    weights = chain.from_iterable(own.engine.module.parameters() for own in masters.values())
    copies = (getattr(weight, "ds_secondary_tensor", None) for weight in weights)
    return (copy for copy in copies if copy is not None)
