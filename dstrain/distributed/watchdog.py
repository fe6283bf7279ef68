"""Detects that a run hangs, writes the stacks of all ranks, names the ranks at fault, and ends the run.

    main thread     records each step and phase that it enters, and each piece of work that ends (progress.py)
    watch           a thread that checks every second how long ago that was; after too long it finds who is at fault
    publisher       a thread that exchanges the states of all ranks, over the store of the process group

A step is too long after `factor` times the median of the steps so far, but at least `least` seconds. Any other work,
such as the start and the first steps, is too long when no piece of it has ended for `most` seconds, however long the
whole lasts. While any rank that answers is within its limit, nothing happens: rank 0 may be writing pictures, for which
the others wait. Time during which the whole process was suspended does not count.
"""

import faulthandler
import json
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dstrain.disk.atomic import replace_file
from dstrain.disk.lines import append_lines
from dstrain.distributed import exit_codes, group
from dstrain.distributed.presence import get_presence
from dstrain.distributed.processes import (
    find_current_line_of_thread,
    install_stack_dump_handler,
    is_debugged,
    is_suspended,
    read_start_time,
)
from dstrain.distributed.progress import get_phases

STEP = "step"
_FIRST = 5  # steps before a median is trusted
_TICK = 1.0  # seconds between two looks
_SUSPENDED = 5.0  # seconds that a look comes late by, after which time starts over
_SILENT = 20.0  # seconds without a word from a rank that seems to run
_KEY = "dstrain/stand"


@dataclass(frozen=True)
class RankStatus:
    """What a rank tells the other ranks about itself: its step, phase and code line, and for how long it has made no
    progress.
    """

    rank: int
    host: str
    pid: int
    step: int
    phase: str
    seconds: float  # since the last piece of it ended
    overdue: bool
    where: str  # the innermost line of dstrain that its main thread is in
    waits: bool  # whether that is within an exchange with other ranks
    beat: int  # grows from word to word

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (process {self.pid})"


