"""MNIST's idx files: train-images-idx3-ubyte and its like, also .gz; Fashion-MNIST, KMNIST, and EMNIST by torchvision.

    data.path=FOLDER           the four files, or what torchvision makes: FOLDER/MNIST/raw/; t10k or test is held out
    data.path=FOLDER/FILE      one file of images, such as t10k-images-idx3-ubyte.gz, with its labels beside it

EMNIST's images lie on their side, as in its files and in torchvision. A .gz of images is unpacked once, beside the
index, and pixels are then read by their place.
"""

import gzip
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from struct import Struct
from typing import BinaryIO

import numpy as np

from dstrain.data.files.listing import few, listing
from dstrain.data.files.local import Files
from dstrain.data.formats import unpacked
from dstrain.data.formats.base import Layout, Place, Request, Sample, exists, peek
from dstrain.recipe import ConfigError, NotRead

_IMAGES = re.compile(r"(?P<set>[a-z]+-[a-z]+-)?(?P<split>train|t10k|test)-images[-.]idx3-ubyte(?P<gz>\.gz)?")
_FOLDERS = ("", *(f"{name}raw/" for name in ("", "MNIST/", "FashionMNIST/", "KMNIST/", "EMNIST/")))
_HEADER = Struct(">IIII")  # magic number, images, rows, columns
_HEADER_OF_LABELS = Struct(">II")  # magic number, labels
_MAGIC, _MAGIC_OF_LABELS = 0x803, 0x801
_BLOCK = 1 << 20


class Idx(Layout):
    """A sample is an image of a file, and `offset` its first pixel there, once the file is unpacked."""

    kind = "MNIST's idx"
    light = True

    def __init__(self, root: str, files: Files, request: Request) -> None:
        super().__init__(root, files, request)
        names = _images(root, files)
        sets = sorted({_match(name)["set"] or "" for name in names})
        if len(sets) > 1:
            raise ConfigError(
                f"{request.key}={root}: holds several sets, {few([name.rstrip('-') for name in sets])}: "
                "keep the files of one, or links to them, in a folder of their own"
            )
        train = [name for name in names if _match(name)["split"] == "train"]
        self.name = (train or names)[0]
        self._unseen = next((name for name in names if train and name not in train), None)
        self._unpacked: Path | None = None  # of a .gz
        self._shape: tuple[int, int] | None = None

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        return bool(_images(root, files))

    def parts(self) -> list[str]:
        return [self.name]

    def watched(self) -> list[str]:
        return [self.name, self._labels_name()]

    def unseen(self) -> str | None:
        return self._unseen and os.path.join(self.root, self._unseen)

    def prepare(self, folder: Path) -> None:
        """Unpacks a .gz of images. ConfigError: it is damaged, or holds more or less than its header says."""
        if not self.name.endswith(".gz"):
            return
        with self._reading(self.name), self._open(self.name) as file:
            number, height, width = _header(file)
            size = _HEADER.size + number * height * width

            def content() -> Iterator[bytes]:
                yield _HEADER.pack(_MAGIC, number, height, width)
                left = size - _HEADER.size
                while left >= 0 and (block := file.read(min(_BLOCK, left + 1))):
                    left -= len(block)
                    yield block
                _require_none(left)

            name = self.name.rpartition("/")[2].removesuffix(".gz")
            self._unpacked = unpacked.unpacked(folder, name, self.files.stat(self.name), size, content())

    def samples(self, part: str) -> Iterator[Sample]:
        with self._reading(part), self._open(part) as file:
            number, height, width = _header(file)
            if not part.endswith(".gz"):  # of others, unpacking has seen it
                _require_none(self.files.stat(part).size - _HEADER.size - number * height * width)
        name = self._labels_name()
        with self._reading(name), self._open(name) as file:
            magic, count = _HEADER_OF_LABELS.unpack(file.read(8).ljust(8, b"\0"))
            labels = file.read(number + 1)
            if (magic, count, len(labels)) != (_MAGIC_OF_LABELS, number, number):
                raise ConfigError(f"it is no file of {number:,} labels")
        stem = part.rpartition("/")[2].removesuffix(".gz")
        self.classes = self.class_list.classes
        for place in range(number):
            at = Place(f"{stem}/{place:05}", 0, _HEADER.size + place * height * width, height * width)
            yield Sample(at, self.label(labels[place], at.name))

    def read(self, place: Place) -> np.ndarray:
        if self._unpacked is not None:
            pixels = unpacked.span(self._unpacked, place.offset, place.size)
        else:
            pixels = self.files.span(self.name, place.offset, place.size)
        if self._shape is None:
            with self._open(self.name) as file:
                self._shape = _header(file)[1:]
        return np.frombuffer(pixels, np.uint8).reshape(*self._shape, 1)

    def _labels_name(self) -> str:
        """The file of the labels, beside the images; packed or not, whatever these are."""
        plain = re.sub(r"images([-.])idx3", r"labels\1idx1", self.name).removesuffix(".gz")
        return plain if exists(self.files, plain) else f"{plain}.gz"

    @contextmanager
    def _open(self, name: str) -> Iterator[BinaryIO]:
        with self.files.open(name) as file:
            yield gzip.GzipFile(fileobj=file) if name.endswith(".gz") else file

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Turns what is wrong with a file into a ConfigError that names it."""
        with listing(self.root, self.request.key):
            try:
                yield
            except (gzip.BadGzipFile, EOFError, zlib.error, ConfigError) as error:
                raise ConfigError(
                    f"{self.request.key}={self.root}: {name} cannot be read: {error}; fetch it anew"
                ) from None


def _match(name: str) -> re.Match:
    return _IMAGES.fullmatch(name.rpartition("/")[2])


def _images(root: str, files: Files) -> list[str]:
    """The files of images: the one that is the root, or of a folder those of the first place that has some.

    Of a file that is there packed and unpacked, the unpacked one. None where there are no idx files.
    """
    top = peek(files)
    for folder in _FOLDERS:
        if folder and (folder.partition("/")[0], True) not in top:
            continue
        try:
            inner = files.names(folder.rstrip("/")) if folder else top
        except NotRead:
            raise
        except OSError:
            continue
        names = {name for name, is_folder in inner if not is_folder and _IMAGES.fullmatch(name)}
        if names := sorted(name for name in names if name.removesuffix(".gz") == name or name[:-3] not in names):
            return [folder + name for name in names]
    return []


def _header(file: BinaryIO) -> tuple[int, int, int]:
    """Number, height and width of the images. ConfigError: it is no file of images."""
    content = file.read(_HEADER.size)
    magic, number, height, width = _HEADER.unpack(content.ljust(_HEADER.size, b"\0"))
    if magic != _MAGIC or not 0 < height * width < 1 << 24 or number * height * width > 1 << 40:
        raise ConfigError("it is no idx file of images")
    return number, height, width


def _require_none(left: int) -> None:
    if left:
        raise ConfigError("it holds more or fewer pixels than its header says")
