"""What decides on the bucket of each sample of an index: the size of an image, or how many frames a clip has.

It is read once, by several threads of one rank, from the headers of the files; the frames of some clips are counted by
reading them whole. Beside an index on a disk it is kept: sizes.bin, int32 (N, 2), and frames.bin, int32 (N, 1). An
interruption loses some seconds of it.
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dstrain.data.clips import count_frames
from dstrain.data.columns import ELSEWHERE
from dstrain.data.folder import of_each
from dstrain.data.images import encoded
from dstrain.data.index import CHUNK, Index
from dstrain.data.index_build import from_first, locked
from dstrain.data.layouts.base import Layout, Place
from dstrain.data.pixels import FORMATS, open_image
from dstrain.data.source import BadSample, reading
from dstrain.data.storage import with_retries
from dstrain.ranks.phases import phases
from dstrain.recipe import write_errors

_CLIPS = 1024                              # files between two writes, where each may take long


def pixel_sizes(layout: Layout, index: Index) -> np.ndarray:
    """int32 (N, 2): width and height of each image of the index, 0 where it cannot be read; on all ranks together.

    NotRead: the storage fails.
    """
    return _table(layout, index, "sizes", 2, lambda place: size_of(layout, place), CHUNK)


def frame_counts(layout: Layout, index: Index) -> np.ndarray:
    """int32 (N, 1): how many frames each clip of the index has, 0 where it cannot be read; as `pixel_sizes`."""
    return _table(layout, index, "frames", 1, lambda place: (frames_of(layout, place),), _CLIPS)


def size_of(layout: Layout, place: Place) -> tuple[int, int]:
    """Width and height of an image, from its header. BadSample: it has none."""
    def read() -> tuple[int, int]:
        content = encoded(layout, place)
        if isinstance(content, np.ndarray):
            return content.shape[1], content.shape[0]
        with open_image(content, FORMATS) as image:
            return image.size

    with reading(place.name, Path(layout.root, place.name)):
        return with_retries(read)


def frames_of(layout: Layout, place: Place) -> int:
    """How many frames a clip has. BadSample: it cannot be read."""
    with reading(place.name, Path(layout.root, place.name)):
        return count_frames(layout.read(place))


def _table(layout: Layout, index: Index, name: str, width: int, read: Callable[[Place], tuple[int, ...]],
           chunk: int) -> np.ndarray:
    """int32 (N, width): what `read` says of each sample, 0 where it cannot be read; on all ranks together.

    Beside an index on a disk, one command at a time writes it. ConfigError: it cannot be written there.
    """
    path = None if index.folder is None else index.folder / f"{name}.bin"

    def stands() -> bool:
        return path.exists() and path.stat().st_size == len(index) * width * np.dtype(np.int32).itemsize

    def make() -> np.ndarray | None:
        if path is None:
            return _read(layout, index, None, width, read, chunk)
        if not stands():
            with locked(index.folder), write_errors(index.folder, ELSEWHERE):
                if not stands():
                    _read(layout, index, path, width, read, chunk)
        return None

    table = from_first(make)
    return np.memmap(path, np.int32, "r").reshape(-1, width) if table is None else table


def _read(layout: Layout, index: Index, path: Path | None, width: int, read: Callable[[Place], tuple[int, ...]],
          chunk: int) -> np.ndarray | None:
    """The table of an index in memory; of one on a disk it is written to `path`."""
    def known(row: int) -> tuple[int, ...]:
        try:
            return read(index.place(row))
        except BadSample:
            return (0,) * width

    size = width * np.dtype(np.int32).itemsize               # bytes of a row
    part = path and path.with_suffix(".part")
    done = part.stat().st_size // size if part and part.exists() else 0
    rows = []
    with tqdm(total=len(index), initial=done, unit=" headers", delay=2, disable=None, desc=layout.root) as bar:
        for start in range(done, len(index), chunk):
            phases().at(f"reading the headers of {layout.root}: {start:,} of {len(index):,}")
            stop = min(start + chunk, len(index))
            block = np.array(list(of_each(known, range(start, stop))), np.int32)
            if part is None:
                rows.append(block)
            else:
                _append(part, block, start * size)
            bar.update(stop - start)
    if part is None:
        return np.concatenate(rows)
    os.replace(part, path)
    return None


def _append(path: Path, block: np.ndarray, offset: int) -> None:
    """Writes rows behind whole ones; what a crash has left of others is cut off."""
    with open(path, "r+b" if path.exists() else "wb") as file:
        file.truncate(offset)
        file.seek(offset)
        file.write(block.tobytes())
