"""Writing a file so that a crash leaves the old one or the new one, and never half of it."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replace_file(path: str | os.PathLike, make: bool = True) -> Iterator[Path]:
    """Yields a temporary path to write to; afterwards it is on the disk as `path`, or after an error it is gone.

    `make`: its folder, too. One process writes a path at a time: all use the same temporary name, so a crash leaves one
    file.
    """
    path = Path(path)
    if make:
        path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_file(path: str | os.PathLike, content: str | bytes, make: bool = True) -> None:
    """Writes a whole file; text as UTF-8. `make`: its folder, too."""
    with replace_file(path, make) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def publish_folder(temporary: str | os.PathLike, folder: str | os.PathLike) -> None:
    """Renames a folder that is filled, when everything in it is on the disk; an empty `folder` gives way."""
    for place, _, names in os.walk(os.fspath(temporary)):
        for name in names:
            descriptor = os.open(os.path.join(place, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(place)
    os.rename(temporary, folder)
    sync_folder(Path(folder).absolute().parent)


def sync_folder(path: str | os.PathLike) -> None:
    """Forces a folder's entries to the disk: without it a rename may be lost with the power.

    Some file systems, mostly of a network, cannot do so for folders: there is nothing more to be done then.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS, errno.EACCES, errno.EPERM):
            raise
    finally:
        os.close(descriptor)
