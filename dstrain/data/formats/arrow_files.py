"""Rows of tables on a disk, each read by itself: Arrow files mapped into memory, parquet files by their bytes.

Of an Arrow file (a stream, or a file with a footer) a row is found by the place of its record batch: nothing is held
that grows with the number of rows. In parquet a row has no place, but the value of a column that is neither compressed
nor coded has one: it stands there as its length and its bytes. `datasets` writes images so.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from dstrain.data.files.local import Files
from dstrain.data.formats.base import Request
from dstrain.recipe import ConfigError, NotRead

_END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream
MAX_GROUP = 1 << 30  # bytes of a column in a row group, which a worker holds
_MAGIC = b"ARROW1\0\0"  # before the stream in a file with a footer
_BATCH = 256  # rows of a parquet file that are decoded at a time, at most
_LARGEST = 1 << 26  # bytes that these rows have, where each is the largest that there may be
_SEARCHED = 64  # bytes of a value that are searched for, before all of it is compared
_IMAGES = ("image", "img", "jpg", "jpeg", "png", "webp", "image_bytes", "bytes", "content", "data")
_CLIPS = ("video", "mp4", "clip")
_LABELS = ("label", "labels", "class", "cls", "class_id", "fine_label")
_CAPTIONS = ("caption", "captions", "text", "texts", "prompt", "sentences")


class ArrowFile:
    """A mapped file, which messages call `where`. ConfigError: it is no Arrow file, or is cut off, or compressed."""

    def __init__(self, path: Path, where: str) -> None:
        self.where = where
        try:
            with pa.memory_map(str(path)) as file:
                self._bytes = file.read_buffer(file.size())  # a view: nothing is read
            self._start = len(_MAGIC) if self._bytes[:8].to_pybytes() == _MAGIC else 0
            self.schema = pa.ipc.read_schema(self._bytes.slice(self._start))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._broken(error) from None

    def batches(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The byte at which each record batch begins, and the batch."""
        at = self._start
        while True:
            if self._bytes[at : at + 8].to_pybytes() == _END:
                return
            try:
                message = pa.ipc.read_message(self._bytes.slice(at))
            except (pa.ArrowException, OSError, EOFError) as error:
                raise self._broken(error) from None
            size = 8 + len(message.metadata) + (message.body.size if message.body is not None else 0)
            if message.type == "record batch":
                yield at, self._batch(message)
            at += size

    def row(self, at: int, row: int, column: str) -> pa.Scalar:
        """A value of the record batch that begins at a byte."""
        batch = self._batch(pa.ipc.read_message(self._bytes.slice(at)))
        return value_at(batch.column(batch.schema.get_field_index(column)), row)

    def _batch(self, message: pa.Message) -> pa.RecordBatch:
        if _is_compressed(message.metadata):
            raise ConfigError(
                f"{self.where} is compressed inside, so that each sample would cost a whole batch: write "
                "it without compression, or as parquet"
            )
        try:
            return pa.ipc.read_record_batch(message, self.schema)
        except (pa.ArrowException, OSError) as error:
            raise self._broken(error) from None

    def _broken(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self.where} is no readable Arrow file ({' '.join(str(error).split())[:200]}): it is cut "
            "off or damaged; make it anew, or take it away"
        )


def value_at(column: pa.Array, row: int) -> pa.Scalar:
    """A value of a column; a damaged file may name bytes outside of it, so the place is checked first."""
    value = column.slice(row, 1)
    value.validate(full=True)
    return value[0]


