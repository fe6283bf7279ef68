"""Writes a file so that a crash leaves the old one or the new one, and never half of it.

A file is first written under a temporary name that only this process can have (owner.py). Nothing may exist there, so
no link is followed. Temporary files that dead processes have left are removed when the next one writes in that folder.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dstrain.disk import owner


@contextmanager
def replace_file(path: str | os.PathLike, make_parent: bool = True) -> Iterator[Path]:
    """A context manager that replaces a file in one step. Yields the path of an empty temporary file to fill. At the
    end of the block it is renamed to `path`, so that readers see either the old content or all of the new. If the block
    raises, `path` stays as it was.

    make_parent: also creates the folder of `path`

    A link at `path` is replaced, not followed. If several processes write `path`, the last rename wins. Raises
    TakenAway if this process has lost its claim on the folder.
    """
    path = Path(path)
    owner.require_claim_not_lost(path)
    if make_parent:
        path.parent.mkdir(parents=True, exist_ok=True)
    owner.remove_abandoned_files(path.parent)
    temporary = owner.make_hidden_path(path)
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        owner.require_claim_not_lost(path)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(path.parent)


def write_file(path: str | os.PathLike, content: str | bytes, make_parent: bool = True) -> None:
    """Writes `content` to a file, text as UTF-8, in one step: readers see either the old content or all of the new.
    Raises TakenAway if this process has lost its claim on the folder.

    make_parent: also creates the folder of `path`
    """
    with replace_file(path, make_parent) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def create_folder_atomically(folder: str | os.PathLike) -> Iterator[Path]:
    """A context manager that makes a folder in one step. Yields a new temporary folder to fill. At the end of the block
    it is renamed to `folder`; if the block raises, it is removed.

    Creates the parent folder. Removes temporary folders of the same name that dead processes have left. Raises OSError
    if `folder` exists and is not empty, TakenAway if this process has lost its claim on it.
    """
    folder = Path(os.path.abspath(folder))
    owner.require_claim_not_lost(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    owner.remove_abandoned_files(folder.parent, folder.name)
    temporary = owner.make_hidden_path(folder)
    try:
        temporary.mkdir()
        yield temporary
        flush_and_rename_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def flush_and_rename_folder(temporary: str | os.PathLike, folder: str | os.PathLike) -> None:
    """Flushes all files of the folder `temporary` to the disk, then renames it to `folder`. Raises OSError if `folder`
    exists and is not empty, TakenAway if this process has lost its claim on it.
    """
    for place, _, names in os.walk(os.fspath(temporary)):
        for name in names:
            descriptor = os.open(os.path.join(place, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        fsync_folder(place)
    owner.require_claim_not_lost(folder)
    os.rename(temporary, folder)
    fsync_folder(Path(folder).absolute().parent)


def fsync_folder(path: str | os.PathLike) -> None:
    """Flushes the list of a folder's entries to the disk. Without this, a rename may be lost when the power fails.

    Ignores the errors of file systems that cannot flush folders, mostly network ones. Raises any other OSError.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS, errno.EACCES, errno.EPERM):
            raise
    finally:
        os.close(descriptor)
