"""Captioned images as pairs, for `dstrain encode`: X.png with X.txt or X.json in folders, tar shards, lists and tables.

Items are {"image": uint8 (3, S, S), "caption": UTF-8 as uint8 (bytes,)}, with the first of several captions.
"""

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dstrain.data.decode.pixels import SUFFIXES
from dstrain.data.files.listing import map_in_threads
from dstrain.data.files.storage import refuse_special_file
from dstrain.data.formats.base import UNCAPTIONED, Request
from dstrain.data.formats.sidecars import Beside
from dstrain.data.index.build import open_index
from dstrain.data.index.index import CHUNK
from dstrain.data.source import Item
from dstrain.data.sources.images import Images
from dstrain.recipe import ConfigError, reword_errors

_NONE = " holds no image with a caption of its name beside it (X.png and X.txt), nor tar shards;"


def open_captioned_source(path: str | Path, image_size: int, upright: bool = True) -> "Captioned":
    """Opens images that have captions, for `dstrain encode`, from any form of data. All ranks must call it. Raises
    ConfigError if no image has a caption.

    image_size: side of the square images, in pixels. upright: turns images as their EXIF says.
    """
    with reword_errors(options={"data.path=": "--data ", ", or builtin:fashion": "", ": no images in it;": _NONE}):
        layout, index = open_index(path, Request(SUFFIXES, captions=True, upright=upright))
    if not index.most_captions:
        raise ConfigError(f"--data {path}{_NONE} images end in {' '.join(SUFFIXES)}")
    return Captioned(layout, index, image_size, captions=True)


class Captioned(Images):
    """Holds the pairs of an image and its caption. Images without a caption are no samples; `num_uncaptioned` counts
    them.
    """

    noun = "captioned images"

    @property
    def num_uncaptioned(self) -> int:
        """Returns the number of images that were left out, since they have no caption."""
        return self.layout.left_out_counts.get(UNCAPTIONED, 0)

    def read(self, index: int, random_number: float | None = None) -> Item:
        """Reads an image and its caption, without a label."""
        item = super().read(index, random_number)
        return {name: item[name] for name in ("image", "caption")}

    def describe_samples(self) -> str:
        """Returns a line with the number of pairs, and of images without a caption."""
        return f"{len(self):,} {self.noun}, and {self.num_uncaptioned:,} images without a caption, which are left out"

    def compute_fingerprint(self) -> str:
        """Returns the fingerprint that covers all files: `dstrain encode` reads them all anyway."""
        return self.compute_full_fingerprint()

    def compute_names_fingerprint(self) -> str:
        """Returns the first part of the fingerprint: the number of pairs, and a hash of their names."""
        return self._compute_fingerprint_prefix()

    def _compute_fingerprint_prefix(self) -> str:
        """Returns the first part of the fingerprint: the number of pairs, and a hash of their names."""
        digest = blake2b(digest_size=8)
        for start in range(0, len(self), CHUNK):
            digest.update(b"".join(self.index.read_names(start, min(start + CHUNK, len(self)))))
        return f"captioned n={len(self)} names={digest.hexdigest()}"

    def _hash_texts(self, file_numbers: range) -> bytes:
        """Returns a hash of captions. If they are in text files beside the images, reads those of the samples
        `file_numbers`; for other data takes the hash from the index, as any source does.
        """
        if not isinstance(self.layout, Beside):
            return super()._hash_texts(file_numbers)
        return hash_captions_beside(self.path, self._iterate_file_names(file_numbers))


def hash_captions_beside(root: Path, files: Iterable[list[str]]) -> bytes:
    """Returns a hash of the text files beside images, X.txt of X.png. files: lists of the images' names, relative to
    `root`.
    """
    texts = blake2b()
    for names in files:
        hash_captions_into(texts, root, names)
    return texts.digest()


def hash_captions_into(digest: Any, root: Path, names: list[str]) -> None:
    """Updates the hash object `digest` with the text file beside each named image, X.txt of X.png. One that cannot be
    read counts as empty.
    """

    def read_text_beside(name: str) -> bytes:
        try:
            path = (root / name).with_suffix(".txt")
            refuse_special_file(path)
            return path.read_bytes().strip()
        except (OSError, ConfigError):  # it will be a bad sample, as one whose caption is empty
            return b""

    for text in map_in_threads(read_text_beside, names):
        digest.update(len(text).to_bytes(8, "little") + text)
