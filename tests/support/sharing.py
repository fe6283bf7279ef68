"""A network whose tokens several ranks share, and the same one alone: outputs and gradients of both, on gloo ranks."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dstrain.distributed import group
from dstrain.nn.sequence import share_tokens_among_ranks

Call = Callable[[nn.Module], list[Tensor]]  # of a network to its outputs, whole on every rank


def draw_network(build: Callable[[], nn.Module]) -> nn.Module:
    """Builds a network in float64 whose weights are random, also those that begin as zero, equal on all ranks."""
    torch.manual_seed(0)
    network = build()
    for weight in network.parameters():
        nn.init.normal_(weight, std=0.3 if weight.ndim > 1 else 0.1)
    return network.double()


def compare(build: Callable[[], nn.Module], call: Call, ranks: int) -> dict[str, float]:
    """How far a network on `ranks` ranks is from the same one alone, relative: its outputs, and the mean over all ranks
    of its weights' gradients.
    """
    network = draw_network(build)
    found = []
    for team in (None, group.get_neighbour_group(ranks)):
        network.zero_grad()
        with share_tokens_among_ranks(team):
            out = call(network)
            # A loss that no output leaves alone, and that is no sum over tokens.
            loss = sum((values.square().mean() - values.sin().mean()) for values in out)
            loss.backward()
        gradients = {name: weight.grad for name, weight in network.named_parameters() if weight.grad is not None}
        found.append(([values.detach() for values in out], {n: g.clone() for n, g in gradients.items()}))
    (alone, wanted), (shared, own) = found
    assert wanted.keys() == own.keys()
    together = torch.cat([gradient.flatten() for gradient in own.values()])
    dist.all_reduce(together)
    sums = together.split([gradient.numel() for gradient in own.values()])
    own = {name: total.view_as(own[name]) for name, total in zip(own, sums)}
    largest = max(gradient.norm() for gradient in wanted.values())
    return {
        "out": max(_measure(a, b) for a, b in zip(shared, alone, strict=True)),
        "gradient": max(_measure(own[name] / dist.get_world_size(), wanted[name], largest) for name in wanted),
    }


def _measure(a: Tensor, b: Tensor, largest: Tensor | float = 0.0) -> float:
    """The distance of two tensors by the norm of the second; of one that is next to nothing by a share of `largest`."""
    return float((a - b).norm() / torch.maximum(b.norm(), torch.as_tensor(1e-3 * largest + 1e-12)))
