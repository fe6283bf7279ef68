"""An .npz of images, as ADM keeps them and `dstrain generate` writes them: arr_0 uint8 (N, H, W, C), arr_1 labels.

Labels are whole numbers (N,) or one-hot rows (N, classes). Rows are read one after the other, so that memory does not
grow with their number.
"""

import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from dstrain.commands.convert import Pictures, Sample
from dstrain.data.files.storage import refuse_special_file
from dstrain.recipe import ConfigError

_MAX_LABEL_BYTES = 1 << 31  # 200 million labels


def read_npz(path: Path) -> dict[str, Pictures]:
    """Returns the images as one split. Raises ConfigError if the file holds none, or its labels are no such."""
    with _get_mapped_array(path, "arr_0") as (_, shape, dtype):
        if dtype != np.uint8 or len(shape) != 4 or shape[3] not in (1, 3, 4) or not math.prod(shape) > 0:
            raise ConfigError(f"{path}: its arr_0 is {dtype} {shape}, and images are uint8 (N, H, W, 1, 3 or 4)")
    return {"train": Pictures(shape[0], _list_samples(path, _read_labels(path, shape[0])))}


def _list_samples(path: Path, labels: np.ndarray | None) -> Iterator[Sample]:
    with _get_mapped_array(path, "arr_0") as (file, shape, _):
        size = math.prod(shape[1:])
        for number in range(shape[0]):
            row = file.read(size)
            if len(row) < size:
                raise ConfigError(f"{path}: its arr_0 ends before row {number}: write it anew")
            label = None if labels is None else int(labels[number])
            yield f"{number:08}", np.frombuffer(row, np.uint8).reshape(shape[1:]), label


def _read_labels(path: Path, number: int) -> np.ndarray | None:
    """Returns arr_1 as numbers (number,); None if there is none."""
    with _open_zip(path) as archive:
        if "arr_1.npy" not in archive.namelist():
            return None
    with _get_mapped_array(path, "arr_1") as (file, shape, dtype):
        size = math.prod(shape) * dtype.itemsize
        if dtype.kind not in "iufb" or len(shape) not in (1, 2) or shape[0] != number or size > _MAX_LABEL_BYTES:
            raise ConfigError(f"{path}: its arr_1 is {dtype} {shape}, and labels are integers ({number},)")
        labels = np.frombuffer(file.read(size), dtype).reshape(shape)
    if labels.ndim == 2:
        whole = ((labels != 0).sum(1) == 1) & (labels.max(1) == 1)
    else:
        whole = np.isfinite(labels) & (labels == np.trunc(labels)) & (labels >= 0)
    if not whole.all():
        raise ConfigError(f"{path}: its arr_1 holds neither whole numbers (N,) nor one-hot rows (N, classes)")
    return labels.argmax(1) if labels.ndim == 2 else labels


@contextmanager
def _open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Opens an .npz. Raises ConfigError if it is none, also where it is read inside."""
    try:
        refuse_special_file(path)
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error, EOFError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): write it with numpy.savez(FILE, arr_0=images)") from None


@contextmanager
def _get_mapped_array(path: Path, name: str) -> Iterator[tuple[IO[bytes], tuple[int, ...], np.dtype]]:
    """Opens an array where its numbers begin; gives its shape and dtype, too. Raises ConfigError if it holds no such.

    Nothing is unpickled: an array of objects is refused by its dtype.
    """
    with _open_zip(path) as archive:
        if f"{name}.npy" not in archive.namelist():
            held = ", ".join(sorted(archive.namelist())[:5])
            raise ConfigError(f"{path} holds {held or 'nothing'}, and no {name} with images, uint8 (N, H, W, C)")
        with archive.open(f"{name}.npy") as file:
            try:
                version = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, by_columns, dtype = read(file)
            except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
                raise ConfigError(f"{path}: its {name} is no array of numpy's ({str(error)[:100]})") from None
            size = file.tell() + math.prod(shape) * dtype.itemsize
            if (
                dtype.hasobject
                or by_columns
                or min(shape, default=0) < 0
                or size != archive.getinfo(f"{name}.npy").file_size
            ):
                raise ConfigError(
                    f"{path}: its {name} is damaged, or holds Python objects, or is stored by columns: it must hold "
                    "numbers by rows (numpy.ascontiguousarray)"
                )
            yield file, shape, dtype
