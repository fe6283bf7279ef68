"""Image sources: the built-in Fashion-MNIST and folders of images by class.

A *source* is map-style and deterministic:

    len(source)             number of samples
    source[i]               {"image": uint8 (C, H, W), "label": int}; raises BadSample where it cannot be read
    source.classes          names of the classes; the label is an index into them
    source.shape            (C, H, W)
    source.name(i)          what to call sample i in a message
    source.fingerprint()    a short string that changes with the data; a run saves it to notice on resume; of folders
                            with the sizes (and captions) of 10,000 files at most, so that it takes a second
    source.contents()       of folders: the same of all files, by which a cache of them is told from another's
    source.light            reading an item costs less than handing it between processes: no workers needed
"""

import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from dstrain.data.bad_files import BadSample
from dstrain.data.pixels import PIXEL_CAP, SUFFIXES, center_crop, read_image, to_tensor
from dstrain.recipe import ConfigError

FASHION = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker",
           "bag", "ankle boot")
SPLITS = ("train", "held_out", "all")
_LOOKED_AT = 10_000
_T = TypeVar("_T")


def open_images(path: str | Path, image_size: int, *, channels: int = 3, split: str = "train",
                held_out: float = 0.0, held_out_path: str | Path | None = None,
                draft: bool = False, pixel_cap: int = PIXEL_CAP) -> "Fashion | ImageFolder":
    """Opens a source of square images.

    path: "builtin:fashion", or a folder: one folder for each class, images at any depth below; or
    images only, which
        is one class, 0.
    image_size: side of the square, pixels. channels: 1 (grey), 3 (RGB, transparency laid on white)
    or 4 (RGBA).
    split: "train", "held_out" or "all".
    held_out: fraction of a folder that is held out, by the hash of the relative path: adding a file
    moves no other.
        The built-in data has its own 500.
    held_out_path: a second folder, with the same classes, that is the held-out split instead.
    draft: fast JPEG decoding at reduced size; other pixels. pixel_cap: the largest image decoded,
    pixels. Raises ConfigError with the path and the remedy.
    """
    if channels not in (1, 3, 4):
        raise ConfigError(f"channels is 1, 3 or 4, not {channels}")
    if split not in SPLITS:
        raise ConfigError(f"split is one of {', '.join(SPLITS)}, not {split!r}")
    if not 0 <= held_out < 1:
        raise ConfigError(f"data.held_out is a fraction in [0, 1), not {held_out}")
    if str(path).startswith("builtin:"):
        if str(path) != "builtin:fashion":
            raise ConfigError(f"data.path={path}: the only built-in data set is builtin:fashion")
        if held_out_path is None or split == "train":
            return Fashion(image_size, channels, split)
        classes = FASHION
    elif held_out_path is None:
        if split == "held_out" and held_out == 0:
            raise ConfigError("no images are held out: set data.held_out (a fraction) or "
                              "data.held_out_path")
        return ImageFolder(path, image_size, channels, split, held_out, draft, pixel_cap)
    else:
        if held_out:
            raise ConfigError("data.held_out and data.held_out_path exclude each other: keep one")
        if split == "train":
            return ImageFolder(path, image_size, channels, "all", 0.0, draft, pixel_cap)
        classes = class_folders(Path(path))
    return ImageFolder(held_out_path, image_size, channels, "all", 0.0, draft, pixel_cap,
                       classes or None)


