"""Grids of pictures, as a person wants to see them."""

import math
import os
import zipfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

_PADDING = 2                # black pixels between pictures and around them
_VISIBLE = 64               # pixels to which smaller pictures are enlarged, by a whole factor


def grid(images: Tensor, columns: int | None = None) -> np.ndarray:
    """One picture of many: uint8 (N, C, H, W) -> (H', W', C), row by row; None is near-square.

    RGBA is laid on white. ValueError: not uint8, not four axes, no picture, or other channels.
    """
    shape = tuple(images.shape)
    if images.dtype != torch.uint8 or len(shape) != 4 or shape[1] not in (1, 3, 4) or 0 in shape:
        raise ValueError(f"a grid needs uint8 (N, 1, 3 or 4, H, W), got {images.dtype} {shape}")
    if shape[1] == 4:
        images = _on_white(images)
    pictures = images.detach().cpu().permute(0, 2, 3, 1).numpy()
    factor = max(1, round(_VISIBLE / min(pictures.shape[1:3])))      # of strips the narrow side
    pictures = pictures.repeat(factor, 1).repeat(factor, 2)
    num, height, width, channels = pictures.shape
    columns = columns or near_square(num)
    rows = math.ceil(num / columns)
    down, right = height + _PADDING, width + _PADDING
    whole = np.zeros((rows * down + _PADDING, columns * right + _PADDING, channels), np.uint8)
    for i, picture in enumerate(pictures):
        top, left = i // columns * down + _PADDING, i % columns * right + _PADDING
        whole[top:top + height, left:left + width] = picture
    return whole


def _on_white(images: Tensor) -> Tensor:
    colours, alpha = images[:, :3].float(), images[:, 3:].float() / 255
    return (colours * alpha + 255 * (1 - alpha)).round().to(torch.uint8)


def near_square(num: int) -> int:
    """Columns of a grid of `num`, no fewer than rows: full rows where that stays below 2 : 1."""
    least = math.isqrt(num - 1) + 1
    full = (columns for columns in range(least, num + 1) if num % columns == 0)
    return next((columns for columns in full if columns * columns <= 2 * num), least)


def save_png(path: str | os.PathLike, pixels: np.ndarray) -> None:
    """Writes uint8 (H, W, 1 or 3) whole or not at all; makes the folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(f".{path.name}.tmp")
    try:
        grey = pixels.shape[2] == 1
        Image.fromarray(pixels[:, :, 0] if grey else pixels).save(tmp, format="PNG")
        os.replace(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


class Album:
    """`arr_0` uint8 (N, H, W, C) in FOLDER/samples_NxHxWxC.npz, written piece by piece and named once it is whole."""

    def __init__(self, folder: Path, shape: tuple[int, ...]) -> None:
        self.path = folder / f"samples_{'x'.join(map(str, shape))}.npz"
        self._tmp = folder / f".{self.path.name}.tmp"
        self._zip = zipfile.ZipFile(self._tmp, "w")
        self._member = self._zip.open("arr_0.npy", "w", force_zip64=True)
        np.lib.format.write_array_header_1_0(
            self._member, {"descr": "|u1", "fortran_order": False, "shape": tuple(shape)})

    def add(self, pictures: np.ndarray) -> None:
        """The next pictures, uint8 (n, H, W, C)."""
        self._member.write(np.ascontiguousarray(pictures).data)

    def close(self) -> None:
        self._member.close()
        self._zip.close()
        os.replace(self._tmp, self.path)
