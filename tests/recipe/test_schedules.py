"""Learning rate and EMA decay as functions of the step."""

import math

import pytest

from dstrain.recipe import Ema, Optimizer

STEPS, WARMUP, LR = 50, 8, 0.25


def rates(steps: int = STEPS, count: int = 70, **options: object) -> list[float]:
    optimizer = Optimizer(lr=LR, **{"warmup": WARMUP, "final_lr": 0.05} | options)
    return [optimizer.compute_lr(step, steps) for step in range(count)]


def decaying(shape, warmup: int, end: int, final: float, count: int = 70) -> list[float]:
    """A line up to LR in `warmup` steps, then final + (LR - final) shape(progress), progress 0 at step `warmup`."""
    up = [LR * (step + 1) / warmup for step in range(warmup)]
    progress = [min((step - warmup) / (end - warmup), 1.0) for step in range(warmup, count)]
    return up + [final + (LR - final) * shape(p) for p in progress]


SHAPES = {"constant": lambda p: 1.0, "linear": lambda p: 1 - p, "cosine": lambda p: math.cos(math.pi * p / 2) ** 2}


@pytest.mark.parametrize("schedule", SHAPES)
@pytest.mark.parametrize("warmup", [0, 1, 8])
@pytest.mark.parametrize("decay_steps", [None, 30])
@pytest.mark.parametrize("final", [0.0, 0.05])
def test_learning_rate(schedule, warmup, decay_steps, final):
    """Oracle: the closed forms at every step, also behind the end: warm-up to LR at its last step, LR at the step after
    it, half-way down in the middle, the final rate from the horizon on.
    """
    found = rates(schedule=schedule, warmup=warmup, decay_steps=decay_steps, final_lr=final)
    end = decay_steps or STEPS
    assert found == pytest.approx(decaying(SHAPES[schedule], warmup, end, final), abs=1e-12)
    assert found[warmup] == LR and (not warmup or (found[warmup - 1] == LR and found[0] == LR / warmup))
    if schedule != "constant":
        assert found[(warmup + end) // 2] == pytest.approx((LR + final) / 2, abs=LR / (end - warmup))
        assert found[end:] == pytest.approx([final] * (70 - end), abs=1e-12)
        assert all(later < sooner for sooner, later in zip(found[warmup:end], found[warmup + 1 : end]))


def test_learning_rate_is_pytorchs():
    """Oracle: torch's own schedulers, step by step."""
    import torch
    from torch.optim import lr_scheduler

    def theirs(make) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
        scheduler, found = make(optimizer), []
        for _ in range(STEPS):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    cosine = theirs(lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS, eta_min=0.05))
    assert rates(schedule="cosine", warmup=0, count=STEPS) == pytest.approx(cosine)
    linear = theirs(lambda o: lr_scheduler.LinearLR(o, 1.0, 0.2, STEPS))
    assert rates(schedule="linear", warmup=0, count=STEPS) == pytest.approx(linear)
    warmed = theirs(lambda o: lr_scheduler.LinearLR(o, 1 / WARMUP, 1.0, WARMUP - 1))
    assert rates(schedule="constant", count=STEPS) == pytest.approx(warmed)


def test_a_warm_up_as_long_as_the_run():
    """Oracle: the line of the warm-up, then the final rate: there is no step left to go down."""
    found = rates(steps=WARMUP, schedule="linear", count=12)
    assert found == pytest.approx([LR * (step + 1) / WARMUP for step in range(WARMUP)] + [LR, 0.05, 0.05, 0.05])


def test_decay_of_the_average():
    """Oracle: min(decay, (1 + s) / (10 + s)) by hand: 1/10, 2/11, ... up to the decay; without warm-up the decay."""
    warm, plain = Ema(decays=(0.5, 0.999), warmup=True), Ema(decays=(0.5, 0.999))
    assert [warm.compute_effective_decay(0.5, step) for step in range(10)] == pytest.approx(
        [1 / 10, 2 / 11, 3 / 12, 4 / 13, 5 / 14, 6 / 15, 7 / 16, 8 / 17, 0.5, 0.5]
    )
    assert (
        warm.compute_effective_decay(0.999, 8980) == pytest.approx(8981 / 8990)
        and warm.compute_effective_decay(0.999, 8990) == 0.999
    )
    for decay in (0.5, 0.999):
        assert [plain.compute_effective_decay(decay, step) for step in (0, 7, 10**6)] == [decay] * 3
