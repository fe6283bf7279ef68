"""Reads tables that others wrote, row by row in bounded memory: .csv, .tsv, .jsonl and .parquet.

Nothing in a table is believed: a line has at most 16 MB, a parquet file is read in batches of rows of the columns that
are needed, and text that is no UTF-8 is refused with its line.
"""

import csv
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from dstrain.data.files.local import Files
from dstrain.data.files.storage import retry
from dstrain.disk.small import parse_json
from dstrain.recipe import ConfigError, NotRead

_LONGEST = 1 << 24  # bytes of a line
# Bytes that the needed columns of a row group may have: a page of it is unpacked as a whole, and a row may be a bomb.
_SMALL, _WIDEST, _LARGEST = 1 << 26, 1 << 12, 1 << 32  # any row group; for each of its rows; at most


class Table(ABC):
    """A table in `files`, which messages call `where`.

    Any method raises ConfigError, which names the line or row group, if the table cannot be read.
    """

    noun = "line"  # what a message counts

    def __init__(self, files: Files, name: str, where: str) -> None:
        self.files, self.name, self.where = files, name, where

    @abstractmethod
    def columns(self) -> list[str]:
        """Returns the names of the columns; of .jsonl those of the first row."""

    @abstractmethod
    def rows(self, columns: Sequence[str], group: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields (line, values by column) of the rows in a group; a missing value is left out or None."""

    def groups(self) -> int:
        """Returns how many groups of rows can be read one by one."""
        return 1

    def holds_files(self) -> bool:
        """Returns whether a column holds the bytes of files, as `datasets` writes pictures."""
        return False


def open_table(files: Files, name: str, where: str) -> Table:
    """Returns the table in a file whose suffix is one of TABLES."""
    return TABLES["." + name.lower().rpartition(".")[2]](files, name, where)


def read_lines(files: Files, name: str, where: str) -> Iterator[str]:
    """Yields the lines of a text file with their ends. Raises ConfigError if one is no UTF-8, or too long."""
    try:
        file = files.open(name)
    except NotRead:
        raise
    except (OSError, ConfigError) as error:
        raise ConfigError(f"{where} cannot be read: {' '.join(str(error).split())}") from None
    with file:
        number = 0
        while line := retry(lambda: file.readline(_LONGEST + 1)):
            number += 1
            if len(line) > _LONGEST:
                raise ConfigError(f"{where}, line {number}: longer than {_LONGEST >> 20} MB: is this a text file?")
            yield _decode(line, number, where)


def _decode(line: bytes, number: int, where: str) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}, line {number}: byte {line[error.start]:#x} is no UTF-8: write the file in UTF-8, "
            "as `iconv -f LATIN1 -t UTF-8 OLD > NEW` does for text in Latin-1"
        ) from None


class _Csv(Table):
    delimiter, separators = ",", "commas"

    def _reader(self) -> "csv.DictReader[str]":
        return csv.DictReader(read_lines(self.files, self.name, self.where), delimiter=self.delimiter)

    def columns(self) -> list[str]:
        try:
            names = [name for name in self._reader().fieldnames or () if name]
        except csv.Error as error:
            raise ConfigError(f"{self.where}, line 1: {error}") from None
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"{self.where}, line 1: two columns are called {twice}: rename or remove one")
        return names

    def rows(self, columns: Sequence[str], group: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        reader = self._reader()
        try:
            for row in reader:
                if any(row.get(None, ())):  # The reader puts fields beyond the first line's columns there.
                    raise ConfigError(
                        f"{self.where}, line {reader.line_num}: more fields than the first line has: put "
                        f"quotation marks around text with {self.separators}"
                    )
                yield reader.line_num, row
        except csv.Error as error:
            raise ConfigError(
                f"{self.where}, line {reader.line_num}: {error}: is a quotation mark left open?"
            ) from None


class _Tsv(_Csv):
    delimiter, separators = "\t", "tabs"


class _Jsonl(Table):
    def columns(self) -> list[str]:
        return next((list(row) for _, row in self.rows(())), [])

    def rows(self, columns: Sequence[str], group: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in enumerate(read_lines(self.files, self.name, self.where), 1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise ConfigError(f'{self.where}, line {number}: no JSON object: write {{"path": ...}}, one a line')
            yield number, row


class _Parquet(Table):
    noun = "row"

    def _open(self) -> Any:
        from dstrain.data.files.arrow import ParquetFile

        return ParquetFile(self.files, self.name, self.where)

    def columns(self) -> list[str]:
        return list(self._open().schema.names)

    def holds_files(self) -> bool:
        from dstrain.data.files.arrow import holds_bytes

        return any(holds_bytes(field.type) for field in self._open().schema)

    def groups(self) -> int:
        return self._open().num_groups

    def rows(self, columns: Sequence[str], group: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        file = self._open()
        size, count = file.count_bytes(group, columns), file.count_rows(range(group, group + 1))
        if size > min(max(_SMALL, _WIDEST * count), _LARGEST):
            raise ConfigError(
                f"{self.where}: row group {group} has {size >> 20} MB of {', '.join(columns)} in {count:,} rows, "
                f"too much for a list: write smaller row groups, with rows below {_WIDEST >> 10} KB"
            )
        yield from enumerate(file.rows(group, columns), 1 + file.count_rows(range(group)))


TABLES = {".csv": _Csv, ".tsv": _Tsv, ".jsonl": _Jsonl, ".parquet": _Parquet}
