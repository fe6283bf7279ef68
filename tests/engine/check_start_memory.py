"""Run by test_start_memory.py: bytes and draws from the first module to the end of the first step, as JSON.

This process is rank 0 of `world` ranks, whose others do not exist, or the only rank.
"""

import json
import os
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dstrain.engine import set_deepspeed_environment
from dstrain.engine.checkpoint import Checkpoints
from dstrain.engine.ema.shadow import EmaShadow
from dstrain.engine.engines import Engines
from dstrain.engine.initial import draw_initial_weights
from dstrain.engine.start import start_process_group
from dstrain.recipe import Run
from tests.support.engines import engines_for, resolve
from tests.support.live import Live

WIDTH, DEPTH, SEED, BUCKET = 384, 24, 3, 100_000
DRAWN: Counter[int] = Counter()  # how often each layer was drawn, by its number


class Layer(nn.Linear):
    """A layer that counts how often values are drawn for it."""

    def __init__(self, number: int):
        self.number = number
        super().__init__(WIDTH, WIDTH)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.05)
        nn.init.ones_(self.bias)
        DRAWN[self.number] += not self.weight.is_meta


class Angles(nn.Module):
    """(B, D) -> (B, D); draws a buffer that no file keeps."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.empty(WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.angles)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.angles.to(x.dtype)


class Stateless:
    """A system without state of its own."""

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        assert not state


def network() -> nn.Module:
    return nn.Sequential(Angles(), *(Layer(number) for number in range(DEPTH)))


def engines(stage: int, bf16: bool, world: int, draw: bool = True) -> Engines:
    run = Run.model_validate(
        {
            "name": "start",
            "seed": SEED,
            "steps": 1,
            "batch": {"global": world},
            "compile": "off",
            "optimizer": {"lr": 0.01, "clip": 0.0},
            "ema": {"decays": (0.5,)},
        }
    )
    zero = {"stage": stage, "reduce_bucket_size": BUCKET}
    settings = resolve({"zero_optimization": zero, "bf16": {"enabled": bf16}}, run, world, "cpu")
    return engines_for(lambda: {"net": network()}, run, settings, lambda name, weight: weight.ndim > 1, draw=draw)


def start_of(stage: int, bf16: bool, world: int) -> tuple[dict[str, Any], Live, Engines, EmaShadow]:
    """A run's beginning, and how often each layer was drawn in it."""
    DRAWN.clear()
    with Live() as live:
        built = engines(stage, bf16, world)
        ema = EmaShadow(built.masters, Run(name="x", ema={"decays": (0.5,)}).ema, ("net",))
        ema.reset_to_masters()
    masters = built.masters["net"]
    drawn = dict(+DRAWN)
    expected = dict(draw_initial_weights(network(), SEED))
    own = [
        (expected[f.name].reshape(-1)[f.start : f.start + f.numel], view)
        for f, view in masters.iterate_fragment_views(masters.flats)
    ]
    figures = {
        "begun": live.peak,
        "own": sum(flat.numel() for flat in masters.flats),
        "drawn": drawn,
        "equal": all(torch.equal(values, view) for values, view in own),
        "layers": sorted({int(f.name.split(".")[0]) - 1 for f, _ in masters.iterate_fragment_views(masters.flats)}),
    }
    return figures, live, built, ema


def from_files(stage: int, bf16: bool, fresh: Engines, ema: EmaShadow) -> dict[str, Any]:
    """What is drawn where a checkpoint, or init_from, gives the weights: of all layers, or of every other one."""
    masters, counts, equal = fresh.masters["net"], {}, []
    weights = {f.name: view.clone().view(f.shape) for f, view in masters.iterate_fragment_views(masters.flats)}

    def compare(name: str, other: Engines) -> None:
        counts[name] = sorted(+DRAWN)
        views, x = other.masters["net"].iterate_fragment_views(other.masters["net"].flats), torch.ones(1, WIDTH)
        equal.extend(torch.equal(weights[fragment.name].flatten(), view) for fragment, view in views)
        with torch.no_grad():
            equal.append(torch.equal(other.modules["net"](x), fresh.modules["net"](x)))

    with TemporaryDirectory() as folder:
        Checkpoints(Path(folder), fresh, ema, Stateless()).save(1, last=True)
        DRAWN.clear()
        resumed = engines(stage, bf16, 1, draw=False)
        shadow = EmaShadow(resumed.masters, Run(name="x", ema={"decays": (0.5,)}).ema, ("net",))
        assert Checkpoints(Path(folder), resumed, shadow, Stateless()).resume() == 1
        compare("resumed", resumed)
    for name, known in (
        ("all", weights),
        ("half", {name: value for name, value in weights.items() if int(name.split(".")[0]) % 2}),
    ):
        DRAWN.clear()
        begun = engines(stage, bf16, 1, draw=False)
        begun.initialize_weights({"net": known})
        compare(name, begun)
    return {"as in files": all(equal), **counts}


def main(path: Path, world: int) -> None:
    if world == 1:
        start_process_group()
    else:
        set_deepspeed_environment()
        os.environ.update(RANK="0", WORLD_SIZE=str(world), LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(world))
        import deepspeed
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        deepspeed.init_distributed(dist_backend="fake", auto_mpi_discovery=False, verbose=False)
    figures = []
    for stage, bf16 in ((0, False), (1, False), (1, True), (2, True), (3, False), (3, True))[world > 1 :]:
        start_figures, live, fresh, ema = start_of(stage, bf16, world)
        files = from_files(stage, bf16, fresh, ema) if world == 1 and stage and not bf16 else {}
        with live, fresh.freeze_all_but("net") as nets:
            x = torch.ones(1, WIDTH, dtype=torch.bfloat16 if bf16 else torch.float32)
            fresh.run_backward_and_step("net", nets["net"](x).mean())
        figures.append({"stage": stage, "bytes": 2 if bf16 else 4, "peak": live.peak, **start_figures, **files})
        del nets, fresh, ema  # before the next one's bytes are counted
    path.write_text(json.dumps(figures))
