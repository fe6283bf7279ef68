"""The interface of a layout: one form in which people keep data, such as class folders, tar shards or a parquet list.

A layout lists its samples once, on one rank, for the index (data/index/). Every worker then reads samples by
their places. A layout is pickled to the workers, so it keeps the names of its partitions and never a list of samples.
"""

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from dstrain.data.files.listing import BEHIND
from dstrain.data.files.local import Files, LocalFiles, is_folder, is_hidden
from dstrain.data.files.tables import match_column_names
from dstrain.data.formats.labels import ClassList, read_class_list
from dstrain.data.formats.splits import FOLD_COLUMNS, parse_split_value
from dstrain.recipe import Cache, ConfigError, NotRead

_PEEKED = 4096  # so many names of a folder are looked at to recognise its form
_TRIED, _DEEP = 8, 3  # so many subfolders of each folder are looked into, and so many levels of folders
VIDEOS = (".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi")
_OTHER_VIDEOS = (".mpg", ".mpeg", ".wmv", ".flv", ".3gp", ".ogv", ".mts", ".m2ts")  # of types that are not read
PICTURES = (  # of types that are not read
    *(".tif", ".tiff", ".gif", ".apng", ".avif", ".heic", ".heif", ".jp2", ".j2k", ".jxl", ".ppm", ".pgm", ".pbm"),
    *(".pnm", ".tga", ".exr", ".hdr", ".dng", ".cr2", ".nef", ".arw", ".psd", ".svg", ".ico", ".dib", ".jif", ".jfi"),
)
CONTAINERS = (".tar", ".tgz", ".zip", ".parquet", ".arrow", ".npz", ".mdb", ".lmdb", ".7z", ".rar")
_LISTS = (".csv", ".tsv", ".jsonl")  # tables that may hold labels or captions, and are read if the user names them
UNCAPTIONED = "without a caption"  # a reason to leave a sample out


