"""Sets of images to measure: folders, zips, arrays in an .npz, and data sources. Each rank reads its share of a set."""

import os
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from dstrain.data.decode.pixels import SUFFIXES, decode_uncropped_image, find_samples_npz, to_tensor
from dstrain.data.files.listing import walk_files
from dstrain.data.files.local import is_hidden_path
from dstrain.data.files.zipped import iterate_zip_members
from dstrain.data.source import Source
from dstrain.distributed import group
from dstrain.encoders.text import unpack_captions
from dstrain.recipe import ConfigError, reword_errors


@dataclass
class Batch:
    """Holds some images of a set, all of one size."""

    numbers: Tensor  # int64 (n,), indices within the set
    images: Tensor  # uint8 (n, C, H, W); of clips (n, T, C, H, W)
    labels: Tensor | None = None  # int64 (n,)
    captions: list[str] | None = None


class Images(ABC):
    """A set of images or clips, of which each rank reads its share."""

    captions: Sequence[str] | None = None  # one for each image, or all different ones; None: they are not known
    clips: bool | None = None  # whether the set holds clips; None: only its batches show it

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of images of the whole set, not only of this rank's share."""

    @abstractmethod
    def iterate_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yields this rank's share of the set in batches of at most `batch_size` images."""

    def get_unreadable_reasons(self) -> dict[str, str]:
        """Returns {name: reason} of the images that this rank could not read so far. It took other images in their
        place.
        """
        return {}


class ImagesWithFirstBatch(Images):
    """Wraps a set. The constructor reads its first batch, so that errors come before a large reference is read."""

    def __init__(self, images: Images, size: int) -> None:
        self.captions, self._length, self._size = images.captions, len(images), size
        self._rest, self.get_unreadable_reasons = images.iterate_batches(size), images.get_unreadable_reasons
        self.first = next(self._rest, None)  # None: this rank has no images

    def __len__(self) -> int:
        return self._length

    def iterate_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yields this rank's batches of at most `batch_size` images; the first was read by the constructor.
        `batch_size` must be the constructor's. Call it only once: a second call yields the first batch alone.
        """
        assert batch_size == self._size
        if self.first is not None:
            yield self.first
        yield from self._rest


def _iterate_ranges_of_rank(count: int, max_size: int) -> Iterator[range]:
    """Yields this rank's share of the indices 0 to `count` - 1, as ranges of at most `max_size` indices."""
    for begin in range(group.rank() * max_size, count, max_size * group.world()):
        yield range(begin, min(begin + max_size, count))


def open_image_set(path: Path, option: str, upright: bool = True) -> Images:
    """Opens a set of images: a folder with images at any depth, or with the .npz that dstrain generate writes; a .zip
    of images; or an .npz with arr_0.

    upright: as data.upright, whether images are turned and mirrored as their EXIF data say.

    Raises ConfigError, which begins with `option`, if the path cannot be read or holds fewer than two images.
    """
    path = find_samples_npz(Path(os.path.expanduser(path)))
    images = _open_images(path, option, upright)
    if len(images) < 2:
        raise ConfigError(
            f"{option} {path} holds {len(images)} image{'s' * (len(images) != 1)}, and metrics compare "
            "sets of images: give two or more"
        )
    return images


def _open_images(path: Path, option: str, upright: bool) -> Images:
    """Opens the images at a path as `open_image_set` does, but does not require two of them. Raises ConfigError, which
    begins with `option`, if the path cannot be read or is no set of images.
    """
    if not path.exists():
        raise ConfigError(f"{option} {path}: there is no such file or folder")
    with _convert_read_errors(path, option):
        if (path / "run.yaml").is_file():  # its images are grids
            raise ConfigError(
                f"{option} {path} is a run's folder: draw from it by dstrain generate, and name the "
                "folder that it wrote"
            )
        if path.is_dir():
            return Files(path, sorted(walk_files(path, "", SUFFIXES)), None, option, upright)
        if path.suffix == ".zip":
            with reword_errors(f"{option} {path}: "), open(path, "rb") as file:
                names = [
                    member.filename for member in iterate_zip_members(file) if not is_hidden_path(member.orig_filename)
                ]
            return Files(path, sorted(name for name in names if name.lower().endswith(SUFFIXES)), path, option, upright)
        if path.suffix == ".npz":
            return Arrays(path, option)
    raise ConfigError(f"{option} {path}: name a folder of images, a .zip of images, or an .npz with arr_0")


