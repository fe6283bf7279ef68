"""Defines the base class of data sources: samples by index, their description, and how a batch is read.

A sample that cannot be read is replaced by the next readable one of its shape, cyclically. The substitute is a function
of the data and the index alone, so it is the same on any rank, in any worker and at any world size.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import default_collate

from dstrain.data.files.storage import is_storage_fault
from dstrain.data.order import Order
from dstrain.recipe import ConfigError, NotRead

Item = dict[str, Tensor | int]
Chance = float | list[float]
Bad = list[tuple[str, str]]  # (name, reason) of samples that cannot be read

_MAX_TRIES = 1000  # substitutes in a row; data with a longer stretch are broken as a whole
_MIRRORED = ("image", "video")  # entries of a batch that have a left and a right side
_LEFT = 3  # column of the entry "size" with the left side of the crop: see images.py
_SAMPLED = 1000  # samples whose captions are looked at
_PACKED = ("caption", "other_caption")  # texts of any length: a batch fills them up with zeros to its longest one


class BadSample(Exception):
    """Raised if a sample cannot be read. `path`, relative to the data, and `reason` are one line each."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason


@contextmanager
def convert_errors_to_bad_sample(name: str, path: Path) -> Iterator[None]:
    """A context manager for reading the sample `name` from the file `path`. Raises any exception of the block as
    BadSample, since a damaged file may raise anything; the message has `name` in place of `path`.

    Raises NotRead instead if the file is not at fault, but the storage or the machine's memory.
    """
    try:
        yield
    except NotRead:
        raise
    except Exception as error:
        if is_storage_fault(error, path):
            raise NotRead(
                f"{path} cannot be read ({type(error).__name__}: {error}), and the fault is not the file's: "
                "mend the storage or free memory, then give the same command again"
            ) from None
        reason = " ".join(str(error).replace(str(path), name).split())[:300]
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        raise BadSample(name, kind + reason) from error


