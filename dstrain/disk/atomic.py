"""Writing a file so that a crash leaves the old one or the new one, and never half of it.

What is being written has a name that only this process can have (owner.py), and is made where nothing stands: no link
is followed. Files that dead processes have left are removed when the next one writes there.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dstrain.disk import owner


@contextmanager
def replace_file(path: str | os.PathLike, make: bool = True) -> Iterator[Path]:
    """Yields a temporary path to write to; afterwards it is on the disk as `path`, or after an error it is gone.

    `make`: its folder, too. A link at `path` gives way. Of several processes that write it the last has it, whole.
    Raises TakenAway if the folder is no longer this process's own.
    """
    path = Path(path)
    owner.check_claim(path)
    if make:
        path.parent.mkdir(parents=True, exist_ok=True)
    owner.sweep_abandoned(path.parent)
    temporary = owner.name_beside(path)
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        owner.check_claim(path)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)


def write_file(path: str | os.PathLike, content: str | bytes, make: bool = True) -> None:
    """Writes a whole file; text as UTF-8. `make`: its folder, too."""
    with replace_file(path, make) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replace_folder(folder: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary folder to fill; afterwards it is on the disk as `folder`, or after an error it is gone.

    What dead processes have left of the same name goes first.
    """
    folder = Path(os.path.abspath(folder))
    owner.check_claim(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    owner.sweep_abandoned(folder.parent, folder.name)
    temporary = owner.name_beside(folder)
    try:
        temporary.mkdir()
        yield temporary
        publish_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish_folder(temporary: str | os.PathLike, folder: str | os.PathLike) -> None:
    """Renames a folder that is filled, when everything in it is on the disk; an empty `folder` gives way."""
    for place, _, names in os.walk(os.fspath(temporary)):
        for name in names:
            descriptor = os.open(os.path.join(place, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        fsync_folder(place)
    owner.check_claim(folder)
    os.rename(temporary, folder)
    fsync_folder(Path(folder).absolute().parent)


def fsync_folder(path: str | os.PathLike) -> None:
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
