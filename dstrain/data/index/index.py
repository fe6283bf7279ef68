"""The index of data: the name, place, label and captions of every sample, listed once and mapped by all processes.

    FOLDER/index.json       sealed (disk/sealed.py): numbers, classes, and the bytes of each column
    FOLDER/watched.json     sealed: sizes and times of change of the files and folders that were listed
    FOLDER/COLUMN.bin       a value a sample, see COLUMNS; a column whose values are all the default is left out
    FOLDER/COLUMN.sums      checksums, by which all that is read of a column is verified (verified.py)
    FOLDER/held_out-0.02/   the samples of each split, made when they are first asked for
    FOLDER/held_out-0.02-left_out-HASH/
                            the same without the samples of data.leave_out, whose patterns HASH stands for

An index of few samples is kept in memory instead, in arrays of the same names. build.py makes both.
"""

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dstrain.data.formats.base import Place
from dstrain.data.index.verified import Verified, map_file, write_checksums_beside
from dstrain.data.left_out import match_captions
from dstrain.disk import atomic, sealed
from dstrain.distributed.progress import get_phases
from dstrain.recipe import ConfigError

HEADER, WATCHED, VERSION = "index.json", "watched.json", 7
COLUMNS = {  # name: (type, default); of "ends" the place behind the last byte or entry
    "names": (None, None),
    "name_ends": (np.uint64, None),
    "name_hash": (np.uint64, None),
    "file": (np.int32, 0),
    "offset": (np.int64, 0),
    "size": (np.int64, -1),
    "label": (np.int32, 0),
    "captions": (None, None),
    "caption_ends": (np.uint64, None),
    "captions_ends": (np.uint64, None),
}  # of the captions of a sample, in caption_ends
CHUNK = 1 << 16  # samples that are worked on at a time
SPLITS = ("train", "held_out")


class Split(NamedTuple):
    """The samples of one split. number: how many they are. members: their rows in the index, ascending; None: all rows.
    counts: number of samples of each class.
    """

    number: int
    members: np.ndarray | Verified | None
    counts: list[int]
    names: str  # a hash of names and labels
    left_out: Sequence[int] = ()  # samples of the whole index that each pattern of data.leave_out fits


