"""Reads and checks manifest.json of a checkpoint, which holds the size and hash of every file and a hash of itself.

The hash of a file is blake2b over the blake2b of each of its 64 MB blocks, so that threads share a large file.
"""

import errno
import hashlib
import os
from collections import deque
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, NonNegativeInt, PositiveInt, ValidationError, field_validator

from dstrain.disk import sealed, small
from dstrain.distributed.progress import get_phases
from dstrain.recipe import ConfigError

NAME = "manifest.json"
CONSOLIDATED = "consolidated.json"  # of dstrain consolidate: hashes of its files, and more
_BLOCK_BYTES = 1 << 26
THREADS = 4  # for each rank; hashlib releases the interpreter's lock
_MAX_BYTES = 1 << 26  # bytes of a manifest: 150 for each file, and a rank writes one for each part


class _Entry(BaseModel):
    size: NonNegativeInt
    hash: str


class _Body(BaseModel):
    """What a manifest says. Any program can seal any body, so that a hash alone proves no types."""

    files: dict[str, _Entry]
    step: NonNegativeInt
    world: PositiveInt
    extra: dict[str, Any] = {}
    versions: dict[str, str] = {}

    @field_validator("files")
    @classmethod
    def _require_paths_within_folder(cls, files: dict[str, _Entry]) -> dict[str, _Entry]:
        for path in map(PurePosixPath, files):
            if path.is_absolute() or ".." in path.parts or "\0" in str(path):
                raise ValueError(f"{str(path)!r} is no path below the checkpoint's folder")
        return files


def read_manifest(path: str | os.PathLike) -> dict:
    """Returns the manifest of a checkpoint folder as a dict: files, step, world, versions, extra. Does not compare the
    files with it.

    Raises ConfigError if manifest.json is missing, altered, too large (64 MB), no regular file, or lacks an entry.
    Raises OSError if the storage fails.
    """
    try:
        body = sealed.parse_json_if_hash_matches(small.read_bytes(Path(path) / NAME, _MAX_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{NAME} is missing") from None
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.EINVAL, errno.EFBIG):
            raise ConfigError(f"{NAME} is none: {error.strerror}") from None
        raise  # of the storage
    if body is None:
        raise ConfigError(f"{NAME} is truncated or altered")
    try:
        return {**_Body.model_validate(body, strict=True).model_dump(), **body}
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{NAME} is malformed: {'.'.join(map(str, first['loc'])) or 'all'}: {first['msg']}") from None


def hash_files(folder: Path, names: list[str], sync: bool = False) -> dict[str, dict]:
    """Returns {name: {"size": bytes, "hash": hex digits}} of the named files in `folder`. sync: also flushes them to
    the disk. Raises OSError if a file is missing or cannot be read.
    """

    def hash_block(job: tuple[str, int]) -> bytes:
        name, start = job
        with open(folder / name, "rb", buffering=0) as file:
            if sync and start == 0:
                os.fsync(file.fileno())
            file.seek(start)
            digest, left = hashlib.blake2b(digest_size=32), _BLOCK_BYTES
            while left and (data := file.read(min(left, 1 << 20))):
                digest.update(data)
                left -= len(data)
            return digest.digest()

    sizes = {name: (folder / name).stat().st_size for name in names}
    jobs = [(name, start) for name in names for start in range(0, max(sizes[name], 1), _BLOCK_BYTES)]
    whole = {name: hashlib.blake2b(digest_size=32) for name in names}
    with ThreadPoolExecutor(THREADS) as pool:
        for (name, _), digest in zip(jobs, pool.map(hash_block, jobs)):
            whole[name].update(digest)
            get_phases().record_progress()
    return {name: {"size": sizes[name], "hash": whole[name].hexdigest()} for name in names}


class Digest:
    """Computes the size and hash of a file from its bytes while they are written, equal to those of `hash_files`.

    With a `pool`, its threads hash whole blocks beside the writing: the bytes must stay as they are until
    `make_manifest_entry`.
    """

    def __init__(self, pool: Executor | None = None) -> None:
        self.size = 0
        self._pool, self._block = pool, hashlib.blake2b(digest_size=32)
        self._pieces: list[memoryview] = []  # of the present block, with a pool
        self._jobs: deque[Future[bytes]] = deque()
        self._whole = hashlib.blake2b(digest_size=32)

    def update(self, data: memoryview) -> None:
        """Adds the next bytes of the file."""
        get_phases().record_progress()
        while data:
            piece = data[: _BLOCK_BYTES - self.size % _BLOCK_BYTES]
            if self._pool is None:
                self._block.update(piece)
            else:
                self._pieces.append(piece)
            self.size, data = self.size + len(piece), data[len(piece) :]
            if self.size % _BLOCK_BYTES == 0:
                self._complete_block_hash()

    def _complete_block_hash(self) -> None:
        """Completes the hash of the present block of 64 MB; with a pool, hands the block to a thread."""
        if self._pool is None:
            self._whole.update(self._block.digest())
            self._block = hashlib.blake2b(digest_size=32)
        else:
            self._jobs.append(self._pool.submit(_hash_pieces, self._pieces))
            self._pieces = []
            while len(self._jobs) > THREADS:  # no more of the bytes is kept than this
                self._whole.update(self._jobs.popleft().result())

    def make_manifest_entry(self) -> dict[str, Any]:
        """Returns {"size": bytes, "hash": hex digits} of all bytes so far, as a manifest holds them. Waits for the
        threads. Call it once, after the last `update`.
        """
        if self.size % _BLOCK_BYTES or not self.size:
            self._complete_block_hash()
        while self._jobs:
            self._whole.update(self._jobs.popleft().result())
        return {"size": self.size, "hash": self._whole.hexdigest()}


def _hash_pieces(pieces: list[memoryview]) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def find_file_faults(folder: Path, names: list[str], expected: dict[str, dict]) -> list[str]:
    """Returns a line about each named file in `folder` that is missing or differs from its {size, hash} in `expected`;
    [] if all are intact. If the storage fails, returns one line with its error alone.
    """
    try:
        sizes = {name: (folder / name).stat().st_size for name in names if (folder / name).is_file()}
        actual = hash_files(folder, [name for name, size in sizes.items() if size == expected[name]["size"]])
    except OSError as error:
        return [f"{type(error).__name__}: {error}"]
    problems = []
    for name in names:
        if name not in sizes:
            problems.append(f"{name} is missing")
        elif sizes[name] < expected[name]["size"]:
            problems.append(f"{name} is truncated to {sizes[name]} of {expected[name]['size']} bytes")
        elif actual.get(name) != expected[name]:
            problems.append(f"{name} has altered bytes")
    return problems
