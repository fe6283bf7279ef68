"""The width and height of every image of an index, from the headers of the files: for buckets and for descriptions.

They are read once, by several threads of one rank, and kept beside the index where that is on a disk: sizes.bin, int32
(N, 2). An interruption loses some seconds of it.
"""

import os
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dstrain.data.folder import of_each
from dstrain.data.images import encoded
from dstrain.data.index import CHUNK, Index
from dstrain.data.index_build import from_first
from dstrain.data.layouts.base import Layout, Place
from dstrain.data.pixels import FORMATS, open_image
from dstrain.data.source import BadSample, reading
from dstrain.data.storage import with_retries
from dstrain.ranks.phases import phases

_ROW = 8                                   # bytes


def pixel_sizes(layout: Layout, index: Index) -> np.ndarray:
    """int32 (N, 2): width and height of each image of the index, 0 where it cannot be read; on all ranks together.

    NotRead: the storage fails.
    """
    path = None if index.folder is None else index.folder / "sizes.bin"
    sizes = from_first(lambda: _sizes(layout, index, path))
    return np.memmap(path, np.int32, "r").reshape(-1, 2) if sizes is None else sizes


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


def _sizes(layout: Layout, index: Index, path: Path | None) -> np.ndarray | None:
    """The sizes of an index in memory; of one on a disk they are written to `path`."""
    if path is not None and path.exists() and path.stat().st_size == len(index) * _ROW:
        return None
    part = path and path.with_suffix(".part")
    done = part.stat().st_size // _ROW if part and part.exists() else 0
    rows = []
    with tqdm(total=len(index), initial=done, unit=" headers", delay=2, disable=None, desc=layout.root) as bar:
        for start in range(done, len(index), CHUNK):
            phases().at(f"reading the headers of {layout.root}: {start:,} of {len(index):,}")
            stop = min(start + CHUNK, len(index))
            block = np.array(list(of_each(lambda row: _known(layout, index.place(row)), range(start, stop))), np.int32)
            if part is None:
                rows.append(block)
            else:
                _append(part, block, start * _ROW)
            bar.update(stop - start)
    if part is None:
        return np.concatenate(rows)
    os.replace(part, path)
    return None


def _known(layout: Layout, place: Place) -> tuple[int, int]:
    try:
        return size_of(layout, place)
    except BadSample:
        return 0, 0


def _append(path: Path, block: np.ndarray, offset: int) -> None:
    """Writes rows behind whole ones; what a crash has left of others is cut off."""
    with open(path, "r+b" if path.exists() else "wb") as file:
        file.truncate(offset)
        file.seek(offset)
        file.write(block.tobytes())
