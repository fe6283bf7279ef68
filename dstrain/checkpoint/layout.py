"""Finds the tensors in the files of dstrain's checkpoints. Reads headers, but no data of tensors; does not import
torch.

    PART-RRRRR-of-WWWWW.safetensors    fragments of a part's tensors, under "kind/name" (kind: master, ema.0.9999, ...);
                                       the metadata's entry "fragments" maps these keys to [shape, start, numel];
                                       float32, or bfloat16 in snapshots of averages; one type in a part
    index-PART.safetensors             where all fragments are stored, see fragment_index.py; earlier versions: none
    common.safetensors                 buffers as buffer/PART/NAME, the system's state as system/NAME

fragments.py writes the shards and reads values from them. Consolidation copies bytes, and needs this file alone.
"""

import difflib
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dstrain.checkpoint.safetensors_io import FLOATS, SIZES, Entry, Span, Stored, read_safetensors_header
from dstrain.recipe import ConfigError

COMMON = "common.safetensors"
RECONSTRUCTED = "reconstructed"  # WIDTH/step_N in it: averages that dstrain reconstruct has made of a run's
SHARD = re.compile(r"(\w[\w.-]*)-(\d{5,})-of-(\d{5,})\.safetensors")  # part, rank, world


@dataclass(frozen=True)
class Fragment:
    """Names a stretch of a tensor: the elements start .. start + numel of the flattened tensor `name` of `shape`.
    Raises ConfigError if they are outside of it.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.start + self.numel <= math.prod(self.shape):
            raise ConfigError(
                f"{self.name}: elements {self.start} .. {self.start + self.numel} are "
                f"outside of shape {tuple(self.shape)}"
            )


def make_shard_file_name(part: str, rank: int, world: int) -> str:
    return f"{part}-{rank:05d}-of-{world:05d}.safetensors"


def make_damage_error(checkpoint: Path, reason: str) -> ConfigError:
    return ConfigError(f"checkpoint {checkpoint} is damaged ({reason}): take an older one with --step")


class TensorLocator(ABC):
    """Finds the files and byte offsets of the elements of one part's tensors. Subclasses read them from the shards'
    headers (Index) or from an index file (FragmentIndex).
    """

    def __init__(self, folder: Path, part: str) -> None:
        self.folder, self.part = folder, part
        self.dtype = ""  # of all tensors: F32 or BF16
        self._shapes: dict[str, tuple[int, ...]] = {}

    @abstractmethod
    def list_value_kinds(self) -> list[str]:
        """Returns the kinds of values that the part's tensors are stored as: "master", the moments, "ema.DECAY", ..."""

    @abstractmethod
    def list_tensor_names(self, kind: str) -> list[str]:
        """Returns the names of the tensors that are stored as this kind; [] if none is."""

    @abstractmethod
    def has_tensor(self, kind: str, name: str) -> bool:
        """Returns whether the tensor `name` is stored as this kind."""

    def choose_kind_of_each_tensor(self, wanted_kind: str) -> dict[str, str]:
        """Returns {tensor name: kind to read} for a network whose weights are wanted as `wanted_kind`, for example an
        average. Tensors that are stored as this kind are read as it, all others, such as frozen weights, as "master".
        """
        own = self.list_tensor_names(wanted_kind)
        return dict.fromkeys(self.list_tensor_names("master"), "master") | dict.fromkeys(own, wanted_kind)

    def _find_tensor_shape_by_kind(self, kind: str, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    @abstractmethod
    def _find_fragments(self, kind: str, name: str, start: int, end: int) -> list[tuple[int, Span]]:
        """Returns (first element, byte range in a shard) of each fragment of a flattened tensor, sorted by first
        element. May leave out fragments that do not overlap the elements start .. end.
        """

    def list_average_decays(self) -> list[float]:
        """Returns the decay, or relative width (EDM2), of each average of the weights, in the order of the recipe."""
        return [float(kind.removeprefix("ema.")) for kind in self.list_value_kinds() if kind.startswith("ema.")]

    def find_tensor_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor. Raises ConfigError if there is no such tensor; the message names the most
        similar one.
        """
        if name not in self._shapes:
            raise self._make_unknown_tensor_error(name, self._shapes)
        return self._shapes[name]

    def find_byte_spans(self, kind: str, name: str, start: int = 0, end: int | None = None) -> list[Span]:
        """Returns the byte ranges, in shards, that hold the elements `start` to `end` - 1 of a flattened tensor: in
        order, and each element once. end: None means the end of the tensor.

        Raises ConfigError for an unknown tensor, or if elements lie outside of it or in no shard.
        """
        if not self.has_tensor(kind, name):
            raise self._make_unknown_tensor_error(name, self.list_tensor_names(kind), kind)
        shape = self._find_tensor_shape_by_kind(kind, name)
        end = math.prod(shape) if end is None else end
        if not 0 <= start <= end <= math.prod(shape):
            raise ConfigError(f"{self.part}: elements {start} .. {end} of {name} are outside of shape {shape}")
        pieces = self._find_fragments(kind, name, start, end)
        spans, done = [], start
        size = SIZES[self.dtype]
        for first, span in pieces:
            if first > done:
                break
            last = min(first + span.nbytes // size, end)
            if last > done:
                spans.append(Span(span.path, span.offset + size * (done - first), size * (last - done)))
                done = last
        if done < end:
            gap_end = min([end, *(first for first, _ in pieces if first > done)])
            raise ConfigError(
                f"{self.part}: elements {done} .. {gap_end} of {kind}/{name} {shape} are in no shard of {self.folder}"
            )
        return spans

    def _make_unknown_tensor_error(self, name: str, names: Iterable[str], kind: str = "tensor") -> ConfigError:
        """Returns the error for a tensor `name` that the checkpoint lacks. Its message names the most similar one of
        `names`.
        """
        near = difflib.get_close_matches(name, list(names), 1)
        nearest = f"; the nearest is {near[0]}" if near else ""
        return ConfigError(f"{self.part}: the checkpoint {self.folder} holds no {kind} named {name}{nearest}")


class Index(TensorLocator):
    """Finds the elements of one part's tensors by reading the headers of its shards.

    Raises ConfigError for a file that is no shard, or if a tensor has two shapes; FileNotFoundError for a missing file.
    """

    def __init__(self, folder: Path, part: str, names: Iterable[str]) -> None:
        super().__init__(folder, part)
        self.pieces: dict[str, dict[str, list[tuple[int, Span]]]] = {}  # kind: name: (first element, bytes)
        for name in names:
            self._add_shard(folder / name)
        for pieces in (pieces for named in self.pieces.values() for pieces in named.values()):
            pieces.sort(key=lambda piece: (piece[0], -piece[1].nbytes))

    def list_value_kinds(self) -> list[str]:
        return list(self.pieces)

    def list_tensor_names(self, kind: str) -> list[str]:
        """Returns the names of the tensors that are stored as this kind, in the order of saving; [] if none is."""
        return list(self.pieces.get(kind, ()))

    def has_tensor(self, kind: str, name: str) -> bool:
        return name in self.pieces.get(kind, ())

    def _find_fragments(self, kind: str, name: str, start: int, end: int) -> list[tuple[int, Span]]:
        return self.pieces[kind][name]

    def _add_shard(self, path: Path) -> None:
        """Reads the header of a shard and adds its fragments to the index. Raises ConfigError if the file is no shard,
        or if one of its tensors has another shape in an earlier shard.
        """
        entries: list[tuple[str, Fragment, Span]] = []
        try:
            tensors, metadata = read_safetensors_header(path)
            for key, (shape, start, numel) in json.loads(metadata.pop("fragments")).items():
                kind, name = key.split("/", 1)
                fragment = Fragment(name.partition("#")[0], tuple(shape), start, numel)  # name#2 is its third piece
                tensor = tensors[key]
                self.dtype = self.dtype or (tensor.dtype if tensor.dtype == "BF16" else "F32")
                if (tensor.dtype, tensor.shape) != (self.dtype, (numel,)):
                    raise ConfigError(
                        f"{key} is {tensor.dtype} {list(tensor.shape)}, its index says {self.dtype} [{numel}]"
                    )
                entries.append((kind, fragment, tensor.spans[0]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is not a shard of named fragments: {error}") from None
        for kind, fragment, span in entries:
            shape = self._shapes.setdefault(fragment.name, fragment.shape)
            if shape != fragment.shape:
                raise ConfigError(
                    f"{self.part}: {fragment.name} has shape {shape} in one shard and {fragment.shape} in {path}"
                )
            self.pieces.setdefault(kind, {}).setdefault(fragment.name, []).append((fragment.start, span))


class Fragments(Index):
    """Finds the tensors of one part in the shards that a checkpoint's manifest lists. Raises ConfigError if a shard is
    damaged or missing.
    """

    def __init__(self, folder: Path, part: str, listed: Iterable[str]) -> None:
        self.files = sorted(name for name in listed if (match := SHARD.fullmatch(name)) and match[1] == part)
        try:
            super().__init__(folder, part, self.files)
        except FileNotFoundError as error:
            raise make_damage_error(folder, f"{Path(error.filename).name} is missing") from None
        except ConfigError as error:
            raise make_damage_error(folder, str(error)) from None

    def iterate_tensors(self, kind: str) -> Iterator[tuple[str, Stored]]:
        """Yields (name, location in files) of every weight, in the order of saving. The location is that of its values
        of this kind, for example an average; for a frozen weight that of its masters. Raises ConfigError if elements
        are in no shard.
        """
        for name, found in self.choose_kind_of_each_tensor(kind).items():
            try:
                yield name, Stored(self.dtype, self.find_tensor_shape(name), tuple(self.find_byte_spans(found, name)))
            except ConfigError as error:
                raise make_damage_error(self.folder, str(error)) from None


def find_reconstructed_average(folder: Path, width: float, step: int | None, checkpoint: Path | None) -> Path | None:
    """Returns the folder into which `dstrain reconstruct` has written an average of the weights of the run in `folder`.
    Returns None if there is none, or if `checkpoint` holds this average itself.

    width: the relative width of the average (EDM2)
    step: the step of the average; None: the newest one that was reconstructed
    checkpoint: the run's own checkpoint of that step, or None
    """
    paths = (folder / RECONSTRUCTED / repr(width)).glob("step_*")
    made = {int(path.name[5:]): path for path in paths if path.name[5:].isdigit()}
    if not made or (checkpoint is not None and width in collect_average_decays(checkpoint)):
        return None
    return made.get(max(made) if step is None else step)


def collect_average_decays(checkpoint: Path) -> set[float]:
    """Returns the decays or relative widths of all averages of weights in a checkpoint, of all parts together. Raises
    ConfigError if a shard is damaged.
    """
    shards = [match for path in checkpoint.glob("*.safetensors") if (match := SHARD.fullmatch(path.name))]
    return {number for match in shards for number in Index(checkpoint, match[1], [match[0]]).list_average_decays()}


def iterate_buffers(checkpoint: Path, part: str) -> Iterator[Entry]:
    """Yields the buffers of a part's network, such as running means, as entries that can be written to a file. Buffers
    of 16 bits become float32. Raises ConfigError if common.safetensors is missing or damaged.
    """
    try:
        tensors, _ = read_safetensors_header(checkpoint / COMMON)
    except FileNotFoundError:
        raise make_damage_error(checkpoint, f"{COMMON} is missing") from None
    except ConfigError as error:
        raise make_damage_error(checkpoint, f"{COMMON}: {error}") from None
    prefix = f"buffer/{part}/"
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            dtype = "F32" if tensor.dtype in FLOATS and SIZES[tensor.dtype] < 4 else tensor.dtype
            yield Entry(name.removeprefix(prefix), tensor, dtype)