class Watchdog(AbstractContextManager):
    """Checks in a thread, until the end of its block, whether the main thread of this rank makes progress. If the run
    hangs, ends this process with exit code 4.

    folder        the run's folder; stacks are written to stacks/ in it
    factor        a step is too long after this many times the median step; 0: only `most` counts
    least, most   seconds: a step below `least` is never too long, and `most` without progress is always too long
    """

    def __init__(self, folder: Path, factor: float, least: float, most: float):
        # Exchanges raise after `most` seconds themselves, see group.explain_lost_ranks: they come first.
        self._folder, self._factor, self._least, self._most = folder, factor, least, most + 10
        self._now = ("start", 0, time.monotonic())
        self._steps: deque[float] = deque(maxlen=1001)  # seconds
        self._base = 0.0  # time before this does not count
        self._overdue = False
        self._closed, self._ending = threading.Event(), threading.Lock()
        self._heard: dict[int, tuple[RankStatus, float]] = {}  # the others' latest words, and when they came
        self._main = threading.get_ident()
        get_phases().record_progress()
        install_stack_dump_handler()
        threading.Thread(target=self._watch_progress, name="watch", daemon=True).start()

    def start_status_exchange(self) -> None:
        """Starts a thread by which the ranks tell each other whether they make progress, over the store of the process
        group. The group must be started. Does nothing if there is only one rank.
        """
        if store := group.open_group_store():
            threading.Thread(
                target=self._exchange_status_until_closed, args=(store,), name="publisher", daemon=True
            ).start()

    def enter_phase(self, step: int, phase: str = STEP) -> None:
        """Records that the main thread enters a phase of step `step`: the step itself, or other work such as its save.
        If the main thread was in a step before, records how long that step took.
        """
        now = time.monotonic()
        before, _, since = self._now
        if before == STEP:
            self._steps.append(now - since)
        self._now = (phase, step, now)
        get_phases().enter_phase(f"{phase} {step}")

    def handle_if_ranks_lost(self, error: BaseException) -> None:
        """Ends the watchdog if `error` means that other ranks are lost; does nothing for other errors. Kills those
        ranks of this machine that are suspended. If `error` is a timeout, first writes the stacks of this rank.

        If this rank, too, has made no progress for too long, ends this process with exit code 4.
        """
        if self._closed.is_set() or not (text := group.explain_lost_ranks(error)):
            return
        if self._overdue:
            self._end_hung_run([text], self._find_suspended_ranks())
        self._closed.set()
        if "timed out" in str(error).lower() or "timeout" in str(error).lower():
            self._run_with_timeout(5, self._write_thread_stacks)
        self._send_signal_to_ranks(self._find_suspended_ranks(), signal.SIGKILL)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.handle_if_ranks_lost(error)
        self._closed.set()

    def _find_time_of_last_progress(self) -> float:
        """Returns the time (time.monotonic) at which a piece of work last ended. During a step, only the work of the
        main thread counts; at other times also that of other threads, such as a save.
        """
        beside = 0.0 if self._now[0] == STEP else get_phases().beaten_beside
        return max(get_phases().beaten, beside, self._base)

    def _choose_hang_limit(self, phase: str) -> float:
        """Returns how many seconds without progress are too long in a phase: `most`. In a step it may be fewer, by the
        median time of the steps so far.
        """
        if phase != STEP or not self._factor or len(self._steps) < _FIRST:
            return self._most
        return min(self._most, max(self._least, self._factor * statistics.median(list(self._steps))))

    def _watch_progress(self) -> None:
        """Checks each second whether this rank makes progress, until the watchdog is closed. If the run hangs, ends
        this process.
        """
        began, last = 0.0, time.monotonic()
        before: set[int] = set()
        while not self._closed.wait(_TICK):
            now = time.monotonic()
            if now - last > _TICK + _SUSPENDED or is_debugged(self._main):
                self._base = now
            last = now
            overdue = now - self._find_time_of_last_progress() > self._choose_hang_limit(self._now[0])
            began = began if self._overdue and overdue else now  # when it became overdue
            self._overdue = overdue
            suspended = self._find_suspended_ranks() if overdue else set()
            reasons, at_fault = self._find_ranks_at_fault(now, began, suspended & before) if overdue else ([], set())
            before = suspended
            if reasons and not self._closed.is_set():
                self._end_hung_run(reasons, at_fault)

    def _find_ranks_at_fault(self, now: float, overdue_since: float, suspended: set[int]) -> tuple[list[str], set[int]]:
        """Finds the ranks because of which the run hangs. Returns a line of text for each, and the set of ranks that
        must be killed, since they cannot end themselves. Suspended ranks are at fault in any case. If there are none,
        both are empty while the cause is not known, or while some rank still makes progress.

        overdue_since   the time at which this rank had made no progress for too long
        suspended       those ranks of this machine that are suspended
        """
        me = self._make_status()
        heard = {
            rank: stand for rank, (stand, when) in dict(self._heard).items() if when > max(overdue_since, now - _SILENT)
        }
        if suspended:
            return [
                f"{self._describe_rank(rank)} is stopped, by SIGSTOP or a debugger" for rank in sorted(suspended)
            ], suspended
        if group.world() == 1:
            return [f"{me} hangs at {me.where}"], set()
        silent = [rank for rank in range(group.world()) if rank not in heard and rank != me.rank]
        if (silent and now - overdue_since < _SILENT) or any(not stand.overdue for stand in heard.values()):
            return [], set()
        if me.rank and len(silent) == group.world() - 1:
            return [f"{self._describe_rank(0)}, through which the ranks hear of each other, does not answer"], {0}
        return [f"{self._describe_rank(rank)} does not answer" for rank in silent] or _describe_late_ranks(
            [me, *heard.values()]
        ), set(silent)

    def _make_status(self, beat: int = 0) -> RankStatus:
        """Returns what this rank tells the others about itself. `beat` is the number of this message."""
        phase, step, _ = self._now
        where, waits = find_current_line_of_thread(self._main)
        seconds = round(time.monotonic() - self._find_time_of_last_progress(), 1)
        return RankStatus(
            group.rank(), socket.gethostname(), os.getpid(), step, phase, seconds, self._overdue, where, waits, beat
        )

    def _exchange_status_until_closed(self, store: dist.Store) -> None:
        """Writes the state of this rank into the store, every second, or less often with more than 256 ranks. Also
        reads the states of all other ranks while this rank makes no progress for too long. Ends when the watchdog or
        the store does.
        """
        # It reads the state of rank 0 once at the beginning: if rank 0 ends, the store ends with it.
        others = [rank for rank in range(group.world()) if rank != group.rank()]
        beat, pause = 0, max(_TICK, group.world() / 256)
        try:
            while not self._closed.wait(pause):
                beat += 1
                store.set(f"{_KEY}/{group.rank()}", json.dumps(asdict(self._make_status(beat))))
                if not (self._overdue or beat == 2):
                    continue
                asked = others if self._overdue else others[: min(group.rank(), 1)]
                known = (
                    asked
                    if store.check([f"{_KEY}/{rank}" for rank in asked])
                    else [rank for rank in asked if store.check([f"{_KEY}/{rank}"])]
                )
                words = store.multi_get([f"{_KEY}/{rank}" for rank in known]) if known else []
                for stand in (RankStatus(**json.loads(word)) for word in words):
                    if stand.rank not in self._heard or self._heard[stand.rank][0].beat != stand.beat:
                        self._heard[stand.rank] = stand, time.monotonic()
        except RuntimeError:  # the store has ended, and with it the run
            pass

    def _find_suspended_ranks(self) -> set[int]:
        """Returns the other ranks of this machine whose processes are suspended, by SIGSTOP or by a debugger."""
        return {
            rank
            for rank, (pid, born) in get_presence().find_other_ranks().items()
            if read_start_time(pid) == born and is_suspended(pid)
        }

    def _describe_rank(self, rank: int) -> str:
        if rank in self._heard:
            return str(self._heard[rank][0])
        pid = get_presence().find_other_ranks().get(rank)
        return f"rank {rank} on {socket.gethostname()} (process {pid[0]})" if pid else f"rank {rank}"

    def _end_hung_run(self, reasons: list[str], at_fault: set[int]) -> None:
        """Writes the stacks and the reasons, kills the ranks at fault on this machine, and ends this process with exit
        code 4. Gives each write 5 s at most, since disks may hang. Never returns.
        """
        self._ending.acquire()  # the watch and the main thread may both come here
        self._send_signal_to_ranks(at_fault - self._find_suspended_ranks(), signal.SIGUSR2)  # they print their stacks
        self._run_with_timeout(5, self._write_thread_stacks)
        self._run_with_timeout(5, self._report_hang, reasons)
        time.sleep(2)  # the others find and write the same
        self._send_signal_to_ranks(at_fault, signal.SIGKILL)
        os._exit(exit_codes.HUNG)

    def _report_hang(self, reasons: list[str]) -> None:
        """Prints the reasons for the end on stderr. Rank 0, or rank 1 if rank 0 is at fault, also appends them to
        log.txt.
        """
        phase, step, _ = self._now
        me = self._make_status()
        text = (
            f"rank {me.rank} on {me.host} has been in {phase} {step} for {me.seconds:.0f} s, and the run ends: "
            f"{'; '.join(reasons)}. Stacks are in {self._folder / 'stacks'}. All saved is whole; the same command "
            "goes on. If it was no hang, raise faults.hang_seconds (a step) or faults.timeout_minutes (all else)"
        )
        print(f"error: {text}", file=sys.stderr, flush=True)
        if me.rank == 0 or (me.rank == 1 and reasons[0].startswith("rank 0 ")):
            append_lines(self._folder / "log.txt", f"{text}\n")

    def _write_thread_stacks(self) -> None:
        """Writes the stacks of all threads of this rank into a file in stacks/ of the run's folder; to stderr if the
        folder has no run.yaml.
        """
        me = self._make_status()
        if not (self._folder / "run.yaml").exists():
            faulthandler.dump_traceback(2, all_threads=True)
            return
        path = self._folder / "stacks" / f"step_{me.step:08d}_rank_{me.rank}.txt"
        with replace_file(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
            file.write(f"{me}: {me.phase} {me.step} for {me.seconds:.0f} s, at {me.where}\n\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    @staticmethod
    def _send_signal_to_ranks(ranks: set[int], signal_number: int) -> None:
        """Sends the signal `signal_number` to those of `ranks` that run on this machine and are alive, except to this
        rank itself.
        """
        for rank, (pid, born) in get_presence().find_other_ranks().items():
            if rank in ranks and read_start_time(pid) == born:
                os.kill(pid, signal_number)

    @staticmethod
    def _run_with_timeout(seconds: float, work: Callable[..., None], *arguments: Any) -> None:
        """Calls `work` in a new thread and waits for its end, at most `seconds`. After that the thread may still
        run.
        """
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        thread.start()
        thread.join(seconds)


def _describe_late_ranks(statuses: list[RankStatus]) -> list[str]:
    """Returns a line of text for each rank that the others wait for. These are the ranks that are in an earlier step
    than others. If all are in the same step, they are the ranks that do not wait in an exchange with others. If this
    singles out no rank, returns one line that refers to the stacks.
    """
    statuses = sorted(statuses, key=lambda stand: stand.rank)
    furthest = max(stand.step for stand in statuses)
    late = [stand for stand in statuses if stand.step < furthest]
    late = late or [stand for stand in statuses if not stand.waits]
    if not 0 < len(late) < len(statuses):
        return [f"all ranks are at {statuses[0].where}: see their stacks"]
    return [f"{stand} is in {stand.phase} {stand.step} at {stand.where}, and the others wait for it" for stand in late]