@dataclass
class Fashion:
    """2,000 training and 500 held-out images of Fashion-MNIST, 28 x 28 grey, inside the package
    (see builtin/).

    image_size 28 gives them as they are, 32 with a border of zeros, any other size resizes those 32
    x 32.
    """

    image_size: int = 32
    channels: int = 1
    split: str = "train"
    classes = FASHION
    light = True

    def __post_init__(self) -> None:
        with np.load(Path(__file__).parent / "builtin" / "fashion-mini.npz") as file:
            splits = ("train", "held_out") if self.split == "all" else (self.split,)
            pixels = b"".join(lzma.decompress(file[split].tobytes()) for split in splits)
            self.labels = np.concatenate([file[f"{split}_label"] for split in splits])
        images = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(-1, 28, 28)
        # (N, 32, 32)
        self.images = images if self.image_size == 28 else F.pad(images, (2, 2, 2, 2))

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.channels, self.image_size, self.image_size

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor | int]:
        image = self.images[index]
        if image.shape[-1] != self.image_size:
            image = to_tensor(center_crop(Image.fromarray(image.numpy()), self.image_size))[0]
        if self.channels == 4:
            image = torch.stack((image, image, image, torch.full_like(image, 255)))
        return {"image": image.expand(self.shape), "label": int(self.labels[index])}

    def name(self, index: int) -> str:
        return f"builtin:fashion/{self.split}/{index}"

    def fingerprint(self) -> str:
        crc = zlib.crc32(self.images.numpy().tobytes())
        return f"builtin:fashion {self.split} n={len(self)} crc={crc:08x}"


@dataclass
class ImageFolder:
    """A folder of images; arguments as `open_images`. classes: names that the folders must be
    among.
    """

    path: str | Path
    image_size: int
    channels: int = 3
    split: str = "all"
    held_out: float = 0.0
    draft: bool = False
    pixel_cap: int = PIXEL_CAP
    classes: tuple[str, ...] | None = None
    light = False

    def __post_init__(self) -> None:
        self.path = Path(self.path)
        names, labels, found = list_folder(self.path)
        if self.classes is not None:
            unknown = [name for name in found if name not in self.classes]
            if unknown:
                raise ConfigError(f"{self.path}: class folders {few(unknown)} are not among the "
                                  f"classes of the training data ({few(self.classes)}): rename or "
                                  "remove them")
            labels = np.array([self.classes.index(name) for name in found] or [0], np.int32)[labels]
        self.classes = self.classes or found
        if self.split != "all" and self.held_out > 0:
            held = np.fromiter((is_held(name, self.held_out) for name in names), bool, len(names))
            keep = np.flatnonzero(held if self.split == "held_out" else ~held)
            if not len(keep):
                raise ConfigError(f"{self.path}: data.held_out={self.held_out} leaves no image of "
                                  f"{len(names)} for the {self.split} split: choose another "
                                  "fraction or give data.held_out_path")
            names, labels = [names[i] for i in keep], labels[keep]
        self.names, self.labels = Names(names), labels

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.channels, self.image_size, self.image_size

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor | int]:
        name = self.name(index)
        try:
            image = read_image(self.path / name, self.image_size, self.channels, self.draft,
                               self.pixel_cap)
        # a hostile file may raise anything; Batches bounds how many are tolerated
        except Exception as error:
            reason = " ".join(str(error).replace(str(self.path / name), name).split())
            raise BadSample(name, f"{type(error).__name__}: {reason}") from error
        return {"image": image, "label": int(self.labels[index])}

    def name(self, index: int) -> str:
        return self.names[index]

    def fingerprint(self) -> str:
        return f"{self._named()} {weighed(self.path, some_of(self.names))}"

    def contents(self) -> str:
        return f"{self._named()} {weighed(self.path, self.names)}"

    def _named(self) -> str:
        names = blake2b(self.names.blob + self.labels.tobytes(), digest_size=8).hexdigest()
        return f"images {self.split} n={len(self)} classes={len(self.classes)} names={names}"


class Names:
    """A list of strings as one block of bytes: a million paths are pickled to a worker in
    milliseconds.
    """

    def __init__(self, names: list[str]) -> None:
        encoded = [os.fsencode(name) for name in names]
        self.blob = b"".join(encoded)
        self.ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        if index < 0 or index >= len(self):
            raise IndexError(index)
        return os.fsdecode(self.blob[self.ends[index - 1] if index else 0:self.ends[index]])


def some_of(names: Names) -> Names:
    """Names evenly spaced, _LOOKED_AT at most: what a run asks its files for whenever it starts."""
    if len(names) <= _LOOKED_AT:
        return names
    return Names([names[i] for i in np.linspace(0, len(names) - 1, _LOOKED_AT).astype(int).tolist()])


