"""Run by test_bench.py in a process of its own, since it starts a process group: five steps of both sides, as JSON."""

import json

import torch

from dstrain import recipe, systems
from dstrain.bench import Repeated, dstrain_side, plain_side
from dstrain.engine.settings import resolve
from dstrain.engine.start import start
from tests.support.launch import ROOT


def main() -> None:
    start()
    run = recipe.load(ROOT / "tests/launch/tiny.yaml", ["batch.micro=4", "optimizer.weight_decay=0.1"])
    run = recipe.check(run, systems.config_class(run.system))
    system = systems.build(run.system, run.model)
    batch = system.synthetic(4)
    engines, ours = dstrain_side(run, resolve({"zero_optimization": {"stage": 1}}, run, 1, "cpu"), system,
                             Repeated(batch, 2))
    weights, plain, flops = plain_side(run, system, batch, 2, torch.float32)
    for step in range(5):
        ours(step)
        plain(step)
    found = dict(engines.modules["denoiser"].named_parameters())
    size = sum(weight.numel() for name, weight in found.items() if name.startswith("blocks") and "adaLN" not in name
               and weight.ndim == 2)
    apart = max((a - b).abs().max().item() for a, b in zip(found.values(), weights))
    print(json.dumps({"apart": apart, "flops": flops, "size": size}))


if __name__ == "__main__":
    main()
