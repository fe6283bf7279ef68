"""CIFAR-10 and CIFAR-100, as their authors pack them: Python pickles or binary files. The test is held out.

The classes of CIFAR-100 are its 100 fine ones. A pickle is a program: here it is read by Python's own unpickler, whose
every name stands for a `Named`, which calls nothing.
"""

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dstrain.commands.convert import Pictures, Sample
from dstrain.data.files.local import LocalFiles
from dstrain.data.formats.unconverted import CIFAR
from dstrain.recipe import ConfigError

_PIXELS = 3072  # bytes: the planes red, green and blue of 32 x 32
_MOST_BYTES = 1 << 28  # of a file


def read_cifar(path: Path, kind: str) -> dict[str, Pictures]:
    """Returns the splits of cifar10 or cifar100 in a folder, or in the folder of that name below it.

    Raises ConfigError if there is no such set, or a file is damaged.
    """
    forms = [form for form in CIFAR if ("100" in form) == (kind == "cifar100")]
    places = [(form, folder) for form in forms for folder in (path, path / form)]
    found = next((place for place in places if _is_whole(*place)), None)
    if found is None:
        raise ConfigError(f"{path} is no {kind}: name the folder {' or '.join(forms)}, or the one above it")
    form, folder = found
    train, test, meta = CIFAR[form]
    classes = _read_classes(folder / meta, 100 if kind == "cifar100" else 10)
    splits = {}
    for split, names in (("train", train), ("held_out", (test,))):
        batches = [(name, *_read_batch(folder / name, kind)) for name in names]
        splits[split] = Pictures(sum(len(labels) for _, _, labels in batches), _list_samples(batches), classes)
    return splits


def _is_whole(form: str, folder: Path) -> bool:
    train, test, meta = CIFAR[form]
    return all((folder / name).is_file() for name in (train[0], test, meta))


def _list_samples(batches: list[tuple[str, np.ndarray, list[int]]]) -> Iterator[Sample]:
    for name, pixels, labels in batches:
        for number, (row, label) in enumerate(zip(pixels, labels, strict=True)):
            yield f"{name}/{number:05}", row.reshape(3, 32, 32).transpose(1, 2, 0), label


def _read_batch(path: Path, kind: str) -> tuple[np.ndarray, list[int]]:
    """Returns pixels uint8 (n, 3072) and the n labels of a file."""
    content = _read_file(path)
    try:
        if path.suffix == ".bin":
            rows = np.frombuffer(content, np.uint8).reshape(-1, _PIXELS + (2 if kind == "cifar100" else 1))
            return rows[:, -_PIXELS:], rows[:, -_PIXELS - 1].tolist()
        batch = _unpickle(content)
        labels = batch["fine_labels" if kind == "cifar100" else "labels"]
        pixels = _as_array(batch["data"])
        if any(type(label) is not int for label in labels) or pixels.shape != (len(labels), _PIXELS):
            raise ValueError(f"pixels {pixels.shape}, {len(labels)} labels")
        return pixels, labels
    except Exception as error:  # a damaged or hostile file may raise anything
        raise _damaged(path, error) from None


def _read_classes(path: Path, count: int) -> tuple[str, ...]:
    content = _read_file(path)
    try:
        if path.suffix == ".txt":
            names = content.decode().split()
        else:
            meta = _unpickle(content)
            names = [_as_text(name) for name in meta["fine_label_names" if count == 100 else "label_names"]]
        if len(set(names)) != count:
            raise ValueError(f"{len(set(names))} classes")
    except Exception as error:
        raise _damaged(path, error) from None
    return tuple(names)


def _read_file(path: Path) -> bytes:
    try:
        with LocalFiles(path.parent).open(path.name) as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"{path} has more than {_MOST_BYTES:,} bytes, and is no file of CIFAR")
    return content


def _damaged(path: Path, error: Exception) -> ConfigError:
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ConfigError(f"{path} cannot be read as a file of CIFAR ({reason}): fetch it anew")


class Named:
    """Stands for whatever a pickle imports, and for what it calls: keeps the arguments and the state, runs nothing."""

    def __init__(self, name: str, arguments: tuple = ()) -> None:
        self.name, self.arguments, self.state = name, arguments, ()

    def __call__(self, *arguments: Any) -> "Named":
        return Named(self.name, arguments)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle._Unpickler):  # Python's own, since the one in C makes a list as long as a pickle says
    def find_class(self, module: str, name: str) -> Named:
        return Named(f"{module}.{name}")


def _unpickle(content: bytes) -> dict[str, Any]:
    """Returns the dict in a pickle of Python 2 or 3."""
    value = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    return {_as_text(key): entry for key, entry in value.items()}


def _as_array(value: Named) -> np.ndarray:
    """Returns a pickled array of numpy's: by its state, or by pickle's protocol 5 the arguments of _frombuffer."""
    if value.name.endswith("._frombuffer"):
        content, dtype, shape, order = value.arguments
        by_columns = order != "C"
    else:
        _, shape, dtype, by_columns, content = value.state
    if by_columns or _as_text(dtype.arguments[0]) != "u1":
        raise ValueError("its data are no bytes by rows")
    if isinstance(content, Named) and content.name == "_codecs.encode":  # by Python 3 in a protocol below 3
        content = content.arguments[0].encode("latin-1")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _as_text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
