"""Run by test_phenaki_turns.py on 2 ranks: Phenaki's tokenizer and its adversary, against plain torch, as JSON.

Clips of several lengths; two of the steps hold images alone, where the weights for later frames learn nothing. The
discriminator begins at step START, with a penalty at every second step. The step is the loop's own.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from dstrain import rng, systems
from dstrain.distributed import group
from dstrain.engine.initial import draw_initial_weights
from dstrain.recipe import Run
from dstrain.train import take_step
from tests.engine.check_engines import Micros, furthest, gathered
from tests.support.engines import count_skipped_steps, engines_for, resolve

STEPS, START, GLOBAL, SEED, EVERY = 6, 2, 8, 5, 2
IMAGES_ALONE = (1, 4)
# Form of the penalty, stage and micro-batch (2: two micro-steps); of all of them CI's, with every form, stage and size.
ALL = [
    (form, stage, micro)
    for form, stages in (("approximate", (0, 1, 2, 3)), ("exact", (0, 1, 2)))
    for stage in stages
    for micro in (4, 2)
]
SAMPLE = [("approximate", 0, 4), ("exact", 1, 2), ("exact", 2, 4), ("approximate", 3, 2)]
ALL_BF16, SAMPLE_BF16 = (1, 3), (3,)  # stages
# The last bias of a discriminator adds to all logits: its gradient is rounding, which Adam divides by what is as small.
LR, EPS, WEIGHT_DECAY, WEIGHT, DECAY, SIGMA, PENALTY = 5e-4, 1e-3, 0.05, 0.7, 0.5, 0.3, 0.8
COMMIT, ENTROPY, GAMMA = 0.25, 0.1, 1.5


def model(form: str) -> dict:
    return {
        "image_size": 16,
        "num_frames": 5,
        "channels": 1,
        "dim": 32,
        "codebook_size": 64,
        "patch_size": 4,
        "spatial_depth": 1,
        "temporal_depth": 1,
        "dim_head": 8,
        "heads": 2,
        "commitment_weight": COMMIT,
        "entropy_weight": ENTROPY,
        "diversity_gamma": GAMMA,
        "usage_decay": DECAY,
        "discriminator": {
            "start": START,
            "n_layers": 2,
            "base_channels": 16,
            "weight": WEIGHT,
            "penalty": {"form": form, "every": EVERY, "weight": PENALTY, "sigma": SIGMA},
        },
    }


def recipe(micro: int, form: str) -> Run:
    return Run.model_validate(
        {
            "name": "turns",
            "system": "phenaki.tokenizer",
            "model": model(form),
            "seed": SEED,
            "steps": STEPS,
            "data": {"image_size": 16, "channels": 1, "num_frames": 5},
            "batch": {"global": GLOBAL, "micro": micro},
            "optimizer": {"lr": LR, "betas": (0.5, 0.9), "eps": EPS, "weight_decay": WEIGHT_DECAY},
        }
    )


def batch(step: int) -> dict[str, torch.Tensor]:
    """The global batch: smooth clips, of which 1, 3 or 5 frames are real, and noise behind those."""
    position = torch.arange(GLOBAL)
    key = rng.keys(SEED, step, position)
    coarse = rng.integers(key, "video", 256, (5, 4, 4)).float()
    video = F.interpolate(coarse, size=(16, 16), mode="bilinear").to(torch.uint8)[:, :, None]
    frames = 1 + 2 * (position % 3)
    if step in IMAGES_ALONE:
        video, frames = video[:, :1], torch.ones_like(frames)
    return {"video": video, "frames": frames, "key": key, "position": position, "step": torch.full_like(position, step)}


def trained(form: str, stage: int, micro: int, bf16: bool = False) -> dict:
    """Weights by part after all steps, the loss of each and what the system learned on the side."""
    run, config = recipe(micro, form), {"zero_optimization": {"stage": stage}}
    if stage == 3:
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": 40, "sub_group_size": 3000}
    if bf16:
        config["bf16"] = {"enabled": True}
    system = systems.build("phenaki.tokenizer", model(form))
    engines = engines_for(
        system.networks,
        run,
        resolve(config, run, group.world(), "cpu"),
        system.has_weight_decay,
        system.list_block_classes(),
    )
    seen = []
    tracker = SimpleNamespace(add_terms=lambda part, terms: seen.append((part, terms["loss"].item())))
    found = {"begun": {part: gathered(masters, masters.flats) for part, masters in engines.masters.items()}}
    for step in range(STEPS):
        take_step(step, run, system, engines, Micros(batch, micro), tracker)
    found |= {part: gathered(masters, masters.flats) for part, masters in engines.masters.items()}
    return found | {"usage": system.state_dict()["usage"], "losses": seen, "skipped": count_skipped_steps(engines)}


def reference(form: str) -> dict:
    """Plain torch on the whole batch in one process: one graph through both networks, two AdamW."""
    nets = systems.build("phenaki.tokenizer", model(form)).networks()
    tokenizer, discriminator = nets.values()
    optimizers = {}
    for part, network in nets.items():
        network.load_state_dict(dict(draw_initial_weights(network, SEED)))
        groups = [
            {"params": [p for p in network.parameters() if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in network.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizers[part] = torch.optim.AdamW(groups, lr=LR, betas=(0.5, 0.9), eps=EPS)

    def descend(part: str, loss: torch.Tensor) -> None:
        optimizers[part].zero_grad()
        loss.backward(inputs=list(nets[part].parameters()))
        optimizers[part].step()

    q, each = torch.full((64,), 1 / 64), torch.arange(GLOBAL)
    for step in range(STEPS):
        whole = batch(step)
        x, frames = whole["video"].float() / 127.5 - 1, whole["frames"]
        real = (torch.arange(x.shape[1]) < frames[:, None]).float()
        passed = tokenizer(x, frames)
        errors = (passed.video - x).square().mean((2, 3, 4)) * real
        spread = passed.entropy + GAMMA * (passed.shares * (0.99 * q + 0.01 / 64).log()).sum(1)
        loss = errors.sum(1) / frames + COMMIT * passed.commitment + ENTROPY * spread
        place = (rng.uniform(whole["key"], "frame") * frames).long()
        frame, truth = passed.video[each, place], x[each, place]
        if step >= START:
            critique = -discriminator(frame).mean((1, 2, 3))
            lengths = [
                torch.autograd.grad(value.sum(), frame, retain_graph=True)[0].flatten(1).norm(dim=1)
                for value in ((frame - truth).square().mean((1, 2, 3)), critique)
            ]
            loss = loss + WEIGHT * lengths[0] / lengths[1].clamp(min=1e-3 / 16) * critique
        shown = frame.detach()
        descend("tokenizer", loss.mean())
        q = DECAY * q + (1 - DECAY) * passed.shares.detach().mean(0)
        if step >= START:
            truth.requires_grad_()
            moved = truth + SIGMA * rng.normal(whole["key"], "penalty", (1, 16, 16))
            judged, fake, moved = discriminator(torch.cat((truth, shown, moved))).chunk(3)
            loss = (F.relu(1 - judged).mean() + F.relu(1 + fake).mean()) / 2
            if step % EVERY == 0:
                if form == "exact":
                    slope = torch.autograd.grad(judged.sum(), truth, create_graph=True)[0].square().sum((1, 2, 3))
                else:
                    slope = ((moved - judged) / SIGMA).sum((1, 2, 3)) ** 2
                loss = loss + EVERY * PENALTY / 2 * (slope / judged[0].numel()).mean()
            descend("discriminator", loss)
    found = {
        part: {name: weight.detach().clone() for name, weight in net.named_parameters()} for part, net in nets.items()
    }
    return found | {"usage": q}


def measure(case: tuple[str, int, int], expected: dict) -> dict:
    found = trained(*case)
    return {
        "weights": {part: furthest(found[part], expected[part]) for part in ("tokenizer", "discriminator")},
        "moved": {part: furthest(found["begun"][part], expected[part]) for part in ("tokenizer", "discriminator")},
        "usage": (found["usage"] - expected["usage"]).abs().max().item(),
        "learned": (found["usage"] - 1 / 64).abs().max().item(),
        "skipped": found["skipped"],
    }


def refusal(stage: int) -> str:
    try:
        trained("exact", stage, 4)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def main(folder: Path, cases: list[tuple[str, int, int]], stages: tuple[int, ...]) -> None:
    """stages: those that are trained in bf16, too."""
    expected = {form: reference(form) for form in ("approximate", "exact")}
    figures = {"-".join(map(str, case)): measure(case, expected[case[0]]) for case in cases}
    bf16 = {stage: trained("approximate", stage, 4, bf16=True) for stage in stages}
    figures["bf16"] = {stage: {"losses": found["losses"], "skipped": found["skipped"]} for stage, found in bf16.items()}
    figures["refused"] = refusal(3)
    if group.rank() == 0:
        (folder / "figures.json").write_text(json.dumps(figures))
