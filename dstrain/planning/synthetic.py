"""Synthetic stand-ins for what a training step reads and calls: batches without data, and a tracker that is silent."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dstrain.data.batches import copy_batch_to_device
from dstrain.distributed import group
from dstrain.systems.base import Batch, System


class Repeated:
    """Repeats a few micro-batches of synthetic samples on the device, as Batches would give them to take_step."""

    def __init__(self, system: System, micro: int, accumulation: int, count: int = 1):
        device = group.device()
        rows = copy_batch_to_device(system.synthetic(micro * count), device)
        rows["position"] = torch.arange(micro * count, device=device) % micro
        self.micro, self.accumulation = micro, accumulation
        self.batches: list[Batch] = [
            {name: values[start : start + micro] for name, values in rows.items()}
            for start in range(0, micro * count, micro)
        ]

    def read_step(self, step: int) -> Iterator[Batch]:
        """Yields the micro-batches of an optimizer step, on the device."""
        for number in range(step * self.accumulation, (step + 1) * self.accumulation):
            batch = self.batches[number % len(self.batches)]
            yield {**batch, "step": torch.full_like(batch["key"], step)}


class NoTracker:
    """Reports nothing, with the interface of Tracker that take_step uses."""

    def add_terms(self, part: str, terms: dict[str, Tensor]) -> None:
        """Does nothing."""
        pass
