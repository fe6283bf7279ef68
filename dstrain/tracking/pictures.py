"""Makes grids of pictures for a person, and files of samples for programs."""

import math
import os
import unicodedata
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from dstrain.disk import owner
from dstrain.disk.atomic import replace_file
from dstrain.recipe import ConfigError

_PADDING = 2  # black pixels between pictures and around them
_SIDE = 64  # pixels near which small pictures are enlarged, by a whole factor
_CAPTIONED_SIDE = 128  # the same for pictures with a caption below
_FONT_SIZE = 10  # pixels
_MAX_LINES = 4  # of a caption that are shown


def make_grid(images: Tensor, columns: int | None = None, captions: Sequence[str] | None = None) -> np.ndarray:
    """Tiles images into one picture, row by row: uint8 (N, C, H, W) -> (H', W', C). Small images are enlarged, RGBA is
    laid on white, and captions are put below. `columns` None makes the grid about square.

    Raises ConfigError if there are no images, or if they are not uint8 (N, 1, 3 or 4, H, W).
    """
    shape = tuple(images.shape)
    if images.dtype != torch.uint8 or len(shape) != 4 or shape[1] not in (1, 3, 4) or 0 in shape:
        raise ConfigError(f"a grid needs uint8 (N, 1, 3 or 4, H, W), got {images.dtype} {shape}")
    pictures = enlarge_pictures(images, _CAPTIONED_SIDE if captions else _SIDE)
    if captions:
        pictures = np.concatenate((pictures, render_captions(captions, *pictures.shape[2:])), axis=1)
    return tile_pictures(pictures, columns)


def enlarge_pictures(images: Tensor, target_side: int = _SIDE) -> np.ndarray:
    """Enlarges images by the whole factor that brings their shorter side nearest to `target_side` pixels, and lays RGBA
    on white: uint8 (N, C, H, W) -> (N, H', W', 1 or 3). The factor is at least 1.
    """
    pictures = composite_on_white(images).detach().cpu().permute(0, 2, 3, 1).numpy()
    factor = max(1, round(target_side / min(pictures.shape[1:3])))
    return pictures.repeat(factor, 1).repeat(factor, 2)


def tile_pictures(pictures: np.ndarray, columns: int | None = None) -> np.ndarray:
    """Tiles pictures of equal size into one, row by row: uint8 (N, H, W, C) -> (H', W', C). `columns` None makes the
    grid about square.
    """
    num, height, width, channels = pictures.shape
    columns = columns or choose_grid_columns(num)
    rows = math.ceil(num / columns)
    down, right = height + _PADDING, width + _PADDING
    whole = np.zeros((rows * down + _PADDING, columns * right + _PADDING, channels), np.uint8)
    for i, picture in enumerate(pictures):
        top, left = i // columns * down + _PADDING, i % columns * right + _PADDING
        whole[top : top + height, left : left + width] = picture
    return whole


def render_captions(captions: Sequence[str], width: int, channels: int) -> np.ndarray:
    """Renders captions as white text on black: uint8 (N, H, width, C). All pictures have as many lines as the longest
    caption needs, at most 4.
    """
    font = ImageFont.load_default(_FONT_SIZE)
    wrapped = [_wrap_and_cut_text(text, font, width) for text in captions]
    bars = []
    for lines in wrapped:
        bar = Image.new("L", (width, max(map(len, wrapped)) * (_FONT_SIZE + 2) + 2))
        ImageDraw.Draw(bar).text((1, 0), "\n".join(lines), fill=255, font=font, spacing=2)
        bars.append(np.asarray(bar))
    return np.stack(bars)[..., None].repeat(channels, 3)


def _wrap_and_cut_text(text: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    """Returns the lines of a text that fit into `width` pixels: broken at blanks, or within words that are too long.
    Cuts off what does not fit into 4 lines.
    """
    letters = (letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))
    words = "".join(letter if letter.isascii() else "?" for letter in letters).split()  # Pillow's font is ASCII only
    lines = [""]
    while words:
        word = words.pop(0)
        whole = f"{lines[-1]} {word}".lstrip()
        if font.getlength(whole) <= width - 2:
            lines[-1] = whole
        elif lines[-1]:
            lines.append("")
            words.insert(0, word)
        else:
            fits = max((n for n in range(1, len(word)) if font.getlength(word[:n]) <= width - 2), default=1)
            lines[-1] = word[:fits]
            words[:0] = [word[fits:]] if word[fits:] else []
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES - 1 :] = [lines[_MAX_LINES - 1][:-3] + "..."]
    return lines


def composite_on_white(images: Tensor) -> Tensor:
    """Lays RGBA images on white, uint8 (..., 4, H, W) -> (..., 3, H, W); returns images without alpha unchanged."""
    if images.shape[-3] != 4:
        return images
    colours, alpha = images[..., :3, :, :].float(), images[..., 3:, :, :].float() / 255
    return (colours * alpha + 255 * (1 - alpha)).round().to(torch.uint8)


def choose_grid_columns(num: int) -> int:
    """Returns a number of columns for a grid of `num` pictures, at least as large as the number of rows. It is the
    smallest number with which all rows are full, if the grid is then at most twice as wide as high. Otherwise it makes
    the grid about square.
    """
    least = math.isqrt(num - 1) + 1
    full = (columns for columns in range(least, num + 1) if num % columns == 0)
    return next((columns for columns in full if columns * columns <= 2 * num), least)


def save_png(path: str | os.PathLike, pixels: np.ndarray) -> None:
    """Writes pixels uint8 (H, W, 1 or 3) as a PNG, whole or not at all; makes its folder."""
    grey = pixels.shape[2] == 1
    with replace_file(path) as file:
        Image.fromarray(pixels[:, :, 0] if grey else pixels).save(file, format="PNG")


class Album:
    """Writes FOLDER/samples_NxHxWxC.npz with `arr_0` uint8 (N, H, W, C), for videos (N, T, H, W, C).

    It is written piece by piece under a temporary name, and renamed when it is complete.
    """

    def __init__(self, folder: Path, shape: tuple[int, ...]) -> None:
        self.path = folder / f"samples_{'x'.join(map(str, shape))}.npz"
        owner.remove_abandoned_files(folder)
        self._tmp = owner.make_hidden_path(self.path)
        self._zip = zipfile.ZipFile(self._tmp, "x")
        self._member = self._zip.open("arr_0.npy", "w", force_zip64=True)
        np.lib.format.write_array_header_1_0(
            self._member, {"descr": "|u1", "fortran_order": False, "shape": tuple(shape)}
        )

    def add_pictures(self, pictures: np.ndarray) -> None:
        """Appends pictures to the file: uint8 (n, H, W, C), or for videos (n, T, H, W, C)."""
        self._member.write(np.ascontiguousarray(pictures).data)

    def close(self, **arrays: np.ndarray) -> None:
        """Completes the file and gives it its final name. `arrays` are added to it, such as arr_1=labels for ADM's
        evaluator.
        """
        self._member.close()
        for name, array in arrays.items():
            with self._zip.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
        self._zip.close()
        owner.require_claim_not_lost(self.path)
        os.replace(self._tmp, self.path)
