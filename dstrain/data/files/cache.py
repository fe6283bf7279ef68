"""A cache of what was fetched from an address: files in one folder, bounded, shared by the processes of a machine.

An entry is written under a temporary name and renamed, so that it is whole or not there. A ledger counts the bytes of
all entries: their room is reserved there, under a lock, before an entry is written. A process that is killed leaves a
temporary file, which counts as an entry and is removed when it is among the oldest.
"""

import contextlib
import fcntl
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from dstrain.recipe import ConfigError

_FOLDER = "dstrain-cache"  # inside the user's folder, so that no file of theirs is ever removed
_LEDGER, _LOCK, _TEMPORARY = "ledger", ".lock", ".tmp"
_KEPT = 0.9  # share of the limit that is left when the oldest entries go


class DiskCache:
    """A cache of files in a folder, at most `limit` bytes in all. The key of an entry is the name of its file. Raises
    ConfigError if the folder cannot be written.
    """

    def __init__(self, folder: str | Path, limit: int) -> None:
        self.folder, self.limit = Path(folder) / _FOLDER, limit
        try:
            with self._hold_file_lock(_LEDGER):
                pass
        except OSError as error:
            raise ConfigError(
                f"data.cache.folder={folder} cannot be written or locked ({error.strerror}): name a "
                "folder on a disk of this machine"
            ) from None

    def has_entry(self, key: str) -> bool:
        """Returns whether an entry exists now; another process may delete it at any moment."""
        return os.path.exists(self.folder / key)

    def open_or_create_entry(self, key: str, size: int, write: Callable[[Path], None], display_name: str) -> BinaryIO:
        """Opens the entry `key` of `size` bytes for reading. If the entry is missing or has another size, first writes
        it with `write(path)`, and may delete the least recently used entries to make room. If several processes ask for
        it, one writes and the others wait.

        display_name: what messages call the entry. Raises ConfigError if `size` is above the limit of the cache.
        """
        if size > self.limit:
            raise ConfigError(
                f"{display_name}: a file of {size / 1e9:.3g} GB does not fit into the cache of {self.limit / 1e9:.3g} "
                f"GB: write data.cache.gb={-(-size * 5 // 4 // 10**9)}, say, or download the data"
            )
        while True:
            if file := self._open_entry_if_complete(key, size):
                return file
            with self._hold_file_lock(key[:2] + _LOCK):  # There are 256 locks at most, and none is ever removed.
                if file := self._open_entry_if_complete(key, size):
                    return file  # Another process has written it meanwhile.
                self._create_entry(key, size, write)

    def _open_entry_if_complete(self, key: str, size: int) -> BinaryIO | None:
        """Opens an entry for reading, and marks it as used now. Returns None if it is missing or has another size."""
        try:
            file = open(self.folder / key, "rb")  # noqa: SIM115 (the caller closes it)
        except FileNotFoundError:
            return None
        if os.fstat(file.fileno()).st_size != size:
            file.close()
            return None
        with contextlib.suppress(PermissionError):  # Another user may own the entry.
            os.utime(file.fileno())  # It was used now: the entry that was not used for longest goes first.
        return file

    def _create_entry(self, key: str, size: int, write: Callable[[Path], None]) -> None:
        """Makes room for an entry of `size` bytes, and calls `write(path)`, which writes it. Other processes see the
        entry only when it is complete.
        """
        temporary = self.folder / f"{key}.{uuid.uuid4().hex}{_TEMPORARY}"
        try:
            self._reserve_space(temporary, size)
            write(temporary)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())  # Else a power failure could leave an entry of zeros.
            os.replace(temporary, self.folder / key)
        finally:
            temporary.unlink(missing_ok=True)

    def _reserve_space(self, temporary_file: Path, size: int) -> None:
        """Reserves `size` bytes for a new entry: adds them to the ledger, a file with the total bytes of all entries.
        If there is no room, first deletes the least recently used entries.

        temporary_file: a file that is made with this size, and holds the place of the entry until it is written.
        """
        with self._hold_file_lock(_LEDGER) as ledger:
            text = os.pread(ledger, 32, 0)
            used = int(text) if text.isdigit() else self.limit  # The entries are counted anew.
            if used + size > self.limit:
                used = self._evict_and_count_remaining_bytes(size)
            with open(temporary_file, "wb") as file:
                file.truncate(size)
            os.pwrite(ledger, b"%032d" % (used + size), 0)

    def _evict_and_count_remaining_bytes(self, needed_bytes: int) -> int:
        """Makes room for `needed_bytes` more bytes. If the entries and these bytes exceed the limit, deletes the least
        recently used entries, until both fit into 90 % of the limit. Returns the bytes of the remaining entries.
        """
        entries = []
        for entry in os.scandir(self.folder):
            if entry.name != _LEDGER and not entry.name.endswith(_LOCK):
                with contextlib.suppress(FileNotFoundError):  # It has just been renamed or replaced.
                    status = entry.stat()
                    entries.append((status.st_mtime_ns, status.st_size, entry.path))
        used = sum(entry[1] for entry in entries)
        if used + needed_bytes <= self.limit:
            return used
        for _, taken, path in sorted(entries):
            if used + needed_bytes <= self.limit * _KEPT or used == 0:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            used -= taken
        return used

    @contextlib.contextmanager
    def _hold_file_lock(self, name: str) -> Iterator[int]:
        """Within the block, this process alone holds the lock of the file `name` in the cache's folder; first waits for
        other processes. Yields the file's descriptor. If the process is killed, the kernel releases the lock.
        """
        self.folder.mkdir(parents=True, exist_ok=True)  # There is none yet on another machine.
        descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)
