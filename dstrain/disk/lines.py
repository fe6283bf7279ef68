"""Files to which lines are added: a line is there whole or not at all, even if the disk was full or the
power failed.
"""

import errno
import os
import stat

from dstrain.disk import owner

_OPEN = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW


def append_lines(path: str | os.PathLike, text: str) -> None:
    """Appends `text`, one or more lines with their line breaks, to a file. Creates the file if it is missing. First
    adds a line break if the file's last line has none.

    Lines of several processes do not mix if the system writes the text in one call, as on a local disk. Raises OSError
    if the text cannot be written, and then removes the part that was written. Raises OSError also if `path` is a link,
    a pipe or a device, or if this process has lost its claim on the folder.
    """
    owner.require_claim_not_lost(path)
    descriptor = _open_regular_file(path, _OPEN | os.O_CREAT)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        content = b"\n" * torn + text.encode()
        try:
            while content:
                content = content[os.write(descriptor, content) :]
        except OSError:
            os.ftruncate(descriptor, size)  # part of a line, to which the next one would be glued
            raise
    finally:
        os.close(descriptor)


def remove_partial_last_line(path: str | os.PathLike) -> int:
    """Cuts off what follows a file's last line break, since a crash may leave half a line. A file without a line break
    becomes empty. Returns the number of bytes removed, 0 if the file is missing. Raises OSError for a link, a pipe or a
    device.
    """
    try:
        descriptor = _open_regular_file(path, _OPEN)
    except FileNotFoundError:
        return 0
    try:
        size = end = os.fstat(descriptor).st_size
        while end:
            start = max(0, end - 65536)
            at = os.pread(descriptor, end - start, start).rfind(b"\n")
            end = start + at + 1 if at >= 0 else start
            if at >= 0:
                break
        if end < size:
            os.ftruncate(descriptor, end)
        return size - end
    finally:
        os.close(descriptor)


def make_printable(text: str, keep: str = "") -> str:
    """Returns `text` with a question mark in place of each character that is neither printable nor in `keep`.

    So a name of a file cannot send an escape code to the terminal, nor begin a new line in a list.
    """
    return "".join(c if c.isprintable() or c in keep else "?" for c in text)


def _open_regular_file(path: str | os.PathLike, flags: int) -> int:
    """Opens a regular file and returns its descriptor. Raises OSError if `path` is a link, a pipe, a device or a
    folder.
    """
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "it is a link, which nothing is written through: remove it", str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no file: move it away", str(path))
    return descriptor
