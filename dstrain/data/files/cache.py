"""A cache of what was fetched from an address: files in one folder, bounded, shared by the processes of a machine.

An entry is written under a temporary name and renamed, so that it is whole or not there. A ledger counts the bytes of
all entries: room is taken there, under a lock, before an entry is written. A process that is killed leaves a temporary
file, which counts as an entry and goes when it is among the oldest.
"""

import contextlib
import fcntl
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dstrain.recipe import ConfigError

_FOLDER = "dstrain-cache"  # inside the user's folder, so that no file of theirs is ever removed
_LEDGER, _LOCK, _TEMPORARY = "ledger", ".lock", ".tmp"
_KEPT = 0.9  # share of the limit that is left when the oldest entries go


class DiskCache:
    """Entries by key (a name of a file), `limit` bytes in all. ConfigError: the folder cannot be written."""

    def __init__(self, folder: str | Path, limit: int) -> None:
        self.folder, self.limit = Path(folder) / _FOLDER, limit
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked(_LEDGER):
                pass
        except OSError as error:
            raise ConfigError(
                f"data.cache.folder={folder} cannot be written or locked ({error.strerror}): name a "
                "folder on a disk of this machine"
            ) from None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.folder.mkdir(parents=True, exist_ok=True)  # on another machine there is none yet

    def read(self, key: str, size: int, start: int, stop: int) -> bytes | None:
        """Bytes [start, stop) of an entry that has `size` bytes; None: it is not there."""
        try:
            descriptor = os.open(self.folder / key, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            if os.fstat(descriptor).st_size != size:
                return None
            content = os.pread(descriptor, stop - start, start)
            return content if len(content) == stop - start else None
        finally:
            os.close(descriptor)

    def write(self, key: str, content: bytes) -> None:
        """Adds an entry; where the disk is full, or the entry above the limit, it is left out."""
        if len(content) > self.limit:
            return
        with contextlib.suppress(OSError), self._filled(key, len(content)) as temporary:
            temporary.write_bytes(content)

    def whole(self, key: str, size: int, fetch: Callable[[Path], None]) -> Path:
        """The file of an entry; where it is not there, one process fills it by `fetch`, and the others wait.

        ConfigError: it does not fit.
        """
        path = self.folder / key
        if size > self.limit:
            raise ConfigError(
                f"a file of {size / 1e9:.3g} GB does not fit into the cache of {self.limit / 1e9:.3g} "
                f"GB: write data.cache.gb={-(-size * 5 // 4 // 10**9)}, say, or download the data"
            )
        with self._locked(key + _LOCK):
            if not path.is_file() or path.stat().st_size != size:
                with self._filled(key, size) as temporary:
                    fetch(temporary)
                    if temporary.stat().st_size != size:
                        raise OSError(f"{temporary.stat().st_size:,} bytes came of {size:,}")
        return path

    @contextlib.contextmanager
    def _filled(self, key: str, size: int) -> Iterator[Path]:
        """A temporary file to fill, for which there is room; afterwards it is the entry, after an error it is gone."""
        temporary = self.folder / f"{key}.{uuid.uuid4().hex}{_TEMPORARY}"
        try:
            self._take_room(temporary, size)
            yield temporary
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())  # else a power failure could leave an entry of zeros
            os.replace(temporary, self.folder / key)
        finally:
            temporary.unlink(missing_ok=True)

    def _take_room(self, temporary: Path, size: int) -> None:
        """Counts `size` bytes more, and makes the file that takes them, so that whoever counts anew sees it."""
        with self._locked(_LEDGER) as ledger:
            text = os.pread(ledger, 32, 0)
            used = int(text) if text.isdigit() else self.limit  # a new or damaged ledger: count anew
            if used + size > self.limit:
                used = self._make_room(size)
            with open(temporary, "wb") as file:
                file.truncate(size)
            os.pwrite(ledger, b"%032d" % (used + size), 0)

    def _make_room(self, size: int) -> int:
        """Removes the oldest entries; returns the bytes of the others."""
        entries = []
        for entry in os.scandir(self.folder):
            if entry.name != _LEDGER and not entry.name.endswith(_LOCK):
                with contextlib.suppress(FileNotFoundError):  # it has just been renamed or replaced
                    status = entry.stat()
                    entries.append((status.st_mtime_ns, status.st_size, entry.path))
        used = sum(entry[1] for entry in entries)
        if used + size <= self.limit:
            return used
        for _, taken, path in sorted(entries):
            if used + size <= self.limit * _KEPT or used == 0:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            used -= taken
        return used

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[int]:
        """A descriptor of a file that this process alone holds; the kernel lets go where the process is killed."""
        descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)
