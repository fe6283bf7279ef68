"""Run by test_optimizers.py on forked ranks: each optimizer against plain torch, saved, resumed and moved; as JSON.

train     ten steps of every case, a checkpoint after five; the last five again from the checkpoint
move      on another number of ranks: ten steps, and the last five from checkpoints of other stages
"""

import importlib.util
import json
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from dstrain import rng
from dstrain.distributed import group
from dstrain.engine import settings
from dstrain.engine.checkpoint import Checkpoints
from dstrain.engine.ema.shadow import EmaShadow
from dstrain.engine.initial import draw_initial_weights
from dstrain.recipe import Run
from tests.engine.check_elastic import History
from tests.engine.check_engines import SEED, decays, furthest, gathered, mean_difference
from tests.support.engines import engines_for, resolve

STEPS, HALF = 10, 5
CLIP = 0.2  # of Lion alone: the factor is rounded in another way than torch's
# A vector instruction rounds Adam's update unlike the scalar ones at the end of a tensor, and Muon makes an error by
# rounding large. So what Adam has is a multiple of 16 elements on each rank, and samples fill a matrix's gradient.
OUTSIDE, INSIDE, GLOBAL = 64, 47, 128
LR, BETAS, DECAY, MOMENTUM = 3e-3, (0.9, 0.95), 0.1, 0.9
NAMES = ("lion", "muon", *(("adamw8bit",) if importlib.util.find_spec("bitsandbytes") else ()))
CASES = [
    (name, stage, precision)
    for name in NAMES
    for precision, stages in (("fp32", (0, 1, 2, 3)), ("bf16", (0, 3)))
    for stage in stages
]
MOVES = [(name, *stages) for name in NAMES for stages in ((1, 3), (3, 2), (2, 0))]


def batch(step: int) -> tuple[Tensor, Tensor]:
    key = rng.keys(SEED, step, torch.arange(GLOBAL))
    return rng.normal(key, "x", (OUTSIDE,)), rng.normal(key, "y", (OUTSIDE,))


class Block(nn.Module):
    """Matrices that are wide and tall, large enough for moments of 8 bits, and a filter; (B, 47) -> (B, 47)."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(INSIDE, 97, bias=False), nn.Linear(97, INSIDE, bias=False)
        self.filter = nn.Conv1d(1, 5, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        return x + torch.tanh(self.filter(x[:, None])).mean(1)


class Network(nn.Module):
    """(B, 64) -> (B, 64): two blocks between two layers that are no block's."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(OUTSIDE, INSIDE, bias=False), nn.Linear(INSIDE, OUTSIDE)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        for block in self.blocks:
            x = block(x)
        return self.last(x).float()


class PlainLion:
    """Algorithm 2 of Chen et al. 2023, on whole weights."""

    def __init__(self, weights: list[tuple[Tensor, float]]):
        self.weights = [(weight, decay, torch.zeros_like(weight)) for weight, decay in weights]

    @torch.no_grad()
    def step(self) -> None:
        for weight, decay, average in self.weights:
            update = torch.sign(BETAS[0] * average + (1 - BETAS[0]) * weight.grad)
            weight -= LR * (update + decay * weight)
            average.copy_(BETAS[1] * average + (1 - BETAS[1]) * weight.grad)


class PlainMuon:
    """torch.optim.Muon of whole matrices, filters as (out, the rest), and torch.optim.AdamW of the other weights."""

    def __init__(self, network: nn.Module):
        matrices = [weight for name, weight in network.named_parameters() if "blocks" in name and weight.ndim >= 2]
        self.pairs = [(weight, nn.Parameter(weight.data.view(len(weight), -1))) for weight in matrices]
        rest = [weight for weight in network.parameters() if all(weight is not matrix for matrix in matrices)]
        self.muon = torch.optim.Muon(
            [matrix for _, matrix in self.pairs],
            lr=LR,
            weight_decay=DECAY,
            momentum=MOMENTUM,
            adjust_lr_fn="match_rms_adamw",
        )
        self.adamw = torch.optim.AdamW(
            [{"params": [weight], "weight_decay": DECAY * (weight.ndim >= 2)} for weight in rest],
            lr=LR,
            betas=BETAS,
            fused=True,
        )

    def step(self) -> None:
        for weight, matrix in self.pairs:
            matrix.grad = weight.grad.view_as(matrix)
        self.muon.step()
        self.adamw.step()


def plain(name: str, network: nn.Module) -> PlainLion | PlainMuon | torch.optim.Optimizer:
    if name == "lion":
        return PlainLion([(weight, DECAY * (weight.ndim >= 2)) for weight in network.parameters()])
    if name == "muon":
        return PlainMuon(network)
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(
        [{"params": [weight], "weight_decay": DECAY * (weight.ndim >= 2)} for weight in network.parameters()],
        lr=LR,
        betas=BETAS,
    )


