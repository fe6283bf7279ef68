"""Drawing and scoring by all ranks together.

Samples are drawn in chunks of a fixed size, dealt to the ranks in turn. So every rank calls the networks equally often,
which ZeRO-3 needs, and a seed's picture does not depend on the number of ranks.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from dstrain.ranks import group
from dstrain.systems.base import Batch, Nets, Request, System


@contextmanager
def resting(nets: Nets) -> Iterator[None]:
    """Inside, the networks are in evaluation mode, without dropout; afterwards in the mode they had."""
    modes = [(module, module.training) for net in nets.values() if isinstance(net, nn.Module)
             for module in net.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@torch.no_grad()
def draw(system: System, nets: Nets, request: Request, chunk: int,
         device: torch.device | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (numbers, images) of each round: which of the request's samples, int64 (n,), and what System.sample makes
    of them, (n, ...).

    All ranks receive all images, on the CPU. `chunk` is the number of samples in one call of the networks; `device`,
    None for this rank's, is where those are.
    """
    total, world, device = len(request.seeds), group.world(), device or group.device()
    for begin in range(0, total, chunk * world):
        index = (begin + group.rank() * chunk + torch.arange(chunk)) % total       # repeated to fill the last chunks
        conditions = {name: value[index].to(device) for name, value in request.conditions.items()}
        own = replace(request, seeds=request.seeds[index].to(device), conditions=conditions)
        with resting(nets):
            images = group.gather(system.sample(nets, own)).cpu()
        numbers = begin + torch.arange(chunk * world)
        yield numbers[numbers < total], images[numbers < total]


def draw_all(system: System, nets: Nets, request: Request, chunk: int, device: torch.device | None = None) -> Tensor:
    """All samples of a request at once, (N, ...) on the CPU."""
    return torch.cat([images for _, images in draw(system, nets, request, chunk, device)])


@torch.no_grad()
def picture_all(system: System, nets: Nets, batch: Batch, chunk: int) -> dict[str, Tensor]:
    """The system's pictures of a batch that all ranks hold: uint8 (N, ...) each, on the CPU of all ranks."""
    pictures: dict[str, list[Tensor]] = {}
    total, world = len(batch["key"]), group.world()
    for begin in range(0, total, chunk * world):
        index = (begin + group.rank() * chunk + torch.arange(chunk)) % total
        rows = {name: values[index].to(group.device()) for name, values in batch.items() if name != "valid"}
        with resting(nets):
            for name, images in system.pictures(nets, system.encode(rows)).items():
                pictures.setdefault(name, []).append(group.gather(images).cpu())
    return {name: torch.cat(images)[:total] for name, images in pictures.items()}


def class_columns(request: Request, most: int = 20) -> int | None:
    """The number of classes, as columns of a grid, where the labels repeat in turn: then each class has a column.

    None where they do not repeat so, or there is one class, or more than `most`.
    """
    labels = request.conditions.get("label")
    count = 0 if labels is None else len(labels.unique())
    if not 1 < count <= most or count >= len(request.seeds):
        return None
    return count if torch.equal(labels[count:], labels[:-count]) else None


@torch.no_grad()
def score(system: System, nets: Nets, batches: Iterable[Batch],
          curves: dict[str, list[float]] | None = None) -> dict[str, float]:
    """Means over held-out samples of the system's evaluation terms, the same for any world size.

    A batch's `valid` bool (B,) is False for the repetitions that fill up a rank's last batch. `curves` receives the
    means of terms (B, K), such as the use of each token.
    """
    sums: dict[str, Tensor] = {}
    count = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        valid = batch.pop("valid")
        with resting(nets):
            terms = system.evaluate(nets, system.encode(batch))
        count += valid.sum().cpu()
        for name, values in terms.items():
            if values.shape[:1] == valid.shape and values.ndim in (1, 2) and name != "quartile":
                counted = valid.view(-1, *(1,) * (values.ndim - 1))
                sums[name] = sums.get(name, 0) + torch.where(counted, values.double(), 0.0).sum(0).cpu()
    names = sorted(sums)
    flat = torch.cat([sums[name].flatten() for name in names] + [count[None]])
    flat = group.total(flat.to(group.device())).cpu()
    means = {name: part.view_as(sums[name])
             for name, part in zip(names, (flat[:-1] / flat[-1]).split([sums[name].numel() for name in names]))}
    figures = {name: mean.item() for name, mean in means.items() if mean.ndim == 0}
    columns = {name: mean for name, mean in means.items() if mean.ndim == 1}
    if curves is not None:
        curves |= {name: mean.tolist() for name, mean in columns.items()}
    return figures | system.digest(columns)
