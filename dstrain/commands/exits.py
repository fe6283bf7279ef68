"""Ends a command: with one message for an error that a user can mend, with a traceback for a fault of the code."""

import atexit
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from dstrain.distributed import exit_codes
from dstrain.distributed.environment import find_problems_or_repair_environment
from dstrain.distributed.launcher import read_rank_and_world
from dstrain.distributed.presence import get_presence
from dstrain.distributed.progress import get_phases
from dstrain.distributed.stops import Stopped, get_stops
from dstrain.recipe import ConfigError, NotRead, NotSaved


def run_main_with_exit_code(main: Callable[[], None], interactive: bool = True) -> None:
    """Runs a script's `main`, and ends the process with an exit code: 2 after a ConfigError, of which only the message
    is printed; 3 if training has diverged; 1 after any other error, with a traceback if it is a fault of the code. A
    rank that has lost the other ranks ends at once.

    interactive: whether a command that is silent for long says on stderr what it is doing (distributed/progress.py),
        and whether a request to stop ends `main`
    """
    _shorten_openmp_busy_waits()
    began = _has_begun_process_group()
    try:
        if problems := find_problems_or_repair_environment():
            _print_problems(problems)
            raise SystemExit(exit_codes.WRONG_INPUT)
        if read_rank_and_world().world > 1:
            get_presence().announce_and_watch_ranks()
        with get_phases() if interactive else nullcontext():
            _convert_errors_to_exit_codes(main, interactive)
        code = exit_codes.DONE
        _record_and_announce_exit_code(code)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        _record_and_announce_exit_code(code, isinstance(ended, Stopped))
        if began == _has_begun_process_group():
            raise
    except Exception:
        if began == _has_begun_process_group():
            raise
        sys.excepthook(*sys.exc_info())
        code = exit_codes.BUG
    if began != _has_begun_process_group():
        _exit_without_freeing_modules(code)


def _has_begun_process_group() -> bool:
    """Returns whether this process has begun a process group, and so has threads of gloo, NCCL and DeepSpeed."""
    return "dstrain.engine.start" in sys.modules and sys.modules["dstrain.engine.start"].exchanged


def _exit_without_freeing_modules(code: int) -> NoReturn:
    """Ends this process with an exit code. Runs exit functions and flushes output, but does not free modules and
    objects: threads of gloo that still run could then abort the process with another exit code.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@contextmanager
def _raise_stopped_on_request() -> Iterator[None]:
    """Raises Stopped in the block if a stop is requested, until training handles such requests itself. Also raises
    Stopped in place of a RuntimeError that comes after a request. Restores the earlier signal handlers afterwards.
    """
    stops = get_stops()
    try:
        yield
    except (Stopped, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not (stops.at_once and stops.is_requested()):
            raise
        if stops.patience is not None:  # of a lost rank: it has left, too
            stops.announce_end_and_remove_stop_file()
        raise Stopped from None
    finally:
        stops.restore_handlers_and_end_thread()


def _shorten_openmp_busy_waits() -> None:
    """Sets GOMP_SPINCOUNT, so that idle OpenMP threads soon sleep; keeps an earlier value, and changes nothing if
    OMP_WAIT_POLICY is set. Makes training several times faster on busy cores. Call it before torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _get_distributed_group_if_imported() -> ModuleType | None:
    """Returns the module distributed.group if it is imported already, else None. Does not import it, since that would
    import torch.
    """
    return sys.modules.get("dstrain.distributed.group")


def _record_and_announce_exit_code(code: int, stopped_at_once: bool = False) -> None:
    """Records this rank's exit code for `dstrain keep`. If the rank has ended as planned (DONE or STOPPED), tells the
    other ranks of this machine, so that they go on. Does not tell them after a stop `stopped_at_once`, which is to end
    them, too.
    """
    exit_codes.append_exit_code_to_file(code)
    if code in (exit_codes.DONE, exit_codes.STOPPED) and not stopped_at_once:
        get_presence().mark_ended_and_clean_up()


def _convert_errors_to_exit_codes(main: Callable[[], None], stops_on_request: bool) -> None:
    """Runs `main`. Turns a ConfigError, NotRead, NotSaved, FloatingPointError or KeyboardInterrupt into a message on
    stderr and a SystemExit with an exit code. Other errors pass through, but if other ranks are lost, the process ends.
    `stops_on_request`: whether a request to stop ends `main`.
    """
    try:
        # Only the main thread may set handlers; a program that runs a verb in another one keeps its own.
        with (
            _raise_stopped_on_request()
            if stops_on_request and threading.current_thread() is threading.main_thread()
            else nullcontext()
        ):
            main()
            sys.stdout.flush()
    except BrokenPipeError:
        if not _has_stdout_lost_its_reader():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still to be flushed
        raise SystemExit(128 + signal.SIGPIPE) from None  # as of other programs before `head`
    except KeyboardInterrupt:  # of other commands than training, which saves when it hears Ctrl-C
        print(f"{Path(sys.argv[0]).name}: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except (FloatingPointError, NotRead, NotSaved, ConfigError) as error:
        _report_error(error)
        code = {
            FloatingPointError: exit_codes.DIVERGED,
            NotRead: exit_codes.BUG,
            NotSaved: exit_codes.BUG,
            ConfigError: exit_codes.WRONG_INPUT,
        }
        raise SystemExit(next(code[kind] for kind in code if isinstance(error, kind))) from None
    except RuntimeError as error:
        if (group := _get_distributed_group_if_imported()) and group.explain_lost_ranks(error):
            if not group.is_started():
                _wait_for_report_of_rank_0()
            group.end_process(error)
        raise


def _has_stdout_lost_its_reader() -> bool:
    """Returns whether stdout is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _report_error(error: Exception) -> None:
    """Prints an error on stderr, on ranks above 0 after `_wait_for_report_of_rank_0`."""
    rank = read_rank_and_world().rank
    _wait_for_report_of_rank_0()
    _print_problems(getattr(error, "problems", [str(error)]), f" [rank {rank}]" if rank else "")


def _wait_for_report_of_rank_0() -> None:
    """Waits 6 seconds on ranks above 0. Mostly rank 0 reports the same fault, or why it has gone, and its end ends this
    rank, after seconds where the launcher has little of a core. What is left then is a fault of this machine alone.
    """
    if read_rank_and_world().rank:
        time.sleep(6)


def _print_problems(lines: list[str], rank_label: str = "") -> None:
    """Prints the program's name, `rank_label` (such as " [rank 3]"), and the problems, a line each, on stderr."""
    count = f"{len(lines)} things are wrong" if len(lines) > 1 else "error"
    print(
        f"{Path(sys.argv[0]).name}{rank_label}: {count}:\n" + "\n".join(f"  {line}" for line in lines),
        file=sys.stderr,
        flush=True,
    )
