"""Progress of a verb: a bar on rank 0's terminal; elsewhere phases.py says now and then how far it is."""

from typing import Any

from tqdm import tqdm

from dstrain.distributed.launcher import place
from dstrain.distributed.progress import phases


class Bar(tqdm):
    """As tqdm. phase: what is done, such as "drawing"; show: whether there may be a bar, which rank 0 alone draws."""

    def __init__(self, phase: str, *, show: bool = True, **options: Any) -> None:
        self._phase = phase
        super().__init__(disable=None if show and place().rank == 0 else True, **options)
        self._at()

    def update(self, n: float | None = 1) -> bool | None:
        if self.disable:
            self.n += n  # tqdm leaves a hidden bar where it began
        else:
            phases().heard()
        drawn = super().update(n)
        self._at()
        return drawn

    def _at(self) -> None:
        phases().at(f"{self._phase}: {self.n:,} of {self.total:,}")
