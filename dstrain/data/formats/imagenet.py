"""ImageNet as people keep it, and other data that hold training and held-out samples below one root.

    ROOT/train/n01440764/*.JPEG, ROOT/val/n01440764/*.JPEG          as PyTorch's examples make it
    ROOT/ILSVRC/Data/CLS-LOC/train/n.../, .../val/*.JPEG            ILSVRC's and Kaggle's tree, with
    ROOT/ILSVRC/Data/CLS-LOC/val.csv                                the table of a val/ without class folders, which
                                                                    `dstrain convert imagenet-kit` writes
    ROOT/train/, ROOT/held_out/                                     shards of `dstrain convert`

Any other data with train/ and val/ of the same classes are split likewise.
"""

import os
from pathlib import Path

from dstrain.data.decode.pixels import SUFFIXES
from dstrain.data.files.listing import convert_oserror_to_config_error, list_class_folders
from dstrain.data.files.local import Files, require_files_of_pattern_exist
from dstrain.data.files.remote import open_files
from dstrain.data.formats.base import Layout, Request
from dstrain.data.formats.hugging_face import ArrowTables, HubTables, ParquetTables
from dstrain.data.formats.labels import SYNSET, read_class_list
from dstrain.data.formats.packed import find_packed_splits
from dstrain.data.formats.splits import is_split_name
from dstrain.data.formats.unconverted import is_flat_imagenet_validation_folder
from dstrain.recipe import Cache, ConfigError

_WITH_HELD_OUT: tuple[type[Layout], ...] = (HubTables, ArrowTables, ParquetTables)
_TREES = ("", "ILSVRC/Data/CLS-LOC", "Data/CLS-LOC")
_TITLES = "LOC_synset_mapping.txt"
_FOLDERS_ABOVE = 5  # so many folders above the data are searched for this file


def find_split_paths(
    path: str | Path,
    held_out_share: float,
    held_out_path: str | Path | None,
    as_one_set: bool = False,
    cache: Cache | None = None,
) -> tuple[str | Path, str | Path | None]:
    """Returns the path of the training data and the path of the held-out data, or None for the second.

    Looks in `path` for two split folders: train/ and val/ with the same classes, or train/ and held_out/ with shards.
    The training data are train/ if there are two such folders, else `path` itself. The path of the held-out data is
    - `held_out_path` if that is given,
    - else None if `held_out_share` is above 0 or `as_one_set` is True,
    - else val/ or held_out/ if there are two such folders,
    - else that of the held-out split of Hugging Face data, or None if there is none.
    held_out_share: the share of the training data to hold out. as_one_set: True to read all data as one.
    Raises ConfigError if `as_one_set` is True and there are two such folders, or if `path` is a pattern that fits no
    file.
    """
    splits = _find_train_and_val_below(path)
    if splits is None:
        files = open_files(path, cache)
        require_files_of_pattern_exist(f"data.path={path}", files)
        splits = find_packed_splits(str(path), files)
    if splits is None:
        return path, held_out_path or (
            None if held_out_share or as_one_set else _find_hugging_face_held_out(str(path), files)
        )
    if as_one_set:
        raise ConfigError(
            f"data.path={path}: {os.path.basename(splits[0])} and {os.path.basename(splits[1])} in it are splits, "
            f"not classes: write data.path={splits[0]}, and for evaluation data.held_out_path={splits[1]}"
        )
    return splits[0], held_out_path or (None if held_out_share else splits[1])


def open_hugging_face_layout(path: str, files: Files) -> Layout | None:
    """Returns the reader of the data at a path if they have one of Hugging Face's forms: a data set of the hub, Arrow
    files or parquet files of images. Returns None for other data.
    """
    request = Request(SUFFIXES)
    kind = next((kind for kind in _WITH_HELD_OUT if kind.recognises(path, files, request)), None)
    return None if kind is None else kind(path, files, request)


def _find_hugging_face_held_out(path: str, files: Files) -> str | None:
    """Returns the path of the held-out split of data in one of Hugging Face's forms. Returns None if there is no such
    split, or if the data have another form.
    """
    tables = open_hugging_face_layout(path, files)
    return None if tables is None else tables.find_held_out_path()


def _find_train_and_val_below(path: str | Path) -> tuple[str, str] | None:
    """Returns the paths of train/ and val/ in a folder, or in ImageNet's tree below it, if both hold the same classes.
    Returns None for any other data.
    """
    with convert_oserror_to_config_error(path):
        for tree in _TREES if os.path.isdir(path) else ():
            if splits := _find_train_and_val_in(Path(path, tree)):
                return splits
    return None


def _find_train_and_val_in(root: Path) -> tuple[str, str] | None:
    """Returns the paths of train/ and val/ directly in a folder, which may also have similar names, such as training/.
    Returns None if there are no two such folders, or if train/ lacks a class of val/.

    If val/ holds ImageNet's validation images without class folders, the second path is that of the table val.csv if it
    exists.
    """
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
        held_out, same = (
            table if table.is_file() else root / val[0],
            of_imagenet and is_flat_imagenet_validation_folder(root / val[0]),
        )
    if len(classes) > 1 and same and (of_imagenet or all(map(is_split_name, folders))):
        return str(root / train[0]), str(held_out)
    return None


def read_class_titles(path: str, class_list: str | None, classes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns what people call each class, such as "tench" for n01440764.

    class_list: the file with these titles. If it is None, reads a LOC_synset_mapping.txt in the folder `path` or above
    it.
    Returns `classes` unchanged if there is no such file, or if the file cannot be read, has no titles, or lacks a
    class.
    """
    file = class_list or next(
        filter(os.path.isfile, (place / _TITLES for place in _list_folder_and_parents(path))), None
    )
    try:
        names = read_class_list(file)
    except ConfigError:  # the file is of another kind
        return classes
    if not names.titles or not set(classes) <= set(names.classes):
        return classes
    return tuple(names.titles[names.places[name]] for name in classes)


def _list_folder_and_parents(root: str | Path) -> list[Path]:
    """Returns the absolute path of a folder, then those of the five folders above it, from the inside outwards."""
    path = Path(root).resolve()
    return [path, *path.parents[:_FOLDERS_ABOVE]]