class Source(ABC):
    """The base class of data sources, whose samples are 0 .. len - 1. An index always gives the same item, unless
    `read` is given a random number by which it chooses, for example the window of a clip.

    An item is a dict such as {"image": uint8 (C, H, W), "label": int}; all items of a source have the same entries, and
    the same shapes except across buckets. Each module of this folder says which entries its items have. Sources are
    pickled for the workers.
    """

    noun: str = "samples"  # what a message calls the samples
    classes: tuple[str, ...] = ()  # names of the classes; the label of an item is an index into them
    light: bool = False  # reading an item costs less than passing it between processes
    captioned: bool = False  # items have captions
    where: str = "data.path"  # for a message: the entry that names them, as data.path=FOLDER
    check: str | None = None  # for a message: the command that lists which of them cannot be read
    uncaptioned: str | None = None  # for a message: the setting whose files lack captions, as data.path=FOLDER
    chance_name: str | None = None  # the random number that `read` takes, by its name in dstrain.rng; None: none
    chance_count: int = 0  # above 0, `read` takes a list of so many such numbers
    left_out: tuple[tuple[str, int], ...] = ()  # each pattern of data.leave_out, and how many samples it has fitted
    batched: bool = False  # `read_batch` is faster than item by item
    prefetches: bool = False  # `prefetch` begins to read what lies on a disk

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of samples."""

    @abstractmethod
    def __getitem__(self, index: int) -> Item:
        """Reads one sample. Raises BadSample if it cannot be read, NotRead if the storage fails."""

    @abstractmethod
    def name_sample(self, index: int) -> str:
        """Returns the name of a sample for messages, such as its path relative to the data."""

    @abstractmethod
    def compute_fingerprint(self) -> str:
        """Returns a short string that changes if the data change. A run saves it and compares it on resume. It is
        quick: of a folder it covers at most 10,000 files, by their sizes and captions.
        """

    def compute_full_fingerprint(self) -> str:
        """Returns a fingerprint that covers all files of the data, so that a cache can prove from which data it was
        made. Here the same as `compute_fingerprint`.
        """
        return self.compute_fingerprint()

    def describe_samples(self) -> str:
        """Returns a line about the data for the start of a command: how many samples and classes there are, whether
        there are captions, and how many samples data.leave_out leaves out.
        """
        words = f"{len(self):,} {self.noun}, {self._describe_classes()}, {self._describe_captions()}"
        if not self.left_out:
            return words
        return f"{words}, left out: {', '.join(f'{pattern} {count:,}' for pattern, count in self.left_out)}"

    def count_samples_by_source(self, seed: int, positions: int) -> dict[str, int]:
        """Returns {name: count}: how many of the first `positions` samples of a training with this `seed` come from
        each source of a mixture. Returns {} if the data are no mixture.
        """
        return {}

    def count_samples_by_class(self) -> np.ndarray | None:
        """Returns the number of samples of each class, int64 (classes,); None if there are no classes, or if counting
        would take long.
        """
        return None

    def _describe_classes(self) -> str:
        """Returns a phrase such as "10 classes of 200" or "2 classes of 5 (cat) to 9 (dog)"; "no classes" if there are
        none.
        """
        count, counts = len(self.classes), self.count_samples_by_class() if self.classes else None
        number = f"{count:,} class{'es' * (count != 1)}" if count else "no classes"
        if counts is None:
            return number
        least, most = int(counts.argmin()), int(counts.argmax())
        if counts[least] == counts[most]:
            return f"{number} of {counts[least]:,}"
        return f"{number} of {counts[least]:,} ({self.classes[least]}) to {counts[most]:,} ({self.classes[most]})"

    def _describe_captions(self) -> str:
        """Returns the phrase about captions in `describe_samples`."""
        return "captions" if self.captioned else "no captions"

    def read_captions(self, index: int) -> tuple[str, ...]:
        """Returns the captions of a sample, () if it has none. Reads the whole sample, unless a subclass has a quicker
        way. Raises BadSample if it cannot be read.
        """
        packed = self[index].get("caption")
        return () if packed is None else (bytes(packed.numpy()).rstrip(b"\0").decode("utf-8", "replace"),)

    @property
    def end_index_by_shape(self) -> tuple[int, ...]:
        """Returns the index after the last sample of each shape: samples of one shape have consecutive indices."""
        return (len(self),)

    def make_sample_order(self, global_batch: int, seed: int) -> Any:
        """Returns the order in which training takes the samples: an object such as `Order`, whose method
        `find_sample_index` gives the sample at each position of the endless stream of samples.
        """
        return Order(len(self), seed)

    def make_single_shape_view(self) -> "Source":
        """Returns a source of the same samples in one shape. That is this source itself, unless its samples are sorted
        into buckets of several shapes.
        """
        return self

    def find_substitute_index(self, index: int, offset: int) -> int:
        """Returns the index `offset` places after `index` among the samples of its shape. After the last one of this
        shape comes the first one.
        """
        first, last = 0, 0
        for end in self.end_index_by_shape:
            first, last = last, end
            if index < end:
                break
        return first + (index - first + offset) % (last - first)

    def read(self, index: int, random_number: Chance | None = None) -> Item:
        """Reads one sample. Raises BadSample if it cannot be read, NotRead if the storage fails.

        random_number: a number in [0, 1), or `chance_count` of them, by which the source chooses, for example, a crop
        or a caption of the sample. None always makes the same choice.
        """
        return self[index]

    def read_first_readable(self) -> Item:
        """Returns sample 0 or, if it cannot be read, the next sample of its shape that can. Raises ConfigError if 1000
        samples in a row cannot be read.
        """
        return read_items_or_substitutes(self, [0])[0][0]

    def prefetch(self, index: Tensor, mirrored: Tensor | None = None, random_number: Tensor | None = None) -> None:
        """Begins to read the samples that a later `read_batch` with the same arguments needs, and does not wait for
        them. Only sources whose `prefetches` is True do this; others do nothing.
        """

    def read_batch(
        self, index: Tensor, mirrored: Tensor | None = None, random_number: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Bad]:
        """Reads the samples at `index` int64 (b,). Returns the batch, and (name, reason) of each sample that could not
        be read and was replaced by another. Raises ConfigError as `read_items_or_substitutes`.

        mirrored: bool (b,), True for samples to mirror left to right; None: mirrors none
        random_number: float32 (b,) or (b, chance_count), see `read`
        """
        items, bad = read_items_or_substitutes(
            self, index.tolist(), None if random_number is None else random_number.tolist()
        )
        for place in () if mirrored is None else mirrored.nonzero()[:, 0].tolist():
            item = items[place]  # before they are stacked: picking rows of a batch copies them twice
            items[place] = item | {name: item[name].flip(-1) for name in _MIRRORED if name in item}
        batch = collate_items(items)
        if "right" in batch:  # what a mirrored crop leaves out on its left was on its right
            right = batch.pop("right")
            if mirrored is not None:
                batch["size"][mirrored, _LEFT] = right[mirrored]
        return batch, bad


def read_items_or_substitutes(
    source: Source, indices: list[int], random_numbers: list[Chance] | None = None
) -> tuple[list[Item], Bad]:
    """Reads the samples at `indices`. If one cannot be read, takes the next sample of its shape that can. Returns the
    items, and (name, reason) of each sample that could not be read.

    random_numbers: for each item, the argument `random_number` of Source.read; None: no item has one

    Raises ConfigError if 1000 samples in a row cannot be read.
    """
    items, bad = [], []
    tries = min(len(source), _MAX_TRIES)
    for place, index in enumerate(indices):
        random_number = None if random_numbers is None else random_numbers[place]
        for count in range(tries):
            try:
                items.append(source.read(source.find_substitute_index(index, count) if count else index, random_number))
                break
            except BadSample as error:
                bad.append((error.path, error.reason))
        else:
            raise ConfigError(
                f"{tries} sample{'s in a row' * (tries > 1)} cannot be read; the last is {bad[-1][0]}: "
                f"{bad[-1][1]}. Is {source.where} right?"
                + (f" `{source.check}` lists what cannot be read" if source.check else "")
            )
    return items, bad


def collate_items(items: list[Item]) -> dict[str, Tensor]:
    """Stacks items to a batch of tensors (b, ...). Numbers become int64 (b,). Captions are filled up with zeros to the
    longest.
    """
    texts = {name: pad_and_stack_texts([item[name] for item in items]) for name in _PACKED if name in items[0]}
    return default_collate([{name: item[name] for name in item if name not in texts} for item in items]) | texts


def pad_and_stack_texts(texts: Sequence[Tensor]) -> Tensor:
    """Stacks texts, each uint8 (..., bytes) in UTF-8, to one tensor uint8 (texts, ..., W). W is the length of the
    longest text in bytes; the others are filled up with zeros.
    """
    width = max(text.shape[-1] for text in texts)
    return torch.stack([F.pad(text, (0, width - text.shape[-1])) for text in texts])


def join_batches(batches: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Joins batches to one, in their order. Captions are filled up with zeros to the longest."""
    joined = {}
    for name in batches[0]:
        parts = [batch[name] for batch in batches]
        joined[name] = (
            pad_and_stack_texts([text for part in parts for text in part]) if name in _PACKED else torch.cat(parts)
        )
    return joined


def read_evenly_spaced_captions(source: Source, max_samples: int = _SAMPLED) -> list[str]:
    """Returns all captions of at most `max_samples` samples, evenly spaced. Skips samples that cannot be read. Returns
    [] for a source without captions.
    """
    texts: list[str] = []
    for index in (
        np.linspace(0, len(source) - 1, min(max_samples, len(source))).astype(int).tolist() if source.captioned else ()
    ):
        with suppress(BadSample, OSError, ValueError):
            texts += source.read_captions(index)
    return texts


def describe_truncated_captions(source: Source, reader: Any) -> list[str]:
    """Returns one line, in a list, that says how many captions are longer than a reader can read; [] if none is longer.
    Looks at no more than 1000 samples, evenly spaced.

    reader: a system or a text encoder
    """
    texts = read_evenly_spaced_captions(source)
    line = (
        reader.describe_cut(texts, "captions" if len(source) <= _SAMPLED else "captions of a sample") if texts else ""
    )
    return [line] if line else []
