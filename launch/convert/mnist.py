"""MNIST's idx files, also as .gz: MNIST, Fashion-MNIST, KMNIST, and EMNIST, whose images lie on their side.

What is held out is t10k, or EMNIST's test.
"""

import gzip
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from dstrain.commands.convert import Pictures, Sample
from dstrain.data.files.local import Files, LocalFiles
from dstrain.data.formats.base import list_first_folder_entries
from dstrain.data.formats.unconverted import IDX
from dstrain.recipe import ConfigError

_FOLDERS = ("", *(f"{name}raw/" for name in ("", "MNIST/", "FashionMNIST/", "KMNIST/", "EMNIST/")))
_IMAGES, _LABELS = 0x803, 0x801  # the first number of a file
_MOST_BYTES = 1 << 32  # of pixels in a file


def read_mnist(path: Path) -> dict[str, Pictures]:
    """Returns the splits in a folder with four idx files, in a folder of torchvision's, or of one file of images.

    Raises ConfigError if there are none, several sets, or a file that is damaged.
    """
    root = path.parent if path.is_file() else path
    files = _find_idx(LocalFiles(path))
    names = {match: root / name for name in files if (match := IDX.fullmatch(Path(name).name))}
    sets = sorted({f"{Path(name).parent}/{match['set'] or ''}".rstrip("-") for match, name in zip(names, files)})
    if not names:
        raise ConfigError(f"{path} holds no idx files of images, such as train-images-idx3-ubyte.gz")
    if len(sets) > 1:
        raise ConfigError(
            f"{path} holds several sets, {', '.join(sets)}: name the folder of one, or put links to its files into one"
        )
    splits = {}
    for match, file in names.items():
        images = _read_idx(file, _IMAGES)
        labels = _read_idx(_find_labels(file), _LABELS)
        if len(images) != len(labels):
            raise ConfigError(f"{file} has {len(images):,} images, and {len(labels):,} labels: fetch both anew")
        split = "train" if match["split"] == "train" else "held_out"
        samples = _list_samples(file.name.removesuffix(".gz"), images, labels)
        splits[split] = Pictures(len(images), samples)
    return dict(sorted(splits.items(), reverse=True))  # train first


def _find_idx(files: Files) -> list[str]:
    """Returns the idx files of images: the file itself, or those in the folder and in torchvision's folders below it.

    Where a file is there both packed and unpacked, the unpacked one counts.
    """
    folders, found = {name for name, inner in list_first_folder_entries(files) if inner}, set()
    for folder in _FOLDERS:
        if not folder or folder.partition("/")[0] in folders:
            with suppress(FileNotFoundError, NotADirectoryError):
                found |= {folder + name for name, inner in files.list_names(folder.rstrip("/")) if IDX.fullmatch(name)}
    return sorted(name for name in found if name.removesuffix(".gz") == name or name[:-3] not in found)


def _list_samples(name: str, images: np.ndarray, labels: np.ndarray) -> Iterator[Sample]:
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        yield f"{name}/{number:05}", image[..., None], int(label)


def _find_labels(images: Path) -> Path:
    """Returns the file of the labels beside that of the images; packed or not, whatever the images are."""
    plain = images.with_name(re.sub(r"images([-.])idx3", r"labels\1idx1", images.name).removesuffix(".gz"))
    return plain if plain.exists() else plain.with_name(f"{plain.name}.gz")


def _read_idx(path: Path, kind: int) -> np.ndarray:
    """Returns the array in an idx file: uint8 (n, H, W) or (n,)."""
    try:
        with LocalFiles(path.parent).open(path.name) as raw:
            file = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            (magic,) = struct.unpack(">I", file.read(4))
            if magic != kind:
                raise ValueError("its first bytes are others")
            axes = 3 if kind == _IMAGES else 1
            shape = struct.unpack(f">{axes}I", file.read(4 * axes))
            size = int(np.prod(shape, dtype=object))
            if not 0 < size <= _MOST_BYTES:
                raise ValueError(f"it says that it holds {shape}")
            content = file.read(size + 1)
        if len(content) != size:
            raise ValueError(f"it holds more or fewer bytes than {size:,}, as its header says")
        return np.frombuffer(content, np.uint8).reshape(shape)
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read as an idx file ({error}): fetch it anew") from None
