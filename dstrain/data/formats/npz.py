"""An .npz of images as ADM keeps them, and launch/generate.py writes: arr_0 uint8 (N, H, W, C), arr_1 their labels.

Where arr_0 is stored as it is (numpy.savez), an image is read by its place. Where it is compressed
(numpy.savez_compressed), it is unpacked once, beside the index.
"""

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from dstrain.data.files.listing import listing
from dstrain.data.files.local import Files
from dstrain.data.files.zipped import DEFLATED, STORED, Member, blocks, data_place, directory
from dstrain.data.formats import unpacked
from dstrain.data.formats.base import Layout, Place, Request, Sample, peek
from dstrain.recipe import ConfigError

_HEADER = 1 << 16  # bytes of an array's header, at most
_MEMBERS = 1000  # of an .npz
_LABELS = 1 << 31  # bytes of labels: 200 million


class _Array(NamedTuple):
    member: Member
    shape: tuple[int, ...]
    dtype: np.dtype
    start: int  # bytes of the header


class Npz(Layout):
    """A sample is a row of arr_0, `offset` its first byte in the file, or in what arr_0 is unpacked to."""

    kind = "npz of images"
    light = True

    def __init__(self, root: str, files: Files, request: Request) -> None:
        super().__init__(root, files, request)
        self.name = peek(files)[0][0]
        self._unpacked: Path | None = None
        self._shape: tuple[int, ...] | None = None

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        names = peek(files)
        return len(names) == 1 and names[0][0].lower().endswith(".npz") and not names[0][1]

    def parts(self) -> list[str]:
        return [self.name]

    def prepare(self, folder: Path) -> None:
        """Unpacks a compressed arr_0. ConfigError: it is damaged, or no array of images."""
        with self._reading() as file:
            images = _images(file)
            if images.member.method == DEFLATED:
                stat = self.files.stat(self.name)
                self._unpacked = unpacked.unpacked(
                    folder, f"{self.name}.arr_0.npy", stat, images.member.size, blocks(file, images.member)
                )

    def samples(self, part: str) -> Iterator[Sample]:
        with self._reading() as file:
            images = _images(file)
            labels = _labels(file, images.shape[0])
            first = images.start
            if images.member.method == STORED:
                first += data_place(file, images.member)
        size = math.prod(images.shape[1:])
        self.classes = self.class_list.classes
        for number in range(images.shape[0]):
            label = None if labels is None else int(labels[number])
            name = f"{number:08}"
            yield Sample(Place(name, 0, first + number * size, size), self.label(label, name))

    def read(self, place: Place) -> np.ndarray:
        if self._unpacked is not None:
            pixels = unpacked.span(self._unpacked, place.offset, place.size)
        else:
            pixels = self.files.span(self.name, place.offset, place.size)
        if self._shape is None:
            with self._reading() as file:
                self._shape = _images(file).shape[1:]
        return np.frombuffer(pixels, np.uint8).reshape(self._shape)

    @contextmanager
    def _reading(self) -> Iterator[BinaryIO]:
        """The file, open; what is wrong with it becomes a ConfigError that names it."""
        with listing(self.root, self.request.key):
            try:
                with self.files.open(self.name) as file:
                    yield file
            except ConfigError as error:
                raise ConfigError(
                    f"{self.request.key}={self.root}: {self.name} cannot be read: {error}; write it with "
                    "numpy.savez(FILE, arr_0=images, arr_1=labels)"
                ) from None


def _arrays(file: BinaryIO) -> dict[str, Member]:
    members = {}
    for member in directory(file):
        if len(members) == _MEMBERS or member.encrypted or member.method not in (STORED, DEFLATED):
            raise ConfigError("it is no .npz that numpy has written")
        members[member.name.removesuffix(".npy")] = member
    return members


def _images(file: BinaryIO) -> _Array:
    """arr_0. ConfigError: there is none, or it holds no images, or not as many as its header says."""
    members = _arrays(file)
    if "arr_0" not in members:
        names = ", ".join(sorted(members)[:5])
        raise ConfigError(f"it holds {names or 'nothing'}, and no arr_0 with images, uint8 (N, H, W, C)")
    images = _header(file, members["arr_0"])
    shape = images.shape
    if images.dtype != np.uint8 or len(shape) != 4 or shape[3] not in (1, 3, 4) or not math.prod(shape) > 0:
        raise ConfigError(f"its arr_0 is {images.dtype} {shape}, and images are uint8 (N, H, W, 1, 3 or 4)")
    return images


def _labels(file: BinaryIO, number: int) -> np.ndarray | None:
    """arr_1, integers (number,), or one-hot rows; None: there is none."""
    members = _arrays(file)
    if "arr_1" not in members:
        return None
    array = _header(file, members["arr_1"])
    if (
        array.dtype.kind not in "iufb"
        or len(array.shape) not in (1, 2)
        or array.shape[0] != number
        or array.member.size > _LABELS
    ):
        raise ConfigError(f"its arr_1 is {array.dtype} {array.shape}, and labels are integers ({number},)")
    content = b"".join(blocks(file, array.member))
    labels = np.frombuffer(content, array.dtype, offset=array.start).reshape(array.shape)
    one_hot = labels.ndim == 2
    whole = (
        ((labels != 0).sum(1) == 1) & (labels.max(1) == 1)
        if one_hot
        else np.isfinite(labels) & (labels == np.trunc(labels))
    )
    if not whole.all():
        raise ConfigError("its arr_1 holds neither whole numbers (N,) nor one-hot rows (N, classes): write these")
    return labels.argmax(1) if one_hot else labels


def _header(file: BinaryIO, member: Member) -> _Array:
    """What an array's header says. ConfigError: it is none, or says another size than the array has."""
    header = io.BytesIO(next(blocks(file, member), b"")[:_HEADER])
    try:
        version = np.lib.format.read_magic(header)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = read(header)
    except (ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError, EOFError):
        raise ConfigError(f"its {member.name[:100]} is no array of numpy's") from None
    size = header.tell() + math.prod(shape) * dtype.itemsize
    if dtype.hasobject or fortran or min(shape, default=0) < 0 or size != member.size:
        raise ConfigError(
            f"its {member.name[:100]} is damaged, or holds Python objects, or is stored by columns: "
            "it must hold numbers by rows (numpy.ascontiguousarray)"
        )
    return _Array(member, shape, dtype, header.tell())
