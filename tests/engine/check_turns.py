"""Run by test_turns.py on 2 ranks: two networks that learn in turns, against plain torch; figures as JSON.

The system is a tiny KL autoencoder with a discriminator that starts at step START; the step is the loop's own.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from dstrain import rng, systems
from dstrain.distributed import group
from dstrain.engine.checkpoint import Checkpoints
from dstrain.engine.ema.shadow import EmaShadow
from dstrain.engine.initial import draw_initial_weights
from dstrain.recipe import Run
from dstrain.train import take_step
from tests.engine.check_engines import Micros, furthest, gathered, list_differences_after_resume
from tests.support.engines import count_skipped_steps, engines_for, resolve

STEPS, START, GLOBAL, SEED = 8, 3, 8, 5
SAVED = (2, 5)  # before the discriminator's start, and after
# Stage, micro-batch (2: two micro-steps), and the saves that another training goes on from; of all of them CI's, with
# each size and save, at stages 1 and 3.
EVERY = {(stage, micro): SAVED for stage in (0, 1, 2, 3) for micro in (4, 2)}
SAMPLE = {(1, 4): SAVED[:1], (3, 2): SAVED[1:]}
# With a small eps Adam divides rounding by rounding: at 1e-6 plain torch moves by 2e-5 when a batch is permuted.
DECAY, LR, EPS, WEIGHT_DECAY = 0.9, 5e-4, 1e-4, 0.05
KL_WEIGHT, WEIGHT = 0.1, 0.7
MODEL = {
    "image_size": 16,
    "channels": 1,
    "kl": {
        "block_out_channels": [8, 16],
        "norm_num_groups": 4,
        "layers_per_block": 1,
        "kl_weight": KL_WEIGHT,
        "discriminator": {"start": START, "n_layers": 2, "base_channels": 16, "weight": WEIGHT},
    },
}


def recipe(micro: int) -> Run:
    return Run.model_validate(
        {
            "name": "turns",
            "system": "vae",
            "model": MODEL,
            "seed": SEED,
            "steps": STEPS,
            "data": {"image_size": 16, "channels": 1},
            "batch": {"global": GLOBAL, "micro": micro},
            "optimizer": {"lr": LR, "betas": (0.5, 0.9), "eps": EPS, "weight_decay": WEIGHT_DECAY},
            "ema": {"decays": [DECAY]},
        }
    )


def batch(step: int) -> dict[str, torch.Tensor]:
    """The global batch, with edges and planes that can be learned."""
    position = torch.arange(GLOBAL)
    key = rng.keys(SEED, step, position)
    coarse = rng.integers(key, "image", 256, (1, 4, 4)).float()
    image = F.interpolate(coarse, size=(16, 16), mode="bilinear").to(torch.uint8)
    return {"image": image, "key": key, "position": position, "step": torch.full_like(position, step)}


class Trial:
    def __init__(self, stage: int, micro: int, folder: Path):
        self.run = recipe(micro)
        config = {"zero_optimization": {"stage": stage}}
        if stage == 3:
            config["zero_optimization"] |= {"stage3_param_persistence_threshold": 40, "sub_group_size": 3000}
        self.system = systems.build("vae", MODEL)
        settings = resolve(config, self.run, group.world(), "cpu")
        self.engines = engines_for(
            self.system.networks, self.run, settings, self.system.has_weight_decay, self.system.list_block_classes()
        )
        self.ema = EmaShadow(self.engines.masters, self.run.ema, self.system.averaged)
        self.saves = Checkpoints(folder, self.engines, self.ema, self.system)
        self.batches, self.seen, self.applied = Micros(batch, micro), [], []

    def steps(self, first: int, last: int, saved: Iterable[int] = ()) -> None:
        tracker = SimpleNamespace(add_terms=lambda part, terms: self.seen.append((part, terms["loss"])))
        for step in range(first, last):
            take_step(step, self.run, self.system, self.engines, self.batches, tracker)
            self.ema.update_averages(step, self.engines.collect_part_change_flags())
            self.applied.append(self.engines.collect_part_change_flags())
            if step + 1 in saved:
                self.saves.save(step + 1, last=True)

    def weights(self) -> dict[str, dict[str, torch.Tensor]]:
        return {part: gathered(masters, masters.flats) for part, masters in self.engines.masters.items()}

    def state(self) -> dict[str, torch.Tensor]:
        """Every fp32 value of both parts and the counts of updates."""
        found = {}
        for part, masters in self.engines.masters.items():
            kinds = {
                "master": masters.flats,
                **{kind: masters.get_moments_in_fp32(kind) for kind in masters.moment_kinds},
                **{f"ema.{decay}": flats for decay, flats in self.ema.flats.get(part, {}).items()},
            }
            found |= {
                f"{part}/{kind}/{name}": value
                for kind, flats in kinds.items()
                for name, value in gathered(masters, flats).items()
            }
            found[f"{part}/updates"] = torch.tensor(masters.num_updates)
        return found


def reference() -> dict[str, dict[str, torch.Tensor]]:
    """Plain torch on the whole batch in one process: one graph through both networks, two AdamW; weights and EMA."""
    system = systems.build("vae", MODEL)
    nets = system.networks()
    optimizers = {}
    for part, network in nets.items():
        network.load_state_dict(dict(draw_initial_weights(network, SEED)))
        groups = [
            {"params": [p for p in network.parameters() if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in network.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizers[part] = torch.optim.AdamW(groups, lr=LR, betas=(0.5, 0.9), eps=EPS)
    shadow = {name: weight.detach().clone() for name, weight in nets["autoencoder"].named_parameters()}

    def descend(part: str, loss: torch.Tensor) -> None:
        optimizers[part].zero_grad()
        loss.backward(inputs=list(nets[part].parameters()))
        optimizers[part].step()

    for step in range(STEPS):
        whole = batch(step)
        x = whole["image"].float() / 127.5 - 1
        picture, mean, log_variance = nets["autoencoder"](x, rng.normal(whole["key"], "latent", (4, 8, 8)))
        distance = (picture - x).abs().mean((1, 2, 3))
        nats = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum((1, 2, 3))
        loss = distance + KL_WEIGHT * nats / 256
        if step >= START:
            critique = -nets["discriminator"](picture).mean((1, 2, 3))
            lengths = [
                torch.autograd.grad(value.sum(), picture, retain_graph=True)[0].flatten(1).norm(dim=1)
                for value in (distance, critique)
            ]
            loss = loss + WEIGHT * lengths[0] / lengths[1].clamp(min=1e-3 / 16) * critique
        shown = picture.detach()
        descend("autoencoder", loss.mean())
        if step >= START:
            real, fake = nets["discriminator"](x), nets["discriminator"](shown)
            descend("discriminator", (F.relu(1 - real).mean() + F.relu(1 + fake).mean()) / 2)
        for name, weight in nets["autoencoder"].named_parameters():
            shadow[name].lerp_(weight.detach(), 1 - DECAY)
    found = {
        part: {name: weight.detach().clone() for name, weight in net.named_parameters()} for part, net in nets.items()
    }
    return found | {"ema": shadow}


def measure(case: tuple[int, int], saved: Iterable[int], expected: dict, folder: Path) -> dict:
    """Trains; and goes on from its own checkpoints: by their step, the names of what differs then."""
    trial = Trial(*case, folder)
    begun = trial.weights()
    trial.steps(0, START, saved)
    waited = trial.weights()
    counts = {part: masters.num_updates for part, masters in trial.engines.masters.items()}
    trial.steps(START, STEPS, saved)
    ended = trial.weights()
    average = gathered(trial.engines.masters["autoencoder"], trial.ema.flats["autoencoder"][DECAY])
    return {
        "weights": {part: furthest(ended[part], expected[part]) for part in ended},
        "moved": {part: furthest(begun[part], expected[part]) for part in ended},
        "ema": furthest(average, expected["ema"]),
        "waited": furthest(begun["discriminator"], waited["discriminator"]),
        "updates_at_start": counts,
        "updates": {part: masters.num_updates for part, masters in trial.engines.masters.items()},
        "applied": [sorted(applied) for applied in trial.applied],
        "all_applied": all(all(applied.values()) for applied in trial.applied),
        "skipped": count_skipped_steps(trial.engines),
        "figures": sorted(trial.engines.collect_metrics()),
        "resumed": {
            step: list_differences_after_resume(Trial(*case, folder), step, STEPS, trial.state()) for step in saved
        },
    }


def main(folder: Path, cases: dict[tuple[int, int], Iterable[int]]) -> None:
    expected = reference()
    figures = {}
    for case, saved in cases.items():
        name = "{}-{}".format(*case)
        figures[name] = measure(case, saved, expected, folder / name)
    if group.rank() == 0:
        (folder / "figures.json").write_text(json.dumps(figures))
