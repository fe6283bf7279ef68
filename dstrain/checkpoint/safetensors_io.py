"""Finds tensors as spans of bytes in files, and writes them as safetensors files without loading a whole tensor.

A *span* is a range of bytes in a file; a stored tensor is its spans, in the order of its elements. The header of the
file to be written depends on names, dtypes and shapes alone, so it is written first, and the bytes go through one
buffer.

This module does not import torch, whose import takes more time and memory than the rest of a consolidation; it imports
numpy only to change a dtype. Dtypes have the names of the safetensors format (github.com/huggingface/safetensors).
"""

import json
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from dstrain.checkpoint.manifest import Digest, hash_files
from dstrain.recipe import ConfigError

SIZES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}  # bytes an element
FLOATS = ("F64", "F32", "F16", "BF16")
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
CHUNK = 1 << 18  # bytes, or elements, on the host at a time: they fit into the cache of a core
_MAX_HEADER = 100_000_000  # the limit of the safetensors library
_OPEN_FILES = 64  # a thousand would meet the limit on descriptors


class Span(NamedTuple):
    """The `nbytes` bytes of a file from `offset` on."""

    path: Path
    offset: int
    nbytes: int


class Stored(NamedTuple):
    """A tensor in files: its dtype, shape, and the spans of its bytes. `strides`, in elements, is None if the tensor is
    row-major; a tensor with strides has one span.

    Span and Stored are tuples because torch_files makes them while unpickling, and a pickle can alter other objects.
    """

    dtype: str
    shape: tuple[int, ...]
    spans: tuple[Span, ...]
    strides: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Entry(NamedTuple):
    """A tensor to be written: its name, its position in files, and the dtype in which it is written."""

    name: str
    source: Stored
    dtype: str

    @property
    def nbytes(self) -> int:
        return self.source.numel * SIZES[self.dtype]


def read_safetensors_header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Returns {name: location and shape} of the tensors of a safetensors file, and the file's metadata. Reads no
    values. Raises ConfigError if it is no safetensors file or is truncated; the message does not name the file.
    """
    tensors = {}
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_HEADER:
                raise ConfigError(f"a header of {length} bytes")
            header, room = json.loads(file.read(length)), os.fstat(file.fileno()).st_size - 8 - length
        metadata = header.pop("__metadata__", {})
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            if type(first) is not int or type(last) is not int or not 0 <= first <= last <= room:
                raise ConfigError("offsets outside of the file: it is truncated or altered")
            span = Span(path, 8 + length + first, last - first)
            tensors[name] = Stored(entry["dtype"], tuple(entry["shape"]), (span,))
            if span.nbytes != tensors[name].numel * SIZES[entry["dtype"]]:
                raise ConfigError("offsets that do not fit a shape")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"no readable safetensors file ({error})") from None
    return tensors, metadata


def render_safetensors_header(
    path: Path, tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: dict[str, str]
) -> bytes:
    """Returns the first bytes of a safetensors file: all that stands before the values. Raises ConfigError, which names
    `path`, if the header is longer than readers accept.

    tensors: (name, dtype, shape) of each tensor, in the order in which their values follow
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER:
        raise ConfigError(
            f"{path}: a header of {len(text)} bytes, readers take {_MAX_HEADER}: one file for so many "
            "tensors is too few (dstrain consolidate makes more with a smaller --shard-size)"
        )
    return len(text).to_bytes(8, "little") + text


def split_entries_into_files(entries: list[Entry], shard_size: int) -> list[list[Entry]]:
    """Divides `entries`, in order, into lists of at most `shard_size` bytes, each for one file. A larger entry gets a
    list of its own.
    """
    files: list[list[Entry]] = [[]]
    room = shard_size
    for entry in entries:
        if entry.nbytes > room and files[-1]:
            files.append([])
            room = shard_size
        files[-1].append(entry)
        room -= entry.nbytes
    return files


def write_huggingface_model(
    folder: Path, entries: list[Entry], shard_size: int, metadata: dict[str, str], progress: Callable[[int], Any]
) -> dict[Path, dict[str, Any]]:
    """Writes tensors in Hugging Face's layout, and flushes them to the disk: model.safetensors, or several numbered
    files of at most `shard_size` bytes and an index. Returns {path: {size, hash}} of the files.

    progress: is called after each write, with its number of bytes
    """
    files = split_entries_into_files(entries, shard_size)
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    by_name = dict(zip(names, files)) if len(files) > 1 else {"model.safetensors": entries}
    folder.mkdir(parents=True, exist_ok=True)
    written = {
        folder / name: _write_safetensors_file(folder / name, content, metadata, progress)
        for name, content in by_name.items()
    }
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(entry.nbytes for entry in entries)},
            "weight_map": {entry.name: name for name, content in by_name.items() for entry in content},
        }
        path = folder / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        written[path] = hash_files(folder, [path.name], sync=True)[path.name]
    return written


