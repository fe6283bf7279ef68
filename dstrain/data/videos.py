"""Clips as sources (see images.py): a folder of videos, with captions or classes, and images mixed into them.

Items are {"video": uint8 (T, C, H, W), "frames": int, how many of the T are real} and, where there are such,
{"caption": UTF-8 as uint8 (CAPTION_BYTES,), "label": int, index into `classes`}. Captions are the first that there are:

    a captions file     lines NAME<TAB>CAPTION, or .csv or .jsonl with `file` and `caption`; names as below the folder
    X.txt               beside X.mp4, for every clip
    class folders       the name of the folder

A video longer than the window begins, in training, where the sample's key says (`drawn`, see batches.py); plain
indexing, hence evaluation and encoding, takes the middle.
"""

import csv
import json
import os
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dstrain.data.bad_files import BadSample
from dstrain.data.captioned import add_captions
from dstrain.data.clips import Cut, Listing, PICTURES, VIDEOS, read_clip
from dstrain.data.images import Names, few, is_held, list_folder, some_of, weighed
from dstrain.data.pixels import SUFFIXES
from dstrain.data.rows import packed
from dstrain.recipe import ConfigError

CLIPS = (*VIDEOS, *PICTURES)
_LISTINGS = 1 << 15                               # kept by a process: some 100 bytes a clip, and 100 a keyframe


def open_videos(path: str | Path, cut: Cut, *, split: str = "train", held_out: float = 0.0,
                held_out_path: str | Path | None = None, captions: str | Path | None = None,
                images: str | Path | None = None, image_share: float = 0.0) -> "Videos | Mixed":
    """Opens a folder of clips: one folder for each class, clips at any depth below, or clips only.

    split: "train" or "held_out". held_out: fraction of the folder that is held out, by the hash of the relative path.
    held_out_path: a second folder that is the held-out split instead, with its own captions file of the same name.
    captions: a captions file. images: a folder of images that are image_share of the training samples.
    Raises ConfigError with the path and the remedy.
    """
    if held_out_path is None:
        source = Videos(path, cut, split, held_out, captions)
    else:
        source = Videos(path, cut, "all", 0.0, captions)
        if split == "held_out":
            there = None if captions is None else Path(held_out_path) / Path(captions).name
            unseen = Videos(held_out_path, cut, "all", 0.0, there, source.classes, key="data.held_out_path")
            if source.captioned and not unseen.captioned:
                raise ConfigError(f"data.held_out_path={held_out_path} has no captions and data.path={path} has: write "
                                  "X.txt beside each X.mp4 there, too")
            return unseen
    if split == "held_out" or images is None:
        return source
    cut = Cut(cut.num_frames, cut.height, cut.width, cut.channels, still=True)
    return Mixed(source, Videos(images, cut, classes=source.classes, suffixes=SUFFIXES, key="data.images"), image_share)


