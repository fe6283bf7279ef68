"""Files behind an address, by fsspec: s3://, gs://, hf://, http(s)://, with a cache on a disk of this machine.

Data that fit into the cache are fetched in blocks, which serve the samples beside the one that was asked for, too. Of
data that do not fit, a sample alone is fetched: in random order the rest of its block would be gone before it is used.
"""

import contextlib
import errno
import io
import os
import posixpath
import queue
import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from dstrain.data.files.cache import DiskCache
from dstrain.data.files.local import Files, LocalFiles, Stat, before_pattern, expanded, is_hidden
from dstrain.data.files.stores import NoRanges, Store
from dstrain.recipe import Cache, ConfigError

BLOCK = 1 << 22  # bytes: what a store gives in little more time than one byte
_THREADS = 16  # requests at once of a process
_AHEAD = 1024  # samples that may wait to be read ahead, of a process
_CACHED = 0.8  # of the cache's limit: data below it stay in the cache
SCHEMES = ("s3", "gs", "hf", "http", "https")
_ADDRESS = re.compile(r"(s3|gs|hf|https?)://")
_SEVERAL = re.compile(r"\s+(?=(?:s3|gs|hf|https?)://)")
_FILES = (
    ".tar",
    ".gz",
    ".tgz",
    ".zip",
    ".parquet",
    ".arrow",
    ".npz",
    ".npy",
    ".csv",
    ".tsv",
    ".jsonl",
    ".json",
    ".mdb",
    ".mp4",
)  # an address that ends so is a file's: many stores have no folders to ask for
_VERSIONS = (
    "ETag",
    "etag",
    "Content-MD5",
    "md5Hash",
    "sha256",
    "blob_id",
    "Last-Modified",
    "LastModified",
    "updated",
    "mtime",
    "created",
)


def files_at(root: str | Path, cache: Cache | None = None) -> Files:
    """Access to a folder, or a single file, on a disk or at an address; `cache` is for the latter."""
    return RemoteFiles(str(root), cache or Cache()) if is_address(root) else LocalFiles(root)


def is_address(root: str | Path) -> bool:
    """Whether data are read through fsspec."""
    return _ADDRESS.match(str(root)) is not None


