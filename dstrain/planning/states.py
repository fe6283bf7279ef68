"""Counts by arithmetic alone what a run keeps: weights by part, a checkpoint's size, a rank's bytes by kind."""

import math
from collections.abc import Iterator
from typing import Any

from torch import nn

from dstrain.engine.blocks import require_known_leaf_modules
from dstrain.engine.optimizers import freeze_weights, make_parameter_groups
from dstrain.engine.planning.memory_kinds import OFFLOADED
from dstrain.engine.settings import is_optimizer_offloaded, read_offload_device, read_precision, read_zero_stage
from dstrain.recipe import Run
from dstrain.systems.base import System

_EIGHT_BITS = 1 + 4 / 256  # Bytes of a moment: its code of one byte, and a scale of 4 bytes for each 256 codes.


def count_weights_and_checkpoint_bytes(run: Run, system: System) -> tuple[dict[str, int], int]:
    """Returns two counts: {part: number of trained weights}, with frozen weights under "frozen/NAME"; and the bytes of
    a checkpoint, without the headers of its files.
    """
    numbers, size = {}, sum(value.nbytes for value in system.state_dict().values())
    for part, network in _build_and_freeze_networks(run, system).items():
        for count, moments, averages in _iterate_weight_moment_average_counts(run, system, part, network):
            numbers[part] = numbers.get(part, 0) + count
            size += 4 * count * (1 + moments + averages)
            size += round(_EIGHT_BITS * count * moments) if run.optimizer.name == "adamw8bit" else 0  # the codes, too
        trained = {name for name, _ in network.named_parameters()}
        size += sum(value.nbytes for name, value in network.state_dict().items() if name not in trained)
        if frozen := _count_frozen_weights(network):
            numbers[f"frozen/{part}"] = frozen
            size += 4 * frozen
    for number, network in enumerate(system.frozen()):
        name = f"frozen/{type(network).__name__}"
        numbers[f"{name}_{number}" if name in numbers else name] = sum(value.numel() for value in network.parameters())
    return numbers, size


def count_state_bytes_by_kind(run: Run, system: System, settings: dict[str, Any], world: int) -> dict[str, int]:
    """Returns {kind: bytes} that each of `world` ranks keeps, for kinds such as "weights", "masters" and "gradients"
    (engine/planning/memory_kinds.py). Does not count padding and buffers.

    Raises ConfigError if the recipe or DeepSpeed's JSON names weights or modules that the networks lack.
    """
    level, wide = read_zero_stage(settings), read_precision(settings) == "fp32"
    width, share = 4 if wide else 2, world if level else 1
    summed = 4 if settings.get("data_types", {}).get("grad_accum_dtype") == "fp32" else width
    moment = _EIGHT_BITS if run.optimizer.name == "adamw8bit" else 4
    sizes = dict.fromkeys(("weights", "masters", "moments", "gradients", "average", "staging"), 0.0)
    networks = _build_and_freeze_networks(run, system)
    require_known_leaf_modules(networks, settings)
    for part, network in networks.items():
        sizes["weights"] += width * _count_frozen_weights(network) / (world if level == 3 else 1)
        for count, moments, averages in _iterate_weight_moment_average_counts(run, system, part, network):
            sizes["weights"] += width * count / (world if level == 3 else 1)
            sizes["masters"] += (
                0 if wide and not level else 4 * count / share
            )  # At stage 0 in fp32 the weights are the masters.
            sizes["moments"] += moment * count * moments / share
            sizes["gradients"] += summed * count / (world if level > 1 else 1)
            sizes["average"] += 4 * count * averages / share
            if is_optimizer_offloaded(settings):  # gradients in fp32; at stages 1 and 2 also 16-bit weights
                sizes["staging"] += (4 if wide or level == 3 else 6) * count / share
    return {kind: math.ceil(size) for kind, size in sizes.items() if size}


def describe_memory_of_states(run: Run, system: System, settings: dict[str, Any], world: int) -> str:
    """Returns a line on what a rank keeps between steps: the GB of weights, masters, moments and the like, and which of
    these lie in the host's memory.
    """
    sizes = count_state_bytes_by_kind(run, system, settings, world)
    offloaded = {
        kind for entry, kinds in OFFLOADED.items() if read_offload_device(settings, entry) != "none" for kind in kinds
    }
    offloaded -= {"gradients"} if read_zero_stage(settings) < 3 else set()  # They are summed on the GPU.
    kinds = ", ".join(f"{kind}{' (host)' * (kind in offloaded)} {size / 1e9:.3g}" for kind, size in sizes.items())
    rank = f"each of {world} ranks keeps" if world > 1 else "the rank keeps"
    return f"memory: {rank} {sum(sizes.values()) / 1e9:.3g} GB: {kinds}; activations and buckets come on top"


def _build_and_freeze_networks(run: Run, system: System) -> dict[str, nn.Module]:
    """Builds the networks on the meta device, freezes the weights that the recipe freezes, and returns the networks by
    part.
    """
    networks = system.build_networks_on_meta()
    freeze_weights(networks, run.train_only, run.optimizer)
    return networks


def _count_frozen_weights(network: nn.Module) -> int:
    """Returns the number of elements in the weights of a network that do not learn."""
    return sum(weight.numel() for weight in network.parameters() if not weight.requires_grad)


def _iterate_weight_moment_average_counts(
    run: Run, system: System, part: str, network: nn.Module
) -> Iterator[tuple[int, int, int]]:
    """Yields, for each group of a part's optimizer, three numbers: of weights, of moments of each weight, and of
    averages of each weight.
    """
    for members in make_parameter_groups(
        network, run.optimizer, system.has_weight_decay, system.list_block_classes(), part
    ):
        yield (
            sum(weight.numel() for weight in members["params"]),
            len(members["moments"]),
            len(run.ema.decays_and_widths) if part in system.averaged else 0,
        )