def values_of(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """The rows of a batch as dictionaries; one without columns has rows, too."""
    for column in batch.columns:
        column.validate(full=True)
    return batch.to_pylist() if batch.num_columns else [{} for _ in range(batch.num_rows)]


def _is_compressed(metadata: pa.Buffer) -> bool:
    """Whether a record batch names a compression, the fourth field of its header (Arrow's Message.fbs)."""
    content = memoryview(metadata)

    def field(table: int, number: int) -> int | None:
        """Place of a field of a table of flatbuffers; None: it is left out."""
        vtable = table - struct.unpack_from("<i", content, table)[0]
        size = struct.unpack_from("<H", content, vtable)[0]
        offset = struct.unpack_from("<H", content, vtable + 4 + 2 * number)[0] if 4 + 2 * number < size else 0
        return table + offset if offset else None

    header = field(struct.unpack_from("<I", content, 0)[0], 2)
    return header is not None and field(header + struct.unpack_from("<I", content, header)[0], 3) is not None


class ParquetRows:
    """A parquet file, which messages call `where`.

    ConfigError: it is none, or is cut off or damaged, or has row groups beyond 1 GB.
    """

    def __init__(self, files: Files, name: str, where: str) -> None:
        self.files, self.name, self.where = files, name, where
        try:
            self._file = pq.ParquetFile(files.open(name))
        except (ConfigError, NotRead):  # of the store, not of the file
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._broken(error) from None
        self.schema, self._metadata = self._file.schema_arrow, self._file.metadata

    def __len__(self) -> int:
        return self._metadata.num_row_groups

    def rows(self, group: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Some columns of a row group, some rows at a time; a dictionary may make a row as large as its column."""
        size = sum(chunk.total_uncompressed_size for chunk in self._chunks(group, columns))
        batch = max(1, min(_BATCH, _LARGEST // max(size, 1)))
        try:
            yield from self._file.iter_batches(batch, row_groups=[group], columns=columns, use_threads=False)
        except NotRead:
            raise
        except (pa.ArrowException, OSError) as error:
            raise self._broken(error) from None

    def plain(self, group: int, column: str) -> "PlainChunk | None":
        """The bytes of a column in a row group, if they are stored as they are."""
        for chunk in self._chunks(group, [column]):
            if chunk.physical_type != "BYTE_ARRAY":
                continue
            if max(chunk.total_uncompressed_size, chunk.total_compressed_size) > MAX_GROUP:
                raise ConfigError(
                    f"{self.where} has row groups of {chunk.total_uncompressed_size / 1e9:.2g} GB, of "
                    "which each worker would hold one: write it anew with row groups of some 100 rows"
                )
            if chunk.compression != "UNCOMPRESSED" or chunk.path_in_schema not in (column, f"{column}.bytes"):
                return None
            start = chunk.dictionary_page_offset or chunk.data_page_offset
            return PlainChunk(start, self.files.span(self.name, start, chunk.total_compressed_size))
        return None

    def stored(self, column: str) -> tuple[int, bool]:
        """Bytes of a column in the first row group, decoded, and whether its values stand there as they are."""
        own = [chunk for chunk in self._chunks(0, [column]) if chunk.path_in_schema in (column, f"{column}.bytes")]
        return sum(chunk.total_uncompressed_size for chunk in own), all(c.compression == "UNCOMPRESSED" for c in own)

    def _chunks(self, group: int, columns: list[str]) -> list[pq.ColumnChunkMetaData]:
        """What the footer says of some columns of a row group; of a struct there is one for each of its members."""
        row_group = self._metadata.row_group(group) if group < len(self) else None
        chunks = [row_group.column(number) for number in range(row_group.num_columns)] if row_group else []
        return [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns]

    def _broken(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self.where} is no readable parquet file ({' '.join(str(error).split())[:200]}): it is "
            "cut off or damaged; make it anew, or take it away"
        )


class PlainChunk:
    """Bytes of a column that hold its values, one after the other, each behind its length."""

    def __init__(self, start: int, content: bytes) -> None:
        self._start, self._content, self._at = start, content, 0

    def place(self, value: bytes) -> int | None:
        """The byte of the file at which the next value begins; None: it is not there as it is."""
        stored = struct.pack("<I", len(value)) + value
        for at in (self._at, *(self._content.find(stored[:_SEARCHED], start) for start in (self._at, 0))):
            if at >= 0 and self._content.startswith(stored, at):  # the next one, or behind the head of a page
                self._at = at + len(stored)
                return self._start + at + 4
        return None


class Columns(NamedTuple):
    image: str
    label: str | None
    captions: tuple[str, ...]
    classes: tuple[str, ...]  # names of a ClassLabel; (): there are none


def columns_of(schema: pa.Schema, request: Request, root: str) -> Columns:
    """Which columns are read. ConfigError: there are none for what is wanted, or several, or one
    that is named is not.
    """
    where = f"{request.key}={root}"
    chosen = {key: [names] if isinstance(names, str) else names for key, names in request.columns.items()}
    for key in ("image", "label"):
        if len(chosen.get(key, ())) > 1:
            raise ConfigError(f"data.columns={{{key}: {', '.join(chosen[key])}}}: a sample has one {key}, so name one")
    if unknown := [f"{key}: {name}" for key, names in chosen.items() for name in names if name not in schema.names]:
        raise ConfigError(
            f"{where} has no column {', '.join(unknown)} of data.columns; it has {', '.join(schema.names)}"
        )
    images = image_columns(schema, request)
    if len(images) != 1:
        raise ConfigError(
            f"{where} has {'several columns' if images else 'no column'} of images"
            f"{' (' + ', '.join(images) + ')' if images else ''} among {', '.join(schema.names)}: name "
            "one, data.columns={image: NAME}"
        )
    features = _features(schema)
    of_classes = [
        name for name, feature in features.items() if feature.get("_type") == "ClassLabel" and name in schema.names
    ]
    label = next((name for name in (*chosen.get("label", ()), *_LABELS) if name in schema.names), None)
    label = label or (of_classes[0] if len(of_classes) == 1 else None)
    if request.labels == "none" or (label is not None and not _is_label(schema.field(label).type)):
        nested = label is not None and pa.types.is_nested(schema.field(label).type)  # boxes, say, and not classes
        if request.labels != "none" and ("label" in chosen or not nested):
            raise ConfigError(
                f"{where}: the column {label} holds {schema.field(label).type}, and labels are whole "
                "numbers or names: name another, data.columns={label: NAME}, or write data.labels=none"
            )
        label = None
    names = features.get(label, {}).get("names") if label else None
    classes = tuple(map(str, names)) if isinstance(names, list) else ()
    captions = (
        tuple(chosen.get("caption", ()))
        or tuple(name for name in _CAPTIONS if name in schema.names and _is_text(schema.field(name).type))[:1]
    )
    return Columns(images[0], label, captions if request.captions else (), classes)


def image_columns(schema: pa.Schema, request: Request) -> list[str]:
    """The columns that may be meant: one, if all is well."""
    if chosen := request.columns.get("image"):
        return [name for name in ([chosen] if isinstance(chosen, str) else chosen) if name in schema.names]
    fitting = [field.name for field in schema if _holds_bytes(field.type)]
    of_clips = request.noun == "clips"
    named = [name for name in (*_CLIPS * of_clips, *_IMAGES) if name in fitting]
    kind = "Video" if of_clips else "Image"
    marked = [name for name, feature in _features(schema).items() if feature.get("_type") == kind and name in fitting]
    return marked or named[:1] or [name for name in fitting if pa.types.is_struct(schema.field(name).type)]


def holds_bytes(schema: pa.Schema) -> bool:
    """Whether a column holds bytes, which may be images under another name."""
    return any(_holds_bytes(field.type) for field in schema)


def _holds_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and _holds_bytes(kind.field("bytes").type)
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _is_label(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):  # pandas' categories
        kind = kind.value_type
    return any(
        fits(kind) for fits in (pa.types.is_integer, pa.types.is_boolean, pa.types.is_string, pa.types.is_large_string)
    )


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _features(schema: pa.Schema) -> dict[str, dict[str, Any]]:
    """The types that `datasets` has written beside the schema: {} where it has not."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