@contextmanager
def _convert_read_errors(path: Path, option: str) -> Iterator[None]:
    """Within the block, raises an error of reading `path` as a ConfigError that begins with `option`."""
    try:
        yield
    except ConfigError:  # a ValueError that already says what to do
        raise
    except (OSError, EOFError, ValueError, KeyError, SyntaxError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(
            f"{option} {path} cannot be read ({type(error).__name__}: {error}); mend or remove it"
        ) from None


class Files(Images):
    """Reads PNG, JPEG, WebP and BMP files of a folder or a .zip, in the order of `names`, as RGB. No image is cropped
    or resized. Images of several sizes are yielded as one batch for each size.

    The constructor raises ConfigError if `names` is empty, and `iterate_batches` if a file cannot be read.
    """

    def __init__(self, path: Path, names: list[str], archive: Path | None, option: str, upright: bool) -> None:
        if not names:
            raise ConfigError(f"{option} {path} holds no images ({', '.join(SUFFIXES)}): name another")
        self.path, self.names, self.archive, self.option, self.upright = path, names, archive, option, upright

    def __len__(self) -> int:
        return len(self.names)

    def iterate_batches(self, batch_size: int) -> Iterator[Batch]:
        archive = zipfile.ZipFile(self.archive) if self.archive else None
        for turn in _iterate_ranges_of_rank(len(self), batch_size):
            images = []
            for name in (self.names[number] for number in turn):
                with _convert_read_errors(self.path / name, self.option):
                    file = archive.open(name) if archive else self.path / name
                    images.append(to_tensor(decode_uncropped_image(file, 3, upright=self.upright)))
            for shape in sorted({image.shape for image in images}):
                chosen = [index for index, image in enumerate(images) if image.shape == shape]
                yield Batch(
                    torch.tensor([turn[index] for index in chosen]), torch.stack([images[index] for index in chosen])
                )


class Arrays(Images):
    """Reads images from an .npz: arr_0, uint8 (N, H, W, C) or (N, T, H, W, C), and if present labels from arr_1 and
    captions from prompts. An arr_1 with other than one axis is ignored.

    The constructor raises ValueError or KeyError if the file is damaged or its arrays do not fit.
    """

    def __init__(self, path: Path, option: str) -> None:
        self.path, self.option, others = path, option, {}
        if not zipfile.is_zipfile(path):  # numpy would advise to read it unsafely
            raise ValueError("it is no whole .npz")
        with np.load(path, allow_pickle=False) as file:
            self.names = file.files
            if "arr_0" not in self.names:
                raise KeyError("it has no arr_0")
            others = {name: file[name] for name in ("arr_1", "prompts") if name in self.names}
        with self._open_pixel_stream() as (_, shape):
            self.shape = shape
        for name, values in others.items():
            if values.ndim and len(values) != len(self):
                raise ValueError(f"{name} has {len(values)} entries, and arr_0 {len(self)} images")
        labels = others.get("arr_1")
        if labels is not None and labels.ndim == 1 and labels.dtype.kind not in "iu":
            raise ValueError(f"arr_1 is {labels.dtype}, and labels are whole numbers")
        self.labels = torch.from_numpy(labels.astype(np.int64)) if labels is not None and labels.ndim == 1 else None
        self.captions = others["prompts"].tolist() if "prompts" in others else None

    def __len__(self) -> int:
        return self.shape[0]

    @contextmanager
    def _open_pixel_stream(self) -> Iterator[tuple[BinaryIO, tuple[int, ...]]]:
        """Opens the array arr_0 within the block. Yields (stream, shape): a stream that begins at the first pixel, so
        that images can be read one after another, and the shape of the array. Raises ValueError if arr_0 is no
        C-ordered uint8 array of images or clips with 1 or 3 channels.
        """
        with zipfile.ZipFile(self.path) as archive, archive.open("arr_0.npy") as stream:
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, reversed_axes, dtype = read(stream)
            if reversed_axes:
                raise ValueError("arr_0 is in Fortran's order: write it by numpy.ascontiguousarray")
            if dtype != np.uint8 or len(shape) not in (4, 5) or shape[-1] not in (1, 3) or 0 in shape[1:]:
                raise ValueError(f"arr_0 is {dtype} {shape}, and images are uint8 (N, H, W, 1 or 3)")
            yield stream, shape

    def iterate_batches(self, batch_size: int) -> Iterator[Batch]:
        with self._open_pixel_stream() as (stream, shape):
            bytes_each = int(np.prod(shape[1:]))
            start = stream.tell()
            for turn in _iterate_ranges_of_rank(len(self), batch_size):
                with _convert_read_errors(self.path, self.option):
                    stream.seek(start + turn[0] * bytes_each)
                    content = stream.read(len(turn) * bytes_each)
                pixels = np.frombuffer(content, np.uint8).reshape(len(turn), *shape[1:])
                numbers = torch.tensor(turn)
                yield Batch(
                    numbers,
                    torch.from_numpy(pixels.copy()).movedim(-1, -3),
                    None if self.labels is None else self.labels[numbers],
                    None if self.captions is None else [self.captions[number] for number in turn],
                )


class Sourced(Images):
    """Reads the images or clips of a data source, cropped and resized as in training. The constructor raises
    ConfigError if the source holds codes or embeddings instead of pixels.
    """

    def __init__(self, source: Source) -> None:
        self.source, self._unreadable = source, {}
        self.key = next((key for key in ("image", "video") if key in source.read_first_readable()), None)
        if self.key is None:
            raise ConfigError(
                "the data hold no pixels, but latents, tokens or embeddings: name a folder of the images "
                "or an .npz as --reference"
            )

    def __len__(self) -> int:
        return len(self.source)

    def get_unreadable_reasons(self) -> dict[str, str]:
        return self._unreadable

    def iterate_batches(self, batch_size: int) -> Iterator[Batch]:
        for turn in _iterate_ranges_of_rank(len(self), batch_size):
            samples, bad = self.source.read_batch(torch.tensor(turn))
            self._unreadable.update(bad)
            captions = samples.get("caption")
            yield Batch(
                torch.tensor(turn),
                samples[self.key],
                samples.get("label") if self.source.classes else None,
                None if captions is None else unpack_captions(captions),
            )
