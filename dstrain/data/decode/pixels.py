"""Decodes image files, guarded against hostile ones, converts them to RGB, and makes the ADM centre crop.

The crop is the one of Dhariwal and Nichol 2021 (ADM), which DiT and the ImageNet literature use: halve with BOX while
the shorter side is at least twice the target, resize it to the target with BICUBIC, cut out the middle. Pictures are
turned as EXIF says, unless data.upright=false: ADM does not turn them. Unlike in ADM, transparency is laid on white
(without its alpha channel an image shows whatever colours lie beneath), and 16-bit grey is scaled to 8 bits (Pillow
would clip it at 255).
"""

import math
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, PngImagePlugin, UnidentifiedImageError
from torch import Tensor

from dstrain.data.files.listing import join_first, walk_files
from dstrain.data.files.storage import refuse_special_file, retry
from dstrain.recipe import ConfigError

SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".jpe", ".pjpeg", ".pjp", ".webp", ".bmp")  # compared in lower case
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")  # by content; Pillow's other parsers stay out of reach
# 512 MiB a worker at Pillow's 4 bytes a pixel: above any camera (a 100 megapixel back fits), and below the 179
# megapixels at which Pillow refuses by itself.
PIXEL_CAP = 1 << 27
_PNG_HEAD, _PNG_TEXTS = 8, (b"eXIf", b"iTXt", b"tEXt", b"zTXt")  # bytes before the first chunk; chunks of EXIF, texts


def read_image(path: str | Path, image_size: int, channels: int = 3, draft: bool = False) -> Tensor:
    """Reads an image file, turned upright and centre-cropped: uint8 (channels, image_size, image_size). Tries again if
    the storage fails.

    draft: decodes a large JPEG at 1/2, 1/4 or 1/8 of its size, but not below the crop's: faster, with slightly
    different pixels.

    Raises ConfigError if the path is no file, or if the header gives more pixels than PIXEL_CAP; OSError if the storage
    keeps failing; any error of Pillow for a broken file.
    """
    least = (image_size, image_size) if draft else None
    return to_tensor(crop_center(retry(lambda: decode_uncropped_image(path, channels, least)), image_size))


def decode_uncropped_image(
    file: str | Path | BinaryIO, channels: int, draft: tuple[int, int] | None = None, upright: bool = True
) -> Image.Image:
    """Returns an image file decoded and not cropped, in Pillow's mode L, RGB or RGBA for 1, 3 or 4 channels. Raises
    what `open_image` raises.

    draft: decodes a JPEG at a reduced size, if that still covers this (width, height); None: at full size. upright:
    turns the image as its EXIF orientation says.
    """
    with open_image(file, FORMATS) as image:
        if draft:
            image.draft(None, draft)
        image.load()
        return convert_mode(turn_upright(image) if upright else image, channels)


