"""Files behind an address, by fsspec: s3://, gs://, hf://, http(s)://, with a cache on a disk of this machine.

Files are fetched whole, once. Of data that do not fit into the cache a sample is fetched alone, by its bytes: in random
order the rest of its file would be gone before it is used. A store that fails, or answers slowly, is asked again, over
31 s; then the run ends as NotRead, and no file is at fault.
"""

import contextlib
import errno
import os
import posixpath
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from dstrain.data.files.cache import DiskCache
from dstrain.data.files.local import (
    Files,
    LocalFiles,
    Stat,
    expand_braces,
    extract_pattern_folder,
    extract_star_pattern,
    is_hidden,
    list_children,
    select_matching_files,
)
from dstrain.data.files.storage import retry
from dstrain.distributed.environment import make_cache_folder
from dstrain.recipe import Cache, ConfigError, NotRead

SCHEMES = ("s3", "gs", "hf", "http", "https")
_TRIES = 5  # over 31 s
_FIRST_TRIES = 3  # over 1 s: at the start the address is as likely at fault
_THREADS = 16  # requests at once of a process
_MAX_WAITING_PREFETCHES = 1024  # samples that may wait to be read ahead, of a process
_CACHED = 0.8  # of the cache's limit: data below it stay in the cache
_ADDRESS = re.compile(r"(s3|gs|hf|https?)://")
_SEVERAL = re.compile(r"\s+(?=(?:s3|gs|hf|https?)://)")
_FILES = (  # An address that ends so is a file's: many stores have no folders to ask for.
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
)
_VERSIONS = (  # where stores say which version of a file they have
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
_NETWORK = {  # libraries whose errors are the network's
    "aiohttp",
    "botocore",
    "aiobotocore",
    "gcsfs",
    "google",
    "httpx",
    "httpx2",
    "requests",
    "urllib3",
    "huggingface_hub",
}
_CREDENTIALS = {  # how they are given, by the scheme
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile of ~/.aws",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or gcloud auth application-default login",
    "hf": "HF_TOKEN, or hf auth login",
    "http": "user:password@ in the address, or a signed one",
}


def open_files(root: str | Path, cache: Cache | None = None) -> Files:
    """Returns an object that lists and reads the files at `root`: a folder, a single file or a pattern, on a disk or at
    an address.

    cache: settings of the cache on a disk, which is used for an address.
    """
    return RemoteFiles(str(root), cache or Cache()) if is_remote_address(root) else LocalFiles(root)


def is_remote_address(root: str | Path) -> bool:
    """Returns whether `root` is an address that fsspec reads, such as s3://BUCKET/DATA."""
    return _ADDRESS.match(str(root)) is not None


class RemoteFiles(Files):
    """A folder at an address, a single file, a brace pattern, or several addresses with spaces between them.

    Names are relative to the folder that all files have in common; what follows a ? in a web address is no part of
    them. What is known of the files is pickled to the workers, connections are not.
    """

    far = True

    def __init__(self, root: str, cache: Cache) -> None:
        self.cache = DiskCache(
            os.path.expanduser(cache.folder or make_cache_folder("dstrain/data")), int(cache.gb * 1e9)
        )
        self._store = Store(root.partition("://")[0])
        self._store.open_file_system()  # What is not installed is told before any file is blamed.
        self._stats: dict[str, Stat] = {}
        self._folders = {""}
        self._queue: queue.Queue | None = None  # of what is read ahead
        # `_addresses` has the address of each name; it is {} for a folder, which the store lists.
        self.root, self._addresses = _parse_common_folder_and_addresses(root)
        self.pattern = None if self._addresses else extract_star_pattern(root)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_queue": None}

    def list_names(self, folder: str = "") -> list[tuple[str, bool]]:
        if self._addresses:
            return list_children(self._addresses, folder)
        address = self._resolve_address(folder).rstrip("/")
        names = set()
        listed = f"{address}/" if self._store.of_the_web else address  # of the web a page of links
        for entry in self._store.call_with_retries(
            address, lambda: self._store.open_file_system().ls(listed, detail=True)
        ):
            path = _strip_query(str(entry["name"]))
            place, _, name = path.rstrip("/").rpartition("/")
            if not name or is_hidden(name) or not place.endswith(address.partition("://")[2]):
                continue  # A page may have links to anywhere.
            is_folder, known = path.endswith("/") or entry["type"] == "directory", f"{folder}/{name}".lstrip("/")
            names.add((name, is_folder))
            if is_folder:
                self._folders.add(known)
            elif entry.get("size") is not None:
                self._stats[known] = _parse_stat(entry)
        return sorted(names) if self.pattern is None else select_matching_files(sorted(names), self.pattern)

    def read_stat(self, name: str) -> Stat:
        if name in self._folders:  # Its version changes when files come or go.
            return Stat(0, blake2b(repr(self.list_names(name)).encode(), digest_size=8).hexdigest())
        if name not in self._stats:
            address = self._resolve_address(name)
            entry = self._store.call_with_retries(address, lambda: self._store.open_file_system().info(address))
            self._stats[name] = _parse_stat(entry, address)
        return self._stats[name]

    def open(self, name: str) -> BinaryIO:
        return self._open_cached_byte_range(name, 0, self.read_stat(name).size)

    def read_span(self, name: str, offset: int, size: int) -> bytes:
        whole = self.read_stat(name).size
        if offset + size > whole:
            raise ConfigError(f"{name} ends after {whole} bytes, before a sample does")
        if not size:
            return b""
        first, last = 0, whole
        is_cached = self.cache.has_entry(self._make_cache_key(name, 0, whole))
        if not is_cached and sum(stat.size for stat in self._stats.values()) > _CACHED * self.cache.limit:
            first, last = offset, offset + size
        with self._open_cached_byte_range(name, first, last) as file:
            return os.pread(file.fileno(), size, offset - first)

    def fetch_local_path(self, name: str) -> Path:
        with self.open(name) as file:
            return Path(file.name)

    def prefetch(self, read: Callable[[Any], Any], places: Iterable[Any]) -> None:
        """Lets 16 threads call `read(place)` for each of the `places`, so that their bytes are in the cache when they
        are needed. Does not wait, and ignores errors. Skips the remaining places if 1024 calls are waiting.
        """
        if self._queue is None:
            self._queue = queue.Queue(_MAX_WAITING_PREFETCHES)
            for _ in range(_THREADS):  # They are daemons: the end of a process does not wait for them.
                threading.Thread(target=_run_queued_reads, args=(self._queue,), daemon=True).start()
        with contextlib.suppress(queue.Full):
            for place in places:
                self._queue.put_nowait((read, place))

    def _open_cached_byte_range(self, name: str, start: int, end: int) -> BinaryIO:
        """Opens a cached copy of the bytes [start, end) of a file for reading. Byte `start` of the file is at position
        0 of the copy. If the cache does not have these bytes, fetches them first.
        """
        address, size, store = self._resolve_address(name), end - start, self._store

        def download_bytes(path: Path) -> None:
            """Writes the bytes [start, end) to the file `path`. Raises OSError if fewer or more came."""
            if size == self.read_stat(name).size:
                store.open_file_system().get_file(address, str(path))
            elif store.of_the_web:
                with store.open_file_system().open(
                    address, "rb", cache_type="none", size=self.read_stat(name).size
                ) as file:
                    file.seek(start)
                    path.write_bytes(file.read(size))
            else:
                path.write_bytes(store.open_file_system().cat_file(address, start=start, end=end))
            if path.stat().st_size != size:
                raise OSError(errno.EIO, f"{path.stat().st_size:,} bytes came of {size:,}")

        def download_with_retries(path: Path) -> None:
            """Writes the bytes [start, end) to the file `path`, and tries again while the store fails."""
            store.call_with_retries(address, lambda: download_bytes(path), reading_sample=True)

        return self.cache.open_or_create_entry(
            self._make_cache_key(name, start, end), size, download_with_retries, address
        )

    def _make_cache_key(self, name: str, start: int, end: int) -> str:
        """Returns the key by which the cache knows the bytes [start, end) of a file in its present version."""
        text = f"{self._resolve_address(name)}\0{self.read_stat(name).version}\0{start}\0{end}"
        return blake2b(text.encode(), digest_size=16).hexdigest()

    def _resolve_address(self, name: str) -> str:
        """Returns the address of the file `name`; the address of the root for "". Raises FileNotFoundError if data.path
        lists files, and this is none of them.
        """
        if self._addresses and name:
            if name not in self._addresses:
                raise FileNotFoundError(errno.ENOENT, "is not among the addresses of data.path", name)
            return self._addresses[name]
        return f"{self.root}/{name}" if name else self.root


class Missing(ConfigError, FileNotFoundError):
    """Raised if there is no object at an address: a FileNotFoundError for a layout that looks for a file, and a
    ConfigError for a user who has named it.
    """


class Store:
    """Calls the store of one scheme: s3, gs, hf, http or https. Its connections are not pickled."""

    def __init__(self, scheme: str) -> None:
        self.scheme, self.of_the_web = scheme, scheme.startswith("http")
        self._fs: Any = None  # made when it is used, in the process that uses it

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_fs": None}

    def call_with_retries(self, address: str, request: Callable[[], Any], reading_sample: bool = False) -> Any:
        """Returns the result of `request()`, which asks the store about an address. If the store fails, tries again.

        reading_sample: True if a sample is read: 5 tries over 31 s. False, as when data are listed: 3 tries over 1 s.
        Raises ConfigError if nothing exists at the address, and NotRead if the last try fails, too. If the store
        refuses the request, as with wrong credentials, raises NotRead if `reading_sample`, else ConfigError.
        """
        began, tries = time.monotonic(), _TRIES if reading_sample else _FIRST_TRIES

        def call_once() -> Any:
            try:
                return request()
            except (ConfigError, NotRead):
                raise
            except Exception as error:
                raise _translate_store_error(error, address, NotRead if reading_sample else ConfigError) from None

        try:
            return retry(call_once, tries)
        except (ConfigError, NotRead):
            raise
        except OSError as error:
            raise NotRead(
                f"{address} cannot be read: the store does not answer, or not in full, in {tries} tries over "
                f"{time.monotonic() - began:.0f} s ({error.strerror}), and no file is at fault: look at the "
                "network and the address, then give the same command again"
            ) from None

    def open_file_system(self) -> Any:
        """Returns fsspec's file system for this store. It is made at the first call in each process, since its
        connections do not survive a fork. Raises ConfigError if a library is not installed.
        """
        if self._fs is None:
            import fsspec

            options: dict[str, Any] = {"use_listings_cache": False}
            try:
                if self.of_the_web:
                    import aiohttp

                    options["client_kwargs"] = {"timeout": aiohttp.ClientTimeout(sock_connect=30, sock_read=60)}
                self._fs = fsspec.filesystem(self.scheme, **options)
            except ImportError as error:
                raise ConfigError(
                    f"{self.scheme}:// needs a library that is not installed ({error}): pip install 'dstrain[remote]'"
                ) from None
        return self._fs


def _run_queued_reads(tasks: queue.Queue) -> None:
    """Takes each (read, place) from the queue and calls read(place). Never returns, so it needs a thread of its own.
    Ignores errors.
    """
    while True:
        read, place = tasks.get()
        with contextlib.suppress(Exception):  # The error shows when the sample is needed.
            read(place)


def _parse_common_folder_and_addresses(root: str) -> tuple[str, dict[str, str]]:
    """Returns the folder that all addresses in `root` have in common, and {name: address} of the files that `root`
    lists. The dictionary is {} if `root` is a folder or has a star: then only the store knows which files there are.
    """
    base = extract_pattern_folder(root)
    addresses = expand_braces(root) if "{" in root else _SEVERAL.split(root)
    if len(addresses) == 1 and (base is not None or not _strip_query(root).lower().endswith(_FILES)):
        return (base or root).rstrip("/"), {}
    paths = [_strip_query(address) for address in addresses]
    if base is None:
        base = posixpath.commonpath([posixpath.dirname(path) for path in paths]).replace(":/", "://", 1)
    return base, {path[len(base) :].lstrip("/"): address for path, address in zip(paths, addresses)}


def _parse_stat(fsspec_info: dict[str, Any], address: str = "") -> Stat:
    """Returns the size and version of a file or folder from fsspec's entry about it. Raises ConfigError if a file's
    size is not known.
    """
    if fsspec_info["type"] == "directory":
        return Stat(0, "")
    if fsspec_info.get("size") is None:
        raise ConfigError(
            f"{address}: the server does not say how many bytes it has: download it, or take a server of plain files"
        )
    return Stat(
        int(fsspec_info["size"]), next((str(fsspec_info[key]) for key in _VERSIONS if fsspec_info.get(key)), "")
    )


def _strip_query(address: str) -> str:
    """Returns a web address without its query, the part after ?, which may hold a signature or a version."""
    return address.partition("?")[0] if address.startswith("http") else address


def _translate_store_error(error: Exception, address: str, refusal_type: type[Exception]) -> Exception:
    """Returns the exception to raise for an error of a library that asked a store about an address:
    - Missing, if nothing exists at the address,
    - `refusal_type`, a class of exceptions, if the store refuses the request, as with wrong credentials,
    - OSError(EIO), which is retried, if the network or the store failed,
    - any other error unchanged.
    """
    if address.startswith("http") and isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # fsspec calls whatever a web server answers "not found".
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if "range requests" in text:
        return refusal_type(
            f"{address}: the server sends whole files alone, and the data do not fit into the cache: raise "
            "data.cache.gb, or download them"
        )
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        return Missing(f"{address}: the store has no such object, folder or bucket: correct the address")
    if isinstance(error, PermissionError) or status in (401, 403) or "Credentials" in text:
        return refusal_type(
            f"{address}: the store refuses it ({text}): give credentials that may read it, by "
            f"{_CREDENTIALS[address.partition('://')[0].replace('https', 'http')]}"
        )
    if isinstance(status, int) and 400 <= status < 500 and status not in (408, 416, 425, 429):
        return refusal_type(f"{address}: the store refuses it ({text}): correct the address")
    roots = {kind.__module__.split(".")[0] for kind in type(error).__mro__}
    return OSError(errno.EIO, text) if isinstance(error, OSError) or roots & _NETWORK else error
