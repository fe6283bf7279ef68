"""Named fragments: a checkpoint's values, independent of how many ranks there were.

A *fragment* is a contiguous run of a flattened named tensor. Every rank writes the fragments that it owns into one file
of its own, a shard; layout.py has the layout. A reader asks for any run of elements and gets it from whichever
shards overlap it, so that every partition loads into every other.

The files are plain safetensors (github.com/huggingface/safetensors: 8 bytes length, JSON header, data) and open in its
library. We write and read them ourselves, because its writer wants all tensors on the host at once, and its reader maps
whole files, whose pages count against a container's memory.

A StoredWeight stays in its file until somebody needs its values, and is then read by slices.
"""

import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dstrain.checkpoint.fragment_index import FragmentIndex, make_index_file_name
from dstrain.checkpoint.layout import SHARD, Fragment, Index, TensorLocator, make_shard_file_name
from dstrain.checkpoint.manifest import THREADS, Digest, read_manifest
from dstrain.checkpoint.safetensors_io import SIZES, Files, render_safetensors_header
from dstrain.distributed.progress import get_phases
from dstrain.recipe import ConfigError

_CHUNK_ELEMENTS = 1 << 24  # elements that are on the host at a time: 64 MB


def write_shard(
    path: str | os.PathLike,
    entries: Iterable[tuple[str, Fragment, Tensor]],
    metadata: dict[str, str] | None = None,
    dtype: str = "F32",
) -> dict[str, Any]:
    """Writes one rank's fragments to a safetensors file, and flushes it to the disk. Leaves out empty fragments.
    Returns the file's {size, hash} for a manifest.

    entries: (kind, fragment, values); a tensor may come in several fragments
        kind: what the values are, such as "master"
        values: float32 or of 16 bits, (fragment.numel,), on any device
    dtype: F32, or BF16, to which values are rounded

    Raises ConfigError for values of another shape or type, a "/" in a kind, or a "#" in a name.
    """
    keys: dict[str, tuple[Fragment, Tensor]] = {}
    for kind, fragment, values in entries:
        if "/" in kind or "#" in fragment.name:
            raise ConfigError(f"a kind has no '/', a name no '#': {kind!r}, {fragment.name!r}")
        if values.dtype not in (torch.float32, torch.bfloat16, torch.float16) or values.shape != (fragment.numel,):
            raise ConfigError(
                f"{kind}/{fragment.name}: expected float32 ({fragment.numel},), "
                f"got {values.dtype} {tuple(values.shape)}"
            )
        if fragment.numel:
            key, copies = f"{kind}/{fragment.name}", 0
            while key in keys:
                key, copies = f"{kind}/{fragment.name}#{copies + 1}", copies + 1
            keys[key] = fragment, values.detach()

    index = {key: [list(f.shape), f.start, f.numel] for key, (f, _) in keys.items()}
    header = render_safetensors_header(
        Path(path),
        ((key, dtype, [fragment.numel]) for key, (fragment, _) in keys.items()),
        {**(metadata or {}), "fragments": json.dumps(index, separators=(",", ":"))},
    )
    with open(path, "wb") as file, ThreadPoolExecutor(THREADS) as pool:
        digest = Digest(pool)

        def write_and_hash(data: memoryview) -> None:
            file.write(data)
            digest.update(data)

        write_and_hash(memoryview(header))
        for _, values in keys.values():
            for piece in values.split(_CHUNK_ELEMENTS):
                piece = piece.cpu().float() if dtype == "F32" else piece.to(torch.bfloat16).cpu().view(torch.int16)
                write_and_hash(memoryview(piece.contiguous().numpy()).cast("B"))
        file.flush()
        os.fsync(file.fileno())
        return digest.make_manifest_entry()


