"""Times of steps on a device, from two that were measured there with different micro-batches.

    seconds = per_operation * (operations of a step, those done again included) + per_weight * weights

The first term grows with samples and depth. The second is what a step does once: optimizer, average, the launch of
kernels. Two steps of one network determine both; batch and depth change the operations and weights that are counted.
"""

from dataclasses import dataclass

from dstrain.planning.counts import Counts


@dataclass(frozen=True)
class Measured:
    """A step of one micro-batch: its costs, and its seconds."""

    counts: Counts
    micro: int
    seconds: float


@dataclass(frozen=True)
class Rates:
    """Seconds of a device for an operation, and for a weight once a step."""

    per_operation: float
    per_weight: float

    def seconds(self, counts: Counts) -> float:
        """Of a step with these costs."""
        return self.per_operation * operations(counts) + self.per_weight * learned(counts)


def rates(first: Measured, second: Measured) -> Rates:
    """From two steps of one network with different micro-batches.

    Where the smaller one took no less (another program took the device), all time is laid to operations.
    """
    less, more = sorted((first, second), key=lambda step: operations(step.counts))
    work = operations(more.counts) - operations(less.counts)
    per_operation = (more.seconds - less.seconds) / work
    once = less.seconds - per_operation * operations(less.counts)
    if not per_operation > 0 or once < 0:
        return Rates(more.seconds / operations(more.counts), 0.0)
    return Rates(per_operation, once / learned(less.counts))


def operations(counts: Counts) -> float:
    return counts.flops + counts.recomputed


def learned(counts: Counts) -> int:
    """Weights that learn, of all parts."""
    return sum(number for part, number in counts.weights.items() if not part.startswith("frozen/"))
