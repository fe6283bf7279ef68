"""Sums of 16-bit gradients over micro-batches, weight by weight; their precision: test_precision.py."""

import pytest
import torch
from torch import Tensor, nn

from dstrain.engine.engines import Engines
from dstrain.engine.settings import resolve
from dstrain.recipe import Run
from tests.engine.check_engines import gathered

pytestmark = pytest.mark.usefixtures("alone")

MICROS, BETA = 4, 0.5
USES = {"always": (0, 1, 2, 3), "early": (0, 1), "late": (3,), "middle": (1, 2), "never": ()}


class Parts(nn.Module):
    """(B, 3) -> (B,); the micro-batch says which of its layers take part."""

    def __init__(self):
        super().__init__()
        for name in USES:
            setattr(self, name, nn.Linear(3, 1, bias=False))

    def forward(self, x: Tensor, names: list[str]) -> Tensor:
        return sum(getattr(self, name)(x.to(self.always.weight.dtype)).float().square() for name in names)


@pytest.mark.parametrize("dtype", ["fp32", None, "bf16"])
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_weights_that_take_turns(stage, dtype):
    """Oracle: plain torch: the sum in fp32 of each micro-batch's bf16 gradient, two steps one after another; a weight
    that no micro-batch used has none. The JSON's own bf16 sums in bf16.
    """
    run = Run.model_validate({"batch": {"global": 2 * MICROS, "micro": 2}, "optimizer": {"lr": 0.0, "betas": (BETA, 0.9)}})
    config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    if dtype:
        config["data_types"] = {"grad_accum_dtype": dtype}
    engines = Engines(lambda: {"net": Parts()}, run, resolve(config, run, 1, "cpu"), lambda name, weight: False)
    masters = engines.masters["net"]
    network = Parts()
    network.load_state_dict(gathered(masters, masters.flats))
    network.bfloat16()
    moments = {name: torch.zeros(1, 3) for name in USES}
    for step in range(2):
        totals = {name: torch.zeros(1, 3) for name in USES}
        engines.set_lr(0.0)
        for micro in range(MICROS):
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + micro)) + 1
            names = [name for name, places in USES.items() if micro in places]
            network.zero_grad()
            (network(x, names).mean() / MICROS).backward()
            for name in names:
                totals[name] += getattr(network, name).weight.grad.float()
            with engines.turn("net") as nets:
                engines.learn("net", nets["net"](x, names).mean())
            assert engines.applied() == {"net": micro == MICROS - 1}
        computed = gathered(masters, masters.moments("exp_avg"))
        for name, total in totals.items():
            moments[name] = BETA * moments[name] + (1 - BETA) * total
            torch.testing.assert_close(computed[f"{name}.weight"], moments[name], rtol=0.01 if dtype != "bf16" else 0.03,
                                       atol=1e-6, msg=lambda text: f"{name}: {text}")
        assert not computed["never.weight"].any() and computed["early.weight"].any()
