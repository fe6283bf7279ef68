"""Tensors as runs of bytes in files, and safetensors files made of them without holding one of them.

A *span* is a run of bytes in a file; a stored tensor is its spans, in the order of its elements. The header of the
file to be written follows from names, types and shapes alone, so it comes first, and the bytes go through one buffer.

Nothing here imports torch, whose import takes more time and memory than the rest of a consolidation; numpy is
imported only to change a type. Types have the names of the safetensors format (github.com/huggingface/safetensors).
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from dstrain.engine.manifest import Digest
from dstrain.recipe import ConfigError

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
         "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}                       # bytes an element
FLOATS = ("F64", "F32", "F16", "BF16")
_CHUNK = 1 << 18            # bytes on the host at a time: they fit into the cache of a core
MAX_HEADER = 100_000_000   # bytes, the limit of the safetensors library


class Span(NamedTuple):
    """`nbytes` of a file from `offset` on."""

    path: Path
    offset: int
    nbytes: int


class Stored(NamedTuple):
    """A tensor where it lies. `strides`, in elements, only where they are not those of the shape; then one span.

    Span and Stored are tuples because torch_files makes them while unpickling, and a hostile pickle can alter the
    attributes of other objects.
    """

    dtype: str
    shape: tuple[int, ...]
    spans: tuple[Span, ...]
    strides: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: its name, where it lies, and the type that it is to have."""

    name: str
    source: Stored
    dtype: str

    @property
    def nbytes(self) -> int:
        return self.source.numel * SIZES[self.dtype]


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, str], int]:
    """(tensors, metadata, first byte of the data) of a safetensors file. ConfigError, without the path: it is none."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER:
                raise ConfigError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", {})
        for entry in header.values():
            first, last = entry["data_offsets"]
            if last - first != math.prod(entry["shape"]) * SIZES[entry["dtype"]]:
                raise ConfigError("offsets that do not fit a shape")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"no readable safetensors file ({error})") from None
    return header, metadata, 8 + length


def stored(path: Path, entry: dict[str, Any], data: int) -> Stored:
    """One entry of `read_header`."""
    first, last = entry["data_offsets"]
    return Stored(entry["dtype"], tuple(entry["shape"]), (Span(path, data + first, last - first),))


def split(entries: list[Entry], shard_size: int) -> list[list[Entry]]:
    """Entries in order, dealt out to files of at most `shard_size` bytes; a larger one has a file of its own."""
    files: list[list[Entry]] = [[]]
    room = shard_size
    for entry in entries:
        if entry.nbytes > room and files[-1]:
            files.append([])
            room = shard_size
        files[-1].append(entry)
        room -= entry.nbytes
    return files


def write_model(folder: Path, entries: list[Entry], shard_size: int, metadata: dict[str, str],
                progress: Callable[[int], Any]) -> dict[Path, dict[str, Any]]:
    """Hugging Face's layout: model.safetensors, or numbered files and their index, synced to the disk; size and hash
    of each, as manifest.hash_files has them.
    """
    files = split(entries, shard_size)
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    names = names if len(files) > 1 else ["model.safetensors"]
    folder.mkdir(parents=True, exist_ok=True)
    written = {folder / name: _write_file(folder / name, some, metadata, progress) for name, some in zip(names, files)}
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(entry.nbytes for entry in entries)},
                 "weight_map": {entry.name: name for name, some in zip(names, files) for entry in some}}
        path, text = folder / "model.safetensors.index.json", (json.dumps(index, indent=2) + "\n").encode()
        path.write_bytes(text)
        digest = Digest()
        digest.update(memoryview(text))
        written[path] = digest.entry()
    return written


def _write_file(path: Path, entries: list[Entry], metadata: dict[str, str],
                progress: Callable[[int], Any]) -> dict[str, Any]:
    # Readers want elements at multiples of their size.
    entries = sorted(entries, key=lambda entry: -SIZES[entry.dtype])
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for entry in entries:
        end = offset + entry.nbytes
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.source.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise ConfigError(f"{path.name}: a header of {len(text)} bytes, readers take {MAX_HEADER}: give a smaller "
                          "--shard-size")
    with open(path, "wb", buffering=0) as out, _Files() as files:
        digest, head = Digest(), memoryview(len(text).to_bytes(8, "little") + text)
        digest.update(head)
        _put(out, head)
        for entry in entries:
            for piece in _converted(entry, files):
                digest.update(piece)
                _put(out, piece)
                progress(len(piece))
        os.fsync(out.fileno())
    return digest.entry()


def _put(file: BinaryIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data):]


class _Files:
    """Reads spans through one buffer; the last file stays open, since spans of one file follow each other."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(_CHUNK))
        self._path: Path | None = None
        self._file: BinaryIO | None = None

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()

    def pieces(self, span: Span, into: memoryview | None = None) -> Iterator[memoryview]:
        """The bytes of a span, at most a buffer full at a time, each valid until the next; in `into` all at once."""
        if span.path != self._path:
            self.__exit__()
            self._path, self._file = span.path, open(span.path, "rb", buffering=0)
        assert self._file
        self._file.seek(span.offset)
        buffer, left = self._buffer if into is None else into, span.nbytes
        while left:
            piece = buffer[:min(left, len(buffer))]
            done = 0
            while done < len(piece):                                     # one read gives at most 2 GB
                count = self._file.readinto(piece[done:])
                if not count:
                    raise ConfigError(f"{span.path} ends early: it is truncated")
                done += count
            left -= len(piece)
            yield piece


def _converted(entry: Entry, files: _Files) -> Iterator[memoryview]:
    """The bytes of a tensor in row-major order and in the type asked for."""
    source = entry.source
    for span in source.spans:
        if source.strides is None:
            pieces = files.pieces(span)
        else:
            pieces = iter([_gathered(source, b"".join(map(bytes, files.pieces(span))))])
        for piece in pieces:
            yield piece if source.dtype == entry.dtype else _cast(piece, source.dtype, entry)


def _gathered(source: Stored, raw: bytes) -> memoryview:
    import numpy as np
    size = SIZES[source.dtype]
    assert source.strides is not None
    reach = 1 + sum((n - 1) * step for n, step in zip(source.shape, source.strides))
    assert min(source.strides) >= 0 and reach * size <= len(raw)         # checked where it was read
    flat = np.frombuffer(raw, f"<u{size}")
    view = np.lib.stride_tricks.as_strided(flat, source.shape, [size * step for step in source.strides])
    return memoryview(np.ascontiguousarray(view)).cast("B")


def _cast(raw: memoryview, dtype: str, entry: Entry) -> memoryview:
    """Floating bytes of one type as another, rounded to nearest even as torch does."""
    import numpy as np
    if dtype == "BF16":
        values = (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    else:
        values = np.frombuffer(raw, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype])
    with np.errstate(over="ignore", invalid="ignore"):
        if entry.dtype != "BF16":
            cast = values.astype({"F64": "<f8", "F32": "<f4", "F16": "<f2"}[entry.dtype])
            if np.isinf(cast).any() and not np.isinf(values).any():
                raise ConfigError(f"{entry.name} holds values beyond {entry.dtype}: take --dtype bfloat16 or float32")
        else:
            bits = values.astype("<f4").view("<u4")
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            cast = np.where(np.isnan(values), 0x7FC0, rounded).astype("<u2")
    return memoryview(cast).cast("B")
