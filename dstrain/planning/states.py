"""What a run keeps, by arithmetic alone: weights by part, a checkpoint's size, a rank's bytes by kind."""

import math
from collections.abc import Iterator
from typing import Any

from torch import nn

from dstrain.engine.optimizers import group_weights
from dstrain.engine.planning.memory_kinds import OFFLOADED
from dstrain.engine.settings import offloads_optimizer, read_offload, read_precision, read_stage
from dstrain.recipe import Run
from dstrain.systems.base import System

_EIGHT_BITS = 1 + 4 / 256  # bytes of a moment: its code, and a scale of 4 bytes for each 256 of them


def whole(run: Run, system: System) -> tuple[dict[str, int], int]:
    """Weights by part, and the bytes of a checkpoint without the headers of its files."""
    numbers, size = {}, sum(value.nbytes for value in system.state_dict().values())
    for part in system.parts:
        network = system.on_meta(part)
        for count, moments, averages in _learned(run, system, part, network):
            numbers[part] = numbers.get(part, 0) + count
            size += 4 * count * (1 + moments + averages)
            size += round(_EIGHT_BITS * count * moments) if run.optimizer.name == "adamw8bit" else 0  # as they are
        trained = {name for name, _ in network.named_parameters()}
        size += sum(value.nbytes for name, value in network.state_dict().items() if name not in trained)
    for number, network in enumerate(system.frozen()):
        name = f"frozen/{type(network).__name__}"
        numbers[f"{name}_{number}" if name in numbers else name] = sum(value.numel() for value in network.parameters())
    return numbers, size


def states(run: Run, system: System, settings: dict[str, Any], world: int) -> dict[str, int]:
    """Bytes by kind of what a rank keeps, by the names of memory_kinds.py, and of the sums of its gradients.

    It is what each of `world` equal shares takes, and what DeepSpeed keeps to the byte but for padding and buffers.
    """
    level, wide = read_stage(settings), read_precision(settings) == "fp32"
    width, share = 4 if wide else 2, world if level else 1
    summed = 4 if settings.get("data_types", {}).get("grad_accum_dtype") == "fp32" else width
    moment = _EIGHT_BITS if run.optimizer.name == "adamw8bit" else 4
    sizes = dict.fromkeys(("weights", "masters", "moments", "gradients", "average", "staging"), 0.0)
    for part in system.parts:
        for count, moments, averages in _learned(run, system, part, system.on_meta(part)):
            sizes["weights"] += width * count / (world if level == 3 else 1)
            sizes["masters"] += 0 if wide and not level else 4 * count / share  # they may be the weights
            sizes["moments"] += moment * count * moments / share
            sizes["gradients"] += summed * count / (world if level > 1 else 1)
            sizes["average"] += 4 * count * averages / share
            if offloads_optimizer(settings):  # its fp32 gradients; at 1 and 2 also 16-bit weights
                sizes["staging"] += (4 if wide or level == 3 else 6) * count / share
    return {kind: math.ceil(size) for kind, size in sizes.items() if size}


def keeps(run: Run, system: System, settings: dict[str, Any], world: int) -> str:
    """What a rank keeps, by kind, and what of it lies in the host's memory: a line."""
    sizes = states(run, system, settings, world)
    offloaded = {
        kind for entry, kinds in OFFLOADED.items() if read_offload(settings, entry) != "none" for kind in kinds
    }
    offloaded -= {"gradients"} if read_stage(settings) < 3 else set()  # summed on the GPU
    kinds = ", ".join(f"{kind}{' (host)' * (kind in offloaded)} {size / 1e9:.3g}" for kind, size in sizes.items())
    rank = f"each of {world} ranks keeps" if world > 1 else "the rank keeps"
    return f"memory: {rank} {sum(sizes.values()) / 1e9:.3g} GB: {kinds}; activations and buckets come on top"


def _learned(run: Run, system: System, part: str, network: nn.Module) -> Iterator[tuple[int, int, int]]:
    """Weights, moments and averages of each group of a part's optimizer."""
    for members in group_weights(network, run.optimizer, system.decays, system.blocks()):
        yield (
            sum(weight.numel() for weight in members["params"]),
            len(members["moments"]),
            len(run.ema.names) if part in system.averaged else 0,
        )
