"""Drawing samples and scoring held-out data, by all ranks together.

Samples are drawn in chunks of a fixed size, dealt to the ranks in turn. So every rank calls the networks equally often,
which ZeRO-3 needs, and a seed's picture does not depend on the number of ranks.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dstrain.distributed import group
from dstrain.distributed.pieces import record_piece_of_work
from dstrain.recipe import ConfigError
from dstrain.systems.base import Batch, Nets, Request, System, Terms


@contextmanager
def set_eval_mode(nets: Nets) -> Iterator[None]:
    """Puts the networks into evaluation mode (no dropout) inside the block, and each module back into its earlier mode
    afterwards. Inside the block, `record_piece_of_work` is called before each call of a network.
    """
    networks = [net for net in nets.values() if isinstance(net, nn.Module)]
    modes = [(module, module.training) for net in networks for module in net.modules()]
    hooks = [net.register_forward_pre_hook(lambda *_: record_piece_of_work(), prepend=True) for net in networks]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for hook in hooks:
            hook.remove()


def draw_samples_in_rounds(
    system: System, nets: Nets, request: Request, chunk: int, device: torch.device | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Draws all samples of a request by all ranks together. In each round every rank draws `chunk` samples by one call
    of System.sample. Yields for each round, on the CPU of every rank:

    numbers  int64 (n,), the samples' indices in the request.
    images   (n, ...), the samples.
    """
    total, world = len(request.seeds), group.world()
    for round, (_, images) in enumerate(draw_samples_of_rank(system, nets, request, chunk, device)):
        images = group.gather_rows(images).cpu()
        numbers = round * chunk * world + torch.arange(chunk * world)
        yield numbers[numbers < total], images[numbers < total]


