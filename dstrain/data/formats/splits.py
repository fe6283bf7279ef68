"""Recognises splits, such as train and test, by the names of files and folders.

    train-00000.parquet, x_test.tar     files of several splits in one folder
    train/ val2017/ training_set/       folders that are splits by all words of their names
    cats_train/ cats_test/              folders whose names are equal without the word of a split

Data with folders of several splits are refused, in folders, zips and tars alike, since all would be trained on.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dstrain.data.files.listing import join_first, list_class_folders
from dstrain.data.files.local import is_folder
from dstrain.disk.texts import parse_whole_number
from dstrain.recipe import ConfigError

SPLITS = {
    "train": "train",
    "training": "train",
    "trainval": "trainval",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
    "heldout": "held_out",
    "holdout": "held_out",
    "unlabeled": "unlabeled",
    "unlabelled": "unlabeled",
}  # words in names, and the split that each means
_ENDS = ("", "set", "data", "images")  # endings that such a word may have in the name of a folder: trainset
_HELD_OUT = re.compile(r"(held|hold)[-_ .]out")
SPLIT_COLUMNS = (  # of a table; the first that is there counts
    *("split", "splits", "data_split", "dataset_split", "is_train", "is_training", "is_training_image", "is_test"),
    *("partition", "subset", "phase", "usage", "set", "data set", "data_set"),
)
FOLD_COLUMNS = ("fold", "folds", "kfold", "k_fold", "cv_fold")  # parts for cross-validation, all of which are read
_BESIDE = {"a", "b", "data", "images", "img", "imgs", "seg", "set"}  # words that may stand beside: train_images, testB


def find_split_in_path(path: str) -> str:
    """Returns the split that a file's path names, a value of SPLITS such as "train" or "validation". The first such
    word in the file's name decides, else the innermost folder with such a name. Returns "" if there is none.
    """
    *folders, name = _HELD_OUT.sub(r"\1out", path.lower()).split("/")
    words = re.split(r"[^a-z]+", name) + folders[::-1]
    return next((SPLITS[word] for word in words if word in SPLITS), "")


def parse_split_value(value: Any) -> str:
    """Returns the split that a table cell names, in a spelling that can be compared with other cells: "train" for
    "Training". A cell may also hold a whole number or a truth value: "1" for 1.0, "true" for True. Returns "" for
    anything else.
    """
    text = str(value).strip().lower()
    if parse_whole_number(text) is not None:
        return str(parse_whole_number(text))
    return text if text in ("true", "false") else find_split_in_path(text)


def is_split_name(name: str) -> bool:
    """Returns whether a folder has the name of a split: train, val2017, training_set, held_out, seg_test, trainA."""
    split, others = _extract_split_and_other_words(name)
    return bool(split) and all(word in _BESIDE or word.isdigit() or _map_word_to_split(word) for word in others)


def find_split_folders(folders: Iterable[str]) -> list[str]:
    """Returns the `folders` that are splits of the same data, sorted: train and val, for example, or cats_train and
    cats_test. Returns [] if there are fewer than two such folders.

    folders: the names of all folders directly in one folder.
    """
    by_rest: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in sorted(name for name in folders if _extract_split_and_other_words(name)[0]):
        by_rest[_extract_split_and_other_words(name)[1]].append(name)
    splits = sorted(name for names in by_rest.values() for name in names if is_split_name(name))
    if len(splits) > 1:
        return splits
    several = (
        names for names in by_rest.values() if len({_extract_split_and_other_words(name)[0] for name in names}) > 1
    )
    return sorted(name for names in several for name in names)


def refuse_split_folders_in_archive(member_paths: Iterable[str], display_name: str) -> None:
    """Raises ConfigError if an archive has splits of the data as folders side by side, such as a/train/ and a/test/.

    member_paths: the paths of the archive's members. display_name: names the archive in the message.
    """
    inner: dict[str, set[str]] = defaultdict(set)
    for folder in {name.rpartition("/")[0] for name in member_paths}:
        while folder:
            above, _, own = folder.rpartition("/")
            inner[above].add(own)
            folder = above
    for above in sorted(inner):
        if splits := find_split_folders(inner[above]):
            place = f", in the folder {above}," if above else ""
            raise ConfigError(
                f"{display_name}: {join_first(splits)}{place} are splits, not classes: pack each by itself, and name "
                "the unseen one in data.held_out_path"
            )


def refuse_split_folders(root: Path, recipe_key: str) -> None:
    """Raises ConfigError if `root`, or a folder directly in it, has subfolders that are splits of the data, such as
    train/ and test/. Also raises it if `root` has only one subfolder, and this has the name of a split.

    recipe_key: the key that names `root`, for the message.
    """
    folders = list_class_folders(root)
    splits = find_split_folders(folders) or [name for name in folders if len(folders) == 1 and is_split_name(name)]
    if not splits:  # one train may be a class among others
        _refuse_splits_in_classes(root, folders, recipe_key)
    elif not any(map(is_split_name, splits)) and len(splits) > 2:
        raise ConfigError(
            f"{recipe_key}={root}: {join_first(splits)} are splits of several classes: turn them round, as train/cat "
            f"and test/cat, and write {recipe_key}={root}/train"
        )
    else:
        _raise_split_error(root, splits, recipe_key)


def _raise_split_error(root: Path, splits: Sequence[str], recipe_key: str) -> None:
    """Raises ConfigError, with a remedy, since the folders `splits` in `root` are splits and not classes."""
    train = next((name for name in splits if "train" in name.lower()), splits[0])
    others = sorted((name for name in splits if name != train), key=lambda name: "val" not in name.lower())
    unseen = (
        f", and for evaluation data.held_out_path={root / others[0]}" if others and recipe_key == "data.path" else ""
    )
    raise ConfigError(
        f"{recipe_key}={root}: {' and '.join(splits)} are splits, not classes: write "
        f"{recipe_key}={root / train}{unseen}"
    )


def _refuse_splits_in_classes(root: Path, folders: Sequence[str], recipe_key: str) -> None:
    """Raises ConfigError if one of the class folders holds several splits, such as cat/train and cat/test.

    folders: the names of the class folders in `root`. recipe_key: the key that names `root`, for the message.
    """
    for name in folders:
        inner = (entry.name for entry in os.scandir(root / name) if "." not in entry.name and is_folder(entry))
        splits = find_split_folders(inner)  # only these are sorted, since a class may hold a million files
        if splits and len(folders) == 1:
            _raise_split_error(root / name, splits, recipe_key)
        if splits:
            raise ConfigError(
                f"{recipe_key}={root}: the folder {name} holds the splits {' and '.join(splits)}, and all of "
                f"them would be learned from: turn them round, {splits[0]}/{name}"
            )


def _extract_split_and_other_words(name: str) -> tuple[str, tuple[str, ...]]:
    """Returns the split that a folder's name contains, and the other words and numbers of the name: ("test", ("seg",))
    for "seg_test". The split is "" if no word means one.
    """
    parts = re.sub(r"(?<=[a-z])([A-Z])", r" \1", name).lower()
    words = re.findall(r"[a-z]+|[0-9]+", _HELD_OUT.sub(r"\1out", parts))
    for place, word in enumerate(words):
        if split := _map_word_to_split(word):
            return split, (*words[:place], *words[place + 1 :])
    return "", tuple(words)


def _map_word_to_split(word: str) -> str:
    """Returns the split that a word means: "train" for "train", "training" or "trainset"; "" if it means none."""
    return next(filter(None, (SPLITS.get(word.removesuffix(end)) for end in _ENDS)), "")
