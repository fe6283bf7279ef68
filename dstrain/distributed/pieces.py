"""Divides long work into pieces: after each, the watchdog learns of progress, and the ranks may stop together.

A piece is a call of the networks while samples are drawn or scored, or a micro-batch of a step. All ranks do the same
number of pieces, which ZeRO-3 needs anyway, so all ranks vote after the same piece. They vote about once a second, as
measured on the slowest rank.
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
    """Counts pieces of work, of which all ranks do the same number, and lets the ranks vote on a stop between them."""

    def __init__(self, stops: Stops) -> None:
        self._stops = stops

    @contextmanager
    def allow_stops_between_pieces(self) -> Iterator[None]:
        """Within the block, `record_piece_of_work` may raise Stopped, on all ranks together, once any rank has a reason
        to stop. Enter it on all ranks. All pieces of work within one block must take about the same time.
        """
        self._every, self._left, self._last = 1, 1, time.monotonic()
        _open.append(self)
        try:
            yield
        finally:
            _open.remove(self)

    def record_piece_or_raise_stopped(self) -> None:
        """Counts a piece of work that has ended, such as a micro-batch. After the first one, and then about once a
        second, the ranks vote: if any rank has a reason to stop, Stopped is raised on all. Call it equally often on all
        ranks.
        """
        self._left -= 1
        if self._left > 0:
            return
        now = time.monotonic()
        vote = group.compute_max_over_ranks(int(1000 * (now - self._last)) + _STOP * self._stops.is_requested())
        if vote >= _STOP:
            raise Stopped
        self._every = min(2 * self._every, max(1, self._every * _SECOND // max(1, vote)))
        self._left, self._last = self._every, now


_open: list[Pieces] = []


def record_piece_of_work() -> None:
    """Records for the watchdog that a piece of work has ended, such as a micro-batch. Within
    `Pieces.allow_stops_between_pieces`, the ranks may also vote here, and Stopped is raised on all of them if any has a
    reason to stop: so all ranks must call this function equally often.
    """
    get_phases().record_progress()
    if _open:
        _open[-1].record_piece_or_raise_stopped()
