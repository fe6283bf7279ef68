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
from dstrain.data.index.build import make_index_files_once
from dstrain.data.index.index import CHUNK, Index
from dstrain.data.index.verified import (
    Verified,
    map_file,
    open_column_if_intact,
    open_previously_checked_column,
    write_checksums_beside,
)
from dstrain.data.source import BadSample, convert_errors_to_bad_sample
from dstrain.data.sources.images import fetch_encoded_file
from dstrain.distributed.progress import get_phases

_CLIPS = 1024  # clips between two writes; fewer than images, since a clip may take long


def measure_image_sizes(layout: Layout, index: Index) -> Verified:
    """Returns int32 (N, 2), the width and height of each image of the index; (0, 0) if the image cannot be read.
    Measures only at the first call, and keeps the result beside the index, which must be on a disk. All ranks must call
    it.

    Raises NotRead if the storage fails.
    """
    name = "upright_sizes" if layout.request.upright else "sizes"
    return _open_or_measure_table(layout, index, name, 2, lambda place: read_image_size(layout, place), CHUNK)


def measure_clip_frame_counts(layout: Layout, index: Index) -> Verified:
    """Returns int32 (N, 1), the number of frames of each clip of the index; 0 if the clip cannot be read. Counts only
    at the first call, and keeps the result beside the index, which must be on a disk. All ranks must call it.

    Raises NotRead if the storage fails.
    """
    return _open_or_measure_table(
        layout, index, "frames", 1, lambda place: (count_sample_frames(layout, place),), _CLIPS
    )


def read_image_size(layout: Layout, place: Place) -> tuple[int, int]:
    """Returns (width, height) of an image in pixels, turned upright unless data.upright is false. Reads the header
    alone. Raises BadSample if the header cannot be read.
    """

    def read_header_size() -> tuple[int, int]:
        with open_image(fetch_encoded_file(layout, place), FORMATS) as image:
            return read_upright_size(image) if layout.request.upright else image.size

    with convert_errors_to_bad_sample(place.name, Path(layout.root, place.name)):
        return retry(read_header_size)


def count_sample_frames(layout: Layout, place: Place) -> int:
    """Returns the number of frames of a clip. Raises BadSample if it cannot be read."""
    with convert_errors_to_bad_sample(place.name, Path(layout.root, place.name)):
        return count_frames(layout.read(place))


def _open_or_measure_table(
    layout: Layout, index: Index, name: str, width: int, measure: Callable[[Place], tuple[int, ...]], chunk: int
) -> Verified:
    """Returns a table with a row of `width` numbers for each sample, int32 (N, width), mapped from the file NAME.bin
    beside the index. If there is no such file, measures all samples and writes it. All ranks must call it.

    measure: returns the numbers of one sample; if it raises BadSample, zeros are written
    chunk: how many samples are measured between two writes

    Raises ConfigError if the file cannot be written.
    """
    path, dtype = index.folder / f"{name}.bin", np.dtype((np.int32, (width,)))
    found = partial(open_column_if_intact, path, dtype, len(index) * dtype.itemsize)
    make_index_files_once(index, found, lambda: _measure_and_write_table(path, layout, index, dtype, measure, chunk))
    return open_previously_checked_column(path, dtype, len(index) * dtype.itemsize)


def _measure_and_write_table(
    path: Path, layout: Layout, index: Index, dtype: np.dtype, measure: Callable[[Place], tuple[int, ...]], chunk: int
) -> None:
    """Measures all samples. Writes to `path` a row of int32 for each sample, zeros if it cannot be read, and checksums
    to a file beside it. Writes `chunk` rows at a time to a .part file; after an interruption the next call goes on
    there.
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
            _write_rows_from_offset(
                part,
                np.array(list(map_in_threads(measure_or_zero, range(start, stop))), np.int32),
                start * dtype.itemsize,
            )
            bar.update(stop - start)
    write_checksums_beside(path, map_file(part))
    os.replace(part, path)


def _write_rows_from_offset(path: Path, block: np.ndarray, offset: int) -> None:
    """Writes `block` to a file at byte `offset`, in place of all that follows. Creates the file if it is missing."""
    with open(path, "r+b" if path.exists() else "wb") as file:
        file.truncate(offset)
        file.seek(offset)
        file.write(block.tobytes())
