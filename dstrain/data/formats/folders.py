"""Folders of files: one folder for each class, with files at any depth below, or files only, which have no classes.

A dataset.json (../labels.py) says the labels instead of the folders.
"""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dstrain.data.files.listing import SAMPLES, join_few, list_class_folders, listing_errors, walk_files
from dstrain.data.files.local import Files, LocalFiles
from dstrain.data.formats.base import Layout, Place, Request, Sample
from dstrain.data.formats.labels import LABELS, read_labels, refuse_splits
from dstrain.data.formats.no_samples import describe_left_out, explain_no_samples
from dstrain.recipe import ConfigError


class Folders(Layout):
    """Every file is a sample, by its relative path. ConfigError: see `parts`. Its note "others" counts other files by
    suffix.
    """

    kind = "folder of files"

    def __init__(self, root: str, files: Files, request: Request) -> None:
        super().__init__(root, files, request)
        self._deeper: list[str] = []  # folders that were listed below the parts
        self._by_name: dict[str, int] | None = None  # of a dataset.json

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        return isinstance(files, LocalFiles) and os.path.isdir(root)

    def parts(self) -> list[str]:
        """Returns the class folders, or "" for all files.

        ConfigError: no files, files beside class folders, class folders without files or named as splits, a folder that
        cannot be listed.
        """
        root, request = Path(self.root), self.request
        with listing_errors(root, request.key):
            self._by_name = read_labels(root, request.key)
            if self._by_name is None:
                return self._class_parts(root, request)
            if self._by_name:
                self.classes = tuple(map(str, range(max(self._by_name.values()) + 1)))
            if next(walk_files(root, "", request.suffixes), None) is None:
                raise explain_no_samples(self)
            return [""]

    def _class_parts(self, root: Path, request: Request) -> list[str]:
        classes = list_class_folders(root)
        refuse_splits(root, classes, request.key)
        full = [name for name in classes if next(walk_files(root, name, request.suffixes), None) is not None]
        flat = self._flat(classes)
        if not flat and not full:
            raise explain_no_samples(self)
        if full == [SAMPLES] and all(Path(name).stem == "grid" for name in flat):
            raise ConfigError(
                f"{request.key}={root}: `dstrain generate` wrote this folder, and its samples are in "
                f"{SAMPLES}: write {request.key}={root / SAMPLES}"
            )
        if flat and full:
            raise ConfigError(
                f"{request.key}={root}: {request.noun} ({join_few(flat)}) beside class folders ({join_few(full)}): "
                f"is this one class or several? Move the {request.noun} into a folder of their "
                "class, or write data.labels=none for no classes"
            )
        if flat:
            return [""]
        if len(full) < len(classes):
            empty = [name for name in classes if name not in full]
            raise ConfigError(
                f"{request.key}={root}: class folders without {request.noun}: {join_few(empty)}; remove or "
                "fill them, since they would count as classes; files ending in "
                f"{' '.join(request.suffixes)} are read, in any case"
            )
        self.classes = tuple(full)
        return full

    def samples(self, part: str) -> Iterator[Sample]:
        with listing_errors(self.root, self.request.key):
            names = self._below(part)
            if self._by_name is not None:
                yield from self._labelled(names, self._by_name)
            else:
                yield from (Sample(Place(name), part or None) for name in names)

    def _below(self, folder: str, *more: str) -> list[str]:
        """Yields the samples below a folder, and files that end in one of `more`."""
        others = Counter(self.notes.get("others"))
        names = sorted(walk_files(Path(self.root), folder, self.request.suffixes + more, self._deeper, others=others))
        self.notes["others"] = others
        return names

    def advice(self) -> str:
        return describe_left_out(self.notes.get("others", {}))

    def _labelled(self, names: list[str], by_name: dict[str, int]) -> Iterator[Sample]:
        if missing := [name for name in names if by_name and name not in by_name]:
            raise ConfigError(
                f"{self.request.key}={self.root}: {LABELS} has no label of {join_few(missing, 1)}, of "
                f"{len(names)} {self.request.noun}: make it anew, or take it away, and folders are the "
                "classes"
            )
        yield from (Sample(Place(name), by_name.get(name)) for name in names)

    def _flat(self, classes: tuple[str, ...]) -> list[str]:
        return sorted(
            name
            for name in set(os.listdir(self.root)).difference(classes)
            if name.lower().endswith(self.request.suffixes) and name[0] != "."
        )

    def seen(self) -> Iterator[str]:
        return walk_files(Path(self.root), "", ("",))

    def read(self, place: Place) -> Path:
        return Path(self.root, place.name)

    def watched(self) -> list[str]:
        names = [".", *self.classes, *self._deeper] if self._by_name is None else [".", LABELS, *self._deeper]
        return [name for name in dict.fromkeys(names) if os.path.lexists(os.path.join(self.root, name))]

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what only listing needs."""
        return self.__dict__ | {"_deeper": [], "_by_name": None}
