"""The costs of a run that count.py counts: bytes by kind, collectives, operations."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The ranks of a run, one a GPU, and how many of them share a machine."""

    world: int
    gpus_per_node: int


@dataclass(frozen=True)
class Collective:
    """All calls of one kind in a step of one rank.

    bytes   of all calls together, the larger of what a rank hands in and what it gets: the whole tensor of an
            all_reduce or a broadcast, what all ranks' shares make up of an all_gather, and what is split of a
            reduce_scatter.
    """

    operation: str  # all_reduce, all_gather, reduce_scatter, broadcast, all_to_all
    count: float  # calls; the mean of a step where turns differ between steps
    bytes: float
    ranks: int  # in the group


@dataclass(frozen=True)
class Counts:
    """Costs of a run on rank 0, which owns as much as any other rank or a little more.

    weights         number by part; frozen networks as frozen/NAME
    device          bytes by kind; their sum is the peak of a step
    elsewhen        bytes by kind of states that are alive at other moments of a step alone, such as gradients
    host            bytes by kind in the host's memory: offloaded states and activations, the copy of an asynchronous
                    save
    collectives     of an optimizer step with all its micro-batches
    flops           useful operations of such a step on one rank, forward and backward
    recomputed      operations on top, which model.recompute does again
    checkpoint      bytes of a checkpoint, of all ranks together
    moved           bytes that model.recompute=offload sends to the host in such a step; as many come back
    """

    weights: dict[str, int]
    device: dict[str, int]
    elsewhen: dict[str, int]
    host: dict[str, int]
    collectives: tuple[Collective, ...]
    flops: float
    recomputed: float
    checkpoint: int
    moved: int = 0

    @property
    def trained_weights(self) -> int:
        """Returns the number of weights that learn, over all parts."""
        return sum(number for part, number in self.weights.items() if not part.startswith("frozen/"))
