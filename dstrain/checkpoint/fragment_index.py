"""Writes and reads index-PART.safetensors, which lists where every fragment of a part is stored, for a rank that reads
few of them.

    fragments    int64 (5, N): key, first element, number of elements, rank of the shard, byte in the shard; by key and
                 first element. A key is the first 8 bytes of blake2b of "kind/name".
    metadata     kinds, the shapes of the trained tensors, the number of shards, a hash of their hashes

The headers of all shards hold the same. Reading these takes 16 us a fragment, on every rank: 38 s for the 2.4 million
fragments of 1,000 ranks. This file is mapped, and a rank searches it for the fragments that it owns. It is valid only
for the very shards of which it was made: if another program has rewritten one, the headers are used.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dstrain.checkpoint.layout import Fragment, TensorLocator, make_shard_file_name
from dstrain.checkpoint.manifest import Digest
from dstrain.checkpoint.safetensors_io import SIZES, Span, read_safetensors_header, render_safetensors_header
from dstrain.distributed import group
from dstrain.recipe import ConfigError

_TENSOR = "fragments"


def make_index_file_name(part: str) -> str:
    return f"index-{part}.safetensors"


class Rows(NamedTuple):
    """The index rows of the shard that one rank has written of a part: its kinds, in the order of writing; the rows,
    int64 (N, 5), in which the rank is still 0; and the hash of the shard.
    """

    kinds: list[str]
    table: np.ndarray
    hash: str


def make_shard_index_rows(entries: Iterable[tuple[str, Fragment, Any]], size_and_hash: dict[str, Any]) -> Rows:
    """Returns the index rows of one shard, one for each fragment. Leaves out empty fragments.

    entries: the (kind, fragment, values) that `fragments.write_shard` has written to the shard
    size_and_hash: the {size, hash} that `write_shard` has returned
    """
    fragments = [(kind, fragment) for kind, fragment, *_ in entries if fragment.numel]
    place = size_and_hash["size"] - SIZES["F32"] * sum(fragment.numel for _, fragment in fragments)  # behind the header
    table = np.zeros((len(fragments), 5), np.int64)
    for row, (kind, fragment) in zip(table, fragments):
        row[:] = _hash_tensor_key(kind, fragment.name), fragment.start, fragment.numel, 0, place
        place += SIZES["F32"] * fragment.numel
    return Rows(list(dict.fromkeys(kind for kind, _ in fragments)), table, size_and_hash["hash"])


def write_index_files(
    folder: Path, own_rows: dict[str, Rows], find_shapes: Callable[[str], dict[str, tuple[int, ...]]]
) -> dict[str, dict[str, Any]]:
    """Writes the index file of each part, on rank 0, from the rows of all ranks. Returns {file name: {size, hash}} on
    rank 0, {} on the others. Call it on all ranks.

    own_rows: this rank's index rows, by part
    find_shapes: returns {name: shape} of the trained tensors of a part
    """
    gathered = group.gather_on_first_rank(own_rows)
    if gathered is None:
        return {}
    return {
        make_index_file_name(part): write_index_file(
            folder, part, [by_part[part] for by_part in gathered], find_shapes(part)
        )
        for part in own_rows
    }


def write_index_file(
    folder: Path, part: str, rows_by_rank: Sequence[Rows], shapes: dict[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Writes the index file of one part, and flushes it to the disk. Returns its {size, hash} for a manifest.

    rows_by_rank: the index rows of each rank's shard
    shapes: {name: shape} of the part's trained tensors
    """
    table = np.concatenate([own.table for own in rows_by_rank])
    table[:, 3] = np.repeat(np.arange(len(rows_by_rank)), [len(own.table) for own in rows_by_rank])
    table = np.ascontiguousarray(table[np.lexsort((table[:, 1], table[:, 0]))].T)  # (5, N)
    path = folder / make_index_file_name(part)
    kinds = list(dict.fromkeys(kind for own in rows_by_rank for kind in own.kinds))
    header = render_safetensors_header(
        path,
        [(_TENSOR, "I64", table.shape)],
        {
            "kinds": json.dumps(kinds),
            "shapes": json.dumps({name: list(shape) for name, shape in shapes.items()}),
            "shards": str(len(rows_by_rank)),
            "seal": _hash_hashes_of_shards(own.hash for own in rows_by_rank),
        },
    )
    digest = Digest()
    with open(path, "wb") as file:
        for data in (memoryview(header), table.astype("<i8", copy=False).reshape(-1).data.cast("B")):
            file.write(data)
            digest.update(data)
        file.flush()
        os.fsync(file.fileno())
    return digest.make_manifest_entry()


