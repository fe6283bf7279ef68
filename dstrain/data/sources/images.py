"""Image sources: the built-in Fashion-MNIST and emoji, and images in any form of formats/.

Items are {"image": uint8 (C, H, W), "label": int, index into `classes`} and, where captions are asked for, {"caption":
UTF-8 as uint8 (bytes,)}; where sizes are asked for {"size": int64 (6,), the height and width of the image, the
top and left of the crop in the scaled image, the height and width of the crop}, and {"right": int, the pixels of the
scaled image to the right of the crop}.
"""

import io
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from dstrain.data.builtin.emoji import EMOJI, Emoji
from dstrain.data.builtin.fashion import FASHION, FASHION_PATH, SPLITS, Fashion
from dstrain.data.cached.rows import pack_caption
from dstrain.data.decode.crops import Crop
from dstrain.data.decode.pixels import SUFFIXES, decode_uncropped_image, to_tensor
from dstrain.data.files.storage import retry
from dstrain.data.formats.base import Layout, Place, Request
from dstrain.data.formats.imagenet import find_split_paths
from dstrain.data.index.build import open_index, run_on_rank_0
from dstrain.data.index.index import Index
from dstrain.data.index.source import Indexed
from dstrain.data.source import Chance, Item, convert_errors_to_bad_sample
from dstrain.recipe import ConfigError


def open_images(
    path: str | Path,
    image_size: int,
    *,
    channels: int = 3,
    split: str = "train",
    held_out: float = 0.0,
    held_out_path: str | Path | None = None,
    draft: bool = False,
    request: Request | None = None,
    index: str | Path | None = None,
    run: Path | None = None,
    crop: Crop = Crop(),
    sizes: bool = False,
    leave_out: tuple[str, ...] = (),
) -> "Fashion | Emoji | Images":
    """Opens a source of images of one size, on all ranks together.

    path: "builtin:fashion", "builtin:emoji", or data in a form of formats/
    image_size: side of the square images, in pixels
    channels: 1 (grey), 3 (RGB, transparency laid on white) or 4 (RGBA)
    split: "train", "held_out" or "all"
    held_out: fraction of the data that is held out; the built-in data have their own
    held_out_path: other data, with the same classes, that are the held-out split instead
    draft: decodes JPEG files faster, at reduced size, with other pixels
    request: how to list the samples; None: without captions
    index, run: see `open_index`
    crop: how an image becomes a square
    sizes: adds the size of the image to its item
    leave_out: patterns of captions; images with a caption that fits one are left out

    Raises ConfigError if there are no such images, or an argument is out of its range.
    """
    if channels not in (1, 3, 4):
        raise ConfigError(f"channels is 1, 3 or 4, not {channels}")
    if split not in SPLITS:
        raise ConfigError(f"split is one of {', '.join(SPLITS)}, not {split!r}")
    if not 0 <= held_out < 1:
        raise ConfigError(f"data.held_out is a fraction in [0, 1), not {held_out}")
    builtin = str(path).startswith("builtin:")
    if builtin and str(path) not in (FASHION_PATH, EMOJI):
        raise ConfigError(f"data.path={path}: the built-in images are {FASHION_PATH} and {EMOJI}")
    if builtin and (crop != Crop() or sizes):
        size = "32 x 32" if path == EMOJI else "28 x 28"
        key = f"data.crop={crop.kind}" if crop != Crop() else "data.size_conditions"
        raise ConfigError(f"{key}: {path} has images of {size} pixels, which are not cropped: leave it out")
    if builtin and (held_out_path is None or split == "train"):
        if path == EMOJI:
            return Emoji(image_size, channels, split)
        captioned = request is not None and request.captions
        return Fashion(image_size, channels, split, captioned=captioned, leave_out=leave_out)
    request = request or Request(SUFFIXES)
    if not builtin:
        path, held_out_path = run_on_rank_0(
            lambda: find_split_paths(path, held_out, held_out_path, split == "all", request.cache)
        )
    if held_out_path is None and split == "held_out" and held_out == 0:
        raise ConfigError("no images are held out: set data.held_out (a fraction) or data.held_out_path")
    if held_out_path is not None and held_out and not builtin:
        raise ConfigError("data.held_out and data.held_out_path exclude each other: keep one")
    images = partial(
        Images,
        image_size=image_size,
        channels=channels,
        draft=draft,
        captions=request.captions,
        crop=crop,
        sizes=sizes,
        leave_out=leave_out,
    )
    if held_out_path is None:
        return images(*open_index(path, request, index, run), split=split, held_out=held_out)
    if split == "train":
        return images(*open_index(path, request, index, run))
    classes = (() if path == EMOJI else FASHION) if builtin else open_index(path, request, index, run)[1].classes
    unseen = replace(request, key="data.held_out_path")
    return images(*open_index(held_out_path, unseen, index, run), classes=classes, key=unseen.key)


