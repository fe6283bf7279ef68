"""Run by test_engines.py on 1 and 2 ranks: measures the engine against plain torch and writes the figures as JSON."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dstrain import rng
from dstrain.distributed import group
from dstrain.engine.ema.shadow import EmaShadow
from dstrain.engine.initial import draw_initial_weights
from dstrain.engine.start import start_process_group
from dstrain.recipe import Ema, Run
from tests.support.engines import engines_for, resolve
from tests.support.tiny import Tiny

STEPS, GLOBAL, SEED = 6, 8, 3
CLIP = 0.05
EMA = Ema(decays=(0.9, 0.5))


def recipe(micro: int) -> Run:
    return Run.model_validate(
        {
            "name": "tiny",
            "seed": SEED,
            "steps": STEPS,
            "batch": {"global": GLOBAL, "micro": micro},
            "optimizer": {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1, "clip": CLIP},
            "ema": EMA.model_dump(),
        }
    )


def decays(name: str, weight: torch.Tensor) -> bool:
    return weight.ndim >= 2


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    key = rng.keys(SEED, step, torch.arange(GLOBAL))
    return rng.normal(key, "x", (5,)), rng.normal(key, "y", (3,))


def rows(micro_step: int, micro: int) -> slice:
    start_row = (micro_step * group.world() + group.rank()) * micro
    return slice(start_row, start_row + micro)


class Micros:
    """This rank's micro-batches of what `batch` gives for a step, in the layout of data/batches.py."""

    def __init__(self, batch: Callable[[int], dict[str, torch.Tensor]], micro: int):
        self.batch, self.micro = batch, micro

    def read_step(self, step: int) -> Iterator[dict[str, torch.Tensor]]:
        whole = self.batch(step)
        for micro_step in range(len(whole["key"]) // (self.micro * group.world())):
            yield {name: tensor[rows(micro_step, self.micro)] for name, tensor in whole.items()}


def reference() -> tuple[dict[str, torch.Tensor], float]:
    """Plain torch: one process, whole batch, AdamW; the weights and the last gradient norm."""
    network = Tiny()
    network.load_state_dict(dict(draw_initial_weights(network, SEED)))
    groups = [
        {"params": [p for p in network.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in network.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    for step in range(STEPS):
        x, y = batch(step)
        (network(x) - y).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.detach().clone() for name, weight in network.named_parameters()}, norm.item()


def gathered(masters, flats) -> dict[str, torch.Tensor]:
    """Full tensors by name from every rank's fragments."""
    full: dict[str, torch.Tensor] = {}
    own = list(masters.iterate_fragment_views_to_save(flats))
    # One tensor: each that is pickled has a header of its own.
    values = torch.cat([view for _, view in own]) if own else torch.empty(0)
    for fragments, theirs in group.gather_objects(([fragment for fragment, _ in own], values)):
        for fragment, view in zip(fragments, theirs.split([fragment.numel for fragment in fragments])):
            whole = full.setdefault(fragment.name, torch.full(fragment.shape, torch.nan))
            whole.view(-1)[fragment.start : fragment.start + fragment.numel] = view
    assert not any(tensor.isnan().any() for tensor in full.values()), "a fragment is missing"
    return full


def applied(engines) -> dict[str, bool]:
    """engines.collect_part_change_flags(), read off the device."""
    return {part: bool(flag) for part, flag in engines.collect_part_change_flags().items()}


def list_differences_after_resume(trial: Any, step: int, last: int, truth: dict[str, torch.Tensor]) -> list[str]:
    """Goes on from the trial's checkpoint of a step to the step `last`; returns the names of what differs from `truth`,
    the state of a run without a break.
    """
    trial.steps(0, 1)  # other weights, which the checkpoint must replace
    trial.saves.load(trial.saves.store.folder / f"step_{step:08d}")
    trial.steps(step, last)
    state = trial.state()
    return [name for name in truth if not torch.equal(state[name], truth[name])]


def furthest(a: dict, b: dict) -> float:
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def mean_difference(a: dict, b: dict) -> float:
    return torch.cat([(a[name] - b[name]).abs().flatten() for name in a]).mean().item()


def measure(stage: int, precision: str, micro: int, expected: dict, norm: float) -> dict:
    run = recipe(micro)
    config = {"zero_optimization": {"stage": stage}, "gradient_clipping": "auto"}
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    if stage in (1, 2):
        config["zero_optimization"]["overlap_comm"] = True
    if stage == 3:
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": 40, "sub_group_size": 300}
    engines = engines_for(lambda: {"tiny": Tiny()}, run, resolve(config, run, group.world(), "cpu"), decays)
    masters = engines.masters["tiny"]
    shadow = EmaShadow(engines.masters, run.ema, ("tiny",))
    begun = gathered(masters, masters.flats)
    full = dict(draw_initial_weights(Tiny(), SEED))
    naive = {decay: {name: weight.clone() for name, weight in begun.items()} for decay in EMA.decays}
    held_x = batch(100)[0]
    swaps, applied = [], []
    for step in range(STEPS):
        engines.begin_step(run.optimizer.compute_lr(step, STEPS))
        x, y = batch(step)
        for micro_step in range(GLOBAL // (micro * group.world())):
            mine = rows(micro_step, micro)
            with engines.freeze_all_but("tiny") as nets:
                loss = (nets["tiny"](x[mine]) - y[mine]).square().mean()
                engines.run_backward_and_step("tiny", loss)
            last = micro_step + 1 == GLOBAL // (micro * group.world())
            applied.append(bool(engines.collect_part_change_flags()["tiny"]) == last)
        shadow.update_averages(step, engines.collect_part_change_flags())
        live = gathered(masters, masters.flats)
        for decay, weights in naive.items():
            for name, weight in weights.items():
                weight.lerp_(live[name], 1 - decay)
        if step in (0, 3):
            with torch.no_grad():
                network = engines.modules["tiny"]
                before, flats = network(held_x), [flat.detach().clone() for flat in masters.flats]
                with shadow.use_averages_as_weights(0.5):
                    inside = network(held_x)
                again = network(held_x)
            oracle = Tiny()
            oracle.load_state_dict(naive[0.5] | {k: v for k, v in full.items() if "table" in k})
            oracle.to(next(network.parameters()).dtype)
            oracle.scale.table = full["scale.table"]
            swaps.append(
                {
                    "restored": bool((before == again).all())
                    and all((a == b).all() for a, b in zip(flats, masters.flats)),
                    "inside": (inside - oracle(held_x)).abs().max().item(),
                    "changed": (inside - before).abs().max().item(),
                }
            )
    figures = {
        "initial": furthest(begun, {name: full[name] for name in begun}),
        "weights": furthest(gathered(masters, masters.flats), expected),
        "weights_mean": mean_difference(gathered(masters, masters.flats), expected),
        "moved_mean": mean_difference(begun, expected),
        "ema": [furthest(gathered(masters, shadow.flats["tiny"][decay]), naive[decay]) for decay in EMA.decays],
        "swapped": swaps,
        "applied": all(applied),
        "updates": masters.num_updates,
        "buffer": (engines.modules["tiny"].scale.table - full["scale.table"]).abs().max().item(),
        "norm": engines.collect_metrics()["grad_norm"],
        "true_norm": norm,
        "param_norm": engines.collect_metrics()["param_norm"],
        "true_param_norm": torch.cat(
            [weight.double().flatten() for weight in gathered(masters, masters.flats).values()]
        )
        .norm()
        .item(),
    }
    # A gradient that is not finite, on one rank only: nothing moves, anywhere.
    flats = [flat.detach().clone() for flat in masters.flats]
    with engines.freeze_all_but("tiny") as nets:
        for micro_step in range(GLOBAL // (micro * group.world())):
            loss = nets["tiny"](x[rows(micro_step, micro)]).sum()
            engines.run_backward_and_step("tiny", loss * (torch.inf if group.rank() == 0 else 1.0))
    shadows = [flat.clone() for flat in shadow.flats["tiny"][0.5]]
    shadow.update_averages(STEPS, engines.collect_part_change_flags())
    figures["skipped"] = {
        "said": not engines.collect_part_change_flags()["tiny"],
        "updates": masters.num_updates,
        "weights": all(bool((a == b).all()) for a, b in zip(flats, masters.flats)),
        "ema": all(bool((a == b).all()) for a, b in zip(shadows, shadow.flats["tiny"][0.5])),
    }
    return figures


def main(path: str) -> None:
    start_process_group()
    expected, norm = reference()
    cases = [(stage, precision, micro) for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16") for micro in (4, 2)]
    figures = {}
    for stage, precision, micro in cases:
        figures[f"{stage}-{precision}-{micro}"] = measure(stage, precision, micro, expected, norm)
    if group.rank() == 0:
        with open(path, "w") as file:
            json.dump(figures, file)
