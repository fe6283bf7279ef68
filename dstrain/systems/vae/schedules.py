"""Computes temperature and KL weight from the optimizer step, for a whole batch on its device."""

import math

import torch
from torch import Tensor

from dstrain.systems.vae.config import Temperature

_INTERVAL = 100  # steps between two updates of the legacy temperature


def compute_temperature(schedule: Temperature, step: Tensor) -> Tensor:
    """Returns the temperature at optimizer steps: int64 (B,) -> float32 (B,).

    The schedule legacy multiplies the temperature at steps 0, 100, 200, ... by exp(-rate * step), which takes effect
    one step later.
    """
    progress = (step.double() / schedule.steps).clamp(max=1)
    start, minimum = schedule.start, schedule.minimum
    if schedule.schedule == "exponential":
        value = start * torch.exp(progress * math.log(minimum / start))
    elif schedule.schedule == "cosine":
        value = minimum + (start - minimum) * (1 + torch.cos(math.pi * progress)) / 2
    elif schedule.schedule == "legacy":
        updates = torch.div(step - 1, _INTERVAL, rounding_mode="floor").clamp(min=0).double()
        value = (start * torch.exp(-schedule.rate * _INTERVAL * updates * (updates + 1) / 2)).clamp(min=minimum)
    else:
        value = torch.full_like(progress, start)
    return value.float()


def get_final_temperature(schedule: Temperature) -> float:
    """Returns the temperature with which held-out data are measured at any step: `minimum`, or `start` if the schedule
    is constant.
    """
    return schedule.start if schedule.schedule == "constant" else schedule.minimum


def compute_kl_weight(final_weight: float, warmup_steps: int, step: Tensor) -> Tensor:
    """Returns the KL weight at optimizer steps, int64 (B,) -> float32 (B,). It grows linearly from 0 at step 0 to
    `final_weight` at step `warmup_steps`; for warmup_steps 0 it is `final_weight` from the start.
    """
    progress = (
        (step.double() / warmup_steps).clamp(max=1) if warmup_steps else torch.ones_like(step, dtype=torch.float64)
    )
    return (final_weight * progress).float()