class Images(Indexed):
    """Reads the images of a layout, as its index lists them; arguments as `Indexed` and `open_images`.

    captions: items have a caption. If a sample has several, `read` takes one by `random_number`, and the first if that
    is None.
    """

    noun = "images"

    def __init__(
        self,
        layout: Layout,
        index: Index,
        image_size: int,
        channels: int = 3,
        draft: bool = False,
        captions: bool = False,
        crop: Crop = Crop(),
        sizes: bool = False,
        **choice: Any,
    ) -> None:
        super().__init__(layout, index, **choice)
        self.image_size, self.channels, self.draft, self.crop, self.sizes = image_size, channels, draft, crop, sizes
        self.captioned = captions and index.most_captions > 0
        self.chance_name = "caption" if self.captioned and index.most_captions > 1 else None
        if crop.num_random_numbers:  # the last number is the caption's
            self.chance_name, self.chance_count = "crop", crop.num_random_numbers + 1

    def __getitem__(self, index: int) -> Item:
        return self.read(index)

    def read(self, index: int, random_number: Chance | None = None, shape: tuple[int, int] | None = None) -> Item:
        """Reads a sample. Raises BadSample if it cannot be read.

        random_number: chooses the crop, if it is random, and one of several captions; see Source.read. None takes the
        centre crop and the first caption. shape: (width, height) in pixels; None for a square of image_size.
        """
        row = self.find_row_of_sample(index)
        place = self.index.read_place(row)
        *numbers, choice = random_number if isinstance(random_number, list) else [random_number or 0.0]
        with convert_errors_to_bad_sample(place.name, self.path / place.name):
            item = retry(lambda: self._decode_and_crop(place, *(shape or (self.image_size,) * 2), numbers or None))
            item["label"] = self.read_label(row)
            if self.captioned:
                captions = self.index.read_captions(row)
                text = captions[int(choice * len(captions))]
                if not text:
                    raise ConfigError("its caption is empty, or cannot be read")
                item["caption"] = pack_caption(text)
        return item

    def read_captions(self, index: int) -> tuple[str, ...]:
        """Returns all captions of a sample, from the index."""
        return self.index.read_captions(self.find_row_of_sample(index))

    def _decode_and_crop(self, place: Place, width: int, height: int, random_numbers: list[float] | None) -> Item:
        """Returns the entry "image" of an item and, if `sizes` is set, "size" (of the image and its crop) and "right"
        (pixels to the right of the crop); see the module's docstring.

        random_numbers: numbers in [0, 1) for a random crop; None: the centre crop
        """
        file, upright = fetch_encoded_file(self.layout, place), self.layout.request.upright
        image = decode_uncropped_image(file, self.channels, (width, height) if self.draft else None, upright)
        cut = self.crop(image, width, height, random_numbers)
        if not self.sizes:
            return {"image": to_tensor(cut.image)}
        size = torch.tensor([image.height, image.width, cut.top, cut.left, height, width])
        return {"image": to_tensor(cut.image), "size": size, "right": cut.right}

    def _compute_fingerprint_prefix(self) -> str:
        """Returns the first part of the fingerprint: split, number of samples and classes, a hash of the names."""
        return f"images {self.split} n={len(self)} classes={len(self.classes)} names={self._hash_names_and_labels()}"


def fetch_encoded_file(layout: Layout, place: Place) -> Path | BinaryIO:
    """Returns what an image decoder opens for a sample: the path of its file, or its bytes as an open file."""
    content = layout.read(place)
    return io.BytesIO(content) if isinstance(content, bytes) else content
