"""Averages what the losses report: sums on the device, and exchanges the sums between ranks once a report.

After edm2's training_stats.py: between reports nothing waits for the device. Sums are float64, for long intervals.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dstrain.distributed import group
from dstrain.recipe import ConfigError

QUARTERS = 4
_Key = tuple[str, tuple[str, ...], tuple[str, ...], bool]  # part, per-sample terms, scalars, whether with quartiles


class Meter:
    """Averages over samples and ranks, from one call of `compute_means` to the next.

    A term is one value per sample (B,), or a scalar, which counts as often as the batch has samples (once, if no
    per-sample term tells B). Values that are not finite are left out of the means; they are counted. Two names are
    special. `quartile` int64 (B,) in 0..3 is the quarter of the timesteps in which a sample lies; by it the other
    per-sample terms are also reported as NAME_q0 .. NAME_q3. `loss_each` (B,), the loss of each sample, is reported as
    loss_q0 .. loss_q3 alone.
    """

    def __init__(self, parts: Sequence[str]) -> None:
        self._prefixes = {part: f"{part}/" if len(parts) > 1 else "" for part in parts}
        self._sums: dict[_Key, Tensor] = {}  # (names, 1 or 5, 3): sum, count, non-finite

    def add_terms(self, part: str, terms: dict[str, Tensor]) -> None:
        """Adds the terms of one micro-batch of `part` to the sums. Never waits for the device. terms: {name: scalar, or
        one value for each of B samples (B,)}.

        Raises ConfigError if a term is neither a scalar nor (B,), or if terms differ in B.
        """
        shapes = {name: tuple(term.shape) for name, term in terms.items() if term.ndim}
        if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) > 1:
            raise ConfigError(f"{part}: terms are scalars or one value a sample (B,), got {shapes}")
        quartile = terms.get("quartile")
        each = tuple(name for name in shapes if name != "quartile")
        if each:
            values = torch.stack([_widen_to_float64(terms[name]) for name in each])  # (names, B)
            self._add_to_sums((part, each, (), quartile is not None), values, quartile)
        scalars = tuple(name for name in terms if name not in shapes)
        if scalars:
            values = torch.stack([_widen_to_float64(terms[name]) for name in scalars])[:, None]  # (names, 1)
            size = next(iter(shapes.values()), (1,))[0]
            self._add_to_sums((part, (), scalars, False), values, None, size)

    def clear_terms(self) -> None:
        """Discards all terms that were added since the last `compute_means`."""
        self._sums = {}

    def _add_to_sums(self, key: _Key, values: Tensor, quartile: Tensor | None, weight: int = 1) -> None:
        """Adds values (names, B) to the sums over all samples. With `quartile` (B,), which says to which quarter of the
        timesteps each sample belongs, also adds them to the sums of the quarters. `weight` is how often each value
        counts.
        """
        finite = values.isfinite()
        values = torch.where(finite, values, 0)  # before any product, since NaN times 0 is NaN
        cells = torch.stack((values * weight, finite * weight, ~finite), -1)  # (names, B, 3)
        sums = [cells.sum(1)]
        if quartile is not None:
            sums += [torch.where((quartile == quarter)[:, None], cells, 0).sum(1) for quarter in range(QUARTERS)]
        total = torch.stack(sums, 1)  # (names, 1 or 5, 3)
        self._sums[key] = self._sums[key] + total if key in self._sums else total

    def compute_means(self) -> dict[str, float]:
        """Returns {name: mean of this term over all samples and ranks since the last call}, and clears the sums. Values
        that are not finite are left out of the means; "nonfinite" is their number, if there are any. A term without a
        finite value is absent. Returns {} if no terms were added.

        All ranks must call it together, after terms of the same names.
        """
        if not self._sums:
            return {}
        keys = sorted(self._sums)
        flat = group.sum_over_ranks(torch.cat([self._sums[key].flatten() for key in keys])).tolist()
        table: dict[str, list[float]] = {}
        nonfinite = 0.0
        cell = iter(zip(flat[::3], flat[1::3], flat[2::3]))
        for part, each, scalars, by_quarter in keys:
            for name in (*each, *scalars):
                for quarter in range(1 + QUARTERS * by_quarter):
                    total, count, bad = next(cell)
                    nonfinite += 0 if quarter else bad
                    if (label := _choose_reported_mean_name(name, quarter)) is not None:
                        entry = table.setdefault(self._prefixes[part] + label, [0.0, 0.0])
                        entry[0] += total
                        entry[1] += count
        self._sums = {}
        means = {name: total / count for name, (total, count) in table.items() if count}
        return means | ({"nonfinite": nonfinite} if nonfinite else {})


def _choose_reported_mean_name(name: str, quarter: int) -> str | None:
    """Returns the name under which a mean of the term `name` is reported; None if it is not reported. `quarter` is 0
    for the mean over all samples, or 1 to 4 for the mean over this quarter of the timesteps.
    """
    if quarter == 0:
        return None if name == "loss_each" else name
    return f"{'loss' if name == 'loss_each' else name}_q{quarter - 1}"


def _widen_to_float64(values: Tensor) -> Tensor:
    """Returns values as float64 without a graph; as float32 on Apple's GPU, which has no float64."""
    return values.detach().to(torch.float32 if values.device.type == "mps" else torch.float64)
