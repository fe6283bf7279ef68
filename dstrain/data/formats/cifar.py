"""CIFAR-10 and CIFAR-100 as their authors pack them and torchvision keeps them: Python pickles, or binary files.

    data.path=FOLDER           cifar-10-batches-py, cifar-100-python, cifar-10-batches-bin, cifar-100-binary, or the
                               folder above; its test batch is the held-out split
    data.path=FOLDER/FILE      one file of these, such as test_batch

Pickles are read without executing them (../pickled.py), and pixels by their place in the file, without a copy of it.
The classes of CIFAR-100 are its 100 fine ones.
"""

import os
from collections.abc import Iterator

import numpy as np

from dstrain.data.files.listing import listing
from dstrain.data.files.local import Files
from dstrain.data.formats.base import Layout, Place, Request, Sample, peek
from dstrain.data.formats.pickled import as_array, read_pickle
from dstrain.recipe import ConfigError, NotRead

_PIXELS = 3072  # bytes: the planes red, green and blue of 32 x 32
_MOST = 1 << 28  # bytes of a file
_TEN = tuple(f"data_batch_{number}" for number in (1, 2, 3, 4, 5))
# Folder -> training files, test file, file of the classes, bytes before the pixels of a row (None: pickles), samples.
_FORMS = {
    "cifar-10-batches-py": (_TEN, "test_batch", "batches.meta", None),
    "cifar-100-python": (("train",), "test", "meta", None),
    "cifar-10-batches-bin": (tuple(f"{name}.bin" for name in _TEN), "test_batch.bin", "batches.meta.txt", 1),
    "cifar-100-binary": (("train.bin",), "test.bin", "fine_label_names.txt", 2),
}


class Cifar(Layout):
    """A sample is a row of a file, `offset` its first pixel there. form: a name of _FORMS; own: files to read."""

    kind = "CIFAR"
    light = True

    def __init__(self, root: str, files: Files, request: Request) -> None:
        super().__init__(root, files, request)
        self.form, self.folder, self.own = _form(root, files)
        self.classes = self.class_list.classes or self._class_names()

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        return _form(root, files) is not None

    def parts(self) -> list[str]:
        return [f"{self.folder}{name}" for name in self.own]

    def unseen(self) -> str | None:
        train, test, _, _ = _FORMS[self.form]
        return os.path.join(self.root, self.folder, test) if self.own == train else None

    def samples(self, part: str) -> Iterator[Sample]:
        before = _FORMS[self.form][3]
        try:
            with listing(self.root, self.request.key):
                content = self._content(part)
            places, labels = _pickled(content) if before is None else _binary(content, before)
        except ConfigError as error:
            raise ConfigError(
                f"{self.request.key}={self.root}: {part} cannot be read as a file of CIFAR: {error}; fetch it anew"
            ) from None
        name = part.removeprefix(self.folder)
        for number, (place, label) in enumerate(zip(places, labels)):
            at = Place(f"{name}/{number:05}", self.own.index(name), place, _PIXELS)
            yield Sample(at, self.label(label, at.name))

    def read(self, place: Place) -> np.ndarray:
        pixels = self.files.span(f"{self.folder}{self.own[place.file]}", place.offset, place.size)
        return np.ascontiguousarray(np.frombuffer(pixels, np.uint8).reshape(3, 32, 32).transpose(1, 2, 0))

    def _class_names(self) -> tuple[str, ...]:
        """What the file of classes says; numbers instead where it is missing or damaged."""
        count = 100 if "100" in self.form else 10
        name = _FORMS[self.form][2]
        try:
            content = self._content(f"{self.folder}{name}")
            if name.endswith(".txt"):
                names = content.decode().split()
            else:
                meta = read_pickle(content)
                names = [
                    _text(word)
                    for word in meta.get(b"fine_label_names")
                    or meta.get("fine_label_names")
                    or meta.get(b"label_names")
                    or meta["label_names"]
                ]
        except NotRead:
            raise
        except (OSError, ConfigError, UnicodeDecodeError, AttributeError, KeyError, TypeError):
            names = []
        return tuple(names) if len(set(names)) == count else tuple(map(str, range(count)))

    def _content(self, name: str) -> bytes:
        with self.files.open(name) as file:
            content = file.read(_MOST + 1)
        if len(content) > _MOST:
            raise ConfigError(f"it has more than {_MOST:,} bytes")
        return content


def _form(root: str, files: Files) -> tuple[str, str, tuple[str, ...]] | None:
    """The form of the data, the folder below the root that holds them, and the files to read; None: no CIFAR."""
    own = root.rstrip("/").rpartition("/")[2]
    top = peek(files)
    is_file = top == [(own, False)]
    for form, (train, test, meta, _) in _FORMS.items():
        if is_file and own in (*train, test) and _exists(files, meta):
            return form, "", (own,)
        for folder, first in (("", (train[0], False)), (f"{form}/", (form, True))):
            if first in top and not is_file and all(_exists(files, folder + name) for name in (train[0], test, meta)):
                return form, folder, train
    return None


def _exists(files: Files, name: str) -> bool:
    try:
        return files.stat(name).size > 0  # a folder has none
    except NotRead:
        raise
    except OSError:
        return False


def _pickled(content: bytes) -> tuple[range, list[int]]:
    """The places of a batch's samples, and their labels."""
    batch = read_pickle(content)
    if not isinstance(batch, dict):
        raise ConfigError("it holds no batch of images")
    batch = {_text(key): value for key, value in batch.items() if isinstance(key, (str, bytes))}
    array = as_array(batch.get("data"))
    labels = batch.get("fine_labels", batch.get("labels"))
    if not isinstance(labels, list) or any(type(label) is not int for label in labels):
        raise ConfigError("it holds no list of labels")
    if array.dtype != np.uint8 or array.shape != (len(labels), _PIXELS):
        raise ConfigError(f"its data are {array.dtype} {array.shape}, and a batch's are uint8 (labels, {_PIXELS})")
    return range(array.place, array.place + len(labels) * _PIXELS, _PIXELS), labels


def _binary(content: bytes, before: int) -> tuple[range, list[int]]:
    row = before + _PIXELS
    if not content or len(content) % row:
        raise ConfigError(f"it has {len(content):,} bytes, and rows of {row:,}: it is truncated")
    return range(before, len(content), row), list(content[before - 1 :: row])


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
