"""ImageNet as people keep it, and other data that hold training and held-out samples below one root.

    ROOT/train/n01440764/*.JPEG, ROOT/val/n01440764/*.JPEG          as PyTorch's examples make it
    ROOT/ILSVRC/Data/CLS-LOC/train/n.../, .../val/*.JPEG            ILSVRC's and Kaggle's tree, with
    ROOT/ILSVRC/Data/CLS-LOC/val.csv                                the table of a val/ without class folders, which
                                                                    `dstrain convert imagenet-kit` writes
    ROOT/train/, ROOT/held_out/                                     shards of `dstrain convert`

Any other data with train/ and val/ of the same classes are split likewise. Here are also the class folders that a list
of classes numbers, and files at any depth with labels in their names or with none.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from dstrain.data.decode.pixels import SUFFIXES
from dstrain.data.files.listing import join_few, list_class_folders, listing_errors, walk_files
from dstrain.data.files.local import Files, require_there
from dstrain.data.files.remote import open_files
from dstrain.data.formats.base import Layout, Place, Request, Sample
from dstrain.data.formats.clips import Clips
from dstrain.data.formats.folders import Folders
from dstrain.data.formats.hugging_face import ArrowTables, HubTables, ParquetTables
from dstrain.data.formats.labels import SYNSET, is_split, read_class_list, refuse_splits
from dstrain.data.formats.no_samples import explain_no_samples
from dstrain.data.formats.packed import find_packed_splits
from dstrain.data.formats.unconverted import is_flat_validation
from dstrain.recipe import Cache, ConfigError

_WITH_HELD_OUT: tuple[type[Layout], ...] = (HubTables, ArrowTables, ParquetTables)
_TREES = ("", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC")
_TITLES = "LOC_synset_mapping.txt"
_FOLDERS_ABOVE = 5  # the data, in which such a file is looked for


def split_root(
    path: str | Path, held_out: float, held_out_path: str | Path | None, whole: bool = False, cache: Cache | None = None
) -> tuple[str | Path, str | Path | None]:
    """Returns data.path and data.held_out_path; of a root with train/ and val/ these two, unless others are held out.

    The same holds for data whose form has a held-out split, such as Hugging Face's.
    Raises ConfigError if the `whole` of a root is asked for, since held-out samples would count among the others.
    """
    splits = _find_splits(path) or _find_packed(path, cache)
    if splits is None:
        return path, held_out_path or (None if held_out or whole else find_held_out(path, cache))
    if whole:
        raise ConfigError(
            f"data.path={path}: {os.path.basename(splits[0])} and {os.path.basename(splits[1])} in it are splits, "
            f"not classes: write data.path={splits[0]}, and for evaluation data.held_out_path={splits[1]}"
        )
    return splits[0], held_out_path or (None if held_out else splits[1])


def _find_packed(path: str | Path, cache: Cache | None) -> tuple[str, str] | None:
    files = open_files(path, cache)
    require_there(f"data.path={path}", files)
    return find_packed_splits(str(path), files)


def find_held_out(path: str | Path, cache: Cache | None = None) -> str | None:
    """Returns the path of the samples that a form of data holds out; None if there are none."""
    files, request = open_files(path, cache), Request(SUFFIXES)
    require_there(f"data.path={path}", files)
    kind = next((kind for kind in _WITH_HELD_OUT if kind.recognises(str(path), files, request)), None)
    return kind(str(path), files, request).unseen() if kind is not None else None


def _find_splits(path: str | Path) -> tuple[str, str] | None:
    """Returns train/ and val/ of a root that holds both, with the same classes. Returns None for any other data."""
    with listing_errors(path):
        for tree in _TREES if os.path.isdir(path) else ():
            if splits := _find_splits_in(Path(path, tree)):
                return splits
    return None


def _find_splits_in(root: Path) -> tuple[str, str] | None:
    folders = list_class_folders(root)
    train = [name for name in folders if name.lower() in ("train", "training")]
    val = [name for name in folders if name.lower() in ("val", "valid", "validation")]
    if len(train) != 1 or len(val) != 1:
        return None
    classes, unseen = list_class_folders(root / train[0]), list_class_folders(root / val[0])
    of_imagenet = classes and all(map(SYNSET.fullmatch, classes))
    if unseen:
        held_out, same = root / val[0], set(unseen) <= set(classes)
    else:
        table = root / f"{val[0]}.csv"
        held_out, same = table if table.is_file() else root / val[0], of_imagenet and is_flat_validation(root / val[0])
    if len(classes) > 1 and same and (of_imagenet or all(map(is_split, folders))):
        return str(root / train[0]), str(held_out)
    return None


class ListedFolders(Folders):
    """Reads class folders whose labels are their places in data.class_list."""

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
                f"{self.request.key}={self.root}: the class folders {join_few(unknown)} are not among the "
                f"{len(names.classes)} of {names.where}: add them there, or take them away"
            )
        self.classes = names.classes
        return parts


class AllFiles(Folders):
    """Reads all files at any depth, without labels (data.labels=none), or with those in their names (prefix)."""

    kind = "CLASS_name.png (ADM)"

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        return super().recognises(root, files, request) and request.labels in ("none", "prefix")

    def parts(self) -> list[str]:
        root, names = Path(self.root), read_class_list(self.request.class_list)
        with listing_errors(root, self.request.key):
            refuse_splits(root, list_class_folders(root), self.request.key)
            if next(walk_files(root, "", self.request.suffixes), None) is None:
                raise explain_no_samples(self)
        self.classes = names.classes if self.request.labels == "prefix" else ()
        return [""]

    def samples(self, part: str) -> Iterator[Sample]:
        names, by_prefix = read_class_list(self.request.class_list), self.request.labels == "prefix"
        with listing_errors(self.root, self.request.key):
            for name in self._below(part):
                yield Sample(Place(name), names.prefix(name, f"{self.request.key}={self.root}") if by_prefix else None)


class ListedClips(Clips, ListedFolders):
    """Reads as ListedFolders do, with the captions of Clips."""


class AllClips(Clips, AllFiles):
    """Reads as AllFiles do, with the captions of Clips."""


def read_titles(path: str, class_list: str | None, classes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns what people call the classes: by data.class_list, or LOC_synset_mapping.txt near the data; else names."""
    file = class_list or next(filter(os.path.isfile, (place / _TITLES for place in _above(path))), None)
    try:
        names = read_class_list(file)
    except ConfigError:  # the file is of another kind
        return classes
    if not names.titles or not set(classes) <= set(names.classes):
        return classes
    return tuple(names.titles[names.places[name]] for name in classes)


def _above(root: str | Path) -> list[Path]:
    path = Path(root).resolve()
    return [path, *path.parents[:_FOLDERS_ABOVE]]
