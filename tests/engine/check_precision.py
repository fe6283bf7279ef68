"""Launched by test_precision.py on 1 and 2 ranks: the precision of sums of gradients, and fp16's loss scale; figures as
JSON. The accelerator's word on fp16 is overruled: DeepSpeed refuses fp16 on a CPU, whose kernels have it.
"""

import json
import math
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from dstrain import rng
from dstrain.distributed import group
from dstrain.engine.checkpoint import Checkpoints
from dstrain.engine.ema.shadow import EmaShadow
from dstrain.engine.engines import Engines
from dstrain.engine.initial import draw_initial_weights
from dstrain.engine.start import start_process_group
from dstrain.recipe import Ema, Run
from tests.engine.check_engines import SEED, furthest, gathered
from tests.support.engines import engines_for, resolve
from tests.support.tiny import Tiny

SAMPLES = 256
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BATCH, MICRO, LR, DECAY = 8, 2, 0.01, 0.5
STEPS, SAVED = 18, 11
DYNAMIC = {"initial_scale_power": 19, "loss_scale_window": 3, "hysteresis": 2, "min_loss_scale": 1}
FIXED = {"loss_scale": 128.0}
INFINITE = {"a": (9, 10), "b": (5, 9, 13)}  # steps in which the last rank's loss is infinite


def drawn(step: int, number: int) -> tuple[Tensor, Tensor]:
    key = rng.keys(SEED, step, torch.arange(number))
    return rng.normal(key, "x", (5,)), rng.normal(key, "y", (3,))


def run_of(total: int, micro: int, lr: float) -> Run:
    return Run.model_validate(
        {
            "seed": SEED,
            "batch": {"global": total, "micro": micro},
            "ema": {"decays": (DECAY,)},
            "optimizer": {"lr": lr, "betas": (0.5, 0.9)},
        }
    )


def engines_of(run: Run, stage: int, parts: tuple[str, ...], **config) -> Engines:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 40, "sub_group_size": 300}
    settings = resolve(
        {"zero_optimization": {"stage": stage} if stage < 3 else zero, **config}, run, group.world(), "cuda"
    )
    return engines_for(lambda: {part: Tiny() for part in parts}, run, settings, lambda name, weight: False)


def rounded(dtype: torch.dtype) -> Tiny:
    """The initial network with weights rounded to `dtype`, in float64."""
    network = Tiny()
    network.load_state_dict(dict(draw_initial_weights(network, SEED)))
    for weight in network.parameters():
        weight.data = weight.data.to(dtype)
    return network.double()


def error_of_sum(stage: int, precision: str, accumulation: int, **config) -> float:
    """Of a step's gradient against float64, relative: SAMPLES samples in `accumulation` micro-batches a rank."""
    micro = SAMPLES // accumulation // group.world()
    engines = engines_of(run_of(SAMPLES, micro, 0.0), stage, ("a",), **{precision: {"enabled": True}}, **config)
    x, y = drawn(0, SAMPLES)
    engines.begin_step(0.0)
    for number in range(accumulation):
        first = (number * group.world() + group.rank()) * micro
        with engines.freeze_all_but("a") as nets:
            engines.run_backward_and_step(
                "a", (nets["a"](x[first : first + micro]) - y[first : first + micro]).square().mean()
            )
    network = rounded(DTYPES[precision])
    inputs = network.first(x.to(DTYPES[precision]).double())
    outputs = network.last(torch.tanh(network.hidden(network.scale(torch.tanh(inputs)))))
    (outputs - y).square().mean().backward()
    exact = torch.cat([weight.grad.flatten() for weight in network.parameters()])
    masters = engines.masters["a"]
    first_moment = gathered(masters, masters.get_moments_in_fp32("exp_avg"))  # half of the gradient, after one step
    computed = torch.cat([first_moment[name].flatten() for name, _ in network.named_parameters()]).double() * 2
    return ((computed - exact).norm() / exact.norm()).item()


