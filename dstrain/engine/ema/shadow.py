"""Sharded moving averages of the fp32 masters: exponential ones by decay, power functions of time by width.

Each rank averages the flats that it owns, so an update communicates nothing and costs 12 bytes an element and average.
An update does shadow = beta * shadow + (1 - beta) * master:

    decays      beta = Ema.compute_effective_decay(decay, step)
    profiles    beta = (1 - 1/t)^(gamma + 1), see profiles.py; t counts the updates of the part since they began

An average is named by its number, the decay or the width; a recipe has none twice.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from dstrain.engine.ema.profiles import solve_profile_exponent
from dstrain.engine.masters import Masters
from dstrain.engine.updates import Flag
from dstrain.recipe import ConfigError, Ema


class EmaShadow:
    """Averages of the masters of every averaged part: `flats[part][decay or width]` are tensors laid out like the
    masters.
    """

    def __init__(self, masters: Mapping[str, Masters], ema: Ema, averaged: tuple[str, ...]):
        self._masters = masters
        self.ema = ema
        self._powers = {width: solve_profile_exponent(width) + 1 for width in ema.profiles}
        self.flats: dict[str, dict[float, list[Tensor]]] = {
            part: {name: [flat.detach().clone() for flat in masters[part].flats] for name in ema.decays_and_widths}
            for part in averaged
        }
        # Of the averages by width: the step at which they began, and each part's updates since, on the device.
        self.began = 0
        self._updates = {
            part: torch.zeros((), dtype=torch.float64, device=masters[part].flats[0].device)
            for part in averaged
            if ema.profiles
        }

    @torch.no_grad()
    def reset_to_masters(self) -> None:
        """Sets every average to the present masters and its number of updates to 0, as before the first step."""
        for part, shadows in self.flats.items():
            self._copy_masters_to_averages(part, shadows)
            self._restart_counters(part, 0)

    @torch.no_grad()
    def update_averages(self, step: int, applied: Mapping[str, Flag]) -> None:
        """Updates the averages of the parts in `applied` with the weights that optimizer step `step` has made. The
        averages of other parts stay.

        applied   {part: whether its weights were updated}; if not, its averages stay, too. The host does not wait for
                  the device to know this.
        """
        for part, shadows in self.flats.items():
            if part not in applied:
                continue
            flag = applied[part].value
            if part in self._updates:
                self._updates[part] += flag
            for name, shadow in shadows.items():
                if name in self._powers:
                    kept = 1 - 1 / self._updates[part].clamp(min=1)
                    weight = ((1 - kept ** self._powers[name]) * flag).float()
                else:
                    weight = (1 - self.ema.compute_effective_decay(name, step)) * flag
                for average, master in zip(shadow, self._masters[part].flats):
                    average.lerp_(master.detach(), weight)

    def collect_counters(self, part: str) -> dict[str, Any]:
        """Returns {"averages": {"widths", "began", "updates"}} for a checkpoint, on those averages of a part that are
        named by width: their widths, the step at which they began, and how often the part was updated since. Returns {}
        if the part has no such averages.
        """
        if part not in self._updates:
            return {}
        updates = int(self._updates[part])
        return {"averages": {"widths": list(self._powers), "began": self.began, "updates": updates}}

    @torch.no_grad()
    def resume_or_restart_averages(self, part: str, counters: dict[str, Any] | None, step: int) -> bool:
        """Restores the counters of those averages of a part that are named by width. `counters` are what a checkpoint
        of `step` holds of them, or None. Returns True, also for a part without such averages.

        Returns False if the checkpoint lacks one of the widths. Then all of these averages begin anew at `step` with
        the values of the weights, since only averages that began together can be combined.
        """
        if part not in self._updates:
            return True
        if goes_on := counters is not None and set(self._powers) <= set(counters["widths"]):
            self.began = counters["began"]
            self._updates[part].fill_(counters["updates"])
        else:
            self._copy_masters_to_averages(part, {width: self.flats[part][width] for width in self._powers})
            self._restart_counters(part, step)
        return goes_on

    def _copy_masters_to_averages(self, part: str, shadows: dict[float, list[Tensor]]) -> None:
        for shadow in shadows.values():
            torch._foreach_copy_(shadow, [flat.detach() for flat in self._masters[part].flats])

    def _restart_counters(self, part: str, step: int) -> None:
        if part in self._updates:
            self.began = step
            self._updates[part].zero_()

    @contextmanager
    def use_averages_as_weights(self, decay_or_width: float | None = None) -> Iterator[None]:
        """Inside the block, the networks have the averages as their weights; afterwards they have the training weights
        again, bit for bit.

        `decay_or_width` is one of the configured decays and widths; None takes the first. All ranks enter and leave the
        block together. A part without averages keeps its training weights. Raises ConfigError if there is no such
        average.
        """
        with ExitStack() as stack:
            for part, shadows in self.flats.items():
                if shadows:
                    chosen = next(iter(shadows)) if decay_or_width is None else decay_or_width
                    if chosen not in shadows:
                        raise ConfigError(
                            f"no EMA of decay or width {decay_or_width}; the recipe's section ema has "
                            f"{', '.join(map(str, shadows))}"
                        )
                    stack.enter_context(self._masters[part].use_flat_tensors_as_weights(shadows[chosen]))
            yield
