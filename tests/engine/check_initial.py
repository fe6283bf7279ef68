"""Run by test_initial.py: the initial weights and first loss of a network whose constructor sets weights, as JSON."""

import json

import torch
from torch import Tensor, nn

from dstrain.distributed import group
from dstrain.engine.initial import build_networks
from dstrain.engine.start import start_process_group
from tests.engine.check_engines import SEED, batch, decays, gathered, recipe, rows
from tests.support.engines import engines_for, resolve
from tests.support.tiny import Tiny

MICRO = 4


class Attention(nn.Module):
    """(B, 17) -> (B, 17); torch's own attention sets its weights in `_reset_parameters`, and other modules' too."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(17, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[None], x[None], x[None], need_weights=False)[0][0]


class Zeroed(Tiny):
    """(B, 5) -> (B, 3); sets weights and a buffer of its children in every way that torch allows."""

    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.shift = nn.Parameter(torch.randn(3))
        nn.init.zeros_(self.last.weight[:2])
        self.hidden.apply(lambda module: nn.init.ones_(module.bias) if isinstance(module, nn.Linear) else None)
        self.first.weight = nn.Parameter(torch.randn(17, 5))
        self.scale.table.add_(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.scale(torch.tanh(self.first(x)))
        return self.last(torch.tanh(self.hidden(x + self.attention(x)))) + self.shift


def plain() -> tuple[dict[str, Tensor], float]:
    """Plain torch: seeded, constructed, and the loss of the whole first batch."""
    torch.manual_seed(SEED)
    network = Zeroed()
    return dict(network.state_dict()), loss_of(network, slice(None)).item()


def loss_of(network: nn.Module, mine: slice) -> Tensor:
    x, y = (tensor[mine] for tensor in batch(0))
    return (network(x) - y).square().mean()


def measure(stage: int) -> dict:
    run = recipe(MICRO)
    settings = resolve({"zero_optimization": {"stage": stage}}, run, group.world(), "cpu")
    engines = engines_for(lambda: {"tiny": Zeroed()}, run, settings, decays)
    weights = gathered(engines.masters["tiny"], engines.masters["tiny"].flats)
    weights["scale.table"] = engines.modules["tiny"].scale.table
    expected, loss = plain()
    losses = []
    with engines.freeze_all_but("tiny") as networks:
        for micro in range(8 // (MICRO * group.world())):
            loss_here = loss_of(networks["tiny"], rows(micro, MICRO))
            losses.append(group.sum_over_ranks(loss_here.detach().double()).item() / group.world())
            engines.run_backward_and_step("tiny", loss_here)
    return {
        "different": [name for name in expected if not torch.equal(weights[name], expected[name])],
        "loss": sum(losses) / len(losses),
        "plain": loss,
        "notes": engines.notes,
    }


class Unseeded(Tiny):
    """Takes its weights from what no seed of torch reaches; here from the rank."""

    def __init__(self):
        super().__init__()
        nn.init.constant_(self.last.weight, group.rank())


def refusals() -> list[str]:
    """What each rank says of weights that differ between ranks."""
    try:
        build_networks(lambda: {"tiny": Unseeded()}, SEED)
    except RuntimeError as error:
        return group.gather_objects(str(error))
    return group.gather_objects("")


def main(path: str) -> None:
    start_process_group()
    figures = {stage: measure(stage) for stage in (0, 1, 2, 3)} | {"refusals": refusals()}
    if group.rank() == 0:
        with open(path, "w") as file:
            json.dump(figures, file)
