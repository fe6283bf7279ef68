"""Run by test_phenaki.py on 2 ranks: MaskGit with either critic, against plain torch; figures as JSON.

The steps are the loop's own. The reference has all logits at once, an optimizer for each part and no engine.
"""

import json
import math
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
from tests.support.engines import engines_for, resolve

STEPS, GLOBAL, SEED, SAVED = 6, 8, 5, 3
# As in check_turns.py: a small eps divides rounding by rounding.
DECAY, LR, EPS, WEIGHT_DECAY, WEIGHT = 0.9, 5e-4, 1e-4, 0.05, 0.7
SHAPE, IDS, WORDS, DROP = (3, 2, 2), 24, 40, 0.3
MODEL = {
    "token_shape": SHAPE,
    "codebook_size": IDS,
    "temporal_patch_size": 2,
    "dim": 16,
    "depth": 2,
    "heads": 2,
    "dim_head": 8,
    "num_words": WORDS,
    "max_text_len": 4,
    "cond_drop_prob": DROP,
    "loss_chunk": 5,
    "critic_loss_weight": WEIGHT,
}
CRITICS = ("token", "self")
# Critic, stage and micro-batch; of all of them CI's, with every critic, stage and size.
EVERY = [(critic, stage, micro) for critic in CRITICS for stage in (0, 1, 2, 3) for micro in (4, 2)]
SAMPLE = [("token", 0, 4), ("self", 1, 2), ("self", 2, 4), ("token", 3, 2)]


def recipe(micro: int, critic: str) -> Run:
    return Run.model_validate(
        {
            "name": "phenaki",
            "system": "phenaki",
            "model": MODEL | {"critic": critic},
            "seed": SEED,
            "steps": STEPS,
            "batch": {"global": GLOBAL, "micro": micro},
            "ema": {"decays": [DECAY]},
            "optimizer": {"lr": LR, "betas": (0.9, 0.99), "eps": EPS, "weight_decay": WEIGHT_DECAY},
        }
    )


def batch(step: int) -> dict[str, torch.Tensor]:
    """The global batch: clips of 1 to 5 frames."""
    position = torch.arange(GLOBAL)
    key = rng.keys(SEED, step, position)
    return {
        "key": key,
        "position": position,
        "step": torch.full_like(position, step),
        "tokens": rng.integers(key, "tokens", IDS, SHAPE),
        "frames": 1 + rng.integers(key, "frames", 5),
        "words": rng.integers(key, "words", WORDS, (4,)),
    }


class Trial:
    def __init__(self, critic: str, stage: int, micro: int, folder: Path):
        self.run = recipe(micro, critic)
        config = {"zero_optimization": {"stage": stage}}
        if stage == 3:
            config["zero_optimization"] |= {"stage3_param_persistence_threshold": 40, "sub_group_size": 3000}
        self.system = systems.build("phenaki", self.run.model)
        settings = resolve(config, self.run, group.world(), "cpu")
        self.engines = engines_for(
            self.system.networks, self.run, settings, self.system.has_weight_decay, self.system.list_block_classes()
        )
        self.ema = EmaShadow(self.engines.masters, self.run.ema, self.system.averaged)
        self.saves = Checkpoints(folder, self.engines, self.ema, self.system)
        self.batches = Micros(batch, micro)

    def steps(self, first: int, last: int) -> None:
        tracker = SimpleNamespace(add_terms=lambda part, terms: None)
        for step in range(first, last):
            take_step(step, self.run, self.system, self.engines, self.batches, tracker)
            self.ema.update_averages(step, self.engines.collect_part_change_flags())
            assert all(self.engines.collect_part_change_flags().values())
            if first == 0 and step + 1 == SAVED:
                self.saves.save(step + 1, last=True)

    def weights(self) -> dict[str, dict[str, torch.Tensor]]:
        return {part: gathered(masters, masters.flats) for part, masters in self.engines.masters.items()}

    def averages(self) -> dict[str, dict[str, torch.Tensor]]:
        return {part: gathered(self.engines.masters[part], flats[DECAY]) for part, flats in self.ema.flats.items()}

    def state(self) -> dict[str, torch.Tensor]:
        found = {}
        for part, masters in self.engines.masters.items():
            kinds = {
                "master": masters.flats,
                **{kind: masters.get_moments_in_fp32(kind) for kind in masters.moment_kinds},
            }
            found |= {
                f"{part}/{kind}/{name}": value
                for kind, flats in kinds.items()
                for name, value in gathered(masters, flats).items()
            }
        return found | {
            f"{part}/ema/{name}": value for part, values in self.averages().items() for name, value in values.items()
        }


