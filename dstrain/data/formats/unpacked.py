"""What can only be read from its beginning, unpacked once into a folder beside the index and read there by place."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from dstrain.data.files.local import LocalFiles, Stat
from dstrain.disk import atomic
from dstrain.distributed.progress import phases
from dstrain.recipe import ConfigError, NotRead, write_errors

_REMEDY = "name another folder with data.index=FOLDER"
_SHARE = 0.9  # of what is free on the disk that a file may take


def unpacked(folder: Path, name: str, packed: Stat, size: int, content: Iterator[bytes]) -> Path:
    """A file in `folder` that holds `content`; where an earlier call has written it, nothing is read.

    packed: of the file that it comes from. size: bytes that `content` has at most. ConfigError: the disk is too full.
    """
    path = folder / f"{blake2b(repr((name, packed, size)).encode(), digest_size=8).hexdigest()}-{name}"
    if path.exists():
        return path
    with write_errors(folder, _REMEDY):
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    if size > _SHARE * free:
        raise ConfigError(f"unpacked it has {size:,} bytes, and {folder} has room for {free:,}: {_REMEDY}")
    phases().at(f"unpacking {name}, once, to {folder}")
    with open(folder / "lock", "a") as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():  # another command may have been here meanwhile
            _write(path, content)
    return path


def _write(path: Path, content: Iterator[bytes]) -> None:
    with atomic.replace_file(path) as temporary, open(temporary, "wb") as file:
        for block in content:
            with write_errors(path.parent, _REMEDY):
                file.write(block)


def span(path: Path, offset: int, size: int) -> bytes:
    """Bytes of a file that `unpacked` has written. NotRead: it is not there, such as on another machine."""
    if not os.path.exists(path):
        raise NotRead(
            f"{path}, to which the data were unpacked, is not there: name a folder that all machines share "
            "with data.index=FOLDER, then give the same command again"
        )
    return LocalFiles(path).span(path.name, offset, size)
