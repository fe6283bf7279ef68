"""Reads tables that others wrote, row by row in bounded memory: .csv, .tsv, .jsonl and .parquet.

Nothing in a table is believed: a line has at most 16 MB, a parquet file is read in batches of rows of the columns that
are needed, and text that is no UTF-8 is refused with its line.
"""

import codecs
import csv
import io
import itertools
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from dstrain.data.files.local import Files
from dstrain.data.files.storage import retry
from dstrain.disk.small import RepeatedKey, parse_json_without_repeated_keys
from dstrain.recipe import ConfigError, NotRead

_LONGEST = 1 << 24  # bytes of a line
_LINES = 1000  # of a text in a table, at most
_SUFFIX = re.compile(r"\.(?=\w*[A-Za-z])\w{2,5}$")  # of a file's name
# Bytes that the needed columns of a row group may have: a page of it is unpacked as a whole, and a row may be a bomb.
_SMALL, _WIDEST, _LARGEST = 1 << 26, 1 << 12, 1 << 32  # any row group; for each of its rows; at most


class Table(ABC):
    """A table in `files`, which messages call `where`.

    Any method raises ConfigError, which names the line or row group, if the table cannot be read.
    """

    noun = "line"  # what a message counts
    ragged = False  # a row may have columns that the first one lacks

    def __init__(self, files: Files, name: str, where: str) -> None:
        self.files, self.name, self.where = files, name, where

    @abstractmethod
    def list_columns(self) -> list[str]:
        """Returns the names of the columns; for .jsonl those that the first row has."""

    @abstractmethod
    def iterate_rows(self, columns: Sequence[str], row_group: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields (number of the line or row, {column: value}) for each row of a group. The dictionary has at least the
        given `columns`; a missing value is None or left out.
        """

    def count_row_groups(self) -> int:
        """Returns the number of groups of rows that can be read separately: 1, or the number of row groups of a parquet
        file.
        """
        return 1

    def has_bytes_column(self) -> bool:
        """Returns whether a column holds the bytes of whole files, as `datasets` stores images."""
        return False


def match_column_names(known_names: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Returns the entries of `columns` that are in `known_names`, in the order of `known_names` but spelled as in
    `columns`. Ignores case, and white space around names: File_Name is file_name.
    """
    found = {name.strip().lower(): name for name in columns} | {name: name for name in columns}
    return [found[name] for name in known_names if name in found]


def open_table(files: Files, name: str, display_name: str) -> Table:
    """Opens a table whose suffix is in TABLES. display_name: what messages call the table."""
    return TABLES["." + name.lower().rpartition(".")[2]](files, name, display_name)


def read_lines(files: Files, name: str, display_name: str) -> Iterator[str]:
    """Yields the lines of a text file in UTF-8, each with its line end. Raises ConfigError if the file cannot be read,
    or if a line is not UTF-8, or is longer than 16 MB. display_name: what messages call the file.
    """
    try:
        file = files.open(name)
    except NotRead:
        raise
    except (OSError, ConfigError) as error:
        raise ConfigError(f"{display_name} cannot be read: {' '.join(str(error).split())}") from None
    with file:
        number = 0
        while line := retry(lambda: file.readline(_LONGEST + 1)):
            number += 1
            if len(line) > _LONGEST:
                raise ConfigError(
                    f"{display_name}, line {number}: longer than {_LONGEST >> 20} MB: is this a text file?"
                )
            yield _decode_line(line, number, display_name)


def _decode_line(line: bytes, line_number: int, display_name: str) -> str:
    """Returns a line of a file as text. Raises ConfigError, with a remedy, if it is not UTF-8 or has a NUL."""
    try:
        text = line.decode("utf-8-sig" if line_number == 1 else "utf-8")
        if "\0" not in text:
            return text
        at = line.index(0)
    except UnicodeDecodeError as error:
        at = error.start
    wide = line.count(0) > 1 or line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if b"\0" in line and not wide:
        raise ConfigError(
            f"{display_name}, line {line_number}: a NUL is in no text: take it away, `tr -d '\\0' <OLD >NEW`"
        )
    encoding = "UTF-16" if wide else "LATIN1"
    raise ConfigError(
        f"{display_name}, line {line_number}: byte {line[at]:#x} is no UTF-8: write the file in UTF-8, "
        f"as `iconv -f {encoding} -t UTF-8 OLD > NEW` does for text in {encoding}"
    )


class _Csv(Table):
    def _make_reader(self) -> "csv.DictReader[str]":
        # A quotation mark that is left open, or stands amid a field, must not swallow rows.
        """Returns a reader of the rows, which raises csv.Error if quotation marks are wrong."""
        return csv.DictReader(read_lines(self.files, self.name, self.where), strict=True)

    def list_columns(self) -> list[str]:
        try:
            names = [name for name in self._make_reader().fieldnames or () if name]
        except csv.Error as error:
            remedy = ": if lines end in carriage returns, write line feeds, `tr '\\r' '\\n' <OLD >NEW`"
            raise ConfigError(f"{self.where}, line 1: {error}{remedy}") from None
        return self._require_distinct_columns(names)

    def _require_distinct_columns(self, names: list[str]) -> list[str]:
        """Returns the names of the columns unchanged. Raises ConfigError if two of them are equal."""
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"{self.where}, line 1: two columns are called {twice}: rename or remove one")
        return names

    def iterate_rows(self, columns: Sequence[str], row_group: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        reader = self._make_reader()
        try:
            last = reader.line_num if reader.fieldnames else 0
            for row in reader:
                if reader.line_num > last + 1:
                    self._require_closed_quotes(row, last + 1)
                last = reader.line_num
                if any(row.get(None, ())):  # The reader puts fields beyond the first line's columns there.
                    raise ConfigError(
                        f"{self.where}, line {reader.line_num}: more fields than the first line has: put "
                        "quotation marks around text with commas"
                    )
                yield reader.line_num, row
        except csv.Error as error:
            raise ConfigError(
                f"{self.where}, line {reader.line_num}: {error}: is a quotation mark left open?"
            ) from None

    def _require_closed_quotes(self, row: dict[str, Any], line_number: int) -> None:
        """Raises ConfigError if a row of several lines seems to contain further rows, since a quotation mark was
        probably left open. line_number: the number of the row's first line.
        """
        texts = [text for text in row.values() if isinstance(text, str)]
        suffixes = {match[0] for text in texts if "\n" not in text and (match := _SUFFIX.search(text))}
        lines = (more for text in texts if "\n" in text for more in text.split("\n"))
        for more in (more for more in lines if more.count(",") >= len(row) - 1):
            if self._looks_like_separate_row(more, texts, suffixes):
                raise ConfigError(
                    f"{self.where}, line {line_number}: its text holds the line {more.strip()[:60]}: if a quotation "
                    "mark is left open there, close it"
                )

    def _looks_like_separate_row(self, line: str, row_texts: list[str], file_suffixes: set[str]) -> bool:
        """Returns whether a line within a quoted text is probably a row of its own, since it names a file that the
        row's `row_texts` do not name.

        file_suffixes: a name with one of these is a file's name. If there are none, a name counts if such a file
        exists.
        """
        if not file_suffixes and not self.files.far:
            names = {field.strip().strip('"') for field in line.split(",")}.difference(row_texts)
            return any(os.path.isfile(self.files.fetch_local_path(name)) for name in names)
        found = (re.search(rf'([^,"]*{re.escape(suffix)})"*\s*(,|$)', line) for suffix in file_suffixes)
        return any(match is not None and match[1].strip() not in row_texts for match in found)


class Tsv(_Csv):
    """A table of fields between tabs. Quotation marks count only around a whole field; elsewhere they are characters
    like others.
    """

    def list_columns(self) -> list[str]:
        return self._require_distinct_columns(next((fields for _, fields in self.iterate_records()), []))

    def iterate_rows(self, columns: Sequence[str], row_group: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        records = self.iterate_records()
        _, names = next(records, (1, []))
        for number, fields in records:
            if len(fields) < len(names) or any(fields[len(names) :]):
                raise ConfigError(
                    f"{self.where}, line {number}: {len(fields)} fields, and the first line has {len(names)}: put one "
                    "tab between two fields, and quotation marks around text with tabs"
                )
            yield number, dict(zip(names, fields))

    def iterate_records(self) -> Iterator[tuple[int, list[str]]]:
        """Yields (number of the record's last line, list of its fields) for each record that is not blank."""
        lines: Iterator[tuple[int, str]] = enumerate(read_lines(self.files, self.name, self.where), 1)
        number, line, width = *next(lines, (0, "")), 0
        while line:
            fields = [_unquote_field(field) for field in line.rstrip("\r\n").split("\t")]
            more: list[tuple[int, str]] = []
            if _has_open_quote(
                fields[-1]
            ):  # quoted text may go on; then a quotation mark ends it, at the end of a field
                for follower in itertools.islice(lines, _LINES):
                    more.append(follower)
                    if '"' in follower[1].replace('""', ""):
                        break
            whole = line + "".join(text for _, text in more)
            quoted = _parse_quoted_record(whole) if more or (width and len(fields) != width) else None
            if quoted is None:
                lines = itertools.chain(more, lines)
            elif more and len(fields) == width and all(text.count("\t") == width - 1 for _, text in more):
                raise ConfigError(
                    f"{self.where}, line {number}: a quotation mark is left open, and the next one is in line "
                    f"{more[-1][0]}: take it away, or double it"
                )
            else:
                number, fields = more[-1][0] if more else number, quoted
            if any(fields):
                width = width or len(fields)
                yield number, fields
            number, line = next(lines, (0, ""))


def _unquote_field(field: str) -> str:
    """Returns a field without its quotation marks if they enclose all of it, else unchanged."""
    inner = field[1:-1].replace('""', "")
    quoted = len(field) > 1 and field[0] == field[-1] == '"' and '"' not in inner
    return field[1:-1].replace('""', '"') if quoted else field


def _has_open_quote(field: str) -> bool:
    """Returns whether a field begins with a quotation mark that is not closed in it."""
    return field.startswith('"') and '"' not in field[1:].replace('""', "")


def _parse_quoted_record(text: str) -> list[str] | None:
    """Returns the fields of a record by the rules of csv, with tabs between the fields. Returns None if the text breaks
    these rules, or holds several records.
    """
    try:
        records = list(csv.reader(io.StringIO(text, newline=""), delimiter="\t", strict=True))
    except csv.Error:
        return None
    return records[0] if len(records) == 1 else None


class _Jsonl(Table):
    ragged = True

    def list_columns(self) -> list[str]:
        return next((list(row) for _, row in self.iterate_rows(())), [])

    def iterate_rows(self, columns: Sequence[str], row_group: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in enumerate(read_lines(self.files, self.name, self.where), 1):
            if not line.strip():
                continue
            try:
                row = parse_json_without_repeated_keys(line)
            except RepeatedKey as error:
                raise ConfigError(f"{self.where}, line {number}: {error}") from None
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise ConfigError(f'{self.where}, line {number}: no JSON object: write {{"path": ...}}, one a line')
            yield number, row


@lru_cache(1)  # each row group asks for its columns several times, and the footer grows with their number
def open_parquet_file(files: Files, name: str, display_name: str) -> Any:
    """Opens a parquet file as a ParquetFile, and keeps the last one open."""
    from dstrain.data.files.arrow import ParquetFile

    return ParquetFile(files, name, display_name)


class _Parquet(Table):
    noun = "row"

    def _open_file(self) -> Any:
        """Opens the table as a ParquetFile."""
        return open_parquet_file(self.files, self.name, self.where)

    def list_columns(self) -> list[str]:
        return list(self._open_file().schema.names)

    def has_bytes_column(self) -> bool:
        from dstrain.data.files.arrow import can_hold_bytes

        return any(can_hold_bytes(field.type) for field in self._open_file().schema)

    def count_row_groups(self) -> int:
        return self._open_file().num_row_groups

    def iterate_rows(self, columns: Sequence[str], row_group: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        file = self._open_file()
        size, count = (
            file.count_uncompressed_bytes(row_group, columns),
            file.count_rows(range(row_group, row_group + 1)),
        )
        if size > min(max(_SMALL, _WIDEST * count), _LARGEST):
            raise ConfigError(
                f"{self.where}: row group {row_group} has {size >> 20} MB of {', '.join(columns)} in {count:,} rows, "
                f"too much for a list: write smaller row groups, with rows below {_WIDEST >> 10} KB"
            )
        yield from enumerate(file.iterate_rows(row_group, columns), 1 + file.count_rows(range(row_group)))


TABLES = {".csv": _Csv, ".tsv": Tsv, ".jsonl": _Jsonl, ".parquet": _Parquet}