class LossScale:
    """The rules of DeepSpeed's documentation, in plain numbers."""

    def __init__(self, fp16: dict):
        self.fixed, self.fp16 = "loss_scale" in fp16, fp16
        self.value = fp16["loss_scale"] if self.fixed else 2.0 ** fp16["initial_scale_power"]
        self.patience, self.good = fp16.get("hysteresis", 1), 0

    def update(self, overflow: bool) -> None:
        if self.fixed:
            return
        self.good = 0 if overflow else self.good + 1
        if overflow and self.patience > 1:
            self.patience -= 1
        elif overflow:
            self.value = max(self.value / 2, self.fp16["min_loss_scale"])
        elif self.good > 1 and (self.good - 1) % self.fp16["loss_scale_window"] == 0:
            self.value, self.patience = self.value * 2, self.fp16["hysteresis"]


class Plain:
    """A part trained by plain torch in one process: fp16 network, fp32 weights, AdamW, the ranks one after another."""

    def __init__(self, part: str, fp16: dict, begun: dict[str, Tensor]):
        self.part, self.scale, self.network = part, LossScale(fp16), Tiny()
        table = self.network.scale.table
        self.weights = {name: begun[f"master/{name}"].clone() for name, _ in self.network.named_parameters()}
        self.average = {name: weight.clone() for name, weight in self.weights.items()}
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=LR, betas=(0.5, 0.9), weight_decay=0.0)
        self.network.half().scale.table = table
        self.show()

    def show(self) -> None:
        for name, weight in self.network.named_parameters():
            weight.data = self.weights[name].half()

    def step(self, step: int) -> dict:
        x, y = drawn(step, BATCH)
        world, accumulation = group.world(), BATCH // MICRO // group.world()
        totals: dict[str, Tensor] = {}
        for rank in range(world):
            sums = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
            for number in range(accumulation):
                first = (number * world + rank) * MICRO
                loss = loss_of(self.network, x[first : first + MICRO], y[first : first + MICRO], self.part, step, rank)
                self.network.zero_grad()
                (loss / accumulation * self.scale.value).backward()
                for name, weight in self.network.named_parameters():
                    sums[name] += weight.grad.float()
            for name, total in sums.items():
                totals[name] = totals.get(name, 0) + total.half() / world
        overflow = not all(total.isfinite().all() for total in totals.values())
        norm = None
        if not overflow:
            for name, total in totals.items():
                self.weights[name].grad = total.float() / self.scale.value
            norm = torch.cat([weight.grad.flatten() for weight in self.weights.values()]).norm().item()
            self.optimizer.step()
            self.show()
            for name, average in self.average.items():
                average.lerp_(self.weights[name], 1 - DECAY)
        self.scale.update(overflow)
        return {"applied": not overflow, "scale": self.scale.value, "norm": norm}


def loss_of(network: nn.Module, x: Tensor, y: Tensor, part: str, step: int, rank: int) -> Tensor:
    factor = math.inf if step in INFINITE[part] and rank == group.world() - 1 else 1.0
    return (network(x) - y).square().mean() * factor


