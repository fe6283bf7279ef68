"""Named fragments: what a weight is, never how many ranks there were.

A *fragment* is a contiguous run of a flattened named tensor. Every rank writes the fragments that
it owns into one file, `PART-RRRRR-of-WWWWW.safetensors`, as tensors named "kind/name" (kind:
master, exp_avg, exp_avg_sq, ema.0.9999, ...); the entry "fragments" of the header's metadata maps
each of these keys to [shape, start, numel]. Reading copies the overlaps into whatever run is asked
for, so that any partition loads into any other.

The files are plain safetensors (github.com/huggingface/safetensors: 8 bytes length, JSON header,
data) and open in its library. We write and read them ourselves, because its writer wants all
tensors on the host at once and its reader maps whole files, whose pages count against a
container's memory.
"""

import difflib
import json
import math
import os
import re
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from dstrain.engine.streams import MAX_HEADER, read_header
from dstrain.recipe import ConfigError

_CHUNK = 1 << 24            # elements that are on the host at a time: 64 MB
_OPEN_FILES = 64            # shards held open: a thousand would meet the limit on descriptors


@dataclass(frozen=True)
class Fragment:
    """Elements start .. start + numel of the flattened tensor `name` of `shape`."""

    name: str
    shape: tuple[int, ...]
    start: int
    numel: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.start + self.numel <= math.prod(self.shape):
            raise ConfigError(f"{self.name}: elements {self.start} .. {self.start + self.numel} are "
                              f"outside of shape {tuple(self.shape)}")


def shard_name(part: str, rank: int, world: int) -> str:
    return f"{part}-{rank:05d}-of-{world:05d}.safetensors"