def reference(critic: str) -> tuple[dict, dict]:
    """Plain torch on the whole batch in one process: weights and averages by part."""
    system = systems.build("phenaki", recipe(GLOBAL, critic).model)
    nets, optimizers, shadows = system.networks(), {}, {}
    for part, network in nets.items():
        network.load_state_dict(dict(draw_initial_weights(network, SEED)))
        named = list(network.named_parameters())
        groups = [
            {"params": [p for n, p in named if system.has_weight_decay(n, p)], "weight_decay": WEIGHT_DECAY},
            {"params": [p for n, p in named if not system.has_weight_decay(n, p)], "weight_decay": 0.0},
        ]
        optimizers[part] = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.99), eps=EPS)
        shadows[part] = {name: weight.detach().clone() for name, weight in named}
    for step in range(STEPS):
        for part, loss in losses(nets, batch(step), critic):
            optimizers[part].zero_grad()
            loss.backward()
            optimizers[part].step()
        for part, network in nets.items():
            for name, weight in network.named_parameters():
                shadows[part][name].lerp_(weight.detach(), 1 - DECAY)
    return {
        part: {name: weight.detach().clone() for name, weight in net.named_parameters()} for part, net in nets.items()
    }, shadows


def losses(nets, whole, critic):
    """Each part's loss, written down once more: all logits at once, loops over samples."""
    tokens, key, net = whole["tokens"], whole["key"], nets["maskgit"]
    real = torch.arange(SHAPE[0]) < (1 + (whole["frames"] - 1) // 2)[:, None]
    total = real.sum(1) * 4
    place = real.repeat_interleave(4, dim=1)
    noise, u = rng.uniform(key, "mask", (12,)), rng.uniform(key, "mask_ratio")
    masked = torch.zeros(GLOBAL, 12, dtype=torch.bool)
    for i in range(GLOBAL):
        count = max(1, round(int(total[i]) * math.cos(math.pi / 2 * float(u[i]))))
        chosen = sorted(torch.nonzero(place[i])[:, 0].tolist(), key=lambda j: float(noise[i, j]))[:count]
        masked[i, chosen] = True
    dropped = rng.uniform(key, "drop") < DROP
    flat, said = tokens.flatten(1), {"real": real, "dropped": dropped, "words": whole["words"]}
    hidden = torch.where(masked, IDS, flat).view_as(tokens)

    def logits():
        states = net.trunk(hidden, **said).flatten(1, 3)
        return states @ net.to_logits.weight.t() + net.to_logits.bias

    with torch.no_grad():
        upto = logits().softmax(-1).cumsum(-1)
        drawn = (upto <= rng.uniform(key, "filled", (12,))[..., None] * upto[..., -1:]).sum(-1)
        filled = torch.where(masked, drawn, flat)

    def share(each):
        return ((each * masked).sum(1) / (2 / math.pi * total)).mean()

    entropy = share(F.cross_entropy(logits().flatten(0, 1), flat.flatten(), reduction="none").view(GLOBAL, 12))

    def criticism(network):
        judged = network.to_critic(network.trunk(filled.view_as(tokens), **said)).flatten(1)
        each = F.binary_cross_entropy_with_logits(judged, masked.float(), reduction="none")
        return ((each * place).sum(1) / total).mean()

    if critic == "self":
        yield "maskgit", entropy + WEIGHT * criticism(net)
    else:
        yield "maskgit", entropy
        yield "critic", criticism(nets["critic"])


def measure(case: tuple[str, int, int], expected: tuple[dict, dict], folder: Path) -> dict:
    """Trains; and goes on from its own checkpoint: the names of what differs then."""
    trial = Trial(*case, folder)
    begun = trial.weights()
    trial.steps(0, STEPS)
    ended, averages = trial.weights(), trial.averages()
    return {
        "weights": {part: furthest(ended[part], expected[0][part]) for part in ended},
        "moved": {part: furthest(begun[part], expected[0][part]) for part in ended},
        "ema": {part: furthest(averages[part], expected[1][part]) for part in ended},
        "updates": {part: masters.num_updates for part, masters in trial.engines.masters.items()},
        "resumed": list_differences_after_resume(Trial(*case, folder), SAVED, STEPS, trial.state()),
    }


def main(folder: Path, cases: list[tuple[str, int, int]]) -> None:
    expected = {critic: reference(critic) for critic in CRITICS}
    names = ["-".join(map(str, case)) for case in cases]
    figures = {name: measure(case, expected[case[0]], folder / name) for name, case in zip(names, cases, strict=True)}
    if group.rank() == 0:
        (folder / "figures.json").write_text(json.dumps(figures))