def turn_upright(image: Image.Image) -> Image.Image:
    """Returns an image turned and mirrored as its EXIF orientation says; unchanged if that is missing or invalid."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # whatever Pillow's parser of hostile EXIF raises
        return image


def read_upright_size(image: Image.Image) -> tuple[int, int]:
    """Returns (width, height) that an open image has after `turn_upright`. Does not decode its pixels."""
    if isinstance(image, PngImagePlugin.PngImageFile) and "exif" not in image.info:
        _read_png_texts_after_pixels(image)
    try:
        exif = Image.Image.getexif(image)  # that of a PNG would decode it
        sideways = exif.get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    except Exception:  # as in turn_upright
        sideways = False
    return image.size[::-1] if sideways else image.size


def _read_png_texts_after_pixels(image: PngImagePlugin.PngImageFile) -> None:
    """Adds to `image.info` the texts and EXIF that a PNG has after its pixels, and that Pillow would read only when it
    decodes them. Ignores damage.
    """
    file, kind, behind = image.fp, b"", False
    png = PngImagePlugin.PngStream(file)
    file.seek(_PNG_HEAD)
    with suppress(struct.error, SyntaxError):  # It is cut off, or damaged, which shows when it is decoded.
        while kind != b"IEND" and not (behind and kind == b"fcTL"):  # the next frame of an animation
            kind, at, size = png.read()
            behind = behind or kind == b"IDAT"
            if kind in _PNG_TEXTS:
                png.call(kind, at, size)
            file.seek(at + size + 4)  # behind its checksum
    image.info.update(png.im_info)


@contextmanager
def open_image(file: str | Path | BinaryIO, formats: Sequence[str]) -> Iterator[Image.Image]:
    """A context manager that opens an image with Pillow and reads its header only. formats: Pillow's names of the
    formats to try.

    Raises ConfigError if it is no regular file, is a video, or has more pixels than PIXEL_CAP or more than 1 MB of
    texts; UnidentifiedImageError if Pillow cannot read it.
    """
    if isinstance(file, (str, Path)):
        refuse_special_file(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own cap follows
        try:
            with Image.open(file, formats=formats) as image:
                require_below_pixel_cap(image.width, image.height)
                _scale_transparency_to_8_bits(image)
                yield image
        except UnidentifiedImageError:
            _refuse_video(file)
            raise UnidentifiedImageError("it is no image that Pillow can read") from None  # its own names an address
        except Image.DecompressionBombError as error:  # above 179 megapixels, before our own cap
            raise ConfigError(f"its pixels exceed the cap of {PIXEL_CAP}: {error}") from None
        except ValueError as error:
            if "MAX_TEXT" not in str(error):
                raise
            raise ConfigError(
                "its texts have more than 1 MB: take them out, as `mogrify -strip FILE` of ImageMagick does"
            ) from None


def _scale_transparency_to_8_bits(image: Image.Image) -> None:
    """Scales the colour that a PNG of 2, 4 or 16 bits declares transparent, in `image.info`, to 8 bits. Pillow scales
    only the pixels, so the two would not match.
    """
    clear, raw = image.info.get("transparency"), image.tile[0].args if image.tile else None
    if isinstance(clear, int) and raw in ("L;2", "L;4"):
        image.info["transparency"] = clear * {"L;2": 85, "L;4": 17}[raw]
    elif isinstance(clear, tuple) and raw == "RGB;16B":
        image.info["transparency"] = tuple(value >> 8 for value in clear)


def _refuse_video(file: str | Path | BinaryIO) -> None:
    """Raises ConfigError if a file is a video, by its first bytes (.mp4, .mov, .webm, .mkv, .avi). Moves the position
    of an open file.
    """
    with open(file, "rb") if isinstance(file, (str, Path)) else nullcontext(file) as stream:
        stream.seek(0)
        head = stream.read(12)
    movie = head[4:8] == b"ftyp" and head[8:12] not in (b"avif", b"heic", b"heix", b"mif1")
    if movie or head[:4] == b"\x1aE\xdf\xa3" or head[:4] + head[8:] == b"RIFFAVI ":
        raise ConfigError(
            "it is a video, and no picture: choose a system that learns from clips, such as system=phenaki.tokenizer"
        )


def require_below_pixel_cap(width: int, height: int) -> None:
    """Raises ConfigError if an image or a video frame has more than PIXEL_CAP pixels."""
    if width * height > PIXEL_CAP:
        raise ConfigError(f"{width} x {height} pixels exceed the cap of {PIXEL_CAP}")


def convert_mode(image: Image.Image, channels: int) -> Image.Image:
    """Returns an image in Pillow's mode L, RGB or RGBA for 1, 3 or 4 channels; `image` itself if it has that mode.

    For 1 and 3 channels, transparency is laid on white. 16-bit grey is scaled to 8 bits.
    """
    mode = {1: "L", 3: "RGB", 4: "RGBA"}[channels]
    if image.mode == mode and "transparency" not in image.info:
        return image  # convert() would copy
    if image.mode.startswith("I"):
        wide, clear = np.clip(np.asarray(image), 0, 65535).astype(np.uint32), image.info.get("transparency")
        image = Image.fromarray(((wide * 255 + 32767) // 65535).astype(np.uint8))
        if isinstance(clear, int):
            image = Image.merge("LA", (image, Image.fromarray(np.where(wide == clear, 0, 255).astype(np.uint8))))
    if image.has_transparency_data and channels != 4:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert(mode)


def crop_center(image: Image.Image, width: int, height: int | None = None) -> Image.Image:
    """Returns the centre crop, width x height pixels, of an RGB, RGBA or L image; a square if `height` is None. Squares
    of RGB and L equal those of ADM (Dhariwal and Nichol 2021) in every bit.

    The image is halved while both sides are at least twice the target's, then resized to just cover the target, and
    cropped. The colours of RGBA are weighted by opacity, so that invisible colours never show at an edge.
    """
    # Pillow resizes columns first, then rows, and rounds to 8 bits in between. So the two passes can be called
    # separately, and what is not needed be cut away between them, with no bit changed. Recent versions of Pillow take
    # rows first if an image is more than twice as high as wide: such images are resized in one call.
    height = height or width
    if image.mode == "RGBA":
        return crop_center(image.convert("RGBa"), width, height).convert("RGBA")
    image = halve_towards_target_size(image, width, height)
    scale = max(width / image.width, height / image.height)
    wide, high = round(image.width * scale), round(image.height * scale)
    x, y = (wide - width) // 2, (high - height) // 2
    if image.height > 1.75 * image.width:
        image = image.resize((wide, high), Image.Resampling.BICUBIC)
        return image.crop((x, y, x + width, y + height))
    image = _resize_width_of_needed_rows(image, wide, high, y, height)
    image = image.crop((x, 0, x + width, image.height))
    image = image.resize((width, high), Image.Resampling.BICUBIC)
    return image if high == height else image.crop((0, y, width, y + height))


def halve_towards_target_size(image: Image.Image, width: float, height: float) -> Image.Image:
    """Returns an image halved until one of its sides is less than twice the target's; `image` itself if one is already.
    Odd sides are rounded down.
    """
    while image.width >= 2 * width and image.height >= 2 * height:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    return image


def _resize_width_of_needed_rows(
    image: Image.Image, new_width: int, new_height: int, first_row: int, num_rows: int
) -> Image.Image:
    """Returns an image resized to `new_width` columns, with its own number of rows: the first of two passes of a resize
    to new_width x new_height. Fills only the rows from which the second pass computes `num_rows` rows from `first_row`
    on; the others are blank.
    """
    full, ratio = image.height, image.height / new_height
    reach = 2 * max(ratio, 1.0) + 2  # BICUBIC reaches 2 pixels of the coarser side; 2 to spare
    top = max(0, math.floor(first_row * ratio - reach))
    bottom = min(full, math.ceil((first_row + num_rows) * ratio + reach))
    if (top, bottom) == (0, full):
        return image.resize((new_width, full), Image.Resampling.BICUBIC)
    image = image.crop((0, top, image.width, bottom))
    image = image.resize((new_width, bottom - top), Image.Resampling.BICUBIC)
    return image.crop((0, -top, new_width, full - top))


def to_tensor(image: Image.Image) -> Tensor:
    """Returns a copy of a Pillow image as uint8 (C, H, W)."""
    bands = image.split()
    pixels = bytearray().join(band.tobytes() for band in bands)
    return torch.frombuffer(pixels, dtype=torch.uint8).view(len(bands), image.height, image.width)


def read_pictures(path: Path, channels: int) -> Tensor:
    """Returns the pictures at `path` as uint8 (N, channels, H, W). Of a folder: all its pictures, sorted by name and
    centre-cropped to squares. Of an .npz file of `dstrain generate`, or a folder with one samples_*.npz: the pictures
    in this file.

    channels: 1 or 3

    Raises ConfigError if there are no such pictures, if one cannot be read, or if they differ in size.
    """
    path = find_samples_npz(path)
    if path.is_dir():
        files = [path / name for name in sorted(walk_files(path, "", SUFFIXES))]
        if not files:
            raise ConfigError(f"{path} holds no pictures ({', '.join(SUFFIXES)}): name another")
        images = []
        for file in files:
            try:
                images.append(retry(partial(decode_uncropped_image, file, channels)))
            except Exception as error:  # Pillow raises anything for a broken file
                reason = f"{path}: a picture cannot be read, {file.name} ({error})"
                raise ConfigError(f"{reason}; remove or replace it") from None
        if len(sizes := {image.size for image in images}) != 1:
            raise ConfigError(f"{path} holds pictures of {len(sizes)} sizes; give one size only")
        return torch.stack([to_tensor(crop_center(image, min(image.size))) for image in images])
    array = read_samples_npz(path)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] not in (1, 3) or not len(array):
        raise ConfigError(f"{path}: arr_0 is {array.dtype} {array.shape}, and pictures are uint8 (N, H, W, 1 or 3)")
    pictures = torch.from_numpy(array).permute(0, 3, 1, 2)
    if channels == 1 and pictures.shape[1] == 3:
        grey = (Image.fromarray(picture).convert("L") for picture in array)
        return torch.stack([torch.from_numpy(np.array(picture))[None] for picture in grey])
    return pictures.expand(-1, channels, -1, -1)


def find_samples_npz(path: Path) -> Path:
    """Returns the file samples_*.npz, as `dstrain generate` writes it, in the folder `path`. Returns `path` itself if
    it is a file, or a folder without such a file. Raises ConfigError if there are several.
    """
    files = sorted(path.glob("samples_*.npz")) if path.is_dir() else []
    if len(files) > 1:
        raise ConfigError(f"{path} holds {join_first([file.name for file in files], 3)}: name one of them")
    return files[-1] if files else path


def read_samples_npz(path: Path) -> np.ndarray:
    """Returns the array `arr_0` of an .npz file of `dstrain generate`. Raises ConfigError if the file has none or
    cannot be read.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return file["arr_0"]
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError, zipfile.BadZipFile, zlib.error):
        raise ConfigError(f"{path} is no folder of pictures, nor a .npz with arr_0 as generate writes it") from None