def of_each(look: Callable[[str], _T], names: Names) -> Iterator[_T]:
    """look(name) in the order of the names, by threads, since the disk of a network answers slowly."""
    with ThreadPoolExecutor(16) as pool:
        for start in range(0, len(names), 4096):                          # a million waiting calls would fill memory
            yield from pool.map(look, [names[i] for i in range(start, min(start + 4096, len(names)))])


def weighed(root: Path, names: Names, said: bytes = b"") -> str:
    """The bytes of all files, and a hash of the size of each (-1 where it cannot be asked) and of what is `said`.

    Of no times: a folder that was copied is the same data.
    """
    def size(name: str) -> int:
        try:
            return os.stat(root / name).st_size
        except OSError:
            return -1

    sizes = np.fromiter(of_each(size, names), np.int64, len(names))
    return f"bytes={sizes.sum()} contents={blake2b(sizes.tobytes() + said, digest_size=8).hexdigest()}"


def list_folder(root: Path, suffixes: tuple[str, ...] = SUFFIXES, key: str = "data.path",
                kind: str = "images") -> tuple[list[str], np.ndarray, tuple[str, ...]]:
    """Relative paths in order, their labels int32 (N,), and the class names (none for a flat folder).

    suffixes: of the files that count, in lower case. key, kind: what they are called in messages.
    """
    if not root.is_dir():
        fault = "is not a folder" if root.exists() else "does not exist"
        raise ConfigError(f"{key}={root}: {fault}; give a folder of {kind}, or builtin:fashion")
    flat, classes = sorted(_files_in(root, suffixes)), class_folders(root)
    members = {name: sorted(_walk(root, name, suffixes, set())) for name in classes}
    full = [name for name in classes if members[name]]
    read = f"files ending in {' '.join(suffixes)} are read, in any case"
    if not flat and not full:
        content = f"no {kind} in it" if any(os.scandir(root)) else "is empty"
        raise ConfigError(f"{key}={root}: {content}; {read}")
    if flat and full:
        raise ConfigError(f"{key}={root}: {kind} ({few(flat)}) beside class folders "
                          f"({few(full)}): is this one class or several? Move the {kind} "
                          "into a folder of their class")
    if flat:
        return flat, np.zeros(len(flat), np.int32), ()
    if len(full) < len(classes):
        empty = [name for name in classes if not members[name]]
        raise ConfigError(f"{key}={root}: class folders without {kind}: {few(empty)}; remove "
                          f"or fill them, since they would count as classes; {read}")
    labels = np.repeat(np.arange(len(full), dtype=np.int32), [len(members[name]) for name in full])
    return [name for folder in full for name in members[folder]], labels, tuple(full)


def class_folders(root: Path) -> tuple[str, ...]:
    """The names of the first-level folders, sorted; hidden ones are none of ours."""
    if not root.is_dir():
        return ()  # list_folder says what is wrong
    with os.scandir(root) as entries:
        return tuple(sorted(entry.name for entry in entries
                            if entry.name[0] != "." and entry.is_dir()))


def _files_in(folder: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            counts = entry.name.lower().endswith(suffixes) and entry.name[0] != "."
            if counts and not entry.is_dir():
                yield entry.name


def _walk(root: Path, folder: str, suffixes: tuple[str, ...], seen: set[str]) -> Iterator[str]:
    """Relative paths of the files at any depth below root/folder; no stat of a file, no link
    twice.
    """
    with os.scandir(root / folder) as entries:
        for entry in entries:
            if entry.name[0] == ".":  # .DS_Store, ._photo.jpg
                continue
            if entry.is_dir():
                if entry.is_symlink():
                    target = os.path.realpath(entry.path)
                    if target in seen:
                        continue
                    seen.add(target)
                yield from _walk(root, f"{folder}/{entry.name}", suffixes, seen)
            elif entry.name.lower().endswith(suffixes):
                yield f"{folder}/{entry.name}"


def is_held(name: str, fraction: float) -> bool:
    digest = blake2b(os.fsencode(name), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0 ** 64


def few(names: list[str] | tuple[str, ...], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
