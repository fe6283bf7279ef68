"""Rows of Arrow files and of parquet files, each read by itself.

A row of an Arrow file (a stream, or a file with a footer) is found by the byte of its record batch in the mapped file:
nothing is held that grows with the number of rows. A row of a parquet file has no byte of its own, but the value of a
column that is neither compressed nor coded has one: it stands there as its length and its bytes. `datasets` writes
images so. The import of pyarrow takes half a second, so this module is imported where such a file is opened.
"""

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dstrain.data.files.local import Files
from dstrain.recipe import ConfigError, NotRead

MAX_GROUP = 1 << 30  # bytes of a column in a row group, which a worker holds
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream
_MAGIC = b"ARROW1\0\0"  # before the stream in a file with a footer
_BATCH = 256  # rows of a parquet file that are decoded at a time, at most
_BATCH_BYTES = 1 << 26  # bytes of these rows, where each is as large as the whole column
_BUFFER = 1 << 16  # bytes that are read at a time from a column of a parquet file
_LARGEST_FOOTER = 1 << 26  # bytes in which the end of another file before this one is looked for
_SEARCHED = 64  # bytes of a value that are searched for, before all of it is compared


class ArrowFile:
    """An Arrow file, mapped into memory; messages call it `where`.

    The constructor raises ConfigError if it is no Arrow file, and the methods if it is cut off or its record batches
    are compressed.
    """

    def __init__(self, path: Path, where: str) -> None:
        self.where = where
        with _convert_errors_to_config_error(where, "Arrow"):
            with pa.memory_map(str(path)) as file:
                self._bytes = file.read_buffer(file.size())  # This is a view: nothing is read.
            self._start = len(_MAGIC) if self._bytes[: len(_MAGIC)].to_pybytes() == _MAGIC else 0
            self.schema = pa.ipc.read_schema(self._bytes.slice(self._start))

    def iterate_batches(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yields (offset in bytes, record batch) for each record batch of the file. Raises ConfigError if the file is
        cut off, or if bytes follow its end, as when files were concatenated.
        """
        at = self._start
        while self._bytes[at : at + len(_END)].to_pybytes() != _END:
            with _convert_errors_to_config_error(self.where, "Arrow"):
                message = pa.ipc.read_message(self._bytes.slice(at))
            if message.type == "record batch":
                yield at, self._decode_batch(message)
            elif message.type == "schema" and at > self._start:
                break
            at += 8 + len(message.metadata) + (message.body.size if message.body is not None else 0)
        footer = self._bytes[-10:-6].to_pybytes() if self._start else b""  # its size stands before the last magic
        rest = int.from_bytes(footer, "little") + 10 if self._start else 0
        if at + len(_END) + rest != self._bytes.size:
            raise _make_concatenated_files_error(self.where, at)

    def read_batch_cell(self, batch_offset: int, row: int, column: str) -> Any:
        """Returns the value of a column in row `row` of the record batch that begins at byte `batch_offset` of the
        file.
        """
        batch = self._decode_batch(pa.ipc.read_message(self._bytes.slice(batch_offset)))
        return read_value(batch.column(batch.schema.get_field_index(column)), row)

    def _decode_batch(self, message: pa.Message) -> pa.RecordBatch:
        """Returns the record batch in an Arrow message. Raises ConfigError if the batch is compressed or damaged."""
        if _is_batch_compressed(message.metadata):
            raise ConfigError(
                f"{self.where} is compressed inside, so that each sample would cost a whole batch: write "
                "it without compression, or as parquet"
            )
        with _convert_errors_to_config_error(self.where, "Arrow"):
            return pa.ipc.read_record_batch(message, self.schema)


class ParquetFile:
    """A parquet file, which messages call `where`. Raises ConfigError if it is no parquet file, or is cut off or
    damaged.
    """

    def __init__(self, files: Files, name: str, where: str) -> None:
        self.files, self.name, self.where = files, name, where
        with _convert_errors_to_config_error(where, "parquet"):
            self._file = pq.ParquetFile(files.open(name), buffer_size=_BUFFER)
        self.schema, self._metadata = self._file.schema_arrow, self._file.metadata

    @property
    def num_row_groups(self) -> int:
        """Returns the number of row groups."""
        return self._metadata.num_row_groups

    def count_rows(self, row_groups: range) -> int:
        """Returns how many rows these row groups have together."""
        return sum(self._metadata.row_group(group).num_rows for group in row_groups)

    def count_uncompressed_bytes(self, row_group: int, columns: Sequence[str]) -> int:
        """Returns the uncompressed size of these columns in a row group, in bytes."""
        return sum(chunk.total_uncompressed_size for chunk in self._list_column_chunks(row_group, columns))

    def iterate_batches(self, row_group: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yields these columns of a row group in batches of at most 256 rows, or fewer if the columns are large."""
        rows = max(1, min(_BATCH, _BATCH_BYTES // max(self.count_uncompressed_bytes(row_group, columns), 1)))
        with _convert_errors_to_config_error(self.where, "parquet"):
            yield from self._file.iter_batches(rows, row_groups=[row_group], columns=list(columns), use_threads=False)

    def iterate_rows(self, row_group: int, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yields the rows of a row group as dictionaries {column: value}."""
        for batch in self.iterate_batches(row_group, columns):
            with _convert_errors_to_config_error(self.where, "parquet"):
                rows = list_rows(batch)
            yield from rows

    def read_chunk_if_uncompressed(self, row_group: int, column: str) -> "UncompressedChunk | None":
        """Returns the stored bytes of a column in row group `row_group`. The column must hold byte strings, or structs
        with a field "bytes", whose bytes are then returned.

        Returns None if the bytes are compressed, or if there is no such column. Raises ConfigError if the column has
        more than 1 GiB in this row group, compressed or not.
        """
        for chunk in self._list_column_chunks(row_group, [column]):
            if chunk.physical_type != "BYTE_ARRAY" or chunk.path_in_schema not in (column, f"{column}.bytes"):
                continue
            if max(chunk.total_uncompressed_size, chunk.total_compressed_size) > MAX_GROUP:
                raise ConfigError(
                    f"{self.where} has row groups of {chunk.total_uncompressed_size / 1e9:.2g} GB, of "
                    "which each worker would hold one: write it anew with row groups of some 100 rows"
                )
            if chunk.compression != "UNCOMPRESSED":
                return None
            start = chunk.dictionary_page_offset or chunk.data_page_offset
            return UncompressedChunk(start, self.files.read_span(self.name, start, chunk.total_compressed_size))
        return None

    def require_not_concatenated(self) -> None:
        """Raises ConfigError if this file consists of several concatenated parquet files, of which only the last would
        be read.
        """
        groups = (self._metadata.row_group(group) for group in range(self.num_row_groups))
        ends = [
            (chunk.dictionary_page_offset or chunk.data_page_offset) + chunk.total_compressed_size
            for group in groups
            for chunk in map(group.column, range(group.num_columns))
        ]
        end = max(ends, default=0)
        rest = self.files.read_stat(self.name).size - end - self._metadata.serialized_size - 8
        if b"PAR1PAR1" in self.files.read_span(self.name, end, min(rest, _LARGEST_FOOTER)):
            raise _make_concatenated_files_error(self.where, end)

    def is_column_compressed(self, column: str) -> bool:
        """Returns whether the values of a column are compressed in the first row group."""
        own = [
            chunk
            for chunk in self._list_column_chunks(0, [column])
            if chunk.path_in_schema in (column, f"{column}.bytes")
        ]
        return any(chunk.compression != "UNCOMPRESSED" for chunk in own)

    def _list_column_chunks(self, row_group: int, columns: Sequence[str]) -> list[pq.ColumnChunkMetaData]:
        """Returns the entries of the file's footer about these columns in a row group: one for each column, or, if a
        column holds structs, one for each of its fields. Returns [] if there is no such row group.
        """
        if row_group >= self.num_row_groups:
            return []
        metadata = self._metadata.row_group(row_group)
        chunks = [metadata.column(number) for number in range(metadata.num_columns)]
        return [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns]


class UncompressedChunk:
    """The uncompressed bytes of a column, which begin at byte `start` of the file. Values follow each other, each
    preceded by its length.
    """

    def __init__(self, start: int, content: bytes) -> None:
        self._start, self._content, self._at = start, content, 0

    def find_value_offset(self, value: bytes) -> int | None:
        """Returns the offset in the file, in bytes, at which `value` begins. Returns None if the file does not store
        its bytes unchanged. Look for values in the order in which the column has them.
        """
        stored = struct.pack("<I", len(value)) + value
        # The value comes next, or behind the head of a page, or in the dictionary before all pages.
        for at in (
            self._at,
            *(self._content.find(stored[:_SEARCHED], start) for start in (self._at, 0)),
        ):
            if at >= 0 and self._content.startswith(stored, at):
                self._at = at + len(stored)
                return self._start + at + 4
        return None


def read_value(column: pa.Array | pa.ChunkedArray, row: int) -> Any:
    """Returns the value of a column in a row, as a Python object. Raises pyarrow's ArrowInvalid if the value is
    damaged.
    """
    value = column.slice(row, 1)
    value.validate(full=True)
    return value[0].as_py()


def list_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Returns the rows of a batch as dictionaries {column: value}. If the batch has no columns, returns {} for each
    row. Raises pyarrow's ArrowInvalid if the batch is damaged.
    """
    for column in batch.columns:
        column.validate(full=True)
    return batch.to_pylist() if batch.num_columns else [{} for _ in range(batch.num_rows)]


def can_hold_bytes(arrow_type: pa.DataType) -> bool:
    """Returns whether a column of this type may hold encoded images: byte strings, or structs with a field "bytes" of
    byte strings.
    """
    if pa.types.is_struct(arrow_type):
        return arrow_type.get_field_index("bytes") >= 0 and can_hold_bytes(arrow_type.field("bytes").type)
    return pa.types.is_binary(arrow_type) or pa.types.is_large_binary(arrow_type)


@contextmanager
def _convert_errors_to_config_error(display_name: str, file_format: str) -> Iterator[None]:
    """Turns errors of reading within the block into ConfigError, which says that a file is cut off or damaged. Raises
    ConfigError and NotRead unchanged.

    display_name: names the file in the message. file_format: the format of the file in the message, "Arrow" or
    "parquet".
    """
    try:
        yield
    except (ConfigError, NotRead):
        raise
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        raise ConfigError(
            f"{display_name} is no readable {file_format} file ({' '.join(str(error).split())[:200]}): it is cut "
            "off or damaged; make it anew, or take it away"
        ) from None


def _make_concatenated_files_error(display_name: str, end_offset: int) -> ConfigError:
    """Returns the error for a file `display_name` that consists of several concatenated files. end_offset: the byte at
    which the first ends.
    """
    return ConfigError(
        f"{display_name} goes on behind its end at byte {end_offset:,}: several files were joined as they are, and "
        "only one of them would be read: keep each as a file of its own"
    )


def _is_batch_compressed(message_metadata: pa.Buffer) -> bool:
    """Returns whether a record batch is compressed.

    message_metadata: the header of the batch's Arrow message, in the flatbuffers format that Arrow's Message.fbs
    defines.
    """
    content = memoryview(message_metadata)

    def find_flatbuffer_field(table_offset: int, field_number: int) -> int | None:
        """Returns the byte at which a field of a flatbuffers table stands; None if the table leaves it out.

        table_offset: the byte at which the table begins. field_number: the number of the field in the table, from 0.
        """
        vtable = table_offset - struct.unpack_from("<i", content, table_offset)[0]
        size = struct.unpack_from("<H", content, vtable)[0]
        offset = (
            struct.unpack_from("<H", content, vtable + 4 + 2 * field_number)[0] if 4 + 2 * field_number < size else 0
        )
        return table_offset + offset if offset else None

    header = find_flatbuffer_field(struct.unpack_from("<I", content, 0)[0], 2)
    return (
        header is not None
        and find_flatbuffer_field(header + struct.unpack_from("<I", content, header)[0], 3) is not None
    )
