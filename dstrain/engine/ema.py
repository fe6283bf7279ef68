"""Sharded exponential moving averages of the fp32 masters.

Each rank averages the flats that it owns, so an update communicates nothing and costs 12 bytes an element and decay.
Update number s does shadow = d * shadow + (1 - d) * master, d = Ema.decay_at(decay, s).
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from dstrain.engine.masters import Masters
from dstrain.engine.updates import Flag
from dstrain.recipe import ConfigError, Ema


class EmaShadow:
    """Averages of the masters of every averaged part, one a decay: `flats[part][decay]` in the masters' layout."""

    def __init__(self, masters: Mapping[str, Masters], ema: Ema, averaged: tuple[str, ...]):
        self._masters = masters
        self._ema = ema
        self.flats: dict[str, dict[float, list[Tensor]]] = {
            part: {decay: [flat.detach().clone() for flat in masters[part].flats] for decay in ema.decays}
            for part in averaged}

    @torch.no_grad()
    def reset(self) -> None:
        """Starts every average from the present masters."""
        for part, shadows in self.flats.items():
            for shadow in shadows.values():
                torch._foreach_copy_(shadow, [flat.detach() for flat in self._masters[part].flats])

    @torch.no_grad()
    def update(self, step: int, applied: Mapping[str, Flag]) -> None:
        """Averages in the weights that optimizer step `step` made, of the parts where it was applied.

        Whether it was stays on the device: where it was not, the new weights count nothing.
        """
        for part, shadows in self.flats.items():
            for decay, shadow in shadows.items() if part in applied else ():
                weight = (1 - self._ema.decay_at(decay, step)) * applied[part].value
                for average, master in zip(shadow, self._masters[part].flats):
                    average.lerp_(master.detach(), weight)

    @contextmanager
    def swapped(self, decay: float | None = None) -> Iterator[None]:
        """The networks compute with the averages inside, and with the training weights, bit for bit, afterwards.

        `decay` is one of the configured ones, None the first. All ranks enter and leave together. A part without
        averages keeps its training weights. ConfigError: no average of this decay.
        """
        with ExitStack() as stack:
            for part, shadows in self.flats.items():
                if shadows:
                    chosen = next(iter(shadows)) if decay is None else decay
                    if chosen not in shadows:
                        raise ConfigError(f"no EMA of decay {decay}; ema.decays has {', '.join(map(str, shadows))}")
                    stack.enter_context(self._masters[part].showing(shadows[chosen]))
            yield
