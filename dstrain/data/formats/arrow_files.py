"""Rows of tables on a disk, each read by itself: Arrow files mapped into memory, parquet files by their bytes.

Of an Arrow file (a stream, or a file with a footer) a row is found by the place of its record batch: nothing is held
that grows with the number of rows. In parquet a row has no place, but the value of a column that is neither compressed
nor coded has one: it stands there as its length and its bytes. `datasets` writes images so.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dstrain.data.files.local import Files
from dstrain.recipe import ConfigError, NotRead

_END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream
MAX_GROUP = 1 << 30  # bytes of a column in a row group, which a worker holds
_MAGIC = b"ARROW1\0\0"  # before the stream in a file with a footer
_BATCH = 256  # rows of a parquet file that are decoded at a time, at most
_LARGEST = 1 << 26  # bytes that these rows have, where each is the largest that there may be
_SEARCHED = 64  # bytes of a value that are searched for, before all of it is compared


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