@torch.no_grad()
def draw_samples_of_rank(
    system: System, nets: Nets, request: Request, chunk: int, device: torch.device | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Draws this rank's share of a request's samples, `chunk` in each round. All ranks call this together. Yields for
    each round:

    numbers  int64 (chunk,) on the CPU, the samples' indices in the request.
    images   (chunk, ...), the samples as System.sample returns them.

    Samples whose index is at or above the number of seeds are surplus: they are drawn so that all ranks call the
    networks equally often. Raises ConfigError unless System.sample returns valid samples, see `require_valid_samples`.
    """
    total, world, device = len(request.seeds), group.world(), device or group.device()
    for begin in range(0, total, chunk * world):
        record_piece_of_work()
        numbers = begin + group.rank() * chunk + torch.arange(chunk)
        index = numbers % total
        conditions = {name: value[index].to(device) for name, value in request.conditions.items()}
        own = replace(request, seeds=request.seeds[index].to(device), conditions=conditions)
        with set_eval_mode(nets):
            images = system.sample(nets, own)
        require_valid_samples(system, images, len(index))
        yield numbers, images


def require_valid_samples(system: System, images: Any, count: int) -> None:
    """Raises ConfigError unless `images`, the result of System.sample, holds `count` pictures or videos, uint8 (count,
    C, H, W) or (count, T, C, H, W); or, for a system that draws embeddings, floating-point vectors (count, D).
    """
    width = system.draws_embeddings
    found = f"{images.dtype} {tuple(images.shape)}" if torch.is_tensor(images) else f"a {type(images).__name__}"
    if not torch.is_tensor(images) or len(images.shape) == 0 or len(images) != count:
        fits = False
    elif width:
        fits = images.is_floating_point() and images.shape == (count, width)
    else:
        fits = images.dtype == torch.uint8 and images.ndim in (4, 5)
    if not fits:
        wanted = f"float32 embeddings ({count}, {width})" if width else f"uint8 images ({count}, C, H, W)"
        raise ConfigError(
            f"system: sample of a {type(system).__name__} returns {found} for {count} seeds: return {wanted}"
            + ("" if width else f" or videos ({count}, T, C, H, W)")
        )


def require_valid_evaluation_terms(system: System, terms: Any, count: int) -> None:
    """Raises ConfigError unless `terms`, the result of System.evaluate, is a dict with at least one term, and each term
    is a tensor (count,), (count, K) or, except for `loss`, a scalar tensor. One at least must not be a scalar.
    """
    place = f"system: evaluate of a {type(system).__name__}"
    if not isinstance(terms, dict) or not terms:
        raise ConfigError(f"{place} returns {'no terms' if terms == {} else type(terms).__name__}: return a dict")
    alone = not any(torch.is_tensor(term) and term.ndim for term in terms.values())
    for name, term in terms.items():
        if name != "loss" and not alone and torch.is_tensor(term) and not term.ndim:
            continue  # A scalar is no mean over samples, and is left out.
        if not torch.is_tensor(term) or term.shape[:1] != (count,) or term.ndim > 2:
            found = f"the shape {tuple(term.shape)}" if torch.is_tensor(term) else f"the type {type(term).__name__}"
            raise ConfigError(
                f'{place}: terms["{name}"] has {found} for {count} samples: return one value a sample, '
                f"({count},), or a curve, ({count}, K)"
            )


def draw_all_samples(
    system: System, nets: Nets, request: Request, chunk: int, device: torch.device | None = None
) -> Tensor:
    """Draws all N samples of a request by all ranks together; a rank draws `chunk` in a call. Returns the samples, (N,
    ...), on the CPU of every rank.
    """
    return torch.cat([images for _, images in draw_samples_in_rounds(system, nets, request, chunk, device)])


def draw_samples_for_first_rank(system: System, nets: Nets, request: Request, chunk: int) -> Tensor | None:
    """Draws all N samples of a request by all ranks together; a rank draws `chunk` in a call. Returns the samples, (N,
    ...), on the CPU of rank 0, and None on the other ranks.
    """
    rounds = [
        group.gather_rows_on_first_rank(images, count_round_samples_by_rank(len(request.seeds), number, chunk))
        for number, (_, images) in enumerate(draw_samples_of_rank(system, nets, request, chunk))
    ]
    return None if rounds[0] is None else torch.cat(rounds)


def count_round_samples_by_rank(total: int, round: int, chunk: int) -> list[int]:
    """Returns for each rank how many of the `chunk` samples that it draws in round `round` (from 0) have an index below
    `total`. The rest is surplus.
    """
    first = round * chunk * group.world()
    return [min(max(total - first - rank * chunk, 0), chunk) for rank in range(group.world())]


@torch.no_grad()
def make_pictures_for_first_rank(system: System, nets: Nets, batch: Batch, chunk: int) -> dict[str, Tensor | None]:
    """Makes the pictures of System.make_pictures, such as reconstructions, from a batch that all ranks hold; a rank
    takes `chunk` samples in a call. Returns {name: uint8 (N, ...)} on the CPU of rank 0, and {name: None} on the
    other ranks.
    """
    pictures: dict[str, list[Tensor | None]] = {}
    total, world = len(batch["key"]), group.world()
    for round, begin in enumerate(range(0, total, chunk * world)):
        index = (begin + group.rank() * chunk + torch.arange(chunk)) % total
        rows = {name: values[index].to(group.device()) for name, values in batch.items() if name != "valid"}
        with set_eval_mode(nets):
            for name, images in system.make_pictures(nets, system.encode(rows)).items():
                pictures.setdefault(name, []).append(
                    group.gather_rows_on_first_rank(images, count_round_samples_by_rank(total, round, chunk))
                )
    return {name: None if rounds[0] is None else torch.cat(rounds) for name, rounds in pictures.items()}


def count_classes_as_grid_columns(request: Request, max_columns: int = 20) -> int | None:
    """Returns with how many columns a grid shows one class in each column: the number of classes, if the request's
    labels repeat one sequence of distinct classes, such as 0 1 2 0 1 2.

    Returns None for other labels or none, for fewer than 2 or more than `max_columns` classes, and if no class is
    repeated.
    """
    labels = request.conditions.get("label")
    count = 0 if labels is None else len(labels.unique())
    if not 1 < count <= max_columns or count >= len(request.seeds):
        return None
    return count if torch.equal(labels[count:], labels[:-count]) else None


@dataclass
class Means:
    """Averages terms over valid samples and ranks. `sums` holds, by (kind, name), the sums of values and of their
    squares and the number of values, float64 (3, K) on the CPU.

    The kinds are figures, of terms (B,); curves, of terms (B, K); and quarters, of figures by quarter of the timesteps.
    """

    sums: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    timesteps: list[int] | None = None  # of the columns of curves
    nonfinite: int = 0  # samples

    def add_terms(self, terms: Terms, valid: Tensor) -> None:
        """Adds the terms of a batch, (B,) or (B, K) by name, to the sums. Samples where `valid`, bool (B,), is False
        are left out, and so are scalar terms.
        """
        valid, terms = valid.cpu(), {name: values.cpu() for name, values in terms.items() if values.ndim}
        quartile, timestep = terms.pop("quartile", None), terms.pop("timestep", None)
        if timestep is not None:
            self.timesteps = timestep[0].tolist()
        for name, values in terms.items():
            values = values.double().view(len(valid), -1)  # (B, K)
            self._add_sums("figures" if terms[name].ndim == 1 else "curves", name, values, valid[:, None])
            if quartile is not None and terms[name].ndim == 1:
                self._add_sums("quarters", name, values, valid[:, None] & (quartile[:, None] == torch.arange(4)))
        finite = torch.stack([values.view(len(valid), -1).isfinite().all(1) for values in terms.values()]).all(0)
        self.nonfinite += int((valid & ~finite).sum())

    def _add_sums(self, kind: str, name: str, values: Tensor, counted: Tensor) -> None:
        """Adds `values` (B, K), their squares and their number to the sums under (kind, name). Only values where
        `counted`, bool (B, 1) or (B, K), is True enter.
        """
        values = torch.where(counted, values, 0.0)
        sums = torch.stack((values.sum(0), values.square().sum(0), counted.expand_as(values).sum(0)))  # (3, K)
        self.sums[kind, name] = self.sums.get((kind, name), 0) + sums

    def average_over_ranks(self) -> dict[str, Any]:
        """Returns the means over all valid samples of all ranks. All ranks call it together, with terms of the same
        names. The keys of the dict are:

        figures            {name: float}, the means of terms (B,).
        standard_errors    {name: float}, the standard errors of these means.
        curves             {name: float64 (K,)}, the means of terms (B, K).
        quarters           {name: float64 (4,)}, the means of terms (B,) in each quarter of the timesteps.
        timesteps          the timestep of each column of the curves, or None.
        nonfinite_samples  the number of samples with a value that is not finite.
        """
        names = list(self.sums)
        flat = torch.cat([*(self.sums[name].flatten() for name in names), torch.tensor([self.nonfinite]).double()])
        flat = group.sum_over_ranks(flat.to(group.device())).cpu()
        result: dict[str, Any] = {
            "figures": {},
            "standard_errors": {},
            "curves": {},
            "timesteps": self.timesteps,
            "quarters": {},
            "nonfinite_samples": int(flat[-1]),
        }
        for (kind, name), part in zip(names, flat[:-1].split([self.sums[name].numel() for name in names])):
            total, squares, count = part.view(3, -1)
            means = total / count
            result[kind][name] = means
            if kind == "figures":
                variance = (squares / count - means.square()).clamp(min=0) / (count - 1)
                result[kind][name], result["standard_errors"][name] = means.item(), variance.sqrt().item()
        return result


@torch.no_grad()
def evaluate_held_out_batches(
    system: System, nets: Nets, batches: Iterable[Batch], curves: dict[str, list[float]] | None = None
) -> dict[str, float]:
    """Returns the mean of each term (B,) of System.evaluate over all held-out samples, by name, and the figures of
    System.compute_figures. All ranks call this together; the result is the same for any number of ranks.

    batches  each with `valid`, bool (B,), False for repeated samples, which are not counted.
    curves   None, or a dict to which {name: list of K means} is added for each term (B, K).

    The mean of a term with a value that is not finite is not finite either; the result then has `nonfinite_samples`,
    the number of such samples.
    """
    means = Means()
    for batch in batches:
        record_piece_of_work()
        valid = batch.pop("valid")
        with set_eval_mode(nets):
            terms = system.evaluate(nets, system.encode(batch))
        require_valid_evaluation_terms(system, terms, len(valid))
        means.add_terms({name: values for name, values in terms.items() if name != "quartile"}, valid)
    result = means.average_over_ranks()
    if curves is not None:
        curves |= {name: mean.tolist() for name, mean in result["curves"].items()}
    bad = result["nonfinite_samples"]  # a mean that such a sample enters is NaN
    figures = dict(sorted(result["figures"].items())) | system.compute_figures(result["curves"])
    return figures | ({"nonfinite_samples": bad} if bad else {})
