"""Folders of videos as sources, with captions or classes, and images mixed into them.

Items are {"video": uint8 (T, C, H, W), "frames": int, how many of the T are real} and, where the folder has such,
{"caption": UTF-8 as uint8 (CAPTION_BYTES,), "label": int, index into `classes`}. Captions are the first of these:

    a captions file     lines NAME<TAB>CAPTION, or .csv or .jsonl with `file` and `caption`; names as below the folder
    X.txt               beside X.mp4, for every clip
    class folders       the name of the folder

In training, the sample's key chooses where in a longer video the window begins. Evaluation takes the middle.
"""

import csv
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, TextIO

from dstrain.data.captioned import add_captions
from dstrain.data.clips import Cut, Listing, PICTURES, VIDEOS, read_clip
from dstrain.data.folder import Folder, Names, few, list_folder, summary_of_sizes
from dstrain.data.pixels import SUFFIXES
from dstrain.data.rows import packed
from dstrain.data.source import Item, Source, reading
from dstrain.data.storage import read_text, with_retries
from dstrain.disk.small import require_file
from dstrain.recipe import ConfigError

CLIPS = (*VIDEOS, *PICTURES)
_MAX_LISTINGS = 1 << 15                           # kept by a process: some 100 bytes a clip, and 100 a keyframe


def open_videos(path: str | Path, cut: Cut, *, split: str = "train", held_out: float = 0.0,
                held_out_path: str | Path | None = None, captions: str | Path | None = None,
                images: str | Path | None = None, image_share: float = 0.0) -> "Videos | Mixed":
    """Opens a folder of clips, see folder.py.

    split: "train" or "held_out". held_out: fraction of the folder that is held out. held_out_path: a second folder that
    is the held-out split instead, with its own captions file of the same name. captions: a captions file. images: a
    folder of images that are image_share of the training samples. ConfigError names the path and the remedy.
    """
    if held_out_path is None:
        source = Videos(path, cut, split, held_out, captions)
    else:
        source = Videos(path, cut, captions=captions)
        if split == "held_out":
            own = None if captions is None else Path(held_out_path) / Path(captions).name
            unseen = Videos(held_out_path, cut, captions=own, classes=source.classes, key="data.held_out_path")
            if source.captioned and not unseen.captioned:
                raise ConfigError(f"data.held_out_path={held_out_path} has no captions and data.path={path} has: write "
                                  "X.txt beside each X.mp4 there, too")
            return unseen
    if split == "held_out" or images is None:
        return source
    cut = Cut(cut.num_frames, cut.height, cut.width, cut.channels, still=True)
    stills = Videos(images, cut, classes=source.classes, suffixes=SUFFIXES, key="data.images")
    stills.noun = "images"
    return Mixed(source, stills, image_share)


@dataclass
class Videos(Folder):
    """A folder of clips; arguments as `open_videos`. classes: names that its class folders must be among, if any."""

    path: str | Path
    cut: Cut
    split: str = "all"
    held_out: float = 0.0
    captions: str | Path | None = None
    classes: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = CLIPS
    key: str = "data.path"                        # in messages
    noun = "clips"
    chance_name = "clip"

    _listings: dict[int, Listing] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.path = Path(self.path)
        names, labels, folders = list_folder(self.path, self.suffixes, self.key, "clips")
        _require_one_clip_a_name(self.path, names)
        texts = _captions(self.path, names, None if self.captions is None else Path(self.captions))
        self.labelled, self.captions_beside = bool(folders), texts == "beside"
        self.captions_from = ("beside" if self.captions_beside else "file" if texts is not None else
                              "classes" if folders else "none")
        self._select(names, labels, folders, self.key, "clip")
        self.texts = Names([texts[name] for name in self.names]) if isinstance(texts, dict) else None
        self.captioned = texts is not None or self.labelled
        self.uncaptioned = None if self.captioned else f"{self.key}={self.path}"

    def __getitem__(self, index: int) -> Item:
        return self.read(index)

    def read(self, index: int, chance: float | None = None) -> Item:
        """The sample; `chance` chooses the window, None takes the middle one. BadSample: it cannot be read."""
        name = self.name(index)
        with reading(name, self.path / name):
            video, frames, listing = read_clip(self.path / name, self.cut, chance, self._listings.get(index))
            caption = self._caption(index, name)
        while len(self._listings) >= _MAX_LISTINGS:
            del self._listings[next(iter(self._listings))]
        self._listings[index] = listing
        item = {"video": video, "frames": frames} | ({} if caption is None else {"caption": packed(caption)})
        return item | ({"label": int(self.labels[index])} if self.labelled else {})

    def _caption(self, index: int, name: str) -> str | None:
        if self.captions_beside:
            caption = with_retries(lambda: read_text((self.path / name).with_suffix(".txt")))
            if not caption:
                raise ConfigError("its caption is empty")
            return caption
        if self.texts is not None:
            return self.texts[index]
        return self.classes[self.labels[index]].replace("_", " ") if self.labelled else None

    def _summary(self) -> str:
        digest = blake2b(self.names.blob + self.labels.tobytes(), digest_size=8)
        if self.texts is not None:
            digest.update(self.texts.blob)
        return (f"videos {self.split} n={len(self)} classes={len(self.classes)} captions={self.captions_from} "
                f"names={digest.hexdigest()}")

    def _caption_words(self) -> str:
        return {"beside": "captions beside them", "file": f"captions of {self.captions}",
                "classes": "the classes as captions", "none": "no captions"}[self.captions_from]

    def _files(self, names: Names) -> str:
        texts = blake2b(b"" if self.texts is None else self.texts.blob + self.texts.ends.tobytes())
        if self.captions_beside:
            add_captions(texts, self.path, names)
        return summary_of_sizes(self.path, names, texts.digest())

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_listings": {}}             # every worker makes its own


