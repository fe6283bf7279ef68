"""Captioned images as sources (see images.py): X.png with X.txt in folders, or in tar shards as webdataset writes them.

Items are {"image": uint8 (3, S, S), "caption": UTF-8 as uint8 (CAPTION_BYTES,)}. A tar file is never extracted: one
pass over its headers finds where members lie, and they are read by offset. Names in it are data, never paths. Only
regular members are read: links, devices and sparse files are passed over, and what a header says is believed no further
than the file reaches.
"""

import io
import os
import tarfile
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dstrain.data.bad_files import BadSample
from dstrain.data.images import Names, of_each, weighed
from dstrain.data.pixels import SUFFIXES, decode, read_image
from dstrain.data.rows import packed
from dstrain.recipe import ConfigError

_MOST = 1 << 28                                   # bytes of a member that is read


def open_captioned(path: str | Path, image_size: int) -> "CaptionedFolder | CaptionedTars":
    """A folder with tar files is read as shards, any other as pairs of files at any depth; a single .tar may be named.

    ConfigError: there is no pair, or a tar file that cannot be read.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".tar":
        return CaptionedTars([path], path.parent, image_size)
    if not path.is_dir():
        raise ConfigError(f"--data {path} is no folder: name one with X.png and X.txt, or with tar shards of such "
                          "pairs")
    tars = sorted(path.glob("*.tar"))
    return CaptionedTars(tars, path, image_size) if tars else CaptionedFolder(path, image_size)


class CaptionedFolder:
    """Images with a .txt of the same name beside them; images without one are counted in `without`, not read."""

    classes = ()
    light = False

    def __init__(self, path: Path, image_size: int) -> None:
        self.path, self.image_size = path, image_size
        found, self.without = [], 0
        for folder, _, files in os.walk(path, followlinks=False):
            there = set(files)
            for name in files:
                stem, suffix = os.path.splitext(name)
                if suffix.lower() in SUFFIXES and name[0] != ".":
                    if f"{stem}.txt" in there:
                        found.append(os.path.relpath(os.path.join(folder, name), path))
                    else:
                        self.without += 1
        if not found:
            raise ConfigError(f"--data {path} holds no image with a caption of its name beside it (X.png and X.txt), "
                              f"nor tar shards; images end in {' '.join(SUFFIXES)}")
        self.names = Names(sorted(found))

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        name = self.names[index]
        path = self.path / name
        try:
            caption = path.with_suffix(".txt").read_text(encoding="utf-8").strip()
            return _item(read_image(path, self.image_size), caption)
        except Exception as error:                # a hostile file may raise anything; how many is bounded elsewhere
            raise BadSample(name, _reason(error)) from error

    def name(self, index: int) -> str:
        return self.names[index]

    def fingerprint(self) -> str:
        """Of names, captions and sizes: of all files, since all will be read."""
        said = blake2b()
        add_captions(said, self.path, self.names)
        names = blake2b(self.names.blob, digest_size=8).hexdigest()
        return f"captioned n={len(self)} names={names} {weighed(self.path, self.names, said.digest())}"


class CaptionedTars:
    """Tar shards in which KEY.png (or another image) and KEY.txt are one pair; a key's first members count."""

    classes = ()
    light = False

    def __init__(self, tars: list[Path], root: Path, image_size: int) -> None:
        self.root, self.image_size = root, image_size
        self.tars = [tar.name for tar in tars]
        self.without, keys, places = 0, [], []
        said = blake2b(digest_size=8)
        for number, tar in enumerate(tars):
            members = _members(tar)
            for key in sorted(members):
                pair = members[key]
                if "image" in pair and "txt" in pair:
                    keys.append(f"{tar.name}/{key}")
                    *place, caption = pair["txt"]
                    places.append((number, *pair["image"], *place))
                    said.update(caption)
                else:
                    self.without += "image" in pair
        if not keys:
            raise ConfigError(f"--data {root}: its tar shards hold no image with a caption of its name (X.png and "
                              "X.txt)")
        self.keys, self.places = Names(keys), np.array(places, np.int64)                          # (N, 5)
        self.captions = said.hexdigest()

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        number, at, size, text_at, text_size = self.places[index].tolist()
        try:
            with open(self.root / self.tars[number], "rb") as file:
                caption = _part(file, text_at, text_size).decode("utf-8").strip()
                image = decode(io.BytesIO(_part(file, at, size)), self.image_size)
            return _item(image, caption)
        except Exception as error:                # as above
            raise BadSample(self.name(index), _reason(error)) from error

    def name(self, index: int) -> str:
        return self.keys[index]

    def fingerprint(self) -> str:
        digest = blake2b(self.keys.blob + self.places.tobytes(), digest_size=8)
        return (f"captioned tars={len(self.tars)} n={len(self)} members={digest.hexdigest()} "
                f"captions={self.captions}")


def add_captions(digest: Any, root: Path, names: Names) -> None:
    """Adds the text beside each file, where there is one: X.txt of X.png."""
    def text_of(name: str) -> bytes:
        try:
            return (root / name).with_suffix(".txt").read_bytes().strip()
        except OSError:                           # a bad sample, as one whose caption is empty
            return b""

    for text in of_each(text_of, names):
        digest.update(len(text).to_bytes(8, "little") + text)


def _members(tar: Path) -> dict[str, dict[str, tuple]]:
    """Where the members of each key lie: key -> {"image": (offset, bytes), "txt": (offset, bytes, hash of it)}."""
    found: dict[str, dict[str, tuple]] = {}
    try:
        with tarfile.open(tar, "r:") as archive:
            for member in archive:
                archive.members = []              # or it would keep all of them
                folder, _, name = member.name.rpartition("/")
                stem, dot, suffix = name.partition(".")                  # webdataset: up to the first dot
                kind = "txt" if suffix.lower() == "txt" else "image" if f".{suffix.lower()}" in SUFFIXES else None
                if kind is None or not stem or not member.isreg() or member.issparse():
                    continue
                key = f"{folder}/{stem}" if folder else stem
                place = (member.offset_data, member.size)
                if kind == "txt":                 # it lies behind its header, and costs nothing to read now
                    place = (*place, blake2b(archive.extractfile(member).read(_MOST), digest_size=8).digest())
                found.setdefault(key, {}).setdefault(kind, place)
    except (tarfile.TarError, OSError, ValueError) as error:
        raise ConfigError(f"--data {tar} is no readable tar file ({error}); make it anew, or take it away") from None
    return found


def _part(file: Any, offset: int, size: int) -> bytes:
    if size > _MOST:
        raise ConfigError(f"its header says {size} bytes, above the cap of {_MOST}")
    file.seek(offset)
    data = file.read(size)
    if len(data) < size:
        raise ConfigError("is cut off")
    return data


def _item(image: Tensor, caption: str) -> dict[str, Tensor]:
    if not caption:
        raise ConfigError("has an empty caption")
    return {"image": image, "caption": packed(caption)}


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
