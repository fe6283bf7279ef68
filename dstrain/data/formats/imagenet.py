"""ImageNet as people keep it: a root with train/ and val/, ILSVRC's CLS-LOC tree, a flat val/ with its development kit.

    ROOT/train/n01440764/*.JPEG, ROOT/val/n01440764/*.JPEG          as PyTorch's examples make it
    ROOT/ILSVRC/Data/CLS-LOC/train/n.../, .../val/*.JPEG            ILSVRC's and Kaggle's tree
    ROOT/val/ILSVRC2012_val_00000001.JPEG, ...                      the labels of val/ stand in one of these files:
        LOC_val_solution.csv                                        Kaggle's
        ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt with meta.mat
        imagenet_2012_validation_synset_labels.txt                  TensorFlow's, a synset a line

Any other data with train/ and val/ of the same classes are taken apart likewise.
"""

import csv
import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from dstrain.data.decode.pixels import SUFFIXES
from dstrain.data.files.listing import class_folders, few, listing, walk
from dstrain.data.files.local import Files, LocalFiles, require_there
from dstrain.data.files.remote import files_at
from dstrain.data.formats.base import Layout, Place, Request, Sample
from dstrain.data.formats.cifar import Cifar
from dstrain.data.formats.clips import Clips
from dstrain.data.formats.folders import Folders
from dstrain.data.formats.hugging_face import ArrowTables, HubTables, ParquetTables
from dstrain.data.formats.idx import Idx
from dstrain.data.formats.labels import SYNSET, is_split, read_class_list, refuse_splits
from dstrain.data.formats.lmdbs import Lmdbs
from dstrain.data.formats.no_samples import without_samples
from dstrain.data.formats.packed import find_packed_splits
from dstrain.disk import small
from dstrain.recipe import Cache, ConfigError

