"""Run by test_alignment.py on 1, 2 and 4 ranks: a modern DiT with LayerSync, REPA, texts or clips, against plain
torch."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from dstrain import rng
from dstrain.data.cached.rows import pack_caption
from dstrain.data.source import pad_and_stack_texts
from dstrain.distributed import group
from dstrain.engine.checkpoint import Checkpoints
from dstrain.engine.ema.shadow import EmaShadow
from dstrain.recipe import Run
from dstrain.systems.dit.align import Align
from dstrain.systems.dit.config import Config
from dstrain.systems.dit.system import DiTSystem
from dstrain.train import take_step
from tests.engine.check_engines import Micros, furthest, gathered
from tests.support.engines import engines_for, resolve
from tests.systems.dit.cases import MODERN

STEPS, SAVED, UNTIL, GLOBAL, SEED = 4, 2, 3, 8, 3
CLIP = 0.05
# Adam divides by the gradient's own size. Where one of its few gradients is little more than rounding, as those of some
# sines of the timestep are, the order of summation decides the step.
ROUNDING = 1e-7
# With condition tokens and tokens that pass a block by; the alignment ends behind the checkpoint.
CASES = {
    "layersync": {
        "align": {"kind": "layersync", "depth": 1, "target": 2, "until": UNTIL},
        "tokens": {"label": 2, "joins": 1},
        "routing": {"start": 2, "end": 2},
    },
    "repa": {"align": {"kind": "repa", "depth": 1, "hidden": 8, "until": UNTIL}},
    "text": {
        "condition": "text",
        "num_words": 40,
        "max_text_len": 5,
        "tokens": {"joins": 1},
        "class_dropout_prob": 0.5,
    },
    "cross": {
        "condition": "text",
        "num_words": 40,
        "max_text_len": 5,
        "cross_attention": True,
        "block": MODERN["block"] | {"modulation": "shared"},
    },
    "video": {
        "condition": "text",
        "num_words": 40,
        "max_text_len": 5,
        "class_dropout_prob": 0.5,
        "video": {"frames": 3, "patch_frames": 2, "given": 1},
    },
}
STAGES = {1: (0,), 2: (0, 1, 2, 3), 4: (2,)}  # by the number of ranks
# Cases and stages by the number of ranks; of all of them CI's, with every case, stage and number.
EVERY = {world: [(case, stage) for case in CASES for stage in stages] for world, stages in STAGES.items()}
SAMPLE = {
    1: [("repa", 0)],
    2: [("layersync", 2), ("repa", 3), ("text", 1), ("cross", 0), ("video", 3)],
    4: [("cross", 2)],
}


def system_of(case: str, encoder: Path) -> DiTSystem:
    model = MODERN | CASES[case]
    if case == "repa":
        model |= {"align": Align.fill_in_encoder_fields({**model["align"], "path": str(encoder)})}
    return DiTSystem(Config(**model))


def network_of(system: DiTSystem) -> nn.Module:
    """No weight is zero: Adam would make steps of mere rounding behind one."""
    network, generator = system.networks()["denoiser"], torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    return network


def recipe(case: str) -> Run:
    return Run.model_validate(
        {
            "name": "tiny",
            "seed": SEED,
            "steps": STEPS,
            "system": "dit",
            "batch": {"global": GLOBAL, "micro": GLOBAL // group.world()},
            "optimizer": {"lr": 0.001, "betas": (0.9, 0.95), "weight_decay": 0.1, "clip": CLIP},
            "ema": {"decays": (0.9,)},
        }
    )


def batch(step: int) -> dict[str, Tensor]:
    key = rng.keys(SEED, step, torch.arange(GLOBAL))
    return {
        "key": key,
        "position": torch.arange(GLOBAL),
        "step": torch.full((GLOBAL,), step),
        "label": rng.integers(key, "label", 10),
        "image": rng.integers(key, "image", 256, (1, 8, 8)).to(torch.uint8),
        "video": rng.integers(key, "video", 256, (3, 1, 8, 8)).to(torch.uint8),
        "caption": pad_and_stack_texts([pack_caption(f"a bag {step} of {number}") for number in range(GLOBAL)]),
    }


def reference(case: str, encoder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Plain torch: one process, whole batch, AdamW; the weights, where their gradients are felt, and every loss."""
    system = system_of(case, encoder)
    network, losses = network_of(system), []
    felt = {name: torch.ones_like(weight, dtype=torch.bool) for name, weight in network.named_parameters()}
    matrices = [weight for name, weight in network.named_parameters() if system.has_weight_decay(name, weight)]
    others = [weight for name, weight in network.named_parameters() if not system.has_weight_decay(name, weight)]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.001, betas=(0.9, 0.95))
    for step in range(STEPS):
        system.turns(step)
        loss = system.compute_denoiser_loss({"denoiser": network}, system.encode(batch(step)))["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP)
        for name, weight in network.named_parameters():
            felt[name] &= (weight.grad.abs() > ROUNDING) | (weight.grad == 0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = {name: weight.detach().clone() for name, weight in network.named_parameters()}
    return weights, felt, losses


class Trial:
    """A training at a stage, and its checkpoints in a folder."""

    def __init__(self, case: str, encoder: Path, stage: int, folder: Path) -> None:
        self.run, self.system = recipe(case), system_of(case, encoder)
        settings = resolve({"zero_optimization": {"stage": stage}}, self.run, group.world(), "cpu")
        self.engines = engines_for(
            lambda: {"denoiser": network_of(self.system)},
            self.run,
            settings,
            self.system.has_weight_decay,
            self.system.list_block_classes(),
        )
        ema = EmaShadow(self.engines.masters, self.run.ema, ("denoiser",))
        self.saves = Checkpoints(folder, self.engines, ema, self.system, report=lambda line: None)

    def steps(self, first: int, last: int) -> list[float]:
        micros, told = Micros(batch, self.run.batch.micro), []
        for step in range(first, last):
            losses = take_step(
                step, self.run, self.system, self.engines, micros, SimpleNamespace(add_terms=lambda part, terms: None)
            )
            told.append(group.sum_over_ranks(sum(losses["denoiser"]).double()).item() / group.world())
        return told

    def weights(self) -> dict[str, Tensor]:
        masters = self.engines.masters["denoiser"]
        return gathered(masters, masters.flats)


def resumed(trial: Trial, again: Trial, told: list[float]) -> bool:
    """Whether another training goes on from the checkpoint as this one did, to the bit."""
    same = again.saves.resume() == SAVED and again.steps(SAVED, STEPS) == told
    there, here = trial.weights(), again.weights()
    return same and all(torch.equal(there[name], here[name]) for name in there)


def main(folder: Path, encoder: Path, cases: list[tuple[str, int]]) -> None:
    figures = {}
    for case, chosen in itertools.groupby(cases, key=lambda pair: pair[0]):
        expected, felt, losses = reference(case, encoder)
        for _, stage in chosen:
            name = f"{case}-{group.world()}-{stage}"
            trial = Trial(case, encoder, stage, folder / name)
            begun, told = trial.weights(), trial.steps(0, SAVED)
            trial.saves.save(SAVED, last=True)
            told += trial.steps(SAVED, STEPS)
            files = [file.name for file in (folder / name).rglob("*.safetensors")]
            own = {name: weight.where(felt[name], expected[name]) for name, weight in trial.weights().items()}
            figures[name] = {
                "weights": furthest(own, expected),
                "felt": torch.cat([mask.flatten() for mask in felt.values()]).float().mean().item(),
                "moved": furthest(begun, expected),
                "losses": max(abs(one - other) for one, other in zip(told, losses, strict=True)),
                "resumed": stage < 2 or resumed(trial, Trial(case, encoder, stage, folder / name), told[SAVED:]),
                "projectors": sum(name.startswith("projectors.") for name in begun),
                "encoder": any("encoder" in name or "tower" in name for name in files + list(begun)),
            }
    if group.rank() == 0:
        (folder / f"figures-{group.world()}.json").write_text(json.dumps(figures))
