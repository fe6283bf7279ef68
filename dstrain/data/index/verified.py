"""Columns in files that are mapped, each block of which is compared with its checksum when it is first read.

    COLUMN.bin      values
    COLUMN.sums     uint32, the CRC-32 of each block of 4,096 bytes

A table of gigabytes is thus never read whole, and no altered byte of it is used. A checksum takes a fraction of the
time of a cryptographic hash, and is no protection against somebody who makes it fit.
"""

import mmap
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from dstrain.disk import atomic
from dstrain.recipe import ConfigError, NotRead

CHECKED = 1 << 29  # bytes that are read at each start, at most: 0.4 s from memory
_BLOCK = 1 << 12  # bytes


def write_checksums_beside(path: Path, values: Any) -> None:
    """Writes the checksums of a column to COLUMN.sums, beside the column's file `path`, which is COLUMN.bin.

    values: the values in the column's file, as an array or as bytes.
    """
    view = memoryview(values).cast("B") if len(values) else b""
    sums = (zlib.crc32(view[start : start + _BLOCK]) for start in range(0, len(view), _BLOCK))
    atomic.write_file(path.with_suffix(".sums"), np.fromiter(sums, np.uint32).tobytes())


class Verified:
    """A column of values of `dtype` (None: bytes) in a memory-mapped file, indexed by an int, a slice or an array of
    ints >= 0. If `dtype` is structured or has a shape, an index selects rows of a table. Pickling stores the path, and
    unpickling opens the file again.

    size: bytes that the file must have. Raises OSError or ValueError if the file or its checksums are missing, or if
    either has another size.
    """

    def __init__(self, path: Path, dtype: Any, size: int) -> None:
        self._path, self._dtype, self._view = path, dtype, map_file(path)
        self._sums = np.frombuffer(map_file(path.with_suffix(".sums")), np.uint8)
        count = -(-size // _BLOCK)
        if (len(self._view), len(self._sums)) != (size, 4 * count):
            raise ValueError(f"{path} and its checksums have {len(self._view)} and {len(self._sums)} bytes")
        self._sums, self._seen = self._sums.view(np.uint32), bytearray(count)
        self._values = self._view if dtype is None else np.frombuffer(self._view, dtype)
        self._width = 1 if dtype is None else np.dtype(dtype).itemsize

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, key: Any) -> Any:
        """Returns the values at `key` after checking their blocks. Raises NotRead if the file was altered there."""
        if isinstance(key, slice):
            start, stop, _ = key.indices(len(self))
            self._verify_blocks(
                range(start * self._width // _BLOCK, -(-stop * self._width // _BLOCK) if start < stop else 0)
            )
        elif isinstance(key, np.ndarray):
            self._verify_blocks(np.unique(key.astype(np.int64) * self._width // _BLOCK).tolist())
        else:
            self._verify_blocks((int(key) * self._width // _BLOCK,))
        return self._values[key]

    def matches_checksums_if_small(self) -> bool:
        """Returns whether the whole file matches its checksums. A file above 512 MB is not checked here but when it is
        read, and counts as intact.
        """
        if len(self._view) > CHECKED:
            return True
        try:
            self._verify_blocks(range(len(self._sums)))
        except NotRead:
            return False
        return True

    def _verify_blocks(self, blocks: Iterable[int]) -> None:
        """Compares blocks of the file with their checksums. Skips blocks that were compared before. Raises NotRead if a
        block was altered.

        blocks: the numbers of blocks of 4,096 bytes.
        """
        for block in blocks:
            if self._seen[block]:
                continue
            if zlib.crc32(self._view[block * _BLOCK : (block + 1) * _BLOCK]) != self._sums[block]:
                raise NotRead(
                    f"{self._path} was altered after it was written (from byte {block * _BLOCK:,} on): remove "
                    f"{self._path.parent}, then give the same command again, which makes it anew"
                )
            self._seen[block] = 1

    def __reduce__(self) -> tuple:
        return open_previously_checked_column, (self._path, self._dtype, len(self._view))


def open_column_if_intact(path: Path, dtype: Any, size: int) -> Verified | None:
    """Returns the column in a file of `size` bytes. Returns None if the file or its checksums are missing or of another
    size, or if a block was altered; a file above 512 MB is checked only when it is read.
    """
    try:
        column = Verified(path, dtype, size)
    except (OSError, ValueError):
        return None
    return column if column.matches_checksums_if_small() else None


def open_previously_checked_column(path: Path, dtype: Any, size: int) -> Verified:
    """Returns the column in a file of `size` bytes that this or another process has already checked. Its blocks are
    checked again when they are read.

    Raises ConfigError if this machine cannot open the file or its checksums, or if either has another size.
    """
    try:
        return Verified(path, dtype, size)
    except (OSError, ValueError):
        raise ConfigError(
            f"{path} is not to be seen from here, or damaged: remove {path.parent}, or write "
            "data.index=FOLDER, a folder that all machines share"
        ) from None


def map_file(path: Path) -> Any:
    """Returns a read-only memory map of a file; b"" for an empty file. Does not check its content. Raises OSError if
    the file cannot be opened.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
