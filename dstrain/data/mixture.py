"""Mixes several sources into one: computes the source of each sample, and in which order each source is read.

    stream position p     lies in block p // 256, whose 256 positions are shuffled by the seed: p -> slot s
    slot s                belongs to source k, and is the n-th of its slots, where count_k(s) = n
    sample                Order(size_k, seed_k).find_sample_index(n): each source passes through its own epochs

count_k(s), how many of the slots before s belong to source k, is computed and not stored. With whole weights w_k, the
first source gets count_0 = floor(s * w_0 / W) of s slots, where W is the sum of all weights. The second gets
floor((s - count_0) * w_1 / (W - w_0)) of the others, and so on; the last gets the rest. One slot more is one more of
exactly one source. So a source misses its share by less than one sample for each source, at any position, and a
sample's source and place depend on the weights, the seed and its position alone. Shuffling within blocks keeps the
pattern of the slots from meeting the pattern of ranks and micro-batches.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dstrain.data.cached.shards import ENCODED_ALIKE, read_index
from dstrain.data.order import Order
from dstrain.data.source import Bad, BadSample, Item, Source, join_batches
from dstrain.recipe import ConfigError, Data

_BLOCK = 256  # positions that are shuffled among each other
_LARGEST = 1 << 30  # sum of whole weights: products of two fit into int64
_MIXED_ALIKE = (*ENCODED_ALIKE, "dtype", "flips")  # of the encodings of caches that are mixed


@dataclass(frozen=True)
class MixtureOrder:
    """The infinite stream of sample indices of a mixture. The indices of the first source come first, then those of the
    second, and so on; the stream takes them from all sources in the ratio of the weights.

    sizes: number of samples of each source. weights: one whole number for each source, as `scale_to_whole_numbers`
    returns.
    """

    sizes: tuple[int, ...]
    weights: tuple[int, ...]
    seed: int = 0

    def find_sample_index(self, position: int | np.ndarray | Tensor) -> int | np.ndarray | Tensor:
        """Returns the index of the sample at each position >= 0 of the endless stream of training samples. Returns an
        int for an int, int64 of the same shape for an array or a CPU tensor. Raises ConfigError if a position is
        negative.
        """
        if isinstance(position, Tensor):
            return torch.from_numpy(self.find_sample_index(position.numpy()))
        if not isinstance(position, np.ndarray):
            return int(self.find_sample_index(np.array([position], np.int64))[0])
        sources, places = self.find_sources_and_positions(position)
        index, begin = np.empty(position.shape, np.int64), 0
        for k, size in enumerate(self.sizes):
            here = sources == k
            index[here] = begin + Order(size, _derive_source_seed(self.seed, k)).find_sample_index(places[here])
            begin += size
        return index

    def find_sources_and_positions(self, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns for each position int64 (...) of the mixture's endless stream: the number of the source from which
        its sample comes, and the sample's position in the endless stream of this source alone. Both int64 (...).
        """
        slots = (
            position - position % _BLOCK + Order(_BLOCK, _derive_source_seed(self.seed, -1)).find_sample_index(position)
        )
        before = self._count_earlier_slots_by_source(slots)  # (sources, ...)
        sources = (self._count_earlier_slots_by_source(slots + 1) - before).argmax(0)
        return sources, np.take_along_axis(before, sources[None], 0)[0]

    def count_samples_by_source(self, positions: int) -> list[int]:
        """Returns how many of the first `positions` samples of the stream come from each source."""
        whole = positions - positions % _BLOCK
        rest, _ = self.find_sources_and_positions(np.arange(whole, positions))
        return (
            self._count_earlier_slots_by_source(np.array(whole)) + np.bincount(rest, minlength=len(self.sizes))
        ).tolist()

    def _count_earlier_slots_by_source(self, slots: np.ndarray) -> np.ndarray:
        """Returns, for each number s in `slots` int64 (...), how many of the stream's first s slots belong to each
        source: int64 (sources, ...). A slot is a position of the stream before the positions are shuffled within
        blocks.
        """
        counts, rest, total = [], slots, sum(self.weights)
        for weight in self.weights:
            counts.append(rest // total * weight + rest % total * weight // total)  # rest * weight might overflow
            rest, total = rest - counts[-1], total - weight
        return np.stack(counts)


def scale_to_whole_numbers(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns positive weights as whole numbers in the same ratio, without a common divisor: 0.3, 0.7 give 3, 7.

    If these numbers have a sum above 2^30, scales them down to a sum of about 2^30: then the ratio is only approximate.
    No number becomes 0.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    numbers = [int(weight * common) for weight in exact]
    divisor, total = math.gcd(*numbers), sum(numbers)
    if total // divisor > _LARGEST:
        return tuple(max(1, number * _LARGEST // total) for number in numbers)
    return tuple(number // divisor for number in numbers)


def _derive_source_seed(seed: int, source: int) -> int:
    """Returns a seed derived from the mixture's `seed`. source: the number of the source whose order it seeds; -1: the
    seed that shuffles the sources within blocks of the stream.
    """
    return int.from_bytes(blake2b(f"{seed} {source}".encode(), digest_size=8).digest(), "little")


class Mixture(Source):
    """The samples of several sources as one source: first all of the first source, then all of the next.
    `make_sample_order` takes them in the ratio of the weights.

    names: names of the sources, all different. weights: one for each source; None: the numbers of their samples.
    classes: those of the mixture, as `join_class_names` returns; labels are indices into them. Items have captions only
    if all sources have captions.
    """

    batched = True

    def __init__(
        self, sources: Sequence[Source], names: Sequence[str], weights: Sequence[float] | None, classes: tuple[str, ...]
    ) -> None:
        self.sources, self.names, self.classes = tuple(sources), tuple(names), classes
        self.sizes = tuple(len(source) for source in sources)
        self.weights = scale_to_whole_numbers(weights or self.sizes)
        self._ends = torch.tensor(self.sizes).cumsum(0)
        places = {name: place for place, name in enumerate(classes)}
        # The label of each class of a source in the mixture, None where they are the same.
        self.labels = [
            None
            if source.classes == classes[: len(source.classes)]
            else torch.tensor([places[name] for name in source.classes])
            for source in sources
        ]
        self.noun = self.sources[0].noun
        self.light = all(source.light for source in sources)
        self.prefetches = any(source.prefetches for source in sources)
        self.captioned = all(source.captioned for source in sources)
        counts = np.sum([[count for _, count in source.left_out] for source in sources], axis=0, dtype=np.int64)
        self.left_out = tuple(zip((pattern for pattern, _ in sources[0].left_out), counts.tolist()))
        self.uncaptioned = next((source.uncaptioned for source in sources if source.uncaptioned), None)
        # All sources that need a random number need the same one.
        chooses = next((source for source in sources if source.chance_name), sources[0])
        self.chance_name, self.chance_count = chooses.chance_name, chooses.chance_count

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Item:
        return self.read(index)

    def read(self, index: int, random_number: float | None = None) -> Item:
        """Reads one sample from its source, and gives it its label in the mixture. Raises BadSample, whose path is
        SOURCE/name, if the sample cannot be read.
        """
        source, place = self._locate_sample(index)
        try:
            return self._relabel_for_mixture(source, self.sources[source].read(place, random_number))
        except BadSample as error:
            raise BadSample(f"{self.names[source]}/{error.path}", error.reason) from error

    def read_batch(
        self, index: Tensor, mirrored: Tensor | None = None, random_number: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Bad]:
        """Reads the samples at `index` int64 (b,), each from its source. Returns the batch, with labels of the mixture,
        and (SOURCE/name, reason) of each sample that could not be read. In its place the batch has another sample of
        the same source. Raises ConfigError as Source.read_batch.
        """
        parts, rows, bad = [], [], []
        for source, here, places in self._group_indices_by_source(index):
            part, unreadable = self.sources[source].read_batch(
                places, *(None if values is None else values[here] for values in (mirrored, random_number))
            )
            parts.append(self._relabel_for_mixture(source, part))
            rows.append(here)
            bad += [(f"{self.names[source]}/{name}", reason) for name, reason in unreadable]
        order = torch.cat(rows).argsort()
        return {name: values[order] for name, values in join_batches(parts).items()}, bad

    def prefetch(self, index: Tensor, mirrored: Tensor | None = None, random_number: Tensor | None = None) -> None:
        """Begins to read the samples at `index` that belong to sources which can prefetch. Skips the others."""
        for source, here, places in self._group_indices_by_source(index):
            if self.sources[source].prefetches:
                self.sources[source].prefetch(
                    places, *(None if values is None else values[here] for values in (mirrored, random_number))
                )

    def read_captions(self, index: int) -> tuple[str, ...]:
        source, place = self._locate_sample(index)
        return self.sources[source].read_captions(place)

    def name_sample(self, index: int) -> str:
        """Returns the name of a sample for messages: SOURCE/name."""
        source, place = self._locate_sample(index)
        return f"{self.names[source]}/{self.sources[source].name_sample(place)}"

    def make_sample_order(self, global_batch: int, seed: int) -> MixtureOrder:
        """Returns the order in which training takes samples from all sources, in the ratio of the weights."""
        return MixtureOrder(self.sizes, self.weights, seed)

    def count_samples_by_source(self, seed: int, positions: int) -> dict[str, int]:
        return dict(zip(self.names, MixtureOrder(self.sizes, self.weights, seed).count_samples_by_source(positions)))

    def compute_fingerprint(self) -> str:
        return self._join_fingerprints([source.compute_fingerprint() for source in self.sources])

    def compute_full_fingerprint(self) -> str:
        return self._join_fingerprints([source.compute_full_fingerprint() for source in self.sources])

    def describe_samples(self) -> str:
        """Returns a line about the mixture, with the share and the line of each source."""
        total = sum(self.weights)
        parts = (
            f"{weight / total:.1%} {name} ({source.describe_samples()})"
            for weight, name, source in zip(self.weights, self.names, self.sources)
        )
        return f"a mixture of {len(self.sources)}, {super().describe_samples()}: {'; '.join(parts)}"

    def count_samples_by_class(self) -> np.ndarray | None:
        """Returns the number of samples of each class of the mixture, int64 (classes,); None if there are no classes,
        or if a source does not count its own.
        """
        counts = np.zeros(len(self.classes), np.int64)
        for source, labels in zip(self.sources, self.labels):
            own = source.count_samples_by_class()
            if own is None:
                return None
            np.add.at(counts, np.arange(len(own)) if labels is None else labels.numpy(), own)
        return counts if self.classes else None

    def _join_fingerprints(self, fingerprints: list[str]) -> str:
        """Returns a fingerprint of the mixture from those of its sources, the weights and the classes."""
        classes = blake2b("\n".join(self.classes).encode(), digest_size=8).hexdigest()
        parts = " + ".join(f"{weight} [{fingerprint}]" for weight, fingerprint in zip(self.weights, fingerprints))
        return f"mixture n={len(self)} classes={len(self.classes)} {classes} of {parts}"

    def _locate_sample(self, index: int) -> tuple[int, int]:
        """Returns (number of the source that holds a sample of the mixture, index of the sample in this source)."""
        source = int(torch.bucketize(index, self._ends, right=True))
        return source, index - int(self._ends[source]) + self.sizes[source]

    def _group_indices_by_source(self, index: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        """Groups indices int64 (b,) of the mixture by source. Returns for each source that occurs:

        the number of the source
        the places in `index` of its samples, int64 (n,)
        the indices of these samples within the source, int64 (n,)
        """
        sources = torch.bucketize(index, self._ends, right=True)
        rows = [(source, torch.nonzero(sources == source)[:, 0]) for source in sources.unique().tolist()]
        return [(source, here, index[here] - self._ends[source] + self.sizes[source]) for source, here in rows]

    def _relabel_for_mixture(self, source: int, item: dict) -> dict:
        """Returns an item or a batch of source number `source`, with labels of the mixture in place of the source's
        own. Leaves out captions unless all sources have captions.
        """
        if not self.captioned:
            item = {name: values for name, values in item.items() if name != "caption"}
        if (labels := self.labels[source]) is not None and "label" in item:
            label = labels[item["label"]]
            item = item | {"label": label if label.ndim else int(label)}
        return item


def open_mixture(
    data: Data, open_part: Callable[[Data], tuple[Source, Source | None]]
) -> tuple[Mixture, Mixture | None]:
    """Opens the sources of data.mixture. Returns the mixture of their training samples, and the mixture of their
    held-out samples, or None if no source holds samples out.

    open_part: opens the data section of one source, and returns (training source, held-out source or None)

    Raises ConfigError as `open_part` and `join_class_names`, and if the training samples have classes but held-out ones
    have none.
    """
    paths = [source.path for source in data.mixture]
    short = [os.path.basename(os.path.normpath(path)) for path in paths]
    names = short if len({*short}) == len(short) else paths
    sources, unseen = zip(*map(open_part, data.list_sources()))
    classes = join_class_names(sources, names, data.mixture_classes)
    weights = None if data.mixture[0].weight is None else [source.weight for source in data.mixture]
    held = [(source, name) for source, name in zip(unseen, names) if source is not None]
    if without := [name for source, name in held if classes and not source.classes]:
        raise ConfigError(
            f"data.mixture: the held-out data of {without[0]} have no classes, and those that are "
            "trained on have: put the files of each class into a folder of its own, named as there"
        )
    return Mixture(sources, names, weights, classes), Mixture(*zip(*held), None, classes) if held else None


def merge_codes_entries_of_sources(data: Data, sections: Sequence[Data]) -> Data:
    """Returns a copy of a mixture's data section, whose entry `codes` describes the cached latents or tokens of all
    sources. The entry is None if the sources are not cached. The scaling factor of latents is 1 / the standard
    deviation of the whole mixture.

    sections: the data sections of the sources, each with its own `codes`

    Raises ConfigError if only some sources are cached, or if they were not encoded alike.
    """
    codes = sections[0].codes
    for section in sections[1:]:
        if (section.codes is None) != (codes is None):
            encoded, plain = (sections[0], section) if section.codes is None else (section, sections[0])
            raise ConfigError(
                f"data.mixture: {encoded.path} holds cached codes, and {plain.path} does not: encode all, or none"
            )
    if codes is None:
        return data.model_copy(update={"codes": None})
    indexes = [read_index(Path(section.path)) for section in sections]
    for section, index in zip(sections[1:], indexes[1:]):
        for key in _MIXED_ALIKE:
            first, other = indexes[0]["encoding"].get(key), index["encoding"].get(key)
            if first != other:
                raise ConfigError(
                    f"data.mixture: {section.path} has {key} {other}, {sections[0].path} has {first}: encode "
                    "all of them alike"
                )
    weights = np.array([source.weight or index["encoding"]["number"] for source, index in zip(data.mixture, indexes)])
    if codes.kind == "latents":
        means, deviations = (np.array([index["statistics"][name] for index in indexes]) for name in ("mean", "std"))
        mean, second = (np.average(values, weights=weights) for values in (means, deviations**2 + means**2))
        codes = codes.model_copy(update={"scaling_factor": float((second - mean**2) ** -0.5)})
    return data.model_copy(update={"codes": codes})


def join_class_names(sources: Sequence[Source], names: Sequence[str], rule: str) -> tuple[str, ...]:
    """Returns the class names of a mixture; () if no source has classes. names: of the sources, for messages.

    rule   "same"    all sources must have the same class names
           "first"   the other sources must have no class name that the first source lacks
           "union"   the class names of the first source, then the new ones of the others

    Raises ConfigError if the sources break the rule, or if only some have classes.
    """
    first = sources[0].classes
    if without := [name for name, source in zip(names, sources) if bool(source.classes) != bool(first)]:
        have, lack = ("has classes", "none") if first else ("has no classes", "some")
        raise ConfigError(
            f"data.mixture: {names[0]} {have}, and {without[0]} has {lack}: give all of them classes, or none"
        )
    classes = dict.fromkeys(first)
    for name, source in zip(names[1:], sources[1:]):
        if rule == "union":
            classes |= dict.fromkeys(source.classes)
            continue
        problem = next(
            (f"{name} has the class {own}, which {names[0]} has not" for own in source.classes if own not in classes),
            None,
        )
        if rule == "same":
            there = set(source.classes)
            problem = problem or next(
                (f"{name} lacks the class {own} of {names[0]}" for own in first if own not in there), None
            )
        if problem:
            raise ConfigError(
                f"data.mixture_classes={rule}: {problem}: name the classes alike, or write "
                "data.mixture_classes=union for the classes of all sources"
            )
    return tuple(classes)
