"""When checkpoints are written: before training goes on, or beside it, in one thread of every rank.

Training then waits only while the values are copied in the host's memory. The thread writes, hashes and seals them, and
its words with other ranks go over a process group of their own. One save is in flight: the next waits for it, and so
does the end of the run. A save that fails leaves older checkpoints whole and is reported, and training goes on.
"""

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dstrain.engine.snapshot import Entry, Snapshot
from dstrain.engine.store import Store
from dstrain.ranks import group
from dstrain.recipe import NotSaved

Entries = dict[str, list[Entry]]             # by part

_PATIENCE = 3                                # failed saves in a row that end the run


@dataclass
class _Flight:
    """A save between its beginning and the moment when all ranks know how it ended."""

    step: int
    score: float | None
    began: float
    waited: float = 0.0                      # seconds that training stood still for it
    seconds: float = 0.0                     # from its beginning to its end
    error: str | None = None
    cause: Exception | None = None           # of an error that the store does not foresee
    remark: str = ""                         # of a fault that does not touch the checkpoint
    told: bool = False
    ended: threading.Event = field(default_factory=threading.Event)


class Saver:
    """Saves into a store, one after another; every method but `look` on all ranks together.

    `report` takes lines for the user, in the main thread; `saved` each step that is whole, in any; both on rank 0.
    """

    def __init__(self, store: Store, asynchronous: bool, report: Callable[[str], None], saved: Callable[[int], None]):
        self.store = store
        self.report = report
        self.newest = 0                      # the newest step known to be whole
        self._saved = saved
        self._asynchronous = asynchronous
        self._snapshot = Snapshot()
        self._group: object = None           # made with the first thread
        self._flight: _Flight | None = None
        self._failed: _Flight | None = None  # the latest that failed
        self._failures = 0                   # in a row

    def save(self, step: int, entries: Entries, write: Callable[[Path, Entries], None], *, need_bytes: int,
             score: float | None, last: bool) -> None:
        """Has `write(folder, entries)` fill the folder of `step` on every rank, and seals it.

        `entries` are live values: where training goes on meanwhile, a copy of them is written. NotSaved after three
        failures in a row, and where the `last` one fails; so the third try is waited for.
        """
        began = time.perf_counter()
        self.settle()
        flight = _Flight(step, score, began)
        at_once = last or self._failures == _PATIENCE - 1
        copies = None if at_once else self._copies(entries)
        if copies is None:
            self._flight = flight
            self._fly(flight, lambda folder: write(folder, entries), need_bytes)
            flight.waited = flight.seconds
            self.settle()
            if self._failures >= _PATIENCE or (last and self._failures):
                failed = self._failed
                raise NotSaved(f"step {failed.step} could not be saved: {failed.error or 'see the other ranks'}. Older "
                               f"checkpoints in {self.store.folder} are whole: mend that, and give the same command "
                               "again") from failed.cause
            return
        if self._group is None:
            self._group = group.new_group()

        def fly() -> None:
            with group.speaking_over(self._group):
                self._fly(flight, lambda folder: write(folder, copies), need_bytes)

        # A daemon: a process whose peers have gone must be able to end.
        thread = threading.Thread(target=fly, name=f"save-{step}", daemon=True)
        self._flight, flight.waited = flight, time.perf_counter() - began
        try:
            thread.start()
        except RuntimeError:                 # no more threads here; the others' are at work
            fly()
            flight.waited = flight.seconds

    def settle(self) -> None:
        """Waits for the save in flight, if there is one; how it ended is then known to all ranks."""
        flight = self._flight
        if flight is None:
            return
        flight.ended.wait()
        self.look()
        self._flight = None
        if group.agree(flight.error is not None):
            self._failures, self._failed = self._failures + 1, flight
        else:
            self.newest, self._failures = flight.step, 0

    @property
    def under_way(self) -> bool:
        """Whether this rank is still writing."""
        return self._flight is not None and not self._flight.ended.is_set()

    def look(self) -> None:
        """Reports a save that has ended since the last look; cheap enough for every step."""
        flight = self._flight
        if flight is None or flight.told or self.under_way:
            return
        flight.told = True
        if group.rank() != 0:
            return
        if flight.error is None:
            self.report(f"saved step {flight.step} in {flight.seconds:.1f} s; training waited {flight.waited:.2f} s"
                        f"{flight.remark}")
        else:
            self.report(f"saving step {flight.step} failed: {flight.error}; older checkpoints are whole")

    def improves(self, score: float) -> bool:
        """Whether a score lies below that of the best checkpoint so far, the one in flight among them."""
        best, flight = self.store.best(), self._flight
        others = [best[1]] if best else []
        if flight is not None and flight.score is not None and not (flight.ended.is_set() and flight.error):
            others.append(flight.score)
        return group.from_first(all(score < other for other in others))

    def close(self) -> None:
        """Lets a save in flight end although an error ends the run; a user who interrupts twice is in haste."""
        if self._flight is not None and not isinstance(sys.exc_info()[1], KeyboardInterrupt):
            self._flight.ended.wait()
            self.look()

    def _copies(self, entries: Entries) -> Entries | None:
        """Copies to write beside training; None, on all ranks alike and from then on, where some host has no memory."""
        if not self._asynchronous:
            return None
        shortage, copies = self._snapshot.shortage(entries), None
        if shortage is None:
            try:
                copies = self._snapshot.take(entries)
            except (RuntimeError, MemoryError) as error:
                shortage = f"rank {group.rank()} has no memory for a copy: {_first_line(error)}"
        shortages = [some for some in group.objects(shortage) if some is not None]
        if not shortages:
            return copies
        self._asynchronous, self._snapshot = False, Snapshot()
        if group.rank() == 0:
            self.report(f"training waits for each save (save.asynchronous): {shortages[0]}")
        return None

    def _fly(self, flight: _Flight, write: Callable[[Path], None], need_bytes: int) -> None:
        try:
            self.store.save(flight.step, write, extra={"score": flight.score}, need_bytes=need_bytes)
            flight.error = self.store.error
            if flight.error is None and group.rank() == 0:
                self._tell(flight)
        except Exception as error:           # such as a peer that has gone: told where the save is waited for
            flight.error, flight.cause = group.lost(error) or f"{type(error).__name__}: {_first_line(error)}", error
        finally:
            flight.seconds = time.perf_counter() - flight.began
            flight.ended.set()

    def _tell(self, flight: _Flight) -> None:
        try:
            self._saved(flight.step)
        except OSError as error:             # the checkpoint is whole all the same
            flight.remark = f"; but that was not written down: {error}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
