"""The pictures of the built-in emoji pairs, 1,910 of 32 x 32 pixels in the package (see builtin/)."""

import lzma
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from dstrain.data.cached.embeddings import map_builtin_captions_to_rows
from dstrain.data.decode.pixels import convert_mode, crop_center, to_tensor
from dstrain.data.order import Order
from dstrain.data.source import Item, Source

EMOJI = "builtin:emoji"
_SIDE = 32  # pixels
_TRAIN = 0.8  # share of the pairs, in their permuted order


@dataclass
class Emoji(Source):
    """Holds the pictures of the built-in emoji pairs.

    split: "train" for those that training on the pairs uses with data.splits=[0.8,0.1,0.1], "held_out" for the others,
    or "all". image_size: side, 32 as they are, else resized. channels: 1, 3 or 4.
    """

    image_size: int = _SIDE
    channels: int = 3
    split: str = "train"
    noun = "images"
    light = True

    def __post_init__(self) -> None:
        with np.load(Path(__file__).parent / "emoji-pictures.npz") as file:
            pixels = lzma.decompress(file["pictures"].tobytes())
        pictures = np.frombuffer(bytearray(pixels), np.uint8).reshape(-1, _SIDE, _SIDE, 3)
        cut, end = round(_TRAIN * len(pictures)), len(pictures)
        begin, end = {"train": (0, cut), "held_out": (cut, end), "all": (0, end)}[self.split]
        self.rows = Order(len(pictures)).find_sample_index(np.arange(begin, end))
        self.pictures = pictures[self.rows]  # (N, 32, 32, 3)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Item:
        picture = self.pictures[index]
        if self.image_size == _SIDE and self.channels == 3:
            return {"image": torch.from_numpy(picture).permute(2, 0, 1), "label": 0}
        image = convert_mode(crop_center(Image.fromarray(picture), self.image_size), self.channels)
        return {"image": to_tensor(image), "label": 0}

    def list_captions(self) -> list[str]:
        """Returns the caption of each picture, in the order of the samples."""
        names = [*map_builtin_captions_to_rows()]
        return [names[row] for row in self.rows]

    def find_row_of_sample(self, index: int) -> int:
        """Returns the row, in the table of all built-in pairs, of the sample at `index` of this split."""
        return int(self.rows[index])

    def name_sample(self, index: int) -> str:
        """Returns "builtin:emoji/ROW", where ROW is the sample's row in the table of all built-in pairs."""
        return f"{EMOJI}/{self.find_row_of_sample(index)}"

    def compute_fingerprint(self) -> str:
        return f"{EMOJI} {self.split} n={len(self)} crc={zlib.crc32(self.pictures.tobytes()):08x}"