class RemoteFiles(Files):
    """A folder at an address, a single file, a brace pattern, or several addresses with spaces between them.

    Names are relative to the folder that all files have in common; what follows a ? in a web address is no part of
    them. What is known of the files is pickled to the workers, connections are not.
    """

    far = True

    def __init__(self, root: str, cache: Cache) -> None:
        self.cache = DiskCache(os.path.expanduser(cache.folder or _own_folder()), int(cache.gb * 1e9))
        self._store = Store(root.partition("://")[0])
        self._store.system()  # what is not installed is told before any file is blamed
        self._stats: dict[str, Stat] = {}
        self._folders = {""}
        self._whole: set[str] = set()  # files whose server knows no ranges
        self._start()
        self.root, self._addresses = _taken_apart(root)  # the latter by name; {}: those of a folder, which lists them

    def __getstate__(self) -> dict[str, Any]:
        unfit = ("_lock", "_pending", "_queue")
        return {name: value for name, value in self.__dict__.items() if name not in unfit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def _start(self) -> None:
        self._queue: queue.Queue | None = None  # of what is read ahead
        self._lock, self._pending = threading.Lock(), {}  # what is being fetched, by the key of its entry

    def names(self, folder: str = "") -> list[tuple[str, bool]]:
        if self._addresses:
            below = [
                name[len(folder) + 1 if folder else 0 :]
                for name in self._addresses
                if not folder or name.startswith(f"{folder}/")
            ]
            return sorted({(name.split("/")[0], "/" in name) for name in below})
        address = self._address(folder).rstrip("/")
        names = set()
        listed = f"{address}/" if self._store.of_the_web else address  # a page of links
        for entry in self._store.ask(address, lambda: self._store.system().ls(listed, detail=True)):
            path = _path(str(entry["name"]))
            place, _, name = path.rstrip("/").rpartition("/")
            if not name or is_hidden(name) or not place.endswith(address.partition("://")[2]):
                continue  # a page may have links to anywhere
            is_folder, known = path.endswith("/") or entry["type"] == "directory", f"{folder}/{name}".lstrip("/")
            names.add((name, is_folder))
            if is_folder:
                self._folders.add(known)
            elif entry.get("size") is not None:
                self._stats[known] = _stat(entry)
        return sorted(names)

    def stat(self, name: str) -> Stat:
        if name in self._folders:  # it changes when files come or go
            return Stat(0, blake2b(repr(self.names(name)).encode(), digest_size=8).hexdigest())
        if name not in self._stats:
            address = self._address(name)
            self._stats[name] = _stat(self._store.ask(address, lambda: self._store.system().info(address)), address)
        return self._stats[name]

    def open(self, name: str) -> BinaryIO:
        return io.BufferedReader(_Blocks(self, name), 1 << 16)

    def span(self, name: str, offset: int, size: int) -> bytes:
        whole = self.stat(name).size
        if offset + size > whole:
            raise ConfigError(f"{name} ends after {whole} bytes, before a sample does")
        if sum(stat.size for stat in self._stats.values()) > _CACHED * self.cache.limit:
            return self._part(name, offset, offset + size, offset, offset + size)
        pieces = []
        for start in range(offset // BLOCK * BLOCK, offset + size, BLOCK):
            stop = min(start + BLOCK, whole)
            pieces.append(self._part(name, start, stop, max(offset, start), min(offset + size, stop)))
        return b"".join(pieces)

    def local(self, name: str) -> Path:
        address, (size, version) = self._address(name), self.stat(name)
        key = _key(address, version, 0, size)
        return self._store.ask(
            address,
            lambda: self.cache.whole(key, size, lambda path: self._store.system().get_file(address, str(path))),
            reading=True,
        )

    def ahead(self, read: Callable[[Any], Any], places: Iterable[Any]) -> None:
        """Reads samples by threads, so that their bytes are in the cache when they are needed. Does not wait.

        What cannot be read shows when it is needed.
        """
        if self._queue is None:
            self._queue = queue.Queue(_AHEAD)
            for _ in range(_THREADS):  # daemons: the end of a process does not wait for them
                threading.Thread(target=_read_ahead, args=(self._queue,), daemon=True).start()
        with contextlib.suppress(queue.Full):
            for place in places:
                self._queue.put_nowait((read, place))

    def part(self, name: str, start: int, stop: int) -> bytes:
        """Bytes of a file within one block, by way of the cache."""
        block = start // BLOCK * BLOCK
        return self._part(name, block, min(block + BLOCK, self.stat(name).size), start, stop)

    def _part(self, name: str, first: int, last: int, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file, of an entry of the cache with bytes [first, last); fetched once at a time."""
        if name in self._whole:
            with open(self.local(name), "rb") as file:
                return os.pread(file.fileno(), stop - start, start)
        address = self._address(name)
        key = _key(address, self.stat(name).version, first, last)
        content = self.cache.read(key, last - first, start - first, stop - first)
        if content is not None:
            return content
        with self._lock:
            future = self._pending.get(key)
            if mine := future is None:
                future = self._pending[key] = Future()
        if mine:
            try:
                content = self._fetched(name, address, first, last)
                self.cache.write(key, content)
                future.set_result(content)
            except BaseException as error:
                future.set_exception(error)
                raise
            finally:
                with self._lock:
                    del self._pending[key]
        return future.result()[start - first : stop - first]

    def _fetched(self, name: str, address: str, start: int, stop: int) -> bytes:
        def fetch() -> bytes:
            if not self._store.of_the_web:
                return self._store.system().cat_file(address, start=start, end=stop)
            with self._store.system().open(
                address, "rb", block_size=BLOCK, cache_type="none", size=self.stat(name).size
            ) as file:
                file.seek(start)
                return file.read(stop - start)

        def checked() -> bytes:
            content = fetch()
            if len(content) != stop - start:
                raise OSError(errno.EIO, f"{len(content):,} bytes came of {stop - start:,}")
            return content

        try:
            return self._store.ask(address, checked, reading=True)
        except NoRanges:
            self._whole.add(name)
            return self._part(name, start, stop, start, stop)

    def _address(self, name: str) -> str:
        if self._addresses and name:
            if name not in self._addresses:
                raise FileNotFoundError(errno.ENOENT, "is not among the addresses of data.path", name)
            return self._addresses[name]
        return f"{self.root}/{name}" if name else self.root


class _Blocks(io.RawIOBase):
    """A file as a stream that can be searched, which is read block by block."""

    def __init__(self, files: RemoteFiles, name: str) -> None:
        self._files, self.name, self._size, self._at = files, name, files.stat(name).size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        stop = min(self._at + len(buffer), (self._at // BLOCK + 1) * BLOCK, self._size)
        if stop <= self._at:
            return 0
        content = self._files.part(self.name, self._at, stop)
        buffer[: len(content)] = content
        self._at = stop
        return len(content)


def _read_ahead(tasks: queue.Queue) -> None:
    while True:
        read, place = tasks.get()
        with contextlib.suppress(Exception):  # it shows when the sample is needed
            read(place)


def _taken_apart(root: str) -> tuple[str, dict[str, str]]:
    """The folder that all addresses have in common, and the address of each name in it; {} for a folder itself."""
    base = before_pattern(root)
    addresses = expanded(root) if "{" in root else _SEVERAL.split(root)
    if len(addresses) == 1 and (base is not None or not _path(root).lower().endswith(_FILES)):
        return (base or root).rstrip("/"), {}
    paths = [_path(address) for address in addresses]
    if base is None:
        base = posixpath.commonpath([posixpath.dirname(path) for path in paths]).replace(":/", "://", 1)
    return base, {path[len(base) :].lstrip("/"): address for path, address in zip(paths, addresses)}


def _stat(entry: dict[str, Any], address: str = "") -> Stat:
    if entry["type"] == "directory":
        return Stat(0, "")
    if entry.get("size") is None:
        raise ConfigError(
            f"{address}: the server does not say how many bytes it has: download it, or take a server of plain files"
        )
    return Stat(int(entry["size"]), next((str(entry[key]) for key in _VERSIONS if entry.get(key)), ""))


def _key(address: str, version: str, start: int, stop: int) -> str:
    return blake2b(f"{address}\0{version}\0{start}\0{stop}".encode(), digest_size=16).hexdigest()


def _path(address: str) -> str:
    """An address without the part after ?, which signs or chooses a version."""
    return address.partition("?")[0] if address.startswith("http") else address


def _own_folder() -> str:
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "dstrain", "data")
