"""Measures what decides the bucket of each sample of an index: the size of an image, or the number of frames of a clip.

Several threads of one rank read the headers of the files, once; the frames of some clips are counted by reading them
whole. The measures are kept beside the index, with checksums: upright_sizes.bin, or sizes.bin if pictures are not
turned upright, int32 (N, 2), and frames.bin, int32 (N, 1). An interruption loses some seconds of work.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dstrain.data.decode.clips import count_frames
from dstrain.data.decode.pixels import FORMATS, open_image, read_upright_size
from dstrain.data.files.listing import map_in_threads
from dstrain.data.files.storage import retry
from dstrain.data.formats.base import Layout, Place
from dstrain.data.index.build import make_files_once
from dstrain.data.index.index import CHUNK, Index
from dstrain.data.index.verified import (
    Verified,
    map_file,
    open_column_if_intact,
    open_shared_column,
    write_checksums_beside,
)
from dstrain.data.source import BadSample, report_bad_sample
from dstrain.data.sources.images import fetch_encoded_file
from dstrain.distributed.progress import get_phases

_CLIPS = 1024  # clips between two writes; fewer than images, since a clip may take long


def measure_images(layout: Layout, index: Index) -> Verified:
    """Returns int32 (N, 2): width and height of each image of the index, (0, 0) if it cannot be read. All ranks call it
    together.

    The index must be on a disk. Raises NotRead if the storage fails.
    """
    name = "upright_sizes" if layout.request.upright else "sizes"
    return _open_or_measure(layout, index, name, 2, lambda place: read_image_size(layout, place), CHUNK)


def measure_clips(layout: Layout, index: Index) -> Verified:
    """Returns int32 (N, 1): how many frames each clip of the index has, 0 if it cannot be read; see `measure_images`.

    The index must be on a disk. Raises NotRead if the storage fails.
    """
    return _open_or_measure(layout, index, "frames", 1, lambda place: (count_sample_frames(layout, place),), _CLIPS)


def read_image_size(layout: Layout, place: Place) -> tuple[int, int]:
    """Returns the width and height of an image, in pixels, from its header: turned upright unless data.upright=false.

    Raises BadSample if the header cannot be read.
    """

    def read() -> tuple[int, int]:
        with open_image(fetch_encoded_file(layout, place), FORMATS) as image:
            return read_upright_size(image) if layout.request.upright else image.size

    with report_bad_sample(place.name, Path(layout.root, place.name)):
        return retry(read)


def count_sample_frames(layout: Layout, place: Place) -> int:
    """Returns the number of frames of a clip. Raises BadSample if it cannot be read."""
    with report_bad_sample(place.name, Path(layout.root, place.name)):
        return count_frames(layout.read(place))


def _open_or_measure(
    layout: Layout, index: Index, name: str, width: int, measure: Callable[[Place], tuple[int, ...]], chunk: int
) -> Verified:
    """Returns int32 (N, width), the measures of each sample, mapped from a file beside the index. If the file is not
    there, measures all samples first, while other commands wait. All ranks call it together.

    name: of the file. width: numbers for each sample. measure: gives them; zeros stand where it raises BadSample.
    chunk: samples between two writes. Raises ConfigError if the file cannot be written.
    """
    path, dtype = index.folder / f"{name}.bin", np.dtype((np.int32, (width,)))
    found = partial(open_column_if_intact, path, dtype, len(index) * dtype.itemsize)
    make_files_once(index, found, lambda: _write_measures(path, layout, index, dtype, measure, chunk))
    return open_shared_column(path, dtype, len(index) * dtype.itemsize)


def _write_measures(
    path: Path, layout: Layout, index: Index, dtype: np.dtype, measure: Callable[[Place], tuple[int, ...]], chunk: int
) -> None:
    """Measures all samples and writes one row of int32 for each to `path`; the row of a sample that cannot be read is
    zeros. Writes checksums to a file beside it. Appends `chunk` rows at a time to a file with the suffix .part, from
    which the next call goes on after an interruption.
    """

    def measure_or_zero(row: int) -> tuple[int, ...]:
        try:
            return measure(index.read_place(row))
        except BadSample:
            return (0,) * dtype.shape[0]

    part = path.with_suffix(".part")
    done = part.stat().st_size // dtype.itemsize if part.exists() else 0
    with tqdm(
        total=len(index),
        initial=done,
        unit=f" {layout.request.noun}",
        delay=2,
        disable=None,
        desc=f"measuring {layout.root}",
    ) as bar:
        for start in range(done, len(index), chunk):
            get_phases().enter_phase(f"measuring {layout.root}: {start:,} of {len(index):,}")
            stop = min(start + chunk, len(index))
            _append_rows(
                part,
                np.array(list(map_in_threads(measure_or_zero, range(start, stop))), np.int32),
                start * dtype.itemsize,
            )
            bar.update(stop - start)
    write_checksums_beside(path, map_file(part))
    os.replace(part, path)


def _append_rows(path: Path, block: np.ndarray, offset: int) -> None:
    """Writes the rows of `block` to a file at byte `offset`, and deletes everything after them. Makes the file if
    needed.
    """
    with open(path, "r+b" if path.exists() else "wb") as file:
        file.truncate(offset)
        file.seek(offset)
        file.write(block.tobytes())