def reference(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The initial weights, and those after ten steps of plain torch on the mean gradient of the ranks' shares."""
    network, world = Network(), group.world()
    network.load_state_dict(dict(draw_initial_weights(network, SEED)))
    initial = {key: weight.detach().clone() for key, weight in network.named_parameters()}
    optimizer = plain(name, network)
    for step in range(STEPS):
        x, y = batch(step)
        for own_x, own_y in zip(x.chunk(world), y.chunk(world)):
            ((network(own_x) - own_y).square().mean() / world).backward()
        if name == "lion":
            nn.utils.clip_grad_norm_(network.parameters(), CLIP)
        optimizer.step()
        network.zero_grad()
    return initial, {key: weight.detach().clone() for key, weight in network.named_parameters()}


def own_share(step: int) -> list[Tensor]:
    return [values.chunk(group.world())[group.rank()] for values in batch(step)]


class Trial:
    def __init__(self, name: str, stage: int, precision: str, folder: Path):
        micro = GLOBAL // group.world()
        run = Run.model_validate(
            {
                "seed": SEED,
                "steps": STEPS,
                "batch": {"global": GLOBAL, "micro": micro},
                "optimizer": {
                    "name": name,
                    "lr": LR,
                    "betas": BETAS,
                    "weight_decay": DECAY,
                    "momentum": MOMENTUM,
                    "clip": CLIP if name == "lion" else 0.0,
                },
                "ema": {"decays": ()},
            }
        )
        config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": precision == "bf16"}}
        if stage == 3:
            config["zero_optimization"] |= {"stage3_param_persistence_threshold": 40, "sub_group_size": 13000}
        self.engines = engines_for(
            lambda: {"tiny": Network()}, run, resolve(config, run, group.world(), "cpu"), decays, (Block,)
        )
        self.masters = self.engines.masters["tiny"]
        self.notes: list[str] = []
        self.saves = Checkpoints(
            folder,
            self.engines,
            EmaShadow(self.engines.masters, run.ema, ("tiny",)),
            History(),
            report=self.notes.append,
        )

    def steps(self, first: int, last: int) -> dict[str, Tensor]:
        """The fp32 weights after these steps."""
        for step in range(first, last):
            x, y = own_share(step)
            with self.engines.freeze_all_but("tiny") as nets:
                self.engines.run_backward_and_step("tiny", (nets["tiny"](x) - y).square().mean())
        return gathered(self.masters, self.masters.flats)

    def skips(self) -> bool:
        """Whether a gradient that is not finite on the last rank changes no weight and no moment."""
        before = self.state()
        x, y = own_share(0)
        with self.engines.freeze_all_but("tiny") as nets:
            loss = (nets["tiny"](x) - y).square().mean()
            self.engines.run_backward_and_step("tiny", loss * (math.inf if group.rank() == group.world() - 1 else 1))
        after = self.state()
        return all(torch.equal(before[key], after[key]) for key in before)

    def state(self) -> dict[str, Tensor]:
        kinds = {
            "master": self.masters.flats,
            **{kind: self.masters.get_moments_in_fp32(kind) for kind in self.masters.moment_kinds},
        }
        return {
            f"{kind}/{key}": value
            for kind, flats in kinds.items()
            for key, value in gathered(self.masters, flats).items()
        } | {"n": torch.tensor(self.masters.num_updates)}


def folder_of(folder: Path, name: str, stage: int, precision: str) -> Path:
    return folder / f"{name}-{stage}-{precision}"


def train(folder: Path) -> dict[str, dict]:
    figures, expected = {}, {name: reference(name) for name in NAMES}
    for name, stage, precision in CASES:
        initial, final = expected[name]
        trial = Trial(name, stage, precision, folder_of(folder, name, stage, precision))
        trial.steps(0, HALF)
        trial.saves.save(HALF, last=True)
        saved = trial.state()
        weights, state = trial.steps(HALF, STEPS), trial.state()
        again = Trial(name, stage, precision, folder_of(folder, name, stage, precision))
        again.steps(0, 1)
        resumed = again.saves.resume()
        again.steps(HALF, STEPS)
        repeated = again.state()
        figures[f"{name}-{stage}-{precision}"] = {
            "furthest": furthest(weights, final),
            "mean": mean_difference(weights, final),
            "moved": mean_difference(initial, final),
            "updates": trial.masters.num_updates,
            "resumed": resumed,
            "differ": [key for key in state if not torch.equal(state[key], repeated[key])],
            "skips": trial.skips(),
        }
        if group.rank() == 0:
            torch.save((saved, weights), folder_of(folder, name, stage, precision) / "truth.pt")
    other = Trial("lion" if NAMES[-1] == "muon" else "muon", 1, "fp32", folder_of(folder, NAMES[-1], 1, "fp32"))
    figures["other"] = {
        "resumed": other.saves.resume(),
        "updates": other.masters.num_updates,
        "notes": other.notes,
        "moments": sum(
            value.abs().sum().item() for key, value in other.state().items() if not key.startswith(("master", "n"))
        ),
    }
    return figures


def move(folder: Path) -> dict[str, dict]:
    figures = {}
    for name in NAMES:
        _, final = reference(name)
        weights = Trial(name, 0 if name == "adamw8bit" else 3, "fp32", folder).steps(0, STEPS)
        figures[f"{name} alone"] = furthest(weights, final)
    for name, before, after in MOVES:
        path = folder_of(folder, name, before, "fp32")
        trial, (saved, truth) = Trial(name, after, "fp32", path), torch.load(path / "truth.pt")
        resumed, state = trial.saves.resume(), trial.state()
        start_weights = gathered(trial.masters, trial.masters.flats)
        weights = trial.steps(HALF, STEPS)
        figures[f"{name} {before}->{after}"] = {
            "resumed": resumed,
            "mean": mean_difference(weights, truth),
            "moved": mean_difference(start_weights, truth),
            "differ": [key for key in saved if not torch.equal(saved[key], state[key])],
            "moments": max(
                (saved[key] - state[key]).abs().max().item() / saved[key].abs().max().item()
                for key in saved
                if key.startswith("exp_avg/")
            ),
        }
    return figures


def main(what: str, folder: Path, out: Path) -> None:
    # torch's Muon computes in bf16 everywhere; ours does so on GPUs and on CPUs that have bf16. These ranks are forked.
    settings.can_cpu_multiply_bf16 = lambda: True
    found = {"train": train, "move": move}[what](folder)
    if group.rank() == 0:
        out.write_text(json.dumps(found, indent=1))
