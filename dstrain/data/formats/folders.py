"""Folders of files: one folder for each class, with files at any depth below, or files only, which have no classes.

A dataset.json (labels.py) says the labels instead of the folders. data.class_list numbers the class folders;
data.labels=prefix takes classes from names such as cat_1.png (ADM), and none reads files at any depth without labels.
"""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dstrain.data.files.listing import (
    SAMPLES,
    convert_oserror_to_config_error,
    join_first,
    list_class_folders,
    walk_files,
)
from dstrain.data.files.local import Files, LocalFiles
from dstrain.data.formats.base import Layout, Place, Request, Sample
from dstrain.data.formats.labels import LABELS, make_numeric_class_names, read_dataset_json_labels
from dstrain.data.formats.lists import refuse_metadata_in_subfolders
from dstrain.data.formats.no_samples import make_no_samples_error
from dstrain.data.formats.splits import refuse_split_folders
from dstrain.data.formats.unconverted import describe_conversion_command
from dstrain.recipe import ConfigError


class Folders(Layout):
    """Reads a folder in which every file with one of the wanted suffixes is a sample, named by its relative path."""

    kind = "folder of files"

    def __init__(self, root: str, files: Files, request: Request) -> None:
        super().__init__(root, files, request)
        self._deeper: list[str] = []  # folders that were listed below the partitions
        self._by_name: dict[str, int] | None = None  # of a dataset.json

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        return isinstance(files, LocalFiles) and os.path.isdir(root)

    def list_partitions(self) -> list[str]:
        """Returns the names of the class folders. Returns [""], the root itself, if there are no class folders, or if
        labels come from a dataset.json, from file names (data.labels=prefix), or not at all (data.labels=none).

        Raises ConfigError if
        - there are no samples, or a folder cannot be listed,
        - samples lie beside class folders,
        - a class folder has no samples, or data.class_list lacks it,
        - folders are splits of the data, such as train and test,
        - data.class_list is given for data without class folders.
        """
        root, request = Path(self.root), self.request
        with convert_oserror_to_config_error(root, request.key):
            if request.labels == "auto":
                self._load_dataset_json_labels()
                if self._by_name is None:
                    return self._choose_class_folders(root, request)
                if not self._by_name:
                    self._refuse_unused_class_list()
            else:
                refuse_split_folders(root, request.key)
                self.classes = self.class_list.classes if request.labels == "prefix" else ()
            if next(walk_files(root, "", request.suffixes), None) is None:
                raise make_no_samples_error(self)
            return [""]

    def _choose_class_folders(self, root: Path, request: Request) -> list[str]:
        """Returns the class folders in `root`; [""] if all samples lie in `root` itself. Sets `classes`. Raises
        ConfigError for the faults that `list_partitions` names.
        """
        classes = list_class_folders(root)
        refuse_split_folders(root, request.key)
        full = [name for name in classes if next(walk_files(root, name, request.suffixes), None) is not None]
        top = [name for name, inner in self.files.list_names() if not inner]
        flat = [name for name in top if name.lower().endswith(request.suffixes)]
        if not flat and not full:
            raise make_no_samples_error(self)
        arrays = [name for name in top if name.startswith("samples_") and name.endswith(".npz")]
        if all(Path(name).stem == "grid" for name in flat) and (full == [SAMPLES] or (arrays and not full)):
            remedy = f"{SAMPLES}: write {request.key}={root / SAMPLES}" if full else arrays[0]
            if not full:
                remedy += f": {describe_conversion_command('npz', str(root / arrays[0]), request.key)}"
            raise ConfigError(
                f"{request.key}={root}: `dstrain generate` wrote this folder, and its samples are in {remedy}"
            )
        if flat and full:
            raise ConfigError(
                f"{request.key}={root}: {request.noun} ({join_first(flat)}) beside class folders ({join_first(full)}): "
                f"is this one class or several? Move the {request.noun} into a folder of their "
                "class, or write data.labels=none for no classes"
            )
        if flat:
            self._refuse_unused_class_list()
            return [""]
        if len(full) < len(classes):
            empty = [name for name in classes if name not in full]
            raise ConfigError(
                f"{request.key}={root}: class folders without {request.noun}: {join_first(empty)}; remove or "
                "fill them, since they would count as classes; files ending in "
                f"{' '.join(request.suffixes)} are read, in any case"
            )
        names = self.class_list
        if unknown := [name for name in full if names.classes and name not in names.places]:
            raise ConfigError(
                f"{request.key}={root}: the class folders {join_first(unknown)} are not among the "
                f"{len(names.classes)} of {names.where}: add them there, or take them away"
            )
        self.classes = names.classes or tuple(full)
        return full

    def _load_dataset_json_labels(self) -> None:
        """Reads the labels from dataset.json. Sets `_by_name` to {file name: label}, or to None if there is no such
        file or it does not tell of labels. If there are labels, also sets `classes`.
        """
        self._by_name = read_dataset_json_labels(Path(self.root), self.request.key)
        if self._by_name:
            self.classes = self.class_list.classes or make_numeric_class_names(self._by_name)

    def _refuse_unused_class_list(self) -> None:
        """Raises ConfigError if the recipe has a data.class_list. Called for data without class folders."""
        if self.request.class_list is not None:
            raise ConfigError(
                f"{self.request.key}={self.root} has no class folders, and {self.class_list.where} names some: "
                "leave it out, or write data.labels=prefix for files such as cat_1.png"
            )

    def iterate_samples(self, partition: str) -> Iterator[Sample]:
        with convert_oserror_to_config_error(self.root, self.request.key):
            names = self._list_files_below(partition)
        self._require_label_for_each(names)
        if self._by_name is None:
            yield from (Sample(Place(name), self.resolve_label(partition or None, name)) for name in names)
        else:
            yield from (Sample(Place(name), self.resolve_label(self._by_name.get(name), name)) for name in names)

    def _require_label_for_each(self, file_names: list[str]) -> None:
        """Raises ConfigError if a dataset.json gives labels, but none to one of the files. Counts as left out the files
        that dataset.json names and that do not exist.
        """
        by_name = self._by_name or {}
        if missing := [name for name in file_names if by_name and name not in by_name]:
            raise ConfigError(
                f"{self.request.key}={self.root}: {LABELS} has no label of {join_first(missing, 1)}, of "
                f"{len(file_names)} {self.request.noun}: make it anew, or take it away, and folders are the "
                "classes"
            )
        if absent := len(by_name) - len(file_names) if by_name else 0:
            self.add_left_out_count(f"that {LABELS} names and that are not there", absent)

    def _list_files_below(self, folder: str, *more_suffixes: str) -> list[str]:
        """Returns the sorted relative paths of the samples in a folder, at any depth, and of files that end in one of
        `more_suffixes`. Counts other files as left out.

        Raises ConfigError if a subfolder has a table of labels or captions of its own, which would not be read.
        """
        root, suffixes, others, tables = Path(self.root), self.request.suffixes + more_suffixes, Counter(), []
        names = sorted(walk_files(root, folder, suffixes, self._deeper, others, metadata_files=tables))
        self.record_unread_files(others)
        refuse_metadata_in_subfolders(self.root, self.files, self.request, tables)
        return names

    def iterate_file_names(self) -> Iterator[str]:
        return walk_files(Path(self.root), "", ("",))

    def read(self, place: Place) -> Path:
        return Path(self.root, place.name)

    def list_files_watched_for_changes(self) -> list[str]:
        names = [".", *self.classes, *self._deeper] if self._by_name is None else [".", LABELS, *self._deeper]
        return [name for name in dict.fromkeys(names) if os.path.lexists(os.path.join(self.root, name))]

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state that is pickled to the workers, without what only listing needs."""
        return self.__dict__ | {"_deeper": [], "_by_name": None}
