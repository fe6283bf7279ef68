"""Long work in pieces: after each the watchdog knows that it goes on, and the ranks may leave it together for a stop.

A piece is a call of the networks while samples are drawn or scored, or a micro-batch of a step. All ranks do equally
many, which ZeRO-3 needs anyway, so that a vote at the same piece of each is a vote of all. They vote about once a
second, after as many pieces as the last second had on the slowest rank.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from dstrain.distributed import group
from dstrain.distributed.progress import get_phases
from dstrain.distributed.stops import Stopped, Stops

_SECOND = 1000  # milliseconds between two votes
_STOP = 1 << 40  # a vote to stop, above all milliseconds


class Pieces:
    """Counts pieces of work, of which all ranks do equally many, and lets the ranks leave the work together."""

    def __init__(self, stops: Stops) -> None:
        self._stops = stops

    @contextmanager
    def allow_stops(self) -> Iterator[None]:
        """Inside the block, `end_piece` may raise Stopped, on all ranks together, once any of them has a reason to
        stop.

        The pieces inside are of one kind, and take about as long.
        """
        self._every, self._left, self._last = 1, 1, time.monotonic()
        _open.append(self)
        try:
            yield
        finally:
            _open.remove(self)

    def count_and_vote(self) -> None:
        """Counts a piece of work; about once a second, all ranks vote on a stop. Raises Stopped on all ranks if any
        voted for it.
        """
        self._left -= 1
        if self._left > 0:
            return
        now = time.monotonic()
        vote = group.find_max_over_ranks(int(1000 * (now - self._last)) + _STOP * self._stops.is_requested())
        if vote >= _STOP:
            raise Stopped
        self._every = min(2 * self._every, max(1, self._every * _SECOND // max(1, vote)))
        self._left, self._last = self._every, now


_open: list[Pieces] = []


def end_piece() -> None:
    """Records that a piece of work is done, for the watchdog. Inside of `Pieces.allow_stops`, raises Stopped on all
    ranks together if any has a reason to stop.
    """
    get_phases().record_progress()
    if _open:
        _open[-1].count_and_vote()