def write_shard(path: str | os.PathLike, entries: Iterable[tuple[str, Fragment, Tensor]],
                metadata: dict[str, str] | None = None) -> int:
    """Writes (kind, fragment, values) to one file, synced to the disk; returns its size in bytes.

    Values are 1-D float32 of fragment.numel elements, on any device; they reach the host 64 MB at a
    time, so give views. One tensor may come in several fragments; empty ones are left out.
    ConfigError: values that do not fit their fragment.
    """
    keys: dict[str, tuple[Fragment, Tensor]] = {}
    for kind, fragment, values in entries:
        if "/" in kind or "#" in fragment.name:
            raise ConfigError(f"a kind has no '/', a name no '#': {kind!r}, {fragment.name!r}")
        if values.dtype != torch.float32 or values.shape != (fragment.numel,):
            raise ConfigError(f"{kind}/{fragment.name}: expected float32 ({fragment.numel},), "
                              f"got {values.dtype} {tuple(values.shape)}")
        if fragment.numel:
            key, copies = f"{kind}/{fragment.name}", 0
            while key in keys:
                key, copies = f"{kind}/{fragment.name}#{copies + 1}", copies + 1
            keys[key] = fragment, values.detach()

    index = {key: [list(f.shape), f.start, f.numel] for key, (f, _) in keys.items()}
    said = {**(metadata or {}), "fragments": json.dumps(index, separators=(",", ":"))}
    header: dict = {"__metadata__": said}
    offset = 0
    for key, (fragment, _) in keys.items():
        end = offset + 4 * fragment.numel
        header[key] = {"dtype": "F32", "shape": [fragment.numel], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise ConfigError(f"{path}: a header of {len(text)} bytes, the limit is {MAX_HEADER}")

    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, values in keys.values():
            for piece in values.split(_CHUNK):
                file.write(piece.cpu().contiguous().numpy().data)
        file.flush()
        os.fsync(file.fileno())
    return 8 + len(text) + offset


@dataclass(frozen=True)
class _Piece:
    """Where a fragment's bytes stand."""

    start: int
    end: int
    shard: int              # index into Shards.paths
    offset: int             # bytes from the start of the file


class Shards:
    """All shards of one part in a folder, as if they were whole tensors; reads what is asked for.

    ConfigError: no shard, one missing of their number, a bad header, one tensor in two shapes.
    """

    def __init__(self, folder: str | os.PathLike, part: str) -> None:
        self.folder, self.part = Path(folder), part
        self.metadata: dict[str, str] = {}                        # of the first shard
        self._pieces: dict[str, dict[str, list[_Piece]]] = {}     # kind -> name -> by start
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._files: OrderedDict[int, BinaryIO] = OrderedDict()
        self.paths = self._find()
        for shard in range(len(self.paths)):
            self._index(shard)
        for names in self._pieces.values():
            for pieces in names.values():
                pieces.sort(key=lambda piece: (piece.start, -piece.end))

    def kinds(self) -> list[str]:
        return list(self._pieces)

    def names(self, kind: str) -> list[str]:
        """Names of the tensors of a kind, in the order of saving; empty where there are none."""
        return list(self._pieces.get(kind, ()))

    def shape(self, name: str) -> tuple[int, ...]:
        self._known(name, self._shapes)
        return self._shapes[name]

    def read(self, kind: str, name: str, start: int = 0, numel: int | None = None,
             shape: tuple[int, ...] | None = None) -> Tensor:
        """Elements start .. start + numel of the flattened tensor: float32 (numel,) on the host.

        numel None: to the end. `shape`, where given, is that of the reader's tensor.
        ConfigError: unknown name, another shape, elements that no shard holds.
        """
        self._known(name, self._pieces.get(kind, ()), kind)
        saved = self._shapes[name]
        if shape is not None and tuple(shape) != saved:
            raise ConfigError(f"{self.part}: {name} has shape {tuple(shape)}, the checkpoint "
                              f"{self.folder} holds {saved}")
        end = math.prod(saved) if numel is None else start + numel
        if not 0 <= start <= end <= math.prod(saved):
            raise ConfigError(f"{self.part}: elements {start} .. {end} of {name} are outside of "
                              f"shape {saved}")
        values = torch.empty(end - start, dtype=torch.float32)
        done = start
        for piece in self._pieces[kind][name]:
            if done == end or piece.start > done:
                break
            upto = min(piece.end, end)
            if upto > done:
                self._copy(piece, done, values[done - start:upto - start])
                done = upto
        if done < end:
            following = [p.start for p in self._pieces[kind][name] if p.start > done]
            raise ConfigError(f"{self.part}: elements {done} .. {min([*following, end])} of "
                              f"{kind}/{name} {saved} are in no shard of {self.folder}")
        return values

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def __enter__(self) -> "Shards":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self) -> list[Path]:
        name = re.compile(re.escape(self.part) + r"-(\d{5,})-of-(\d{5,})\.safetensors")
        paths = self.folder.glob("*.safetensors")
        found = {tuple(map(int, match.groups())): path for path in paths
                 if (match := name.fullmatch(path.name))}
        if not found:
            raise ConfigError(f"no file {self.part}-*-of-*.safetensors in {self.folder}")
        worlds = {world for _, world in found}
        if len(worlds) > 1:
            raise ConfigError(f"{self.folder} holds shards of {self.part} of several world sizes: "
                              f"{sorted(worlds)}")
        world = worlds.pop()
        missing = [shard_name(self.part, r, world) for r in range(world) if (r, world) not in found]
        if missing or len(found) != world:
            raise ConfigError(f"{self.folder} lacks {', '.join(missing[:5])} "
                              f"({len(found)} of {world} shards)")
        return [found[rank, world] for rank in range(world)]

    def _index(self, shard: int) -> None:
        path = self.paths[shard]
        try:
            header, metadata, data = read_header(path)
            for key, (shape, start, numel) in json.loads(metadata.pop("fragments")).items():
                kind, name = key.split("/", 1)
                fragment = Fragment(name.partition("#")[0], tuple(shape), start, numel)
                entry = header[key]
                if entry["dtype"] != "F32" or entry["shape"] != [numel]:
                    kept = f"{entry['dtype']} {entry['shape']}"
                    raise ConfigError(f"{key} is {kept}, the index says F32 [{numel}]")
                self._add(kind, fragment, shard, data + entry["data_offsets"][0])
        except _ShapesDiffer:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is not a shard of named fragments: {error}") from None
        if shard == 0:
            self.metadata = metadata

    def _add(self, kind: str, fragment: Fragment, shard: int, offset: int) -> None:
        shape = self._shapes.setdefault(fragment.name, fragment.shape)
        if shape != fragment.shape:
            raise _ShapesDiffer(f"{self.part}: {fragment.name} has shape {shape} in one shard and "
                                f"{fragment.shape} in {self.paths[shard]}")
        pieces = self._pieces.setdefault(kind, {}).setdefault(fragment.name, [])
        end = fragment.start + fragment.numel
        pieces.append(_Piece(fragment.start, end, shard, offset))

    def _copy(self, piece: _Piece, start: int, into: Tensor) -> None:
        """Elements of the whole tensor from `start`, as many as `into` (n,) holds."""
        file = self._open(piece.shard)
        file.seek(piece.offset + 4 * (start - piece.start))
        left = memoryview(into.numpy()).cast("B")
        while left:                                          # one read gives at most 2 GB
            count = file.readinto(left)
            if not count:
                raise ConfigError(f"{self.paths[piece.shard]} ends early: it is truncated")
            left = left[count:]

    def _open(self, shard: int) -> BinaryIO:
        if shard not in self._files:
            if len(self._files) >= _OPEN_FILES:
                self._files.popitem(last=False)[1].close()
            self._files[shard] = open(self.paths[shard], "rb", buffering=0)
        self._files.move_to_end(shard)
        return self._files[shard]

    def _known(self, name: str, names: Iterable[str], kind: str = "tensor") -> None:
        if name not in names:
            near = difflib.get_close_matches(name, list(names), 1)
            nearest = f"; the nearest is {near[0]}" if near else ""
            raise ConfigError(f"{self.part}: the checkpoint {self.folder} holds no {kind} named "
                              f"{name}{nearest}")


class _ShapesDiffer(ConfigError):
    pass
