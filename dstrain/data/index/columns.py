"""Collects samples into the columns of an index, writes them piece by piece, and finishes labels and hashes last."""

import os
import re
import sys
import unicodedata
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dstrain.data.files.listing import join_first
from dstrain.data.formats.base import Layout, Sample
from dstrain.data.formats.no_samples import make_no_samples_error
from dstrain.data.index.index import CHUNK, COLUMNS, HEADER, VERSION, Index, hash_name, hash_names_and_other_columns
from dstrain.data.index.verified import write_checksums_beside
from dstrain.disk import atomic, sealed
from dstrain.disk.texts import parse_whole_number
from dstrain.recipe import ConfigError, explain_write_errors

ELSEWHERE = "make room, or name another folder for the index with data.index=FOLDER"
_RENUMBERED = "label.new"  # the column of labels, once classes are sorted
_LARGEST = 1 << 30  # label of a number that no text says
_MOST_CLASSES = 1 << 20  # of labels that are numbers in texts
_TRUTH = ("true", "false")  # labels of JSON, and of columns of truth values
_NO_LETTER = re.compile("[\0-\x1f\x7f\ud800-\udfff]")  # control characters, and bytes of paths that are no UTF-8
_CODES = {np.int32: "i", np.int64: "q", np.uint64: "Q"}