class Place(NamedTuple):
    """Says where the bytes of a sample are. Each layout defines what `file`, `offset` and `size` mean for it."""

    name: str  # of the sample; of a file below the root: its relative path
    file: int = 0  # number of the file that holds it, mostly a place in `list_partitions()`
    offset: int = 0  # a byte, or a row
    size: int = -1  # bytes there; -1: not known


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample as a layout lists it."""

    place: Place
    label: int | str | None = None  # a number, or the name of a class; all samples have one or none has
    captions: tuple[str, ...] = ()  # any number; all samples have some or none has


@dataclass(frozen=True)
class Request:
    """Holds what a command reads from data: the suffixes of samples, and where labels and captions are found."""

    suffixes: tuple[str, ...]  # of the files that count, in lower case: pictures or clips
    noun: str = "images"  # what a message calls the samples
    key: str = "data.path"  # what a message calls the data
    captions: bool = False  # captions are needed; without, a layout need not look for any
    captions_file: str | None = None  # data.captions
    labels: str = "auto"  # data.labels: auto, prefix (ADM's CLASS_name.png) or none
    class_list: str | None = None  # data.class_list: a file with a class (synset) a line
    columns: dict[str, str | list[str]] = field(default_factory=dict)  # data.columns: path, image, label, caption
    cache: Cache = field(default_factory=Cache)  # data.cache, of data at an address
    mixed: bool = False  # one of several sources, which share the entries above
    upright: bool = True  # data.upright: pictures are turned as their files say
    measured: bool = False  # sizes or frame counts of all samples are needed; the index on a disk keeps them


class Layout(ABC):
    """Lists and reads the data of one form below `root`. A subclass implements one form.

    files: access to the files, local or at an address. classes: the names of the classes if the layout knows them
    before its samples are listed, else (); labels that are numbers then name the classes. notes: what else is to be
    known of the listed samples, as JSON; the index stores and restores it.
    Any method but `read` raises ConfigError if something is wrong with the data; the message says what, and the remedy.
    """

    kind: ClassVar[str]  # as the table of docs/guides/data.md calls it: "zip with dataset.json"
    columns_read: ClassVar[tuple[str, ...]] = ()  # keys of data.columns that the layout uses
    labels_written: bool = False  # labels are texts as people wrote them: numbers where all of them are, else names

    def __init__(self, root: str, files: Files, request: Request) -> None:
        self.root, self.files, self.request = root, files, request
        self.classes: tuple[str, ...] = ()
        self.notes: dict[str, Any] = {}

    @classmethod
    @abstractmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        """Returns whether the data at `root` have the form that this class reads. Judges by file names and by a few
        files.
        """

    @abstractmethod
    def list_partitions(self) -> list[str]:
        """Returns the names of the partitions of which the data consist, such as class folders or shards. Samples are
        listed by partitions; after an interruption, listing goes on with the first partition that was not finished.
        """

    @abstractmethod
    def iterate_samples(self, partition: str) -> Iterator[Sample]:
        """Yields the samples of one partition, a name from `list_partitions`. Their order is always the same while the
        data do not change.
        """

    @abstractmethod
    def read(self, place: Place) -> Path | bytes:
        """Returns the encoded image or clip of the sample at `place`, as bytes. Returns a path instead if the image or
        clip is a file of its own.

        If this method raises an error, the sample counts as unreadable, and another sample replaces it in the batch.
        But if the storage has failed (files/storage.py), the run ends.
        """

    @cached_property
    def class_list(self) -> ClassList:
        """Returns the classes in the file data.class_list, in the order of their labels. The file is read once. The
        list is empty if the recipe names no such file.
        """
        return read_class_list(self.request.class_list)

    def resolve_label(self, given_class: int | str | None, sample_name: str) -> int | str | None:
        """Returns the label of a sample: the index of its class in data.class_list, or the class itself without such a
        list. Returns None if data.labels=none, or if data.labels=auto and `given_class` is None.

        given_class: the class that the data give the sample, such as the name of its folder; None if they give none.
        sample_name: the sample's name. With data.labels=prefix, its beginning is the class (cat for cat_1.png), and
        `given_class` is ignored.
        Raises ConfigError if the class list lacks the class, or if data.labels=prefix and the name does not begin with
        a class.
        """
        if self.request.labels == "none" or (given_class is None and self.request.labels == "auto"):
            return None
        at = f"{self.request.key}={self.root}"
        return (
            self.class_list.parse_label_from_name(sample_name, at)
            if self.request.labels == "prefix"
            else self.class_list.find_index_or_keep_label(given_class, at)
        )

    def find_held_out_path(self) -> str | None:
        """Returns the path of held-out samples that come with the data, such as those of a split `test`; None if there
        are none. Returns None by default; layouts with splits override this method.
        """

    def require_split_of_first_row(self, column: str, row_split: Any, location: str) -> None:
        """Checks that all rows of a table belong to one split, such as train; called for each row. Keeps the split of
        the first row in `notes`.

        column: the name of the column of splits, for the message.
        row_split: the value of this row in that column.
        location: names the row in the message.
        Raises ConfigError if the split of this row differs from that of the first row.
        """
        first = self.notes.setdefault("split", str(row_split))
        if parse_split_value(row_split) != parse_split_value(first):
            raise ConfigError(
                f"{location} is of the split {row_split}, and rows before it of {first}, and all would be learned "
                f"from: write a table of each, or give the column `{column}` another name"
            )

    def record_cross_validation_column(self, columns: Sequence[str], used_columns: Sequence[str]) -> None:
        """Records in `notes` which column of a table numbers the folds of a cross-validation, such as "fold".
        `compose_data_advice` then tells the user that the rows of all folds are read.

        columns: all columns of the table. used_columns: the columns that are read for something else, which are not
        recorded.
        """
        for column in match_column_names(FOLD_COLUMNS, columns)[:1]:
            if column not in used_columns:
                self.notes["folds"] = column

    def add_left_out_count(self, reason: str, count: int = 1) -> None:
        """Adds `count` to the number of files or samples that are left out for `reason`. This number is kept in
        `notes`.

        reason: a suffix such as ".tif", or words for the message of `compose_data_advice`, such as "without a caption".
        """
        counts = self.notes.setdefault("left_out", {})
        counts[reason] = counts.get(reason, 0) + count

    def record_unread_files(self, counts_by_suffix: Mapping[str, int]) -> None:
        """Counts files as left out if they may hold samples in a format that is not read, judged by their suffix, such
        as .tif.

        counts_by_suffix: the number of files by suffix. Two of its keys are no suffixes, and are always counted: "" for
        files without a suffix, and the constant BEHIND for names that go on after a suffix, such as x.jpg.1.
        """
        for suffix in sorted(counts_by_suffix):
            if (
                suffix in VIDEOS + _OTHER_VIDEOS + PICTURES + CONTAINERS + _LISTS
                and suffix not in self.request.suffixes
            ):
                self.add_left_out_count(suffix, counts_by_suffix[suffix])
        for key, reason in ((BEHIND, BEHIND), ("", "files without a suffix")):
            if counts_by_suffix.get(key):
                self.add_left_out_count(reason, counts_by_suffix[key])

    def record_unread_files_beside_shards(self) -> None:
        """Adds to `left_out_counts` the files beside or below the shards (tars, tables) that may hold samples but are
        not read: pictures and videos in other formats, and files without a suffix.

        Looks at only a part of a large folder.
        """
        suffixes = Counter(os.path.splitext(name)[1].lower() for name in walk_some_files(self.files))
        self.record_unread_files({suffix: suffixes[suffix] for suffix in suffixes if suffix not in CONTAINERS + _LISTS})

    @property
    def left_out_counts(self) -> dict[str, int]:
        """Returns how many files or samples were left out when the data were listed, by reason: {".tif": 3, "without a
        caption": 5}.
        """
        return self.notes.get("left_out", {})

    def compose_data_advice(self) -> str:
        """Returns what to tell the user about the data when a command starts, with a remedy: what is left out, or why
        reading is slow. Returns "" if there is nothing to tell.
        """
        remarks = [_describe_left_out(self.left_out_counts)]
        if "folds" in self.notes:
            remarks.append(f"the column {self.notes['folds']} is no split: rows of all its values are read")
        return "; ".join(filter(None, remarks))

    def prefetch(self, places: Iterable[Place]) -> None:
        """Starts to fetch the bytes of the samples at `places`, which will be read soon, and returns without waiting.
        Does nothing unless the data are remote (s3://, hf://, http://).
        """
        self.files.prefetch(self.read, places)

    def iterate_file_names(self) -> Iterator[str]:
        """Yields the names of all files in the data, of any type. If no sample is found, an error message names some of
        these. Yields none here; layouts override it.
        """
        return iter(())

    def list_files_watched_for_changes(self) -> list[str]:
        """Returns the names of the files and folders to watch for changes. If the size or the modification time of one
        of them changes, the data are listed anew. By default, these are the names from `list_partitions`.
        """
        return self.list_partitions()

    def check_after_listing(self) -> None:
        """Raises ConfigError for faults that show only after all samples were listed, such as captions of clips that do
        not exist. Checks nothing here; layouts override it.
        """


def list_first_folder_entries(files: Files, folder: str = "") -> list[tuple[str, bool]]:
    """Returns what a folder holds, as a sorted list of (name, whether it is a folder), without hidden names.

    If the data are a folder on a disk, looks at no more than 4096 entries of `folder`, and returns [] if it cannot be
    listed.
    """
    if not isinstance(files, LocalFiles) or files.listed or files.pattern:
        return files.list_names(folder)
    try:
        with os.scandir(files.fetch_local_path(folder)) as entries:
            return sorted(
                (entry.name, is_folder(entry)) for entry in islice(entries, _PEEKED) if not is_hidden(entry.name)
            )
    except OSError:
        return []


def walk_some_files(files: Files, folder: str = "", ancestors: tuple[str, ...] = ()) -> Iterator[str]:
    """Yields the paths of some files in `folder` and its subfolders, relative to the root of `files`. Goes three levels
    deep, into at most 8 subfolders of each folder, and looks at no more than 4096 entries of a folder on a disk.

    ancestors: for the recursion, the real paths of the folders above `folder`. Links back to those are not followed.
    """
    ancestors += (os.path.realpath(os.path.join(files.root, folder)),)
    start, names = f"{folder}/" if folder else "", list_first_folder_entries(files, folder)
    yield from (start + name for name, inner in names if not inner)
    for name in [name for name, inner in names if inner][: _TRIED if len(ancestors) <= _DEEP else 0]:
        if os.path.realpath(os.path.join(files.root, start + name)) not in ancestors:
            yield from walk_some_files(files, start + name, ancestors)


def _describe_left_out(counts_by_reason: Mapping[str, int]) -> str:
    """Returns in words how many files or samples were left out and for which reasons, with remedies; "" if none were.

    counts_by_reason: numbers by reason, as `Layout.left_out_counts` returns them.
    """
    suffixes = sorted(reason for reason in counts_by_reason if reason[0] == ".")
    remarks = [f"{counts_by_reason[reason]:,} {reason} are left out" for reason in counts_by_reason if reason[0] != "."]
    if suffixes:
        ways = ["convert pictures to PNG or JPEG"] * any(suffix in PICTURES for suffix in suffixes)
        ways += ["read videos by data.num_frames"] * any(suffix in VIDEOS for suffix in suffixes)
        ways += ["convert videos to MP4"] * any(suffix in _OTHER_VIDEOS for suffix in suffixes)
        ways += ["name archives and tables themselves"] * any(suffix in CONTAINERS for suffix in suffixes)
        ways += ["name a list of labels or captions itself"] * any(suffix in _LISTS for suffix in suffixes)
        listed = ", ".join(f"{suffix} {counts_by_reason[suffix]:,}" for suffix in suffixes)
        remarks.append(f"files of other types are left out, {listed}: {', '.join(ways)}, if they are samples")
    return "; ".join(remarks)


def file_exists(files: Files, name: str) -> bool:
    """Returns whether a file or folder `name` exists. Raises NotRead if the storage does not answer."""
    try:
        files.read_stat(name)
        return True
    except NotRead:
        raise
    except OSError:
        return False
