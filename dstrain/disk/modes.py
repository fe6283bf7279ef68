"""Sets modes of files to what the umask allows, where a library has written by way of a private temporary file."""

import os
import stat
from pathlib import Path

from dstrain.disk.owner import make_owner_mark


def apply_umask(path: str | os.PathLike) -> None:
    """Gives a file, or a folder and everything in it, the permissions that the umask allows: 0666 & ~umask for files,
    0777 & ~umask for folders. Leaves links as they are.
    """
    path = Path(path)
    file, folder = _probe_modes_of_new_files(path if path.is_dir() else path.parent)
    if not path.is_dir():
        os.chmod(path, file)
        return
    for place, folders, files in os.walk(path):
        for name in files:
            if not os.path.islink(os.path.join(place, name)):
                os.chmod(os.path.join(place, name), file)
        for name in folders:
            if not os.path.islink(os.path.join(place, name)):
                os.chmod(os.path.join(place, name), folder)
    os.chmod(path, folder)


def _probe_modes_of_new_files(folder: Path) -> tuple[int, int]:
    """Returns the permission bits (of a new file, of a new folder) in `folder`. Finds them by making both and removing
    them again: Python can read the umask only by changing it, which would affect all threads.
    """
    name = folder / f".{make_owner_mark()}.mode"
    descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        file = stat.S_IMODE(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)
        os.unlink(name)
    os.mkdir(name)
    try:
        return file, stat.S_IMODE(os.stat(name).st_mode)
    finally:
        os.rmdir(name)
