"""Run by test_bench.py in a process of its own, since it starts a process group: five steps of each side, as JSON."""

import json
import sys

import torch

from dstrain import recipe, systems
from dstrain.engine.start import start_process_group
from dstrain.planning.synthetic import Repeated
from dstrain.tracking.flops import count_step_flops
from kit.rivals import rivals
from kit.sides import Dstrain, Plain, apart
from tests.support.engines import resolve
from tests.support.launch import ROOT


def main() -> None:
    start_process_group()
    run = recipe.load_recipe(ROOT / "tests/launch/tiny.yaml", ["batch.micro=4", "optimizer.weight_decay=0.1"])
    run = recipe.complete_model_section(run, systems.find_config_class(run.system))
    system = systems.build(run.system, run.model)
    batches, settings = Repeated(system, 4, 2, 3), resolve({"zero_optimization": {"stage": 1}}, run, 1, "cpu")
    ours, plain = Dstrain(run, settings, system, batches), Plain(run, system, batches, torch.float32)
    losses = apart(*zip(*((ours.step(step), plain.step(step)) for step in range(5))))
    weights = dict(ours.engines.modules["denoiser"].named_parameters())
    size = sum(
        weight.numel()
        for name, weight in weights.items()
        if name.startswith("blocks") and "adaLN" not in name and weight.ndim == 2
    )
    off = {"plain": furthest(weights.values(), plain.networks["denoiser"].masters), "losses": losses}
    for name in sys.argv[1:]:
        # These loops hold one learning rate and decay all weights, and fast-DiT does not clip: nor does the
        # recipe here.
        clip = 0.0 if name == "fast-DiT" else 1.0
        optimizer = run.optimizer.model_copy(update={"warmup": 0, "weight_decay": 0.0, "clip": clip})
        run = run.model_copy(update={"optimizer": optimizer})
        settings = resolve({"zero_optimization": {"stage": 1}}, run, 1, "cpu")
        ours, rival = Dstrain(run, settings, system, batches), rivals(run, settings, system, batches, (name,))[name]
        for step in range(5):
            ours.step(step)
            rival.step(step)
        off[name] = furthest(ours.engines.modules["denoiser"].parameters(), rival.network.parameters())
    print(json.dumps({"apart": off, "flops": count_step_flops(system, run.batch.global_), "size": size}))


def furthest(ours, theirs) -> float:
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    main()