class Trial:
    """Two networks in fp16 under dstrain, and what they leave."""

    def __init__(self, stage: int, fp16: dict, folder: Path):
        run = run_of(BATCH, MICRO, LR)
        self.engines = engines_of(run, stage, ("a", "b"), fp16={"enabled": True, **fp16})
        self.ema = EmaShadow(self.engines.masters, Ema(decays=(DECAY,)), ("a", "b"))
        self.saves = Checkpoints(folder, self.engines, self.ema, nn.Module())

    def steps(self, first: int, last: int) -> list[dict[str, dict]]:
        reports = []
        for step in range(first, last):
            x, y = drawn(step, BATCH)
            self.engines.begin_step(LR)
            for number in range(BATCH // MICRO // group.world()):
                row = (number * group.world() + group.rank()) * MICRO
                for part in ("a", "b"):
                    with self.engines.freeze_all_but(part) as nets:
                        self.engines.run_backward_and_step(
                            part,
                            loss_of(nets[part], x[row : row + MICRO], y[row : row + MICRO], part, step, group.rank()),
                        )
            self.ema.update_averages(step, self.engines.collect_part_change_flags())
            figures = self.engines.collect_metrics()
            reports.append(
                {
                    part: {
                        "applied": bool(self.engines.collect_part_change_flags()[part]),
                        "scale": figures[f"{part}/loss_scale"],
                        "norm": figures[f"{part}/grad_norm"],
                    }
                    for part in ("a", "b")
                }
            )
        return reports

    def state(self, part: str) -> dict[str, Tensor]:
        masters = self.engines.masters[part]
        kinds = {
            "master": masters.flats,
            "exp_avg": masters.get_moments_in_fp32("exp_avg"),
            "ema": self.ema.flats[part][DECAY],
        }
        return {
            f"{kind}/{name}": value for kind, flats in kinds.items() for name, value in gathered(masters, flats).items()
        }


def fp16(stage: int, settings: dict, folder: Path) -> dict:
    """A run of STEPS steps against plain torch, and the same run saved at SAVED and gone on with."""
    trial = Trial(stage, settings, folder)
    begun = {part: trial.state(part) for part in ("a", "b")}
    plain = {part: Plain(part, settings, weights) for part, weights in begun.items()}
    reports = trial.steps(0, SAVED)
    trial.saves.save(SAVED, last=True)
    kept = {part: masters.loss_scaler_state for part, masters in trial.engines.masters.items()}
    reports += trial.steps(SAVED, STEPS)
    again = Trial(stage, settings, folder)
    assert again.saves.resume() == SAVED
    restored = {part: masters.loss_scaler_state for part, masters in again.engines.masters.items()}
    resumed = again.steps(SAVED, STEPS)
    figures = {
        "reports": reports,
        "expected": [{part: one.step(step) for part, one in plain.items()} for step in range(STEPS)],
        "kept": kept,
        "restored": restored,
        "resumed": resumed == reports[SAVED:],
        "same": True,
    }
    for part, one in plain.items():
        state = trial.state(part)
        figures["same"] &= all(torch.equal(value, again.state(part)[name]) for name, value in state.items())
        for kind, weights in (("master", one.weights), ("ema", one.average)):
            expected = {f"{kind}/{name}": weight.detach() for name, weight in weights.items()}
            figures[f"{part} {kind}"] = furthest({name: state[name] for name in expected}, expected)
            figures[f"{part} {kind} moved"] = furthest({name: begun[part][name] for name in expected}, expected)
    return figures


EVERY = tuple((kind, stage) for kind in ("dynamic", "fixed") for stage in (1, 2, 3))
SAMPLE = (("dynamic", 1), ("fixed", 2), ("dynamic", 3))  # of these CI's: every kind and stage


def main(folder: Path, cases: tuple[tuple[str, int], ...]) -> None:
    start_process_group()
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    most, figures = SAMPLES // group.world(), {}
    for stage in (0, 1, 2, 3):
        figures[f"sums {stage}"] = [error_of_sum(stage, "bf16", count) for count in (1, most)]
    figures["narrow"] = error_of_sum(2, "bf16", most, data_types={"grad_accum_dtype": "bf16"})
    for kind, stage in cases:
        scale = DYNAMIC if kind == "dynamic" else FIXED
        figures[f"{kind} {stage}"] = fp16(stage, scale, folder / f"{kind}{stage}-{group.world()}")
    if group.rank() == 0:
        (folder / f"figures-{group.world()}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    folder, cases = (word for word in sys.argv[1:] if not word.startswith("--"))
    main(Path(folder), EVERY if cases == "every" else SAMPLE)
