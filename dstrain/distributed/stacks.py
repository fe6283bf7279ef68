"""Where a thread of this process stands, read off its frames, without torch."""

import faulthandler
import signal
import sys
from pathlib import Path
from types import FrameType

_PACKAGE = Path(__file__).parents[1]
_DEBUGGERS = ("pdb.py", "bdb.py", "pydevd.py")


def print_on_request() -> None:
    """From here on `kill -USR2 PID` prints the stacks of all threads of this process on stderr."""
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)


def place_of(thread: int) -> tuple[str, bool]:
    """The innermost line of dstrain that a thread is in, and whether that is within an exchange with other ranks."""
    frame, place, exchanges = _frame(thread), "", False
    while frame is not None and not place:
        path = frame.f_code.co_filename
        exchanges |= "torch/distributed/" in path or "deepspeed/comm/" in path
        if (path.startswith(f"{_PACKAGE}/") and not path.endswith("distributed/group.py")) or frame.f_back is None:
            place = f"{Path(path).name}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return place, exchanges


def debugged(thread: int) -> bool:
    """Whether a thread stands in a debugger of Python."""
    frame = _frame(thread)
    while frame is not None:
        if Path(frame.f_code.co_filename).name in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def _frame(thread: int) -> FrameType | None:
    return sys._current_frames().get(thread)
