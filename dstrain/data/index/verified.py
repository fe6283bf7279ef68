"""Columns in files that are mapped, each block of which is compared with its checksum when it is first read.

    COLUMN.bin      values
    COLUMN.sums     uint64, the checksum of each block of 4,096 bytes

A table of gigabytes is thus never read whole, and no altered byte of it is used. The checksum of a block is the sum of
its words of 8 bytes times odd numbers, modulo 2^64, where the upper half of a word has been added to its lower half by
XOR: else two flipped upper bits would cancel. A change within one word always changes the sum, any other one almost
surely. It takes a fraction of the time of a cryptographic hash, and is no protection against somebody who makes it fit.
"""

import mmap
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dstrain.disk import atomic
from dstrain.recipe import ConfigError, NotRead

CHECKED = 1 << 29  # bytes that are read at each start, at most: 0.1 s from memory
_BLOCK = 1 << 12  # bytes
_MANY = 1 << 8  # blocks that are summed at once: they stay in a core's cache


def write_sums(path: Path, values: Any) -> None:
    """Writes the checksums of the column `path`, COLUMN.bin, beside it. values: an array, or bytes."""
    view = memoryview(values).cast("B") if len(values) else b""
    count = -(-len(view) // _BLOCK)
    parts = [_sums(view, range(start, min(start + _MANY, count))) for start in range(0, count, _MANY)]
    atomic.write_file(path.with_suffix(".sums"), b"".join(part.tobytes() for part in parts))


class Verified:
    """A column that is mapped: values of `dtype`, None for bytes. Indexed by an int, a slice or an array of ints >= 0.
    A dtype of several values makes a table, whose rows are indexed.

    size: bytes that the file has. OSError, ValueError: it or its checksums are not there, or of another size.
    """

    def __init__(self, path: Path, dtype: Any, size: int) -> None:
        self._view, sums = mapped(path), mapped(path.with_suffix(".sums"))
        count = -(-size // _BLOCK)
        if (len(self._view), len(sums)) != (size, 8 * count):
            raise ValueError(f"{path} and its checksums have {len(self._view)} and {len(sums)} bytes")
        self._path, self._sums, self._seen = path, np.frombuffer(sums, np.uint64), bytearray(count)
        self._values = self._view if dtype is None else np.frombuffer(self._view, dtype)
        self._width = 1 if dtype is None else np.dtype(dtype).itemsize

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, key: Any) -> Any:
        """NotRead: the file was altered where these values stand."""
        if isinstance(key, slice):
            start, stop, _ = key.indices(len(self))
            if start < stop:
                self._verify_range(start * self._width // _BLOCK, -(-stop * self._width // _BLOCK))
        elif isinstance(key, np.ndarray):
            self._verify_some(key.astype(np.int64) * self._width // _BLOCK)
        else:
            self._verify(int(key) * self._width // _BLOCK)
        return self._values[key]

    def is_whole(self) -> bool:
        """Whether the file is what was written; reads all of it."""
        try:
            self._verify_range(0, len(self._sums))
        except NotRead:
            return False
        return True

    def _verify(self, block: int) -> None:
        if not self._seen[block]:
            start = block * _BLOCK
            words = np.frombuffer(self._view, np.uint64, min(_BLOCK, len(self._view) - start) // 8, start)
            if len(words) * 8 < _BLOCK or _mixed(words) @ _odd(len(words)) != self._sums[block]:  # last, or altered
                self._verify_range(block, block + 1)
            self._seen[block] = 1

    def _verify_some(self, blocks: np.ndarray) -> None:
        """Blocks in any order, mostly ascending, with repetitions."""
        blocks = blocks[np.frombuffer(self._seen, np.uint8)[blocks] == 0]
        blocks = np.unique(blocks[np.flatnonzero(np.diff(blocks, prepend=-1))])
        if len(blocks) and blocks[-1] - blocks[0] < 2 * len(blocks):
            self._verify_range(int(blocks[0]), int(blocks[-1]) + 1)
        else:
            for block in blocks.tolist():
                self._verify(block)

    def _verify_range(self, first: int, last: int) -> None:
        for start in range(first, last, _MANY):
            blocks = range(start, min(start + _MANY, last))
            if self._seen.find(0, start, blocks.stop) >= 0:
                wrong = np.flatnonzero(_sums(self._view, blocks) != self._sums[start : blocks.stop])
                if len(wrong):
                    byte = (start + int(wrong[0])) * _BLOCK
                    raise NotRead(
                        f"{self._path} was altered after it was written (from byte {byte:,} on): remove "
                        f"{self._path.parent}, then give the same command again, which makes it anew"
                    )
                self._seen[start : blocks.stop] = b"\1" * len(blocks)


def open_whole(path: Path, dtype: Any, size: int) -> Verified | None:
    """A column as it was written; None: it is not there, or altered. A large one is verified as it is used."""
    try:
        column = Verified(path, dtype, size)
    except (OSError, ValueError):
        return None
    return column if size > CHECKED or column.is_whole() else None


def open_shared(path: Path, dtype: Any, size: int) -> Verified:
    """A column that this or another process has just found whole. ConfigError: it is not to be seen from here."""
    try:
        return Verified(path, dtype, size)
    except (OSError, ValueError):
        raise ConfigError(
            f"{path} is not to be seen from here, or damaged: remove {path.parent}, or write "
            "data.index=FOLDER, a folder that all machines share"
        ) from None


def mapped(path: Path) -> Any:
    """The bytes of a file, which is not read before they are used."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""


def _sums(view: Any, blocks: range) -> np.ndarray:
    """The checksums of blocks that stand one behind the other: uint64 (blocks,)."""
    words, (whole, rest) = _BLOCK // 8, divmod(min(blocks.stop * _BLOCK, len(view)) - blocks.start * _BLOCK, _BLOCK)
    table = np.frombuffer(view, np.uint64, whole * words, blocks.start * _BLOCK).reshape(whole, words)
    sums = _mixed(table) @ _odd(words)
    if not rest:
        return sums
    last = bytes(view[len(view) - rest :]).ljust(_BLOCK, b"\0")
    return np.append(sums, _mixed(np.frombuffer(last, np.uint64)[None]) @ _odd(words))


def _mixed(words: np.ndarray) -> np.ndarray:
    return words ^ words >> np.uint64(32)


@cache
def _odd(count: int) -> np.ndarray:
    return np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)
