"""Image sources: the built-in Fashion-MNIST and folders of images by class.

Items are {"image": uint8 (C, H, W), "label": int, index into `classes`}.
"""

import lzma
import zlib
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

from dstrain.data.folder import Folder, class_names, list_folder
from dstrain.data.pixels import SUFFIXES, center_crop, read_image, to_tensor
from dstrain.data.source import Item, Source, reading
from dstrain.recipe import ConfigError

FASHION = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
SPLITS = ("train", "held_out", "all")


def open_images(path: str | Path, image_size: int, *, channels: int = 3, split: str = "train", held_out: float = 0.0,
                held_out_path: str | Path | None = None, draft: bool = False) -> "Fashion | ImageFolder":
    """Opens a source of square images.

    path: "builtin:fashion", or a folder as in folder.py. image_size: side of the square, pixels. channels: 1 (grey), 3
    (RGB, transparency laid on white) or 4 (RGBA). split: "train", "held_out" or "all". held_out: fraction of a folder
    that is held out; the built-in data have their own 500. held_out_path: a second folder, with the same classes, that
    is the held-out split instead. draft: fast JPEG decoding at reduced size, with other pixels. ConfigError: a path.
    """
    if channels not in (1, 3, 4):
        raise ConfigError(f"channels is 1, 3 or 4, not {channels}")
    if split not in SPLITS:
        raise ConfigError(f"split is one of {', '.join(SPLITS)}, not {split!r}")
    if not 0 <= held_out < 1:
        raise ConfigError(f"data.held_out is a fraction in [0, 1), not {held_out}")
    builtin = str(path).startswith("builtin:")
    if builtin and str(path) != "builtin:fashion":
        raise ConfigError(f"data.path={path}: the only built-in data set is builtin:fashion")
    if builtin and (held_out_path is None or split == "train"):
        return Fashion(image_size, channels, split)
    if held_out_path is None:
        if split == "held_out" and held_out == 0:
            raise ConfigError("no images are held out: set data.held_out (a fraction) or data.held_out_path")
        return ImageFolder(path, image_size, channels, split, held_out, draft)
    if held_out and not builtin:
        raise ConfigError("data.held_out and data.held_out_path exclude each other: keep one")
    if split == "train":
        return ImageFolder(path, image_size, channels, draft=draft)
    classes = FASHION if builtin else class_names(Path(path))
    return ImageFolder(held_out_path, image_size, channels, draft=draft, classes=classes, key="data.held_out_path")


@dataclass
class Fashion(Source):
    """2,000 training and 500 held-out images of Fashion-MNIST, 28 x 28 grey, inside the package (see builtin/).

    image_size 28 gives them as they are, 32 with a border of zeros; any other size resizes those 32 x 32.
    """

    image_size: int = 32
    channels: int = 1
    split: str = "train"
    noun = "images"
    classes = FASHION
    light = True

    def __post_init__(self) -> None:
        with np.load(Path(__file__).parent / "builtin" / "fashion-mini.npz") as file:
            splits = ("train", "held_out") if self.split == "all" else (self.split,)
            pixels = b"".join(lzma.decompress(file[split].tobytes()) for split in splits)
            self.labels = np.concatenate([file[f"{split}_label"] for split in splits])
        images = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(-1, 28, 28)
        self.images = images if self.image_size == 28 else F.pad(images, (2, 2, 2, 2))           # (N, 32, 32)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Item:
        image = self.images[index]
        if image.shape[-1] != self.image_size:
            image = to_tensor(center_crop(Image.fromarray(image.numpy()), self.image_size))[0]
        if self.channels == 4:
            image = torch.stack((image, image, image, torch.full_like(image, 255)))
        return {"image": image.expand(self.channels, -1, -1), "label": int(self.labels[index])}

    def name(self, index: int) -> str:
        return f"builtin:fashion/{self.split}/{index}"

    def class_counts(self) -> np.ndarray:
        return np.bincount(self.labels, minlength=len(FASHION))

    def fingerprint(self) -> str:
        crc = zlib.crc32(self.images.numpy().tobytes())
        return f"builtin:fashion {self.split} n={len(self)} crc={crc:08x}"


@dataclass
class ImageFolder(Folder):
    """A folder of images; arguments as `open_images`. classes: names that its class folders must be among, if any."""

    path: str | Path
    image_size: int
    channels: int = 3
    split: str = "all"
    held_out: float = 0.0
    draft: bool = False
    classes: tuple[str, ...] = ()
    key: str = "data.path"                        # in messages
    noun = "images"

    def __post_init__(self) -> None:
        self.path = Path(self.path)
        self._select(*list_folder(self.path, SUFFIXES, self.key), self.key, "image")

    def __getitem__(self, index: int) -> Item:
        name = self.name(index)
        path = self.path / name
        with reading(name, path):
            image = read_image(path, self.image_size, self.channels, self.draft)
        return {"image": image, "label": int(self.labels[index])}

    def _summary(self) -> str:
        names = blake2b(self.names.blob + self.labels.tobytes(), digest_size=8).hexdigest()
        return f"images {self.split} n={len(self)} classes={len(self.classes)} names={names}"
