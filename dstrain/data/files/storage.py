"""Decides whether an error of reading is the fault of a file, or of the storage or the machine, and retries the latter.

A damaged file is replaced by another sample, and listed. If the storage fails, no sample may be replaced, since another
run would then learn from other samples: reading is retried, and then the run ends.
"""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dstrain.disk import small
from dstrain.recipe import ConfigError

_STORAGE = {
    errno.EIO,
    errno.EAGAIN,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EINTR,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EBUSY,
    errno.ENODEV,
    errno.ENXIO,
    errno.ENOTCONN,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ESHUTDOWN,
}
_TRIES = 4


def retry(read: Callable[[], Any], tries: int = _TRIES) -> Any:
    """Returns the result of `read()`. If the storage fails or memory is short, waits and calls `read` again. After
    `tries` calls (by default 4, over 6 s) raises the last error. Raises other errors at once.
    """
    for attempt in range(tries):
        try:
            return read()
        except (OSError, MemoryError, SystemError) as error:
            if not _is_transient_error(error) or attempt == tries - 1:
                raise
            time.sleep(0.2 * 5**attempt)


def is_storage_fault(error: Exception, path: Path) -> bool:
    """Returns whether an error in reading the file `path` is the fault of the storage or the machine, and not of the
    file. May read the whole file once more to find out.
    """
    if not _is_transient_error(error):
        return False
    if type(error).__module__ == "builtins":
        return True
    try:  # FFmpeg reports damaged files as EIO, too, so the file is read once more.
        with open(path, "rb") as file:
            while file.read(1 << 24):
                pass
    except OSError:
        return True
    return False


def _is_transient_error(error: Exception) -> bool:
    """Returns whether an error comes of failing storage or short memory, so that another try may succeed."""
    if isinstance(error, MemoryError):  # FFmpeg raises one of its own for a size that the file asks for.
        return type(error).__module__ == "builtins"
    if isinstance(error, SystemError):  # Two threads parsed headers of .npy at once: CPython's issue 106905.
        return "AST constructor" in str(error)
    return isinstance(error, OSError) and error.errno in _STORAGE


def refuse_special_file(path: str | os.PathLike) -> None:
    """Raises ConfigError if `path` is no regular file but, for example, a pipe, which might block for ever. Raises
    OSError if nothing exists at `path`.
    """
    if kind := small.describe_special_file(path):
        raise ConfigError(f"it is {kind}, and no file")