class _TensorReader(TensorLocator):
    """Reads the elements of tensors from their files. The end of its `with` block closes the files; a later read opens
    them again.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._files = Files()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.__exit__()

    def read(
        self, kind: str, name: str, start: int = 0, numel: int | None = None, shape: tuple[int, ...] | None = None
    ) -> Tensor:
        """Reads `numel` elements of a flattened tensor from element `start` on: float32 (numel,) on the host.

        kind    which value of the tensor: "master", a moment or an average
        numel   None: to the end
        shape   the shape that the caller expects of the whole tensor; None: any

        Raises ConfigError for an unknown name, another shape, or elements that no shard holds.
        """
        if shape is not None and tuple(shape) != self.find_tensor_shape(name):
            raise ConfigError(
                f"{self.part}: {name} has shape {tuple(shape)}, "
                f"the checkpoint {self.folder} holds {self.find_tensor_shape(name)}"
            )
        spans = self.find_byte_spans(kind, name, start, None if numel is None else start + numel)
        counts = [span.nbytes // SIZES[self.dtype] for span in spans]
        values = torch.empty(sum(counts), dtype=torch.float32 if self.dtype == "F32" else torch.int16)
        for span, piece in zip(spans, values.split(counts)):
            self._files.read_span(span, memoryview(piece.numpy()).cast("B"))
            get_phases().record_progress()
        return values if self.dtype == "F32" else values.view(torch.bfloat16).float()


class Shards(_TensorReader, Index):
    """Reads the tensors of one part from all its shards in a folder; finds them by the headers of the shards.

    Raises ConfigError if a shard is missing or has a bad header, or one tensor has two shapes.
    """

    def __init__(self, folder: str | os.PathLike, part: str) -> None:
        super().__init__(Path(folder), part, _list_shard_names(Path(folder), part))


class IndexedShards(_TensorReader, FragmentIndex):
    """Reads as Shards does, but finds the tensors in the index file of the part, and reads no headers."""


def open_shards(folder: Path, part: str) -> Shards | IndexedShards:
    """Opens the shards of a part (a network) in a checkpoint folder for reading. A shard is the file that one rank has
    written. If the part's index file was made of these shards, finds tensors by this file. Otherwise reads the headers
    of all shards, and raises ConfigError if one is missing or malformed.
    """
    if (folder / make_index_file_name(part)).is_file():  # earlier versions wrote none
        indexed = IndexedShards(folder, part)
        if indexed.matches_shards(read_manifest(folder)["files"]):
            return indexed
    return Shards(folder, part)


def _list_shard_names(folder: Path, part: str) -> list[str]:
    """Returns the file names of a part's shards, in the order of ranks. Raises ConfigError if the shard of a rank is
    missing, or if there are shards of several world sizes.
    """
    names = {
        (int(match[2]), int(match[3])): path.name
        for path in folder.glob("*.safetensors")
        if (match := SHARD.fullmatch(path.name)) and match[1] == part
    }
    if not names:
        raise ConfigError(f"no file {part}-*-of-*.safetensors in {folder}")
    worlds = {world for _, world in names}
    if len(worlds) > 1:
        raise ConfigError(f"{folder} holds shards of {part} of several world sizes: {sorted(worlds)}")
    world = worlds.pop()
    missing = [make_shard_file_name(part, rank, world) for rank in range(world) if (rank, world) not in names]
    if missing or len(names) != world:
        raise ConfigError(f"{folder} lacks {', '.join(missing[:5])} ({len(names)} of {world} shards)")
    return [names[rank, world] for rank in range(world)]


class StoredWeight(torch.Tensor):
    """A float32 tensor in the shards of a checkpoint: its shape is known, and every operation reads its values anew.

    So a network may be fitted to a file of any size, and `read_slice` gives each rank what it owns. It cannot be
    written.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, shards: Shards | IndexedShards, kind: str, name: str) -> Self:
        return torch.Tensor._make_wrapper_subclass(cls, shards.find_tensor_shape(name), dtype=torch.float32)

    def __init__(self, shards: Shards | IndexedShards, kind: str, name: str) -> None:
        self._shards, self._place = shards, (kind, name)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StoredWeight({'/'.join(self._place)}, {tuple(self.shape)})"

    def read_slice(self, start: int = 0, numel: int | None = None) -> Tensor:
        """Reads `numel` elements of the flattened tensor from element `start` on, or all to its end if `numel` is None:
        float32 (numel,) on the host. Closes the files afterwards.
        """
        with self._shards:
            return self._shards.read(*self._place, start, numel)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if op._schema.is_mutable and isinstance(args[0], cls):
            raise TypeError(f"{op} writes into a weight of a checkpoint: write into a clone of it")
        args, kwargs = tree_map(
            lambda value: value.read_slice().view(value.shape) if isinstance(value, cls) else value,
            (args, kwargs or {}),
        )
        return op(*args, **kwargs)


def read_flattened_slice(value: Tensor, start: int, numel: int) -> Tensor:
    """Returns `numel` elements of the flattened tensor `value` from element `start` on. If `value` is a StoredWeight,
    reads only these elements from its files.
    """
    return (
        value.read_slice(start, numel) if isinstance(value, StoredWeight) else value.reshape(-1)[start : start + numel]
    )


def make_lazily_read_weights(shards: Shards | IndexedShards, kind: str) -> dict[str, Tensor]:
    """Returns {state-dict name: StoredWeight} of all weights: their values of one kind, such as "master" or an average.
    A frozen weight has no averages: its values are always the masters. A StoredWeight is a tensor whose values are read
    when they are needed.
    """
    return {name: StoredWeight(shards, found, name) for name, found in shards.choose_kind_of_each_tensor(kind).items()}
