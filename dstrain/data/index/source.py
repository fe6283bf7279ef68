"""Base class for sources of images and of clips: the samples of one split of an index, their labels and fingerprint."""

import json
import shlex
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np
from torch import Tensor

from dstrain.data.decode.pixels import SUFFIXES
from dstrain.data.files.listing import join_first, map_in_threads
from dstrain.data.formats.base import Layout
from dstrain.data.index.alike import count_file_bytes
from dstrain.data.index.build import make_index_files_once
from dstrain.data.index.index import CHUNK, Index
from dstrain.data.source import Source
from dstrain.recipe import ConfigError

_ASKED = 10_000  # files whose sizes are asked for whenever a run starts


class Indexed(Source):
    """The samples of one split of an index. All ranks must call the constructor; if the index is on a disk, it writes
    the splits beside the index unless they are there.

    split: "train", "held_out" or "all". held_out: fraction of the samples that is held out. classes: class names, among
    which are all of the data's; labels are then indices into them; () takes the data's own. key: the recipe's entry,
    for messages. leave_out: patterns of captions; samples with a caption that fits one are left out. Raises ConfigError
    if the data have other classes, no captions to compare with `leave_out`, or no samples in the split.
    """

    def __init__(
        self,
        layout: Layout,
        index: Index,
        split: str = "all",
        held_out: float = 0.0,
        classes: tuple[str, ...] = (),
        key: str = "data.path",
        leave_out: tuple[str, ...] = (),
    ) -> None:
        self.layout, self.index = layout, index
        self.split, self._held_out = split, held_out
        self.prefetches = layout.files.far
        self.path = Path(layout.root)
        self.where, self.check = f"{layout.request.key}={layout.root}", _compose_index_check_command(layout)
        self.classes, self._renumbered = index.classes, None
        if classes and index.classes:
            places = {name: place for place, name in enumerate(classes)}
            if unknown := [name for name in index.classes if name not in places]:
                raise ConfigError(
                    f"{key}={self.path}: class folders {join_first(unknown)} are not among the classes of the "
                    f"training data ({join_first(classes)}): rename or remove them"
                )
            self.classes = classes
            if classes != index.classes:
                self._renumbered = np.array([places[name] for name in index.classes], np.int32)
        if leave_out and not index.most_captions:
            remedy = "give them a file of captions, data.captions" if self.noun == "clips" else "add captions"
            raise ConfigError(f"data.leave_out: no captions are listed of {key}={self.path}: {remedy}, or leave it out")
        splits = held_out, leave_out
        if index.folder is not None:
            make_index_files_once(index, lambda: index.has_splits(*splits), lambda: index.write_splits(*splits))
        self.chosen = index.open_split(split, *splits)
        self.left_out = tuple(zip(leave_out, self.chosen.left_out))
        if not self.chosen.number and leave_out:
            raise ConfigError(
                f"data.leave_out fits all captions of {key}={self.path}, or all of its {split} split: give patterns "
                "that fit fewer"
            )
        if not self.chosen.number:
            raise ConfigError(
                f"{key}={self.path}: data.held_out={held_out} leaves no {self.noun.removesuffix('s')} of "
                f"{len(index)} for the {split} split: choose another fraction or give "
                "data.held_out_path"
            )

    def __len__(self) -> int:
        return self.chosen.number

    def name_sample(self, index: int) -> str:
        return self.index.read_name(self.find_row_of_sample(index))

    def find_row_of_sample(self, index: int) -> int:
        """Returns the row of the index that holds sample `index` of this split. Raises IndexError if there is no such
        sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        return index if self.chosen.members is None else int(self.chosen.members[index])

    def read_label(self, row: int) -> int:
        """Returns the label of the sample in a row of the index, as an index into `classes`."""
        label = self.index.read_label(row)
        return label if self._renumbered is None else int(self._renumbered[label])

    @property
    def labels(self) -> np.ndarray:
        """Returns the labels of all samples: int32 (N,). They are all read into memory, so use it only for small
        data.
        """
        return np.concatenate([labels for _, labels in self._iterate_rows_and_labels()])

    def prefetch(self, index: Tensor, mirrored: Tensor | None = None, random_number: Tensor | None = None) -> None:
        self.layout.prefetch(self.index.read_place(self.find_row_of_sample(sample)) for sample in index.tolist())

    def describe_samples(self) -> str:
        remarks = filter(
            None,
            (
                super().describe_samples(),
                _describe_case_only_differences(self.classes),
                self.layout.compose_data_advice(),
            ),
        )
        return "; ".join(remarks)

    def count_samples_by_class(self) -> np.ndarray | None:
        if not self.classes:
            return None
        counts = np.zeros(len(self.classes), np.int64)
        counts[slice(None) if self._renumbered is None else self._renumbered] = self.chosen.counts
        return counts

    def compute_fingerprint(self) -> str:
        count = self._count_files()
        files = range(count) if count <= _ASKED else np.linspace(0, count - 1, _ASKED).astype(int)
        return f"{self._compute_fingerprint_prefix()} {self._compute_files_fingerprint(files)}"

    def compute_full_fingerprint(self) -> str:
        return f"{self._compute_fingerprint_prefix()} {self._compute_files_fingerprint(range(self._count_files()))}"

    @abstractmethod
    def _compute_fingerprint_prefix(self) -> str:
        """Returns the beginning of the fingerprint: the kind of the samples, the split, the numbers of samples and of
        classes, and a hash of names.
        """

    def _hash_names_and_labels(self, texts: Iterable[bytes] = ()) -> str:
        """Returns a hash of all names, then all labels, then `texts`, as hexadecimal text."""
        if self._renumbered is None and not texts:
            return self.chosen.names
        digest = blake2b(digest_size=8)
        for rows, _ in self._iterate_rows_and_labels():
            digest.update(b"".join(self._read_names(rows)))
        for _, labels in self._iterate_rows_and_labels():
            digest.update(labels.tobytes())
        for text in texts:
            digest.update(text)
        return digest.hexdigest()

    def _iterate_rows_and_labels(self) -> Iterator[tuple[range | np.ndarray, np.ndarray]]:
        """Yields (rows in the index, labels int32) of the samples of the split, 65,536 samples at a time."""
        for start in range(0, len(self), CHUNK):
            stop = min(start + CHUNK, len(self))
            rows = range(start, stop) if self.chosen.members is None else self.chosen.members[start:stop]
            labels = self.index.read_labels(slice(start, stop) if isinstance(rows, range) else rows)
            yield rows, labels if self._renumbered is None else self._renumbered[labels]

    def _read_names(self, rows: range | np.ndarray) -> list[bytes]:
        """Returns the names of the samples in these rows of the index, as bytes."""
        if isinstance(rows, range):
            return self.index.read_names(rows.start, rows.stop)
        return [self.index.read_name_bytes(row) for row in rows.tolist()]

    def _count_files(self) -> int:
        """Returns the number of files of the data. If each sample is a file, this is the number of samples; else it is
        the number of the layout's partitions, such as shards.
        """
        return len(self) if self.index.single else len(self.layout.list_partitions())

    def _iterate_file_names(self, file_numbers: Sequence[int]) -> Iterator[list[str]]:
        """Yields the names of the files with these numbers, as lists of at most 65,536. A file is one sample, or, if
        files hold several samples, a partition of the layout, such as a shard.
        """
        pieces = [] if self.index.single else self.layout.list_partitions()
        for start in range(0, len(file_numbers), CHUNK):
            some = file_numbers[start : start + CHUNK]
            yield [self.name_sample(int(number)) if self.index.single else pieces[number] for number in some]

    def _compute_files_fingerprint(self, file_numbers: Sequence[int]) -> str:
        """Returns "bytes=SUM contents=HASH" for the files with these numbers. SUM is the sum of their sizes, in which
        -1 stands for an unknown size. HASH is a hash of all these sizes and of the result of `_hash_texts`.

        Modification times do not count, so a copy of the data gives the same result.
        """
        total, digest = 0, blake2b(digest_size=8)
        for names in self._iterate_file_names(file_numbers):
            sizes = np.fromiter(map_in_threads(partial(count_file_bytes, self.layout), names), np.int64, len(names))
            total += int(sizes.sum())
            digest.update(sizes.tobytes())
        digest.update(self._hash_texts(file_numbers))
        return f"bytes={total} contents={digest.hexdigest()}"

    def _hash_texts(self, file_numbers: Sequence[int]) -> bytes:
        """Returns the hash of all columns of the index except names and labels, such as captions and sizes; b"" if
        there are no such columns. Subclasses may instead hash the captions in the files with these `file_numbers`.
        """
        return self.index.rest.encode()


def _compose_index_check_command(layout: Layout) -> str:
    """Returns the shell command `dstrain index ... --check`, which lists the samples of these data that cannot be
    read.
    """
    request, words = layout.request, ["dstrain", "index", layout.root]
    entries = {
        "num_frames": None if request.suffixes == SUFFIXES else 1,
        "captions": request.captions_file,
        "labels": None if request.labels == "auto" else request.labels,
        "class_list": request.class_list,
        "columns": json.dumps(request.columns) if request.columns else None,
    }
    words += [f"data.{name}={value}" for name, value in entries.items() if value is not None]
    words += ["--captions"] if request.captions and request.suffixes == SUFFIXES else []
    return shlex.join([*words, "--check"])


def _describe_case_only_differences(classes: Sequence[str]) -> str:
    """Returns a remark on the first classes whose names differ only in case, such as cat and Cat; "" if none do."""
    by_name: dict[str, list[str]] = {}
    for name in classes:
        by_name.setdefault(str(name).casefold(), []).append(str(name))
    alike = [names for names in by_name.values() if len(names) > 1]
    return f"the classes {' and '.join(alike[0])} differ in capitals alone" if alike else ""