class Columns:
    """The columns of an index to which samples are added, in memory. If there is a folder, `write_to_disk` moves their
    values to files in it.
    """

    def __init__(
        self, folder: Path | None = None, classes: Sequence[str] = (), state: dict[str, Any] | None = None
    ) -> None:
        """Makes empty columns, or continues those in `folder` if `state`, a result of `get_state`, is given. classes:
        known class names, whose labels are their indices; further names are numbered in the order of their samples.
        """
        state = state or {"number": 0, "sizes": {}, "kinds": None, "classes": list(classes), "most": 0}
        self.folder = folder
        self.number: int = state["number"]
        self.sizes: dict[str, int] = dict(state["sizes"])  # bytes on the disk
        self.buffers = {name: self._make_buffer(name) for name in self.sizes}
        self.kinds: list[Any] | None = state["kinds"]  # [kind of label, whether there are captions]
        self.numbers = {name: place for place, name in enumerate(state["classes"])}
        self.most: int = state["most"]  # captions of a sample
        for name in ("names", "name_ends", "name_hash"):
            self._add_column_if_missing(name, None)

    @staticmethod
    def _make_buffer(name: str) -> bytearray | array:
        """Returns an empty buffer for the values of a column: a bytearray for text, or an array of the column's type
        for numbers.
        """
        dtype = COLUMNS[name][0]
        return bytearray() if dtype is None else array(_CODES[dtype])

    def _add_column_if_missing(self, name: str, default: int | None) -> None:
        """Makes a column, unless it exists, and gives the samples added so far the value `default` in it. If `default`
        is None, the new column is empty.
        """
        if name not in self.buffers:
            self.sizes[name], self.buffers[name] = 0, self._make_buffer(name)
            if default is not None:
                self.buffers[name].extend([default] * self.number)

    def add_sample(self, sample: Sample, layout: Layout) -> None:
        """Adds a sample to the columns. Raises ConfigError if the sample does not fit the first one: if only one of
        them has captions, or if their labels are of different types (text, number or none). Also raises it if the label
        is a number out of range.
        """
        place, label, captions = sample.place, sample.label, sample.captions
        self._require_consistent_sample(sample, layout)
        encoded = os.fsencode(place.name)
        self._append_text_and_end("names", "name_ends", encoded)
        self.buffers["name_hash"].append(hash_name(encoded))  # here, once: at the start of a run it takes a minute
        if isinstance(label, str):
            label = self.numbers.setdefault(label, len(self.numbers))
        for name, value in (("file", place.file), ("offset", place.offset), ("size", place.size), ("label", label)):
            default = COLUMNS[name][1]
            if name not in self.buffers and value is not None and value != default:
                self._add_column_if_missing(name, default)
            if name in self.buffers:
                self.buffers[name].append(value)
        if captions:
            self._add_column_if_missing("captions", None)
            for caption in captions:
                self._append_text_and_end("captions", "caption_ends", caption.encode("utf-8", "replace"))
            self._append_end_offset("captions_ends", len(captions))
            self.most = max(self.most, len(captions))
        self.number += 1

    def _require_consistent_sample(self, sample: Sample, layout: Layout) -> None:
        """Raises ConfigError if the sample's label or captions do not fit those of the first sample; see
        `add_sample`.
        """
        kind = "none" if sample.label is None else "str" if isinstance(sample.label, str) else "int"
        kinds = [kind, bool(sample.captions)]
        self.kinds = self.kinds or kinds
        where = f"{layout.request.key}={layout.root}: {sample.place.name}"
        if kinds[1] != self.kinds[1]:
            raise ConfigError(
                f"{where} has {'a' if kinds[1] else 'no'} caption, unlike those before: write captions "
                "for all, or for none"
            )
        if kind != self.kinds[0]:
            words = {"none": "no label", "str": "a class as its label", "int": "a number as its label"}
            raise ConfigError(f"{where} has {words[kind]}, and those before it {words[self.kinds[0]]}: label all alike")
        if kind == "int" and not 0 <= sample.label < _LARGEST:
            raise ConfigError(f"{where} has the label {sample.label}: labels are whole numbers from 0 on")

    def _append_text_and_end(self, text_column: str, end_column: str, text: bytes) -> None:
        """Appends `text` to one column, and the byte at which the text ends in this column to another column. Makes
        the two columns if needed.
        """
        self._add_column_if_missing(text_column, None)
        self.buffers[text_column] += text
        self._append_end_offset(end_column, len(text))

    def _append_end_offset(self, name: str, length: int) -> None:
        """Appends a value to the column `name`: its last value (0 if it is empty) plus `length`. Makes the column if
        needed.
        """
        self._add_column_if_missing(name, None)
        buffer = self.buffers[name]
        buffer.append((buffer[-1] if buffer else self._read_last_end_offset(name)) + length)

    def _read_last_end_offset(self, name: str) -> int:
        """Returns the last value of the column `name` in its file on the disk; 0 if the file has no values."""
        if not self.sizes[name]:
            return 0
        with open(self.folder / f"{name}.bin", "rb") as file:
            file.seek(self.sizes[name] - 8)
            return int.from_bytes(file.read(8), sys.byteorder)

    def write_to_disk(self, durable: bool = False) -> None:
        """Appends the values in memory to the files, and removes them from memory.

        durable: True to wait until the disk has stored the values.
        Raises ConfigError if the files cannot be written, such as on a full disk.
        """
        for name, buffer in self.buffers.items():
            with explain_write_errors(self.folder, ELSEWHERE), open(self.folder / f"{name}.bin", "ab") as file:
                file.write(buffer)
                self.sizes[name] += len(buffer) * getattr(buffer, "itemsize", 1)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            self.buffers[name] = self._make_buffer(name)

    def get_state(self) -> dict[str, Any]:
        """Returns the state as values for JSON, with which the constructor resumes after an interruption. The state
        counts the values in memory as written, so call `write_to_disk` right before or after this method.
        """
        sizes = {
            name: self.sizes[name] + len(buffer) * getattr(buffer, "itemsize", 1)
            for name, buffer in self.buffers.items()
        }
        return {
            "number": self.number,
            "sizes": sizes,
            "kinds": self.kinds,
            "classes": list(self.numbers),
            "most": self.most,
        }

    def make_index(self, layout: Layout) -> Index:
        """Returns the index of the samples that were added. If there is a folder, also writes the index there and
        deletes the journal of the listing. If classes got other numbers meanwhile, rewrites the column of labels.

        Raises ConfigError if there are no samples, or if labels do not fit the layout's classes.
        """
        folder = self.folder
        if folder is not None:
            self.write_to_disk()
        if not self.number:
            raise make_no_samples_error(layout)
        kind, _ = self.kinds
        columns = {}
        for name, buffer in self.buffers.items():
            dtype = COLUMNS[name][0]
            if folder is None:
                columns[name] = bytes(buffer) if dtype is None else np.frombuffer(buffer, dtype)
            elif not self.sizes[name]:
                columns[name] = b"" if dtype is None else np.empty(0, dtype)
            else:
                columns[name] = np.memmap(folder / f"{name}.bin", dtype or np.uint8, "r")
        classes, counts = self._renumber_labels_and_count_classes(layout, columns)
        names, rest = hash_names_and_other_columns(columns, self.number)
        header = {
            "version": VERSION,
            "layout": type(layout).__name__,
            "number": self.number,
            "classes": list(classes),
            "labelled": kind != "none",
            "most_captions": self.most,
            "counts": counts,
            "names": names,
            "single": not {"file", "offset", "size"} & set(columns),
            "rest": rest,
            "columns": self.sizes,
            "notes": layout.notes,
        }
        if folder is None:
            return Index(header, columns)
        (folder / "journal.jsonl").unlink(missing_ok=True)  # with other labels, nobody may go on from here
        if (folder / _RENUMBERED).exists():
            os.replace(folder / _RENUMBERED, folder / "label.bin")
        for name, column in columns.items():
            write_checksums_beside(folder / f"{name}.bin", column)
        atomic.write_file(folder / HEADER, sealed.render_json_with_hash(header))
        return Index(header, columns, folder)

    def _renumber_labels_and_count_classes(
        self, layout: Layout, columns: dict[str, Any]
    ) -> tuple[tuple[str, ...], list[int]]:
        """Returns the names of the classes, and the number of samples of each; ((), []) if samples have no labels.
        Labels that are texts were numbered in the order of the samples; changes them in `columns` to indices into the
        returned names.

        The names are the layout's classes if it has some; else "0", "1", ... if all labels are numbers; else the sorted
        texts.
        Raises ConfigError if a label is out of range or not among the layout's classes, if labels mix numbers with
        truth values, or if two names look alike.
        """
        kind, classes, names = self.kinds[0], layout.classes, list(self.numbers)
        if kind == "none":
            return (), []
        where = f"{layout.request.key}={layout.root}"
        if kind == "str":
            written = layout.labels_written and layout.request.labels == "auto" and not classes
            numbers = [parse_whole_number(name) for name in names] if written else [None]
            mixed = None in numbers and any(number is not None for number in numbers)
            if mixed and any(name.lower() in _TRUTH for name in names):
                raise ConfigError(f"{where}: labels are numbers and truth values: write all as numbers")
            if None in numbers:
                classes = classes or tuple(sorted(names))
                places = {name: place for place, name in enumerate(classes)}
            else:
                places = dict(zip(names, numbers))
                classes = _make_numeric_class_names(places, where)
            if unknown := [name for name in names if name not in places]:
                raise ConfigError(
                    f"{where}: the labels {join_first(unknown)} are not among the {len(classes)} classes "
                    f"{join_first(classes)}"
                )
            if list(map(places.get, names)) != list(range(len(names))):
                self._renumber_labels(columns, np.array([places[name] for name in names], np.int32))
        _require_distinct_classes(classes, where)
        counts = np.zeros(len(classes), np.int64)
        for start in range(0, self.number, CHUNK):
            stop = min(start + CHUNK, self.number)
            labels = columns["label"][start:stop] if "label" in columns else np.zeros(stop - start, np.int32)
            more = np.bincount(labels, minlength=len(counts))
            more[: len(counts)] += counts
            counts = more
        classes = classes or tuple(map(str, range(len(counts))))
        if len(counts) > len(classes):
            raise ConfigError(f"{where}: the label {len(counts) - 1} is not among the {len(classes)} classes")
        return classes, counts.tolist()

    def _renumber_labels(self, columns: dict[str, Any], new_numbers: np.ndarray) -> None:
        """Replaces each label in `columns` by new_numbers[label]. If there is a folder, writes the new labels to the
        file label.new, and keeps the old file, with which an interrupted listing can be resumed.
        """
        old = columns.get("label", np.broadcast_to(np.int32(0), self.number))  # a column of zeros is left out
        if self.folder is None:
            columns["label"] = new_numbers[old]
            return
        with open(self.folder / _RENUMBERED, "wb") as file:
            for start in range(0, self.number, CHUNK):
                file.write(new_numbers[old[start : start + CHUNK]].tobytes())
        columns["label"] = np.memmap(self.folder / _RENUMBERED, np.int32, "r")
        self.sizes["label"] = columns["label"].nbytes