_WITH_HELD_OUT: tuple[type[Layout], ...] = (HubTables, Cifar, Idx, Lmdbs, ArrowTables, ParquetTables)
_TREES = ("", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC")
_VAL = re.compile(r"ILSVRC2012_val_(\d{8})\.jpe?g", re.IGNORECASE)
_TRUTHS = (
    "LOC_val_solution.csv",
    "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt",
    "data/ILSVRC2012_validation_ground_truth.txt",
    "ILSVRC2012_validation_ground_truth.txt",
    "imagenet_2012_validation_synset_labels.txt",
)
_TITLES = "LOC_synset_mapping.txt"
_UP = 5  # folders above val/ in which such files are looked for
_LOOKED = 100  # entries of a folder that are looked at
_MOST = 1 << 24  # bytes of such a file


def taken_apart(
    path: str | Path, held_out: float, held_out_path: str | Path | None, whole: bool = False, cache: Cache | None = None
) -> tuple[str | Path, str | Path | None]:
    """data.path and data.held_out_path: of a root with train/ and val/ these two, unless other data are held out; also
    of data whose form holds some out, such as CIFAR's test batch.

    ConfigError: the `whole` of such a root is asked for, which would count held-out samples among the others.
    """
    splits = _train_and_held_out(path) or _packed_splits(path, cache)
    if splits is None:
        return path, held_out_path or (None if held_out or whole else held_out_by(path, cache))
    if whole:
        raise ConfigError(
            f"data.path={path}: {os.path.basename(splits[0])} and {os.path.basename(splits[1])} in it are splits, "
            f"not classes: write data.path={splits[0]}, and for evaluation data.held_out_path={splits[1]}"
        )
    return splits[0], held_out_path or (None if held_out else splits[1])


def _packed_splits(path: str | Path, cache: Cache | None) -> tuple[str, str] | None:
    files = files_at(path, cache)
    require_there(f"data.path={path}", files)
    return find_packed_splits(str(path), files)


def held_out_by(path: str | Path, cache: Cache | None = None) -> str | None:
    """The path of the samples that these data hold out; None: none. cache: of data at an address."""
    files, request = files_at(path, cache), Request(SUFFIXES)
    require_there(f"data.path={path}", files)
    kind = next((kind for kind in _WITH_HELD_OUT if kind.recognises(str(path), files, request)), None)
    return kind(str(path), files, request).unseen() if kind is not None else None


def _train_and_held_out(path: str | Path) -> tuple[str, str] | None:
    """train/ and val/ of a root that holds both, with the same classes; None for any other data."""
    with listing(path):
        for tree in _TREES if os.path.isdir(path) else ():
            if splits := _splits(Path(path, tree)):
                return splits
    return None


def _splits(root: Path) -> tuple[str, str] | None:
    folders = class_folders(root)
    train = [name for name in folders if name.lower() in ("train", "training")]
    val = [name for name in folders if name.lower() in ("val", "valid", "validation")]
    if len(train) != 1 or len(val) != 1:
        return None
    classes, unseen = class_folders(root / train[0]), class_folders(root / val[0])
    of_imagenet = classes and all(map(SYNSET.fullmatch, classes))
    same = set(unseen) <= set(classes) if unseen else of_imagenet and _first_val(root / val[0])
    if len(classes) > 1 and same and (of_imagenet or all(map(is_split, folders))):
        return str(root / train[0]), str(root / val[0])
    return None


class ListedFolders(Folders):
    """Class folders whose labels are their places in data.class_list."""

    kind = "class folders with data.class_list"

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        return super().recognises(root, files, request) and request.class_list is not None and request.labels == "auto"

    def parts(self) -> list[str]:
        parts, names = super().parts(), read_class_list(self.request.class_list)
        unknown = [name for name in self.classes if name not in names.places]
        if parts == [""] or self._by_name is not None:
            raise ConfigError(
                f"{self.request.key}={self.root} has no class folders, and {names.where} names some: "
                "leave it out, or write data.labels=prefix for files such as cat_1.png"
            )
        if unknown:
            raise ConfigError(
                f"{self.request.key}={self.root}: the class folders {few(unknown)} are not among the "
                f"{len(names.classes)} of {names.where}: add them there, or take them away"
            )
        self.classes = names.classes
        return parts


class AllFiles(Folders):
    """All files at any depth, without labels (data.labels=none), or with those that begin their names (prefix)."""

    kind = "CLASS_name.png (ADM)"

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        return super().recognises(root, files, request) and request.labels in ("none", "prefix")

    def parts(self) -> list[str]:
        root, names = Path(self.root), read_class_list(self.request.class_list)
        with listing(root, self.request.key):
            refuse_splits(root, class_folders(root), self.request.key)
            if next(walk(root, "", self.request.suffixes), None) is None:
                raise without_samples(self)
        self.classes = names.classes if self.request.labels == "prefix" else ()
        return [""]

    def samples(self, part: str) -> Iterator[Sample]:
        names, by_prefix = read_class_list(self.request.class_list), self.request.labels == "prefix"
        with listing(self.root, self.request.key):
            for name in self._below(part):
                yield Sample(Place(name), names.prefix(name, f"{self.request.key}={self.root}") if by_prefix else None)


class ListedClips(Clips, ListedFolders):
    """As ListedFolders, with the captions of Clips."""


class AllClips(Clips, AllFiles):
    """As AllFiles, with the captions of Clips."""


class FlatVal(Layout):
    """ImageNet's 50,000 validation images in one folder, with their labels from a file beside or above it."""

    kind = "ImageNet's flat val/ with the development kit"

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        return (
            isinstance(files, LocalFiles)
            and os.path.isdir(root)
            and request.labels == "auto"
            and _first_val(root)
            and _truth(root) is not None
        )

    def parts(self) -> list[str]:
        self.classes = read_class_list(self.request.class_list).classes or class_folders(
            Path(self.root).resolve().parent / "train"
        )
        return [""]

    def samples(self, part: str) -> Iterator[Sample]:
        at, (truth, synsets) = f"{self.request.key}={self.root}", _synsets(_truth(self.root))
        for name, is_folder in self.files.names():
            match = _VAL.fullmatch(name)
            if is_folder or match is None:
                if name.lower().endswith(self.request.suffixes):
                    raise ConfigError(
                        f"{at}: {name} is none of ImageNet's validation images, as the others are: take it away"
                    )
                continue
            number = int(match[1])
            if not 1 <= number <= len(synsets):
                raise ConfigError(
                    f"{at}: {truth} has no label of {name}, only of {len(synsets)} images: take the kit's own file"
                )
            yield Sample(Place(name), synsets[number - 1])

    def read(self, place: Place) -> Path:
        return self.files.local(place.name)

    def watched(self) -> list[str]:
        truth = _truth(self.root)
        return ["."] if truth is None else [".", str(truth), str(truth.with_name("meta.mat"))]


def titles(path: str, class_list: str | None, classes: tuple[str, ...]) -> tuple[str, ...]:
    """What people call the classes: of data.class_list or LOC_synset_mapping.txt near the data; else their names."""
    file = class_list or next(filter(os.path.isfile, (place / _TITLES for place in _above(path))), None)
    try:
        names = read_class_list(file)
    except ConfigError:  # then the data could not be read, or it is someone else's
        return classes
    if not names.titles or not set(classes) <= set(names.classes):
        return classes
    return tuple(names.titles[names.places[name]] for name in classes)


def _first_val(root: str | Path) -> bool:
    """Whether one of ImageNet's validation images is among the first entries of a folder, which then is flat."""
    with os.scandir(root) as entries:
        return any(_VAL.fullmatch(entry.name) for entry in islice(entries, _LOOKED))


def _above(root: str | Path) -> list[Path]:
    path = Path(root).resolve()
    return [path, *path.parents[:_UP]]


def _truth(root: str | Path) -> Path | None:
    """The nearest file with the labels of val/."""
    return next((place / name for place in _above(root) for name in _TRUTHS if (place / name).is_file()), None)


def _synsets(truth: Path) -> tuple[Path, list[str]]:
    """A file with the labels of val/, and the synset of each image in the order of their numbers."""
    try:
        rows = small.read_text(truth, _MOST).split("\n")
        pairs = list(csv.reader(rows)) if truth.suffix == ".csv" else []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{truth} cannot be read ({' '.join(str(error).split())}): take the kit's own file") from None
    if truth.suffix == ".csv":
        numbered = {
            int(match[1]): row[1].partition(" ")[0]
            for row in pairs
            if len(row) == 2 and (match := _VAL.fullmatch(f"{row[0]}.JPEG"))
        }
        labels = [numbered.get(number, "") for number in range(1, len(numbered) + 1)]
    else:
        labels = [row.strip() for row in rows if row.strip()]
        if truth.name.startswith("ILSVRC2012"):
            numbers = _numbers_of_kit(truth.parent / "meta.mat")
            labels = [numbers.get(label, "") for label in labels]
    wrong = next((place for place, label in enumerate(labels, 1) if not SYNSET.fullmatch(label)), 0 if labels else 1)
    if wrong:
        raise ConfigError(f"{truth}: no synset such as n01440764 for image {wrong}: take the kit's own file")
    return truth, labels


def _numbers_of_kit(path: Path) -> dict[str, str]:
    """Synset of each class by its ILSVRC2012_ID, from the kit's meta.mat. ConfigError: it cannot be read."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise ConfigError(
            f"{path} is MATLAB's: `pip install scipy` reads it; or put LOC_val_solution.csv beside val/"
        ) from None
    try:
        small.read_bytes(path, _MOST)
        rows: Any = np.atleast_1d(loadmat(path, squeeze_me=True, variable_names=["synsets"])["synsets"])
        return {str(int(row["ILSVRC2012_ID"])): str(row["WNID"]) for row in rows if int(row["num_children"]) == 0}
    except Exception as error:  # whatever a damaged file makes scipy raise
        raise ConfigError(
            f"{path} cannot be read ({type(error).__name__}: {' '.join(str(error).split())[:200]}): take "
            "the kit's own file"
        ) from None