@dataclass
class Mixed(Source):
    """Videos, then as many slots for images as make them `share` of an epoch; the key chooses which image fills a slot.

    Every video is thus met once in an epoch, and the images in turn by chance; without a key a slot has its own image.
    Captions and labels are in the items where both have them.
    """

    videos: Videos
    images: Videos
    share: float
    chance_name = "clip"

    def __post_init__(self) -> None:
        self.slots = max(1, round(len(self.videos) * self.share / (1 - self.share)))
        self.classes = self.videos.classes if self.images.labelled else ()
        self.captioned = self.videos.captioned and self.images.captioned
        self.uncaptioned = self.videos.uncaptioned or self.images.uncaptioned
        self.dropped = {*([] if self.captioned else ["caption"]), *([] if self.classes else ["label"])}

    def __len__(self) -> int:
        return len(self.videos) + self.slots

    def __getitem__(self, index: int) -> Item:
        return self.read(index)

    def read(self, index: int, chance: float | None = None) -> Item:
        """As Videos.read. Neighbouring slots have different images, so that a broken one is replaced by another."""
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

    def describe(self) -> str:
        return f"{self.videos.describe()}; {self.share:.0%} of the samples are images: {self.images.describe()}"


def _require_one_clip_a_name(root: Path, names: list[str]) -> None:
    """ConfigError: two files differ in their suffix alone: X.jpg may be the thumbnail of X.mp4, and both have X.txt."""
    stems: dict[str, str] = {}
    for name in names:
        other = stems.setdefault(os.path.splitext(name)[0], name)
        if other != name:
            raise ConfigError(f"{root}: {other} and {name} have one name: remove or rename the other")


def _captions(root: Path, names: list[str], file: Path | None) -> dict[str, str] | str | None:
    """The caption of each name, from a captions file; "beside": every clip has its X.txt; None: there are none."""
    if file is None:
        return "beside" if _have_texts_beside(root, names) else None
    texts = read_captions(file)
    missing = [name for name in names if name not in texts]
    if missing:
        raise ConfigError(f"data.captions={file}: no caption of {few(missing, 1)}, of {len(names)} clips in {root}: "
                          "write a line for each")
    superfluous = sorted(set(texts) - set(names))
    if superfluous:
        raise ConfigError(f"data.captions={file}: {few(superfluous, 1)} not among the {len(names)} clips in {root}: "
                          "put the files there, or take out the lines")
    return texts


def _have_texts_beside(root: Path, names: list[str]) -> bool:
    """Whether every clip has its X.txt, or none. ConfigError: only some have it."""
    texts_in: dict[str, set[str]] = {}            # by one look at each folder, not one at each file
    without = []
    for name in names:
        folder, stem = os.path.split(os.path.splitext(name)[0])
        if folder not in texts_in:
            texts_in[folder] = {entry.name for entry in os.scandir(root / folder) if entry.name.endswith(".txt")}
        if f"{stem}.txt" not in texts_in[folder]:
            without.append(name)
    if without and len(without) < len(names):
        raise ConfigError(f"{root}: no .txt with a caption beside {few(without, 1)}, of {len(names)} clips: write it, "
                          "or remove the clip; clips have captions all or none")
    return not without


def read_captions(file: Path) -> dict[str, str]:
    """File name -> caption, of NAME<TAB>CAPTION lines, .csv or .jsonl. ConfigError names the line that is wrong."""
    where = f"data.captions={file}"
    if file.exists() and not file.is_file():
        raise ConfigError(f"{where} is no file: name one with a line for each clip")
    try:
        require_file(file)
        with open(file, encoding="utf-8-sig", newline="") as lines:
            rows = list(_rows(lines, file.suffix.lower()))
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


def _rows(lines: TextIO, suffix: str) -> Iterator[tuple[int, Any, Any]]:
    """(line number, file name, caption) of each line of a captions file, None for what a line lacks."""
    if suffix == ".csv":
        table = csv.DictReader(lines)
        yield from ((table.line_num, row.get("file"), row.get("caption")) for row in table)
        return
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if suffix == ".jsonl":
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            yield number, *((row.get("file"), row.get("caption")) if isinstance(row, dict) else (None, None))
        else:
            name, _, caption = line.rstrip("\r\n").partition("\t")
            yield number, name, caption or None
