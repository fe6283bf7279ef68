"""Run by test_sequence.py: systems whose samples ranks share, in steps of the loop under DeepSpeed; figures as JSON."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dstrain import rng, systems
from dstrain.distributed import group
from dstrain.nn.pixels import convert_to_uint8
from dstrain.recipe import Run
from dstrain.runs import trained
from dstrain.sampling.draw import draw_all_samples
from dstrain.sampling.requests import make_sampling_request_and_captions
from dstrain.systems.base import System
from dstrain.train import build_engines, take_step
from tests.support.engines import resolve

STEPS, GLOBAL, SEED = 20, 2, 5
MODELS: dict[str, dict[str, Any]] = {
    "dit": {
        "patch_size": 4,
        "hidden_size": 32,
        "depth": 2,
        "num_heads": 4,
        "image_size": 16,
        "in_channels": 1,
        "num_classes": 10,
    },
    "phenaki.tokenizer": {
        "dim": 16,
        "codebook_size": 64,
        "image_size": (16, 8),
        "num_frames": 5,
        "channels": 1,
        "patch_size": 4,
        "spatial_depth": 1,
        "temporal_depth": 1,
        "dim_head": 8,
        "heads": 4,
    },
    "phenaki": {
        "token_shape": (3, 4, 2),
        "codebook_size": 24,
        "temporal_patch_size": 2,
        "dim": 16,
        "depth": 2,
        "heads": 4,
        "dim_head": 8,
        "num_words": 40,
        "max_text_len": 4,
        "critic": "token",
        "beginnings": [0.3, 0.2],
    },
}


def recipe(name: str, sequence: int, recompute: str, compiled: bool) -> Run:
    return Run.model_validate(
        {
            "name": "shared",
            "system": name,
            "model": MODELS[name] | {"recompute": recompute},
            "seed": SEED,
            "steps": STEPS,
            "compile": "on" if compiled else "off",
            "batch": {"global": GLOBAL, "micro": 1},
            "parallel": {"sequence": sequence},
            # As in check_turns.py: a small eps divides rounding by rounding.
            "optimizer": {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-4, "weight_decay": 0.05},
        }
    )


class Samples:
    """The micro-batches, of one sample each, of the ranks of a group."""

    def __init__(self, system: System, sequence: int) -> None:
        self.rows = system.synthetic(GLOBAL)
        self.first, self.groups = group.rank() // sequence, group.world() // sequence

    def read_step(self, step: int) -> Iterator[dict[str, Tensor]]:
        place = torch.arange(GLOBAL)
        rows = self.rows | {
            "key": rng.keys(SEED, step, place),
            "position": place,
            "step": torch.full_like(place, step),
        }
        for number in range(self.first, GLOBAL, self.groups):
            yield {name: values[number : number + 1] for name, values in rows.items()}


class Losses:
    """A tracker that keeps the losses of a step."""

    def __init__(self) -> None:
        self.values: dict[str, list[Tensor]] = {}

    def add_terms(self, part: str, terms: dict[str, Tensor]) -> None:
        self.values.setdefault(part, []).append(terms["loss"].double())

    def take(self) -> list[float]:
        """The means over the samples of a step, by part."""
        means = torch.stack([torch.stack(losses).mean() for _, losses in sorted(self.values.items())])
        self.values = {}
        return (group.sum_over_ranks(means) / group.world()).tolist()


def train(
    name: str,
    stage: int,
    sequence: int,
    recompute: str = "none",
    compiled: bool = False,
    steps: int = STEPS,
    **more: Any,
) -> dict[str, Any]:
    """Trains a system: the losses of the steps, the norms of their gradients, the bytes that went to the host, and how
    many samples it observed after each step. more: words of zero_optimization.
    """
    run = recipe(name, sequence, recompute, compiled)
    zero = {"stage": stage, "sub_group_size": 3000, "stage3_param_persistence_threshold": 100, **more}
    settings = resolve({"zero_optimization": zero}, run, group.world(), "cpu")
    system = systems.build(run.system, run.model)
    engines, batches, losses = build_engines(run, settings, system), Samples(system, sequence), Losses()
    told: dict[str, Any] = {"losses": [], "norms": [], "sent": 0, "observed": []}
    send, observe = engines.host.send_to_host, system.observe

    def count(tensor: Tensor) -> tuple[torch.device, Tensor]:
        told["sent"] += tensor.nbytes
        return send(tensor)

    def count_rows(terms: dict[str, Tensor]) -> None:
        told["observed"] += {len(values) for values in terms.values()}
        observe(terms)

    engines.host.send_to_host, system.observe = count, count_rows
    for step in range(steps):
        take_step(step, run, system, engines, batches, losses)
        told["losses"].append(losses.take())
        told["norms"].append([masters.grad_norm for _, masters in sorted(engines.masters.items())])
    return told


def draw(folders: Iterable[Path], out: Path) -> None:
    """Draws 8 samples of the newest checkpoint of each run, two in a call, and writes them as they are before they are
    rounded to pixels: (runs, 8, C, H, W).
    """
    drawn = []
    for folder in folders:
        run = trained.read_recipe(folder)
        system = systems.build(run.system, run.model)
        checkpoint = trained.find_checkpoint(folder)
        assert checkpoint.name == f"step_{STEPS:08d}"
        kinds = trained.choose_raw_or_ema_by_part(system, checkpoint, run.samples.ema, False)
        networks = trained.load_networks(system, checkpoint, kinds, torch.float32)
        request, _ = make_sampling_request_and_captions(run.samples, system, 8)
        sample, own = system.process.sample, []

        def keep(*words: Any, sample: Any = sample, own: list[Tensor] = own) -> Tensor:
            own.append(sample(*words))
            return own[-1]

        system.process.sample = keep
        pictures = draw_all_samples(system, networks, request, 2)
        drawn.append(torch.cat([group.gather_rows(part) for part in own]))
        assert torch.equal(convert_to_uint8(drawn[-1]), pictures)
    if group.rank() == 0:
        torch.save(torch.stack(drawn), out)


def work(cases: Iterable[tuple[Any, ...]], out: Path) -> None:
    """Trains each case, in one process group."""
    figures = [train(*case) for case in cases]
    if group.rank() == 0:
        out.write_text(json.dumps(figures))
