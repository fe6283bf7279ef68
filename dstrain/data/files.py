"""Files below a root, by relative names with slashes: on a disk here, or behind an address in remote.py."""

import os
import stat
from abc import ABC, abstractmethod
from pathlib import Path
from typing import BinaryIO, NamedTuple

from dstrain.data.storage import require_regular, with_retries
from dstrain.recipe import ConfigError


class Stat(NamedTuple):
    size: int                              # bytes; of a folder 0
    version: str                           # changes when the file does: its time of change, or a store's tag


class Files(ABC):
    """Access to the files below `root`. OSError: they cannot be read. Pickled to the workers."""

    root: str

    @abstractmethod
    def names(self, folder: str = "") -> list[tuple[str, bool]]:
        """(name, whether it is a folder) of what a folder holds, sorted by name; hidden ones left out."""

    @abstractmethod
    def stat(self, name: str) -> Stat:
        """Size and version of a file or folder."""

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """A regular file, open for reading, that can be searched."""

    @abstractmethod
    def span(self, name: str, offset: int, size: int) -> bytes:
        """`size` bytes of a file. ConfigError: it ends before."""

    @abstractmethod
    def local(self, name: str) -> Path:
        """The file as one on this machine, for libraries that open files themselves."""


class LocalFiles(Files):
    """A folder, or a single file, on this machine; of a file, its own name is the only one below the root."""

    def __init__(self, root: str | Path) -> None:
        path = Path(root)
        self.single = path.name if path.is_file() else None
        self.root = str(path.parent if self.single else path)

    def names(self, folder: str = "") -> list[tuple[str, bool]]:
        if self.single is not None:
            return [(self.single, False)]
        with os.scandir(os.path.join(self.root, folder)) as entries:
            return sorted((entry.name, entry.is_dir()) for entry in entries if entry.name[0] != ".")

    def stat(self, name: str) -> Stat:
        status = os.stat(os.path.join(self.root, name))
        return Stat(0 if stat.S_ISDIR(status.st_mode) else status.st_size, str(status.st_mtime_ns))

    def open(self, name: str) -> BinaryIO:
        require_regular(self.local(name))
        return open(self.local(name), "rb")

    def span(self, name: str, offset: int, size: int) -> bytes:
        def read() -> bytes:
            with self.open(name) as file:
                file.seek(offset)
                return file.read(size)

        content = with_retries(read)
        if len(content) < size:
            raise ConfigError(f"{name} ends after {offset + len(content)} bytes, before a sample does")
        return content

    def local(self, name: str) -> Path:
        return Path(self.root, name)