def _write_safetensors_file(
    path: Path, entries: list[Entry], metadata: dict[str, str], progress: Callable[[int], Any]
) -> dict[str, Any]:
    """Writes one safetensors file, and flushes it to the disk. Returns its {size, hash}. Sorts tensors by the size of
    their elements, largest first.

    progress: is called after each write, with its number of bytes
    """
    # Readers want elements at multiples of their size.
    entries = sorted(entries, key=lambda entry: -SIZES[entry.dtype])
    header = render_safetensors_header(
        path, ((entry.name, entry.dtype, entry.source.shape) for entry in entries), {"format": "pt", **metadata}
    )
    digest, buffer = Digest(), memoryview(bytearray(CHUNK))
    with open(path, "wb", buffering=0) as out, Files() as files:
        digest.update(memoryview(header))
        _write_all_bytes(out, memoryview(header))
        for entry in entries:
            for piece in iterate_converted_bytes(entry, files, buffer):
                digest.update(piece)
                _write_all_bytes(out, piece)
                progress(len(piece))
        os.fsync(out.fileno())
    return digest.make_manifest_entry()


def _write_all_bytes(file: BinaryIO, data: memoryview) -> None:
    """Writes all of `data` to an unbuffered file, one call of which may write only a part."""
    while data:
        data = data[file.write(data) :]


class Files:
    """Reads spans of files. Keeps the 64 files that were read last open, since one tensor's spans may be in many files;
    closes them at the end of its block.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[Path, FileIO] = OrderedDict()

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def read_span(self, span: Span, buffer: memoryview) -> None:
        """Fills `buffer` with the bytes of a span; both have the same length. Raises ConfigError if the file is too
        short.
        """
        if span.path not in self._open:
            if len(self._open) >= _OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            self._open[span.path] = FileIO(span.path)  # without a buffer
        self._open.move_to_end(span.path)
        file = self._open[span.path]
        file.seek(span.offset)
        while buffer:  # one read gives at most 2 GB
            count = file.readinto(buffer)
            if not count:
                raise ConfigError(f"{span.path} ends early: it is truncated")
            buffer = buffer[count:]


def iterate_converted_bytes(entry: Entry, files: Files, chunk: memoryview) -> Iterator[memoryview]:
    """Yields the values of a tensor as bytes, row-major and in the dtype of `entry`, in pieces. A tensor that is not
    row-major in its file comes in one piece. Raises ConfigError if a value is too large for the dtype.

    chunk: a buffer into which one piece at a time is read; so a piece is valid only until the next one is asked for
    """
    source = entry.source
    for span in source.spans:
        buffer = chunk if source.strides is None else memoryview(bytearray(span.nbytes))
        for start in range(0, span.nbytes, len(buffer)):
            piece = buffer[: span.nbytes - start]
            files.read_span(Span(span.path, span.offset + start, len(piece)), piece)
            if source.strides is not None:
                piece = _reorder_to_row_major(source, piece)
            yield piece if source.dtype == entry.dtype else _cast_floats(piece, source.dtype, entry)


def _reorder_to_row_major(source: Stored, raw: memoryview) -> memoryview:
    """Returns the values of a tensor that has strides, as bytes in row-major order. raw: the bytes of its storage."""
    import numpy as np

    size = SIZES[source.dtype]
    assert source.strides is not None
    reach = 1 + sum((n - 1) * step for n, step in zip(source.shape, source.strides))
    assert min(source.strides) >= 0 and reach * size <= len(raw)  # checked where it was read
    flat = np.frombuffer(raw, f"<u{size}")
    view = np.lib.stride_tricks.as_strided(flat, source.shape, [size * step for step in source.strides])
    return np.ascontiguousarray(view).data.cast("B")


def decode_floats(raw: memoryview, dtype: str) -> Any:
    """Returns bytes as a 1-D numpy array of the floating-point `dtype`, such as "F16". For "BF16", which numpy lacks,
    returns float32.
    """
    import numpy as np

    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(raw, _NUMPY[dtype])


def _cast_floats(raw: memoryview, dtype: str, entry: Entry) -> memoryview:
    """Returns floating-point values of `dtype` as bytes of the entry's dtype, rounded to nearest even as torch does.
    Raises ConfigError if a finite value would become infinite in a dtype other than BF16.
    """
    import numpy as np

    values = decode_floats(raw, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        if entry.dtype != "BF16":
            cast = values.astype(_NUMPY[entry.dtype])
            if np.isinf(cast).any() and not np.isinf(values).any():
                raise ConfigError(f"{entry.name} holds values beyond {entry.dtype}: take --dtype bfloat16 or float32")
        else:
            bits = values.astype("<f4").view("<u4")
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            cast = np.where(np.isnan(values), 0x7FC0, rounded).astype("<u2")
    return memoryview(cast).cast("B")
