"""Sources for tests of batches, in a module that loader workers can import."""

import os
import time

import torch

from dstrain.data.batches import Batches
from dstrain.data.source import BadSample, Source
from dstrain.recipe import NotRead


class Numbers(Source):
    """Sample i is an image whose first pixel row encodes i, with label i; those in `bad` cannot be read, and at those
    in `failing` the storage fails.
    """

    light = True

    def __init__(self, size: int, bad: tuple[int, ...] = (), failing: tuple[int, ...] = ()) -> None:
        self.size, self.bad, self.failing = size, frozenset(bad), frozenset(failing)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict:
        if index in self.bad:
            raise BadSample(self.name_sample(index), "broken on purpose")
        if index in self.failing:
            raise NotRead(f"{self.name_sample(index)} cannot be read (OSError: on purpose)")
        image = torch.zeros(1, 2, 4, dtype=torch.uint8)
        image[0, 0] = torch.tensor([index >> shift & 255 for shift in (0, 8, 16, 24)])
        return {"image": image, "label": index}

    def name_sample(self, index: int) -> str:
        return f"number {index}"

    def compute_fingerprint(self) -> str:
        return f"numbers n={self.size}"


class Slow(Numbers):
    """Numbers whose workers take `seconds` for a sample and write their number of threads to a file, their PID."""

    def __init__(self, size: int, folder: str, seconds: float = 0.0) -> None:
        super().__init__(size)
        self.folder, self.seconds = folder, seconds

    def __getitem__(self, index: int) -> dict:
        path = os.path.join(self.folder, str(os.getpid()))
        if not os.path.exists(path):
            with open(path, "w") as file:
                file.write(str(torch.get_num_threads()))
        time.sleep(self.seconds)
        return super().__getitem__(index)


def global_batches(source, steps, world=1, micro_batch=2, num_workers=0, **options):
    """The global batches of `steps`, put together from all ranks in order of position."""
    settings = {"global_batch": 24, "seed": 3} | options
    parts = {step: [] for step in steps}
    for rank in range(world):
        with Batches(
            source, micro_batch=micro_batch, rank=rank, world=world, num_workers=num_workers, **settings
        ) as batches:
            for step in steps:
                parts[step] += batches.read_step(step)
    whole = []
    for step in steps:
        batch = {name: torch.cat([part[name] for part in parts[step]]) for name in parts[step][0]}
        order = batch["position"].argsort()
        whole.append({name: tensor[order] for name, tensor in batch.items()})
    return whole


def same(one, other):
    """Whether two lists of batches hold the same names and the same bits."""
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in zip(one, other)
    )