@dataclass
class Videos:
    """A folder of clips; arguments as `open_videos`. classes: names that its class folders must be among, if any."""

    path: str | Path
    cut: Cut
    split: str = "all"
    held_out: float = 0.0
    captions: str | Path | None = None
    classes: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = CLIPS
    key: str = "data.path"                        # in messages
    light = False
    drawn = "clip"                                # the name of the draw that `read` wants

    _listings: dict[int, Listing] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.path = Path(self.path)
        names, labels, found = list_folder(self.path, self.suffixes, self.key, "clips")
        _one_a_name(self.path, names)
        texts = _captions(self.path, names, None if self.captions is None else Path(self.captions))
        self.labelled = bool(found)
        if self.classes and found:
            unknown = [name for name in found if name not in self.classes]
            if unknown:
                raise ConfigError(f"{self.key}={self.path}: class folders {few(unknown)} are not among the classes of "
                                  f"data.path ({few(self.classes)}): rename or remove them")
            labels = np.array([self.classes.index(name) for name in found], np.int32)[labels]
        self.classes = self.classes or found
        self.beside = texts == "beside"
        if self.split != "all" and self.held_out > 0:
            held = np.fromiter((is_held(name, self.held_out) for name in names), bool, len(names))
            keep = np.flatnonzero(held if self.split == "held_out" else ~held)
            if not len(keep):
                raise ConfigError(f"{self.path}: data.held_out={self.held_out} leaves no clip of {len(names)} for the "
                                  f"{self.split} split: choose another fraction or give data.held_out_path")
            names, labels = [names[i] for i in keep], labels[keep]
        self.names, self.labels = Names(names), labels
        self.texts = Names([texts[name] for name in names]) if isinstance(texts, dict) else None

    @property
    def captioned(self) -> bool:
        """Whether items have captions."""
        return self.beside or self.texts is not None or self.labelled

    @property
    def silent(self) -> str | None:
        """Of what there are no captions, None where there are."""
        return None if self.captioned else f"{self.key}={self.path}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.cut.num_frames, self.cut.channels, self.cut.height, self.cut.width

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> dict[str, Tensor | int]:
        return self.read(index)

    def read(self, index: int, chance: float | None = None) -> dict[str, Tensor | int]:
        """The sample, its window by `chance` in [0, 1), None: the middle. BadSample where it cannot be read."""
        name = self.name(index)
        try:
            video, frames, listing = read_clip(self.path / name, self.cut, chance, self._listings.get(index))
            caption = self._caption(index, name)
        except Exception as error:                # a hostile file may raise anything; how many is bounded elsewhere
            reason = " ".join(str(error).replace(str(self.path / name), name).split())
            raise BadSample(name, f"{type(error).__name__}: {reason[:300]}") from error
        while len(self._listings) >= _LISTINGS:
            del self._listings[next(iter(self._listings))]
        self._listings[index] = listing
        item = {"video": video, "frames": frames} | ({} if caption is None else {"caption": packed(caption)})
        return item | ({"label": int(self.labels[index])} if self.labelled else {})

    def _caption(self, index: int, name: str) -> str | None:
        if self.beside:
            caption = (self.path / name).with_suffix(".txt").read_text(encoding="utf-8").strip()
            if not caption:
                raise ConfigError("its caption is empty")
            return caption
        if self.texts is not None:
            return self.texts[index]
        return self.classes[self.labels[index]].replace("_", " ") if self.labelled else None

    def name(self, index: int) -> str:
        return self.names[index]

    def fingerprint(self) -> str:
        return f"{self._named()} {self._weighed(some_of(self.names))}"

    def contents(self) -> str:
        """With the sizes and captions of all files; classes are in their names."""
        return f"{self._named()} {self._weighed(self.names)}"

    def _named(self) -> str:
        digest = blake2b(self.names.blob + self.labels.tobytes(), digest_size=8)
        if self.texts is not None:
            digest.update(self.texts.blob)
        kind = "beside" if self.beside else "file" if self.texts is not None else "classes" if self.labelled else "none"
        return (f"videos {self.split} n={len(self)} classes={len(self.classes)} captions={kind} "
                f"names={digest.hexdigest()}")

    def _weighed(self, names: Names) -> str:
        said = blake2b(b"" if self.texts is None else self.texts.blob + self.texts.ends.tobytes())
        if self.beside:
            add_captions(said, self.path, names)
        return weighed(self.path, names, said.digest())

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_listings": {}}             # every worker makes its own


@dataclass
class Mixed:
    """Videos, then as many slots for images as make them `share` of an epoch; the key draws which image fills a slot.

    Every video is thus met once in an epoch, and the images in turn by chance; without a key a slot has its own image.
    Captions and labels are in the items where both have them.
    """

    videos: Videos
    images: Videos
    share: float
    light = False
    drawn = "clip"

    def __post_init__(self) -> None:
        self.slots = max(1, round(len(self.videos) * self.share / (1 - self.share)))
        self.classes = self.videos.classes if self.images.labelled else ()
        self.dropped = {name for name, there in (("caption", self.captioned), ("label", bool(self.classes)))
                        if not there}

    @property
    def captioned(self) -> bool:
        return self.videos.captioned and self.images.captioned

    @property
    def silent(self) -> str | None:
        """As of Videos."""
        return self.videos.silent or self.images.silent

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.videos.shape

    def __len__(self) -> int:
        return len(self.videos) + self.slots

    def __getitem__(self, index: int) -> dict[str, Tensor | int]:
        return self.read(index)

    def read(self, index: int, chance: float | None = None) -> dict[str, Tensor | int]:
        """As Videos.read. Neighbouring slots have different images, so that one that is broken is replaced."""
        if index < len(self.videos):
            item = self.videos.read(index, chance)
        else:
            item = self.images.read(self._image(index, chance or 0.0))
        return {name: value for name, value in item.items() if name not in self.dropped}

    def _image(self, index: int, chance: float) -> int:
        return (index - len(self.videos) + int(chance * len(self.images))) % len(self.images)

    def name(self, index: int) -> str:
        return self.videos.name(index) if index < len(self.videos) else self.images.name(self._image(index, 0.0))

    def fingerprint(self) -> str:
        return f"{self.videos.fingerprint()} + {self.share} {self.images.fingerprint()}"

    def contents(self) -> str:
        return f"{self.videos.contents()} + {self.share} {self.images.contents()}"


