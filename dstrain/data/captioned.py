"""Captioned images as sources: X.png with X.txt in folders, or in tar shards as webdataset writes them.

Items are {"image": uint8 (3, S, S), "caption": UTF-8 as uint8 (CAPTION_BYTES,)}. A tar file is never extracted: one
pass over its headers finds where its members lie, and they are read by offset. Names in it are data, never paths. Only
regular members are read; links, devices and sparse files are skipped, and sizes in headers are not believed.
"""

import io
import os
import tarfile
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dstrain.data.folder import Folder, Names, of_each, summary_of_sizes
from dstrain.data.pixels import SUFFIXES, decode, read_image
from dstrain.data.rows import packed
from dstrain.data.source import Item, Source, reading
from dstrain.data.storage import read_text, require_regular, with_retries
from dstrain.recipe import ConfigError

_MAX_BYTES = 1 << 28                              # of a member that is read


def open_captioned(path: str | Path, image_size: int) -> "CaptionedFolder | CaptionedTars":
    """A folder with tar files is read as shards, any other as pairs of files at any depth; a single .tar may be named.

    ConfigError: there is no pair, or a tar file that cannot be read.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".tar":
        return CaptionedTars([path], path.parent, image_size)
    if not path.is_dir():
        raise ConfigError(f"--data {path} is no folder: name one with X.png and X.txt, or with tar shards of them")
    tars = sorted(path.glob("*.tar"))
    return CaptionedTars(tars, path, image_size) if tars else CaptionedFolder(path, image_size)


class CaptionedFolder(Folder):
    """Images with a .txt of the same name beside them; others are counted in `num_uncaptioned` and not read."""

    noun = "captioned images"
    captioned = True

    def __init__(self, path: Path, image_size: int) -> None:
        self.path, self.image_size, self.num_uncaptioned = path, image_size, 0
        names = []
        for folder, _, files in os.walk(path, followlinks=False):
            in_folder = set(files)
            for name in files:
                stem, suffix = os.path.splitext(name)
                if suffix.lower() in SUFFIXES and name[0] != ".":
                    if f"{stem}.txt" in in_folder:
                        names.append(os.path.relpath(os.path.join(folder, name), path))
                    else:
                        self.num_uncaptioned += 1
        if not names:
            raise ConfigError(f"--data {path} holds no image with a caption of its name beside it (X.png and X.txt), "
                              f"nor tar shards; images end in {' '.join(SUFFIXES)}")
        self.names = Names(sorted(names))

    def __getitem__(self, index: int) -> Item:
        name = self.names[index]
        path = self.path / name
        with reading(name, path):
            caption = with_retries(lambda: read_text(path.with_suffix(".txt")))
            return _item(read_image(path, self.image_size), caption)

    def describe(self) -> str:
        return f"{len(self):,} {self.noun}, and {self.num_uncaptioned:,} images without a caption, which are left out"

    def fingerprint(self) -> str:
        """Of all files, since all will be read."""
        return self.contents()

    def _summary(self) -> str:
        return f"captioned n={len(self)} names={blake2b(self.names.blob, digest_size=8).hexdigest()}"

    def _files(self, names: Names) -> str:
        texts = blake2b()
        add_captions(texts, self.path, names)
        return summary_of_sizes(self.path, names, texts.digest())


class CaptionedTars(Source):
    """Tar shards in which KEY.png (or another image) and KEY.txt are one pair; a key's first members count."""

    noun = "captioned images"
    captioned = True

    def __init__(self, tars: list[Path], root: Path, image_size: int) -> None:
        self.root, self.image_size, self.num_uncaptioned = root, image_size, 0
        self.tars = [tar.name for tar in tars]
        keys, places = [], []
        texts = blake2b(digest_size=8)
        for number, tar in enumerate(tars):
            members = _members(tar)
            for key in sorted(members):
                pair = members[key]
                if "image" in pair and "txt" in pair:
                    keys.append(f"{tar.name}/{key}")
                    *text_place, text_hash = pair["txt"]
                    places.append((number, *pair["image"], *text_place))
                    texts.update(text_hash)
                else:
                    self.num_uncaptioned += "image" in pair
        if not keys:
            raise ConfigError(f"--data {root}: its tar shards hold no image with its caption (X.png and X.txt)")
        self.keys = Names(keys)
        self.places = np.array(places, np.int64)        # (N, 5): tar, offset and bytes of the image, and of the text
        self.captions = texts.hexdigest()

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Item:
        number, offset, size, text_offset, text_size = self.places[index].tolist()
        path = self.root / self.tars[number]

        def read() -> Item:
            with open(path, "rb") as file:
                caption = _part(file, text_offset, text_size).decode("utf-8").strip()
                return _item(decode(io.BytesIO(_part(file, offset, size)), self.image_size), caption)

        with reading(self.name(index), path):
            return with_retries(read)

    def name(self, index: int) -> str:
        return self.keys[index]

    describe = CaptionedFolder.describe

    def fingerprint(self) -> str:
        digest = blake2b(self.keys.blob + self.places.tobytes(), digest_size=8)
        return f"captioned tars={len(self.tars)} n={len(self)} members={digest.hexdigest()} captions={self.captions}"


def add_captions(digest: Any, root: Path, names: Names) -> None:
    """Adds to a hash the text beside each file: X.txt of X.png, none where that cannot be read."""
    def text_of(name: str) -> bytes:
        try:
            path = (root / name).with_suffix(".txt")
            require_regular(path)
            return path.read_bytes().strip()
        except (OSError, ConfigError):            # it will be a bad sample, as one whose caption is empty
            return b""

    for text in of_each(text_of, names):
        digest.update(len(text).to_bytes(8, "little") + text)


def _members(tar: Path) -> dict[str, dict[str, tuple]]:
    """The places of each key's members: key -> {"image": (offset, bytes), "txt": (offset, bytes, hash of the text)}."""
    members: dict[str, dict[str, tuple]] = {}
    try:
        require_regular(tar)
        with tarfile.open(tar, "r:") as archive:
            for member in archive:
                archive.members = []              # tarfile would keep them all in memory
                folder, _, name = member.name.rpartition("/")
                stem, dot, suffix = name.partition(".")                  # as webdataset: up to the first dot
                kind = "txt" if suffix.lower() == "txt" else "image" if f".{suffix.lower()}" in SUFFIXES else None
                if kind is None or not stem or not member.isreg() or member.issparse():
                    continue
                key = f"{folder}/{stem}" if folder else stem
                place = (member.offset_data, member.size)
                if kind == "txt":                 # it follows its header, so it costs little to read now
                    place = (*place, blake2b(archive.extractfile(member).read(_MAX_BYTES), digest_size=8).digest())
                members.setdefault(key, {}).setdefault(kind, place)
    except (tarfile.TarError, OSError, ValueError) as error:
        raise ConfigError(f"--data {tar} is no readable tar file ({error}); make it anew, or take it away") from None
    return members


def _part(file: Any, offset: int, size: int) -> bytes:
    if size > _MAX_BYTES:
        raise ConfigError(f"its header says {size} bytes, above the cap of {_MAX_BYTES}")
    file.seek(offset)
    data = file.read(size)
    if len(data) < size:
        raise ConfigError("is cut off")
    return data


def _item(image: Tensor, caption: str) -> dict[str, Tensor]:
    if not caption:
        raise ConfigError("has an empty caption")
    return {"image": image, "caption": packed(caption)}