class Index:
    """The samples 0 .. len - 1 in the order in which a layout lists them, with name, place, label and captions.
    Pickling an index on a disk stores only its path and its identity. classes: the class names, () without labels.
    """

    def __init__(self, header: dict[str, Any], columns: dict[str, Any], folder: Path | None = None) -> None:
        self.header, self._columns, self.folder = header, columns, folder
        self.classes = tuple(header["classes"])
        self.labelled: bool = header["labelled"]  # samples have labels
        self.most_captions: int = header["most_captions"]  # of a sample; 0: there are none
        self.rest: str = header["rest"]  # a hash of all columns but names and labels; "" without any
        self.single: bool = header["single"]  # every sample is a file of its own, named as the sample

    @classmethod
    def open(cls, folder: Path) -> "Index | None":
        """Opens the index in a folder. Returns None if there is none, if its header is damaged or of another version,
        or if a column has a wrong size. Values are checked only when they are read.
        """
        header = read_json_if_intact(folder / HEADER)
        if header is None or header.get("version") != VERSION:
            return None
        columns: dict[str, Any] = {}
        for name, size in header["columns"].items():
            try:
                columns[name] = Verified(folder / f"{name}.bin", COLUMNS[name][0], size)
            except (OSError, ValueError):
                return None
        return cls(header, columns, folder)

    def __len__(self) -> int:
        return self.header["number"]

    def matches_checksums_if_small(self) -> bool:
        """Returns whether all columns match their checksums. A column above 512 MB is not checked here but when it is
        read, and counts as intact.
        """
        return all(column.matches_checksums_if_small() for column in self._columns.values())

    def read_name(self, index: int) -> str:
        return os.fsdecode(self.read_name_bytes(index))

    def read_name_bytes(self, index: int) -> bytes:
        """Returns the name of a sample as bytes, as the file system has it. Raises IndexError if there is no such
        sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._read_text("names", "name_ends", index)

    def read_names(self, start: int, stop: int) -> list[bytes]:
        """Returns the names of the samples start .. stop - 1 as bytes, as the file system has them."""
        text, ends = self.read_joined_names(start, stop)
        places = ends.tolist()
        return [text[begin:end] for begin, end in itertools.pairwise(places)]

    def read_joined_names(self, start: int, stop: int) -> tuple[bytes, np.ndarray]:
        """Returns the names of the n samples start .. stop - 1, joined without a separator, and n + 1 offsets in bytes
        into the joined names: name i goes from offset i to offset i + 1. The first offset is 0.
        """
        ends = self._read_end_offsets("name_ends", start, stop)
        return self._columns["names"][int(ends[0]) : int(ends[-1])], ends - ends[0]

    def read_name_hashes(self, start: int, stop: int) -> np.ndarray:
        """Returns the hash of the name, as `hash_name` makes it, of each of the n samples start .. stop - 1: uint64
        (n,).
        """
        return self._columns["name_hash"][start:stop]

    def read_place(self, index: int) -> Place:
        return Place(self.read_name(index), *(self._read_value(name, index) for name in ("file", "offset", "size")))

    def read_label(self, index: int) -> int:
        return self._read_value("label", index)

    def read_labels(self, index: slice | np.ndarray) -> np.ndarray:
        """Returns the labels of the samples in a slice or at an array of indices: int32 (n,); zeros if the data have no
        labels.
        """
        if "label" in self._columns:
            return self._columns["label"][index]
        return np.zeros(len(range(*index.indices(len(self)))) if isinstance(index, slice) else len(index), np.int32)

    def read_captions(self, index: int) -> tuple[str, ...]:
        """Returns the captions of a sample; () if the data have none."""
        if not self.most_captions:
            return ()
        ends = self._columns["captions_ends"]
        numbers = range(int(ends[index - 1]) if index else 0, int(ends[index]))
        return tuple(self._read_text("captions", "caption_ends", number).decode("utf-8") for number in numbers)

    def read_captions_of_range(self, start: int, stop: int) -> list[list[str]]:
        """Returns the captions of each of the samples start .. stop - 1. The index must have captions."""
        numbers = self._read_end_offsets("captions_ends", start, stop).astype(np.int64)
        ends = self._read_end_offsets("caption_ends", *numbers[[0, -1]].tolist()).astype(np.int64)
        text = bytes(self._columns["captions"][int(ends[0]) : int(ends[-1])])
        captions = [text[begin:end].decode("utf-8") for begin, end in itertools.pairwise((ends - ends[0]).tolist())]
        return [captions[begin:end] for begin, end in itertools.pairwise((numbers - numbers[0]).tolist())]

    def open_split(self, split: str, held_out: float, leave_out: Sequence[str] = ()) -> Split:
        """Returns the samples of the split "train", "held_out" or "all". A sample is held out if the hash of its name,
        as a fraction of 2^64, is below the share `held_out`; other samples do not matter.

        leave_out: patterns of captions. Samples with a caption that fits a pattern are in no split, and "all" then
        means "train".
        If the index is on a disk, call `write_splits` first, unless all samples are wanted.
        Raises ConfigError if the split was not written, or is damaged.
        """
        if not leave_out and (split == "all" or not held_out):
            return Split(len(self), None, self.header["counts"], self.header["names"])
        split = "train" if split == "all" else split
        if self.folder is None:
            chunks = list(_divide_rows_into_splits(self, held_out, leave_out))
            names = blake2b(b"".join(parts[split][1] for parts, _ in chunks), digest_size=8)
            rows = np.concatenate([parts[split][0] for parts, _ in chunks])
            return _make_split(self, rows, names)._replace(left_out=sum(fits for _, fits in chunks).tolist())
        splits = self._open_splits(held_out, leave_out)
        if splits is None:
            raise ConfigError(
                f"{self._name_splits_folder(held_out, leave_out)} is not to be seen from here, damaged, or of other "
                "data: remove it, or write data.index=FOLDER, a folder that all machines share"
            )
        return splits[split]

    def has_splits(self, held_out: float, leave_out: Sequence[str] = ()) -> bool:
        """Returns whether `write_splits` has written the splits of this index, and the files match their checksums (not
        checked above 512 MB). If no sample is held out or left out, returns True, since no files are needed.
        """
        splits = self._open_splits(held_out, leave_out) if held_out or leave_out else {}
        return splits is not None and all(own.members.matches_checksums_if_small() for own in splits.values())

    def write_splits(self, held_out: float, leave_out: Sequence[str] = ()) -> None:
        """Writes the splits "train" and "held_out" to a subfolder of the index's folder. The index must be on a disk.
        Replaces old files and does not overwrite them, since other processes may have mapped them.
        """
        folder, header = self._name_splits_folder(held_out, leave_out), {"index": self._join_column_hashes()}
        left_out = np.zeros(len(leave_out), np.int64)
        folder.mkdir(exist_ok=True)
        names = {split: blake2b(digest_size=8) for split in SPLITS}
        with ExitStack() as stack:
            paths = {split: stack.enter_context(atomic.replace_file(folder / f"{split}.bin")) for split in names}
            files = {split: stack.enter_context(open(path, "wb")) for split, path in paths.items()}
            for parts, fits in _divide_rows_into_splits(self, held_out, leave_out):
                left_out += fits
                for split, (rows, text) in parts.items():
                    files[split].write(rows.tobytes())
                    names[split].update(text)
        for split, digest in names.items():
            path = folder / f"{split}.bin"
            members = np.frombuffer(map_file(path), _choose_row_dtype(self))
            write_checksums_beside(path, members)
            own = _make_split(self, members, digest)
            header[split] = {"number": own.number, "counts": own.counts, "names": own.names}
            if leave_out:
                header[split]["left_out"] = left_out.tolist()
        atomic.write_file(folder / HEADER, sealed.render_json_with_hash(header))

    def _open_splits(self, held_out: float, leave_out: Sequence[str]) -> dict[str, Split] | None:
        """Returns the splits "train" and "held_out" from the disk, by name. Returns None if they are missing, have a
        wrong size, or belong to another index.
        """
        folder, dtype = self._name_splits_folder(held_out, leave_out), np.dtype(_choose_row_dtype(self))
        header = read_json_if_intact(folder / HEADER)
        if header is None or header.get("index") != self._join_column_hashes():
            return None
        splits = {}
        for split in SPLITS:
            try:
                rows = Verified(folder / f"{split}.bin", dtype, header[split]["number"] * dtype.itemsize)
            except (OSError, ValueError):
                return None
            splits[split] = Split(members=rows, **header[split])
        return splits

    def _name_splits_folder(self, held_out: float, leave_out: Sequence[str]) -> Path:
        """Returns the subfolder of the index's folder for the splits with this share `held_out` and these patterns
        `leave_out`.
        """
        folder = self.folder / f"held_out-{held_out!r}"
        if not leave_out:
            return folder
        digest = blake2b("\0".join(leave_out).encode(), digest_size=8).hexdigest()
        return folder.with_name(f"{folder.name}-left_out-{digest}")

    def _read_end_offsets(self, name: str, start: int, stop: int) -> np.ndarray:
        """Returns uint64 (n + 1,) from the column `name`, which says where each entry of another column ends: where
        entry `start` begins, then where each of the n entries start .. stop - 1 ends.
        """
        ends = self._columns[name][max(start - 1, 0) : stop]
        return ends if start else np.concatenate((np.zeros(1, np.uint64), ends))

    def _read_text(self, text_column: str, end_column: str, index: int) -> bytes:
        """Returns text number `index` of the column `text_column`, as bytes. end_column: says where each text ends."""
        column = self._columns[end_column]
        return bytes(self._columns[text_column][int(column[index - 1]) if index else 0 : int(column[index])])

    def _read_value(self, name: str, index: int) -> int:
        """Returns the value of a sample in a column. A column that was left out has its default value for all
        samples.
        """
        return int(self._columns[name][index]) if name in self._columns else COLUMNS[name][1]

    def _join_column_hashes(self) -> str:
        """Returns the hashes of the index's columns, joined as one text. Two indices are of the same samples if these
        texts are equal.
        """
        return f"{self.header['names']} {self.rest}"

    def __getstate__(self) -> dict[str, Any]:
        """Returns for an index on a disk its folder and its identity alone: another process opens it at the first use.
        An index in memory is pickled whole.
        """
        if self.folder is None:
            return self.__dict__
        return {"folder": self.folder, "identity": self._join_column_hashes()}

    def __getattr__(self, name: str) -> Any:
        """Opens an unpickled index at the first use of an attribute, and returns the attribute. Raises ConfigError if
        there is no index at its path, or another one.
        """
        if name.startswith("__") or "header" in self.__dict__ or self.__dict__.get("folder") is None:
            raise AttributeError(name)
        index = Index.open(self.folder)
        if index is None or index._join_column_hashes() != self.__dict__["identity"]:
            fault = "is not to be seen from here" if index is None else "was made anew meanwhile, of other data"
            raise ConfigError(
                f"the index of the data at {self.folder} {fault}: name a folder that all machines share, "
                "data.index=FOLDER, then give the same command again"
            )
        self.__dict__.update(index.__dict__)
        return getattr(self, name)


def hash_names_and_other_columns(columns: dict[str, Any], num_samples: int) -> tuple[str, str]:
    """Returns two hashes as hexadecimal text: one of all names and labels, and one of all other columns, or "" if there
    are none.

    num_samples: how many samples there are.
    """
    names, rest = blake2b(digest_size=8), blake2b(digest_size=8)
    for start in range(0, len(columns["names"]), 1 << 20):
        names.update(columns["names"][start : start + (1 << 20)])
    for start in range(0, num_samples, CHUNK):
        zeros = np.zeros(min(CHUNK, num_samples - start), np.int32)
        names.update(columns["label"][start : start + CHUNK].tobytes() if "label" in columns else zeros.tobytes())
    more = sorted(set(columns) - {"names", "name_ends", "name_hash", "label"})
    for name in more:
        rest.update(name.encode())
        for start in range(0, len(columns[name]), 1 << 17):
            rest.update(bytes(columns[name][start : start + (1 << 17)]))
    return names.hexdigest(), rest.hexdigest() if more else ""


def hash_name(name: bytes) -> int:
    """Returns the hash of a sample's name, from 0 to 2^64 - 1. A sample is held out if this hash is below held_out *
    2^64.
    """
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")


def _choose_row_dtype(index: Index) -> type[np.unsignedinteger]:
    """Returns the smallest dtype for rows of the index: uint32, or uint64 from 2^32 samples on."""
    return np.uint32 if len(index) < 1 << 32 else np.uint64


def _divide_rows_into_splits(
    index: Index, held_out: float, leave_out: Sequence[str]
) -> Iterator[tuple[dict[str, tuple[np.ndarray, bytes]], np.ndarray]]:
    """Yields (parts, counts) for each chunk of 65,536 samples of the index.

    parts: {split: (rows, names)} for "train" and "held_out": the split's rows in the chunk, and their names, joined.
    counts: int64 (patterns,): how many samples of the chunk have a caption that fits each pattern of `leave_out`. These
    samples are in no split.
    """
    action = f"holding out {held_out:g} of the samples" + ", and data.leave_out" * bool(leave_out)
    dtype = _choose_row_dtype(index)
    bound = np.uint64(math.ceil(held_out * 2.0**64))  # below 2 ** 64, since the share is below 1
    for start in range(0, len(index), CHUNK):
        get_phases().enter_phase(f"{action}: {start:,} of {len(index):,}")
        unseen = index.read_name_hashes(start, start + CHUNK) < bound
        stop = start + len(unseen)
        fits = (
            match_captions(index.read_captions_of_range(start, stop), leave_out)
            if leave_out
            else np.zeros((0, 1), bool)
        )
        kept = ~fits.any(0)
        rows = np.arange(start, stop, dtype=dtype)
        text, ends = index.read_joined_names(start, stop)
        own = {"train": kept & ~unseen, "held_out": kept & unseen}
        yield (
            {split: (rows[members], _select_joined_names(text, ends, members)) for split, members in own.items()},
            fits.sum(1),
        )


def _select_joined_names(text: bytes, ends: np.ndarray, chosen: np.ndarray) -> bytes:
    """Returns the names of the rows for which `chosen`, bool (n,), is True, joined without a separator.

    text, ends: the joined names of all n rows, and their n + 1 offsets, as `Index.read_joined_names` returns them.
    """
    edges = ends[np.flatnonzero(np.diff(chosen, prepend=False, append=False))].tolist()
    return b"".join([text[begin:end] for begin, end in zip(edges[::2], edges[1::2])])


def _make_split(index: Index, members: np.ndarray, digest: Any) -> Split:
    """Returns the split that consists of the rows `members`.

    digest: a hash object to which the names of these rows were added. This function adds their labels to it.
    """
    counts = np.zeros(len(index.classes), np.int64)
    for start in range(0, len(members), CHUNK):
        labels = index.read_labels(members[start : start + CHUNK])
        digest.update(labels.tobytes())
        if len(counts):
            counts += np.bincount(labels, minlength=len(counts))
    return Split(len(members), members, counts.tolist(), digest.hexdigest())


def read_json_if_intact(path: Path) -> dict[str, Any] | None:
    """Returns the content of a JSON file with a hash of itself (disk/sealed.py); None if it cannot be read or was
    altered.
    """
    try:
        return sealed.parse_json_if_hash_matches(path.read_bytes())
    except OSError:
        return None