class FragmentIndex(TensorLocator):
    """Finds the fragments of a part in its index file, which is mapped into memory. Raises ConfigError if the file is
    no such index, FileNotFoundError if there is none.
    """

    def __init__(self, folder: Path, part: str) -> None:
        super().__init__(folder, part)
        path, self.dtype = folder / make_index_file_name(part), "F32"
        try:
            tensors, metadata = read_safetensors_header(path)
            self._kinds = list(json.loads(metadata["kinds"]))
            self._shapes = {name: tuple(shape) for name, shape in json.loads(metadata["shapes"]).items()}
            self._shards, self._sealed, stored = int(metadata["shards"]), metadata["seal"], tensors[_TENSOR]
            if stored.dtype != "I64" or len(stored.shape) != 2 or stored.shape[0] != 5:
                raise ConfigError(f"{_TENSOR} is {stored.dtype} {list(stored.shape)}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} is no index of fragments: {error}") from None
        span = stored.spans[0]
        self._table = (
            np.memmap(path, "<i8", "r", span.offset, stored.shape) if span.nbytes else np.empty(stored.shape, np.int64)
        )

    def matches_shards(self, files: dict[str, dict[str, Any]]) -> bool:
        """Returns whether this index was made of the shards in a manifest: whether the manifest lists shards of the
        same names and hashes. files: the manifest's {name: {size, hash}}.
        """
        names = [
            make_shard_file_name(self.part, rank, self._shards) for rank in range(min(self._shards, len(files) + 1))
        ]
        return (
            all(name in files for name in names)
            and _hash_hashes_of_shards(files[name]["hash"] for name in names) == self._sealed
        )

    def list_value_kinds(self) -> list[str]:
        return self._kinds

    def list_tensor_names(self, kind: str) -> list[str]:
        """Returns the names of the trained tensors that are stored as this kind (such as "master"), in the network's
        order.
        """
        return [name for name in self._shapes if self.has_tensor(kind, name)]

    def has_tensor(self, kind: str, name: str) -> bool:
        first, last = self._find_column_range_of_tensor(kind, name)
        return first < last

    def _find_tensor_shape_by_kind(self, kind: str, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor. For a tensor whose shape is not in the index, such as an optimizer's 8-bit
        codes, returns (number of elements,).
        """
        if name in self._shapes:
            return self._shapes[name]
        last = self._find_column_range_of_tensor(kind, name)[1] - 1  # of codes of 8 bits, which are flat
        return (int(self._table[1, last] + self._table[2, last]),)

    def _find_fragments(self, kind: str, name: str, start: int, end: int) -> list[tuple[int, Span]]:
        first, last = self._find_column_range_of_tensor(kind, name)
        starts = self._table[1, first:last]
        begin = max(int(np.searchsorted(starts, start, "right")) - 1, 0)
        stop = int(np.searchsorted(starts, end)) + 1  # one more, which ends a gap
        pieces = []
        for _, element, numel, rank, place in self._table[:, first + begin : min(first + stop, last)].T.tolist():
            if not 0 <= rank < self._shards or numel < 0 or place < 0:
                raise ConfigError(
                    f"{self.folder / make_index_file_name(self.part)} names elements beyond the shards: it is damaged"
                )
            path = self.folder / make_shard_file_name(self.part, rank, self._shards)
            pieces.append((element, Span(path, place, SIZES[self.dtype] * numel)))
        return pieces

    def _find_column_range_of_tensor(self, kind: str, name: str) -> tuple[int, int]:
        """Returns (start, stop), the columns of the index's table that describe a tensor's fragments. start equals stop
        if the tensor has none.
        """
        keys, key = self._table[0], _hash_tensor_key(kind, name)
        return int(np.searchsorted(keys, key)), int(np.searchsorted(keys, key, "right"))


def _hash_hashes_of_shards(hashes: Iterable[str]) -> str:
    """Returns one hash of the hashes of all shards, in the order of ranks."""
    return hashlib.blake2b("".join(hashes).encode(), digest_size=16).hexdigest()


def _hash_tensor_key(kind: str, name: str) -> int:
    """Returns the number, int64, under which the index lists a tensor: a hash of "kind/name"."""
    return int.from_bytes(hashlib.blake2b(f"{kind}/{name}".encode(), digest_size=8).digest(), "little", signed=True)
