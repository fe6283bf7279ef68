"""The built-in images: a part of Fashion-MNIST."""

import lzma
import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

from dstrain.data.cached.rows import pack_caption
from dstrain.data.decode.pixels import crop_center, to_tensor
from dstrain.data.left_out import match_captions
from dstrain.data.source import Item, Source

FASHION_PATH = "builtin:fashion"
FASHION = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
SHADES = ("dark", "light")
SPLITS = ("train", "held_out", "all")
_BACKGROUND, _LIGHT = 25, 150  # of 255: the brightest background, and the mean of an item from which it is light


def classify_shades(images: torch.Tensor) -> torch.Tensor:
    """Returns whether each clothing item is dark (0) or light (1): int64 (N,), indices into SHADES. An item is light if
    its pixels have a mean of 150 or more.

    images: uint8 (N, H, W), items on black; pixels up to 25 are background and do not count
    """
    pixels = images.flatten(1).double()
    item = pixels > _BACKGROUND
    return ((pixels * item).sum(1) / item.sum(1).clamp(min=1) >= _LIGHT).long()


def map_captions_to_item_and_shade() -> dict[str, tuple[int, int]]:
    """Returns {caption: (index into FASHION, index into SHADES)} of every caption of the built-in images, such as "a
    dark trouser"; all dark ones first.
    """
    return {
        f"a {shade} {name}": (item, number) for number, shade in enumerate(SHADES) for item, name in enumerate(FASHION)
    }


@cache
def _decompress_images_and_labels(split: str) -> tuple[bytes, np.ndarray]:
    """Returns the images and labels of a split: 28 x 28 bytes for each image, and an array of class numbers. Keeps the
    result for later calls.
    """
    with np.load(Path(__file__).parent / "fashion-mini.npz") as file:
        return lzma.decompress(file[split].tobytes()), file[f"{split}_label"]


@dataclass
class Fashion(Source):
    """Holds 2,000 training and 500 held-out images of Fashion-MNIST, 28 x 28 grey, that the package contains.

    image_size: 28 gives the images as they are, 32 adds a border of zeros, any other size resizes those of 32 x 32.
    captioned: adds captions such as "a dark trouser", by the mean of an item's pixels. leave_out: patterns of captions;
    images whose caption fits one are left out, which needs `captioned`.
    """

    image_size: int = 32
    channels: int = 1
    split: str = "train"
    captioned: bool = False
    leave_out: tuple[str, ...] = ()
    noun = "images"
    classes = FASHION
    light = True

    def __post_init__(self) -> None:
        splits = ("train", "held_out") if self.split == "all" else (self.split,)
        pixels = b"".join(_decompress_images_and_labels(split)[0] for split in splits)
        self.labels = np.concatenate([_decompress_images_and_labels(split)[1] for split in splits])
        images = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(-1, 28, 28)
        self.shades = classify_shades(images) if self.captioned else None
        if self.leave_out:
            fits = match_captions([[self._compose_caption(index)] for index in range(len(images))], self.leave_out)
            self.left_out = tuple(zip(self.leave_out, fits.sum(1).tolist()))
            kept = ~fits.any(0)
            images, self.shades, self.labels = images[kept], self.shades[kept], self.labels[kept]
        self.images = images if self.image_size == 28 else F.pad(images, (2, 2, 2, 2))  # (N, 32, 32)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Item:
        image = self.images[index]
        if image.shape[-1] != self.image_size:
            image = to_tensor(crop_center(Image.fromarray(image.numpy()), self.image_size))[0]
        if self.channels == 4:
            image = torch.stack((image, image, image, torch.full_like(image, 255)))
        item: Item = {"image": image.expand(self.channels, -1, -1), "label": int(self.labels[index])}
        if self.shades is not None:
            item["caption"] = pack_caption(self._compose_caption(index))
        return item

    def _compose_caption(self, index: int) -> str:
        """Returns the caption of a sample, such as "a dark trouser"."""
        return f"a {SHADES[self.shades[index]]} {FASHION[self.labels[index]]}"

    def name_sample(self, index: int) -> str:
        return f"{FASHION_PATH}/{self.split}/{index}"

    def count_samples_by_class(self) -> np.ndarray:
        """Returns the number of images of each class, int64 (10,)."""
        return np.bincount(self.labels, minlength=len(FASHION))

    def compute_fingerprint(self) -> str:
        crc = zlib.crc32(self.images.numpy().tobytes())
        return f"{FASHION_PATH} {self.split} n={len(self)} crc={crc:08x}"