def _one_a_name(root: Path, names: list[str]) -> None:
    """X.jpg beside X.mp4 is its thumbnail, and X.txt would be the caption of both."""
    stems: dict[str, str] = {}
    for name in names:
        other = stems.setdefault(os.path.splitext(name)[0], name)
        if other != name:
            raise ConfigError(f"{root}: {other} and {name} have one name: which is the clip? Remove or rename the "
                              "other")


# ------------------------------------------------------------------------------------------------------------- captions


def _captions(root: Path, names: list[str], file: Path | None) -> dict[str, str] | str | None:
    """The caption of each name; "beside" where every clip has its X.txt; None where there are none."""
    if file is not None:
        texts = read_captions(file)
        missing = [name for name in names if name not in texts]
        if missing:
            raise ConfigError(f"data.captions={file}: no caption of {few(missing, 1)}, of {len(names)} clips in "
                              f"{root}: write a line for each")
        superfluous = sorted(set(texts) - set(names))
        if superfluous:
            raise ConfigError(f"data.captions={file}: {few(superfluous, 1)} not among the {len(names)} clips in "
                              f"{root}: put the files there, or take out the lines")
        return texts
    texts_in: dict[str, set[str]] = {}            # by one look at each folder, not one at each file
    without = []
    for name in names:
        folder, stem = os.path.split(os.path.splitext(name)[0])
        if folder not in texts_in:
            texts_in[folder] = {entry.name for entry in os.scandir(root / folder) if entry.name.endswith(".txt")}
        if f"{stem}.txt" not in texts_in[folder]:
            without.append(name)
    if len(without) == len(names):
        return None
    if without:
        raise ConfigError(f"{root}: no .txt with a caption beside {few(without, 1)}, of {len(names)} clips: write it, "
                          "or remove the clip; clips have captions all or none")
    return "beside"


def read_captions(file: Path) -> dict[str, str]:
    """File name -> caption, of NAME<TAB>CAPTION lines, .csv or .jsonl. ConfigError names the line that is wrong."""
    where = f"data.captions={file}"
    try:
        with open(file, encoding="utf-8-sig", newline="") as lines:
            if file.suffix.lower() == ".csv":
                rows = [(table.line_num, row.get("file"), row.get("caption")) for table in [csv.DictReader(lines)]
                        for row in table]
            elif file.suffix.lower() == ".jsonl":
                rows = [(number, *_fields(line)) for number, line in enumerate(lines, 1) if line.strip()]
            else:
                rows = [(number, *(line.rstrip("\r\n").split("\t", 1) + [None])[:2])
                        for number, line in enumerate(lines, 1) if line.strip()]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{where} cannot be read: {' '.join(str(error).split())}") from None
    texts: dict[str, str] = {}
    for number, name, caption in rows:
        if not isinstance(name, str) or not isinstance(caption, str) or not name or not caption.strip():
            raise ConfigError(f"{where}, line {number}: no file and caption in it; write NAME<TAB>CAPTION, or a .csv "
                              "or .jsonl with `file` and `caption`")
        if name in texts:
            raise ConfigError(f"{where}, line {number}: {name} a second time; keep one")
        texts[name] = caption.strip().encode("utf-8", "replace").decode()
    return texts


def _fields(line: str) -> tuple[Any, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        return None, None
    return (row.get("file"), row.get("caption")) if isinstance(row, dict) else (None, None)