def _require_distinct_classes(classes: Sequence[str], where: str) -> None:
    """Raises ConfigError if two names of classes look alike: if they differ only in white space or in how Unicode
    composes letters. The names true and false must also differ in more than case.

    Also raises ConfigError if a name has control characters, or bytes that are not UTF-8.
    """
    known: dict[str, str] = {}
    for name in classes:
        if fault := _NO_LETTER.search(name):
            kind = "bytes that are no UTF-8" if fault[0] >= "\ud800" else "a line break or a control character"
            raise ConfigError(f"{where}: the class {name!a} holds {kind}: rename it, in UTF-8 and on one line")
        text = " ".join(unicodedata.normalize("NFC", name).split())
        other = known.setdefault(text.lower() if text.lower() in _TRUTH else text, name)
        if other != name:
            raise ConfigError(f"{where}: the classes {other!a} and {name!a} look alike: call both the same")


def _make_numeric_class_names(numbers: dict[str, int], where: str) -> tuple[str, ...]:
    """Returns the class names "0", "1", ... up to the largest of `numbers`.

    numbers: the number that each label's text means, such as {"07": 7}.
    Raises ConfigError if a number is negative, or 2^20 or more.
    """
    wrong = next((name for name, number in numbers.items() if not 0 <= number < _MOST_CLASSES), None)
    if wrong is not None:
        raise ConfigError(f"{where}: the label {wrong} is no number from 0 to {_MOST_CLASSES - 1:,}: mend it")
    return tuple(map(str, range(max(numbers.values()) + 1)))
