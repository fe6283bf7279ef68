"""Lists of files: a table (.csv, .tsv, .jsonl, .parquet) with one sample in each row, or Hugging Face's metadata.

Columns are known by their names, or named by data.columns={path: url_local, caption: text, label: category}. Paths are
relative to the table's folder, or absolute; a list is what its writer says, so paths may lead out of the folder through
`..` and links. Whatever they lead to is only ever decoded as a picture or a clip. Open-Sora's csv (path, text, ...) is
such a table; WebVid's csv and lines PATH NUMBER, as UCF-101's trainlist01.txt has them, have layouts of their own.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from dstrain.data.bad_files import Names
from dstrain.data.files.listing import METADATA, convert_oserror_to_config_error, join_first, walk_files
from dstrain.data.files.local import Files, LocalFiles
from dstrain.data.files.tables import TABLES, Table, match_column_names, open_table, read_lines
from dstrain.data.formats.base import VIDEOS, Layout, Place, Request, Sample, file_exists
from dstrain.data.formats.labels import LABELS, ClassList, read_class_list, read_dataset_json_labels
from dstrain.data.formats.splits import SPLIT_COLUMNS
from dstrain.disk.texts import TEXT_NAMES, extract_captions
from dstrain.recipe import ConfigError

COLUMNS = {  # names by which a column is known, the first that is there counts
    "path": (
        "file_name",
        "path",
        "file",
        "filename",
        "file_path",
        "filepath",
        "image",
        "image_path",
        "image_file",
        "video",
        "video_path",
    ),
    "label": ("label", "class", "class_name", "category"),
    "caption": TEXT_NAMES,
}
_NAMED = 20  # columns that a message names
_LOOKED = 20  # first rows whose files are looked for
_LINE = re.compile(r"(\S.*?\.[A-Za-z0-9]{2,5})(?:\s+(\d{1,9}))?\s*")
_CLASSES = "classInd.txt"  # of UCF-101: lines such as 1 ApplyEyeMakeup


class TableList(Layout):
    """Reads a table that data.path names, with one sample in each row."""

    kind = "csv, tsv, jsonl or parquet list"
    columns_read = ("path", "label", "caption")
    bases: ClassVar[tuple[str, ...]] = ("",)  # folders in which the files may be, from that of the list
    known: ClassVar[dict[str, tuple[str, ...]]] = COLUMNS

    def __init__(self, root: str, files: Files, request: Request) -> None:
        super().__init__(root, files, request)
        self.names = read_class_list(request.class_list)
        self.classes = self.names.classes

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        name = os.path.basename(root)
        if not _is_file_with_suffix(root, files, tuple(TABLES)):
            return False
        # A parquet file with the pictures themselves is no list, but another layout's.
        return "path" in request.columns or not open_table(files, name, f"{request.key}={root}").has_bytes_column()

    def list_partitions(self) -> list[str]:
        if self.request.captions_file is not None:
            raise ConfigError(
                f"data.captions={self.request.captions_file}: {self.root} is a list, and its captions "
                "stand in a column of it: write data.columns={caption: NAME}"
            )
        table = self._open_table()
        return [f"{table.name}:{group}" for group in range(table.count_row_groups())]

    def list_files_watched_for_changes(self) -> list[str]:
        return [self._open_table().name]

    def iterate_samples(self, partition: str) -> Iterator[Sample]:
        group = partition.rpartition(":")[2]
        table = self._open_table()
        columns = self._choose_columns(table)
        label = columns["label"] if self.request.labels == "auto" else []
        self.labels_written = bool(label)
        base, used = self._find_base_folder(table, columns), [column for kind in columns.values() for column in kind]
        split = [column for column in match_column_names(SPLIT_COLUMNS, table.list_columns()) if column not in used][:1]
        self.record_cross_validation_column(table.list_columns(), used)
        for line, row in table.iterate_rows([*used, *split], int(group)):
            at = f"{table.where}, {table.noun} {line}"
            for column in split:
                self.require_split_of_first_row(column, row.get(column), at)
            if table.ragged:
                self._refuse_new_columns(row, columns, at)
            path = self._read_path(row, columns["path"], at)
            captions = [text for column in columns["caption"] for text in _parse_captions(row.get(column), at)]
            if columns["caption"] and not captions:
                captions = [""]  # Without a text, it will be a bad sample.
            yield Sample(
                Place(path if path.startswith("/") else base + path),
                self._parse_label(row.get(label[0]), at) if label else self._derive_label_from_path(path, at),
                tuple(captions),
            )

    def read(self, place: Place) -> Path:
        return self.files.fetch_local_path(place.name)

    def _open_table(self) -> Table:
        return open_table(self.files, os.path.basename(self.root), f"{self.request.key}={self.root}")

    def _choose_columns(self, table: Table) -> dict[str, list[str]]:
        """Returns the columns to read, by what they hold: {"path": [...], "label": [...], "caption": [...]}. A list is
        [] if there is no such column. That of captions is also [] if the request asks for none.

        Raises ConfigError if no column holds paths, or if data.columns names a column that is not there.
        """
        columns = {kind: _find_columns_of_field(kind, table, self.request, self.known) for kind in self.known}
        if not self.request.captions:
            columns["caption"] = []
        if not columns["path"]:
            if not table.list_columns():
                raise ConfigError(
                    f"{table.where} is empty: write a first line with the names of columns, as file_name,"
                    f"label, then a line for each of the {self.request.noun}"
                )
            names = table.list_columns()
            raise ConfigError(
                f"{table.where} has no column with the paths of {self.request.noun}, only "
                f"{join_first(names, _NAMED)}: {self._explain_missing_path_column(names)}"
            )
        return columns

    def _explain_missing_path_column(self, names: list[str]) -> str:
        """Returns advice, for an error message, on a table in which no column is known to hold paths. names: its
        columns.
        """
        if any(name.lower().endswith(self.request.suffixes) for name in names):
            return "this line is of a file: write a line with the names of the columns, as file_name,label, above it"
        if len(names) == 1 and (mark := next((mark for mark in ";\t|" if mark in names[0]), None)):
            return f"put commas between fields, and not {mark!r} (fields between tabs are read from a .tsv)"
        return "name it, data.columns={path: NAME}"

    def _refuse_new_columns(self, row: dict[str, Any], first_row_columns: dict[str, list[str]], location: str) -> None:
        """Raises ConfigError if a row has a column of labels or captions that the first row of the table lacks, and the
        request asks for these.

        row: the row as {column: value}.
        first_row_columns: the columns of the first row, from `_choose_columns`.
        location: names the row in the message.
        """
        wanted = ["label"] * (self.request.labels == "auto") + ["caption"] * self.request.captions
        for kind in wanted:
            if not first_row_columns[kind] and (late := match_column_names(self.known[kind], list(row))):
                raise ConfigError(
                    f"{location} has a {late[0]}, and the first has none: write one in each row, or in none"
                )

    def _read_path(self, row: dict[str, Any], columns: Sequence[str], location: str) -> str:
        """Returns the path of the file that a row names, without a leading "./".

        columns: a list whose first entry is the column of paths.
        Raises ConfigError if the row has no path, or if the path is an address such as s3://DATA/x.png. If the list
        itself is at an address, also raises it if the path leads out of the list's folder.
        """
        path = row.get(columns[0])
        if not isinstance(path, str) or not path.strip() or "\0" in path:
            raise ConfigError(f"{location}: no path in the column {columns[0]}: write one, or take the row out")
        try:
            os.fsencode(path)
        except UnicodeEncodeError:
            raise ConfigError(f"{location}: {path!r} holds half a character, which no path has: mend it") from None
        if "://" in path:
            raise ConfigError(
                f"{location}: {path} is an address: fetch the files first, for example with img2dataset or "
                "video2dataset, whose output is read as it is"
            )
        if not isinstance(self.files, LocalFiles) and (path[0] == "/" or ".." in path.split("/")):
            raise ConfigError(
                f"{location}: {path} leads out of the folder of the list, which only a list on a disk may do"
            )
        return path.removeprefix("./")

    def _parse_label(self, cell: Any, location: str) -> int | str:
        """Returns the label that a cell means. Raises ConfigError if the cell is empty or holds no class."""
        label = self.names.parse_label_value(cell, location)
        if label is None:
            raise ConfigError(f"{location}: no label: write one in each row, or data.labels=none for no labels at all")
        return label

    def _derive_label_from_path(self, path: str, location: str) -> str | int | None:
        """Returns the label of a file if the table has no column of labels. With data.labels=prefix, this is the label
        of the class with which the file's name begins; else None.
        """
        return self.names.parse_label_from_name(path, location) if self.request.labels == "prefix" else None

    def _find_base_folder(self, table: Table, columns: dict[str, list[str]]) -> str:
        """Returns the folder to which the paths in the table are relative: the first of `bases` in which one of the
        table's first 20 files exists. The result is relative to the table's own folder: "" for that folder itself, else
        a path that ends in a slash.

        Raises ConfigError if none of these files exists, or if the first is a video and images are asked for.
        """
        rows = islice(table.iterate_rows(columns["path"]), _LOOKED)
        paths = [self._read_path(row, columns["path"], f"{table.where}, {table.noun} {line}") for line, row in rows]
        if not paths:
            raise ConfigError(f"{table.where} has no rows: name a list of {self.request.noun}")
        if paths[0].lower().endswith(VIDEOS) and not paths[0].lower().endswith(self.request.suffixes):
            raise ConfigError(f"{table.where} lists videos: write data.num_frames=17, say, for clips")
        for base in self.bases:
            if any(file_exists(self.files, os.path.join(base, path)) for path in paths):
                return base
        raise ConfigError(
            f"{table.where}: none of its first {len(paths)} files is there, the first is "
            f"{self.files.fetch_local_path(paths[0])}: paths are relative to the folder of the list, or absolute; "
            "move the list, or name another column, data.columns={path: NAME}"
        )


class Metadata(TableList):
    """Reads a folder with metadata.csv, .tsv, .jsonl or .parquet, as Hugging Face's `imagefolder` reads it: a column
    file_name, and columns of labels or captions.

    This layout is chosen only if the table has labels or captions that the request asks for. Folder names are then no
    labels.
    """

    kind = "metadata.csv, metadata.jsonl or metadata.parquet beside files (Hugging Face)"

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        if request.captions_file is not None:
            return False
        tables = _open_metadata_tables(root, files, request)
        if len(tables) > 1:
            raise ConfigError(
                f"{request.key}={root} has {' and '.join(table.name for table in tables)}: which of them "
                "counts? Keep one"
            )
        counts = any(_list_requested_fields(table, request) for table in tables)
        if counts and request.labels == "auto" and read_dataset_json_labels(Path(root), request.key) is not None:
            raise ConfigError(f"{request.key}={root} has {LABELS} and {tables[0].name}: which of them counts? Keep one")
        return counts

    def iterate_samples(self, partition: str) -> Iterator[Sample]:
        if partition == self.list_partitions()[0] and isinstance(self.files, LocalFiles):
            self._record_files_without_row()
        yield from super().iterate_samples(partition)

    def _record_files_without_row(self) -> None:
        """Counts files as left out: the images (or clips) that have no row in the table, and files in formats that are
        not read.
        """
        table, named, others = self._open_table(), Names(), Counter()
        columns = self._choose_columns(table)["path"]
        for group in range(table.count_row_groups()):
            for line, row in table.iterate_rows(columns, group):
                named.add_name_if_new(
                    os.path.normpath(self._read_path(row, columns, f"{table.where}, {table.noun} {line}"))
                )
        with convert_oserror_to_config_error(self.root, self.request.key):
            files = walk_files(Path(self.root), "", self.request.suffixes, other_suffix_counts=others)
            if unnamed := sum(name not in named for name in files):
                self.add_left_out_count(f"{self.request.noun} without a row in {table.name}", unnamed)
        self.record_unread_files(others)

    def _open_table(self) -> Table:
        return _open_metadata_tables(self.root, self.files, self.request)[0]


class WebVid(TableList):
    """Reads WebVid's csv: videoid, page_dir and the caption `name`; a clip is page_dir/videoid.mp4 in a folder
    `videos`.
    """

    kind = "WebVid's csv"
    bases = ("../videos/", "videos/", "", "../")
    known: ClassVar[dict[str, tuple[str, ...]]] = {"path": ("videoid",), "label": (), "caption": ("name",)}

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        if not _is_file_with_suffix(root, files, (".csv",)) or "path" in request.columns:
            return False
        columns = set(open_table(files, os.path.basename(root), f"{request.key}={root}").list_columns())
        return {"videoid", "page_dir"} <= columns and not columns & set(COLUMNS["path"])

    def _read_path(self, row: dict[str, Any], columns: Sequence[str], location: str) -> str:
        if not row.get("page_dir") or not row.get("videoid"):
            raise ConfigError(f"{location}: no page_dir and videoid: write them, or take the row out")
        return super()._read_path({"path": f"{row['page_dir']}/{row['videoid']}.mp4"}, ["path"], location)


class PathList(TableList):
    """Reads a text file with lines PATH, or PATH NUMBER where the number is the label. If classInd.txt lies beside it,
    numbers count the classes in that from 1.

    Without numbers, the folder of a file is its class, as in UCF-101's testlist01.txt.
    """

    kind = "lines PATH NUMBER, as UCF-101's trainlist01.txt"
    bases = ("", "../UCF-101/", "UCF-101/", "../", "../videos/", "videos/")

    def __init__(self, root: str, files: Files, request: Request) -> None:
        super().__init__(root, files, request)
        self.from_one = False
        if not self.classes and request.labels == "auto":
            self.names = self._read_class_index_file()
            self.classes, self.from_one = self.names.classes, bool(self.names.classes)

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        if not _is_file_with_suffix(root, files, (".txt", ".lst")):
            return False
        match = _LINE.fullmatch(next(read_lines(files, os.path.basename(root), f"{request.key}={root}"), ""))
        return match is not None and match[1].lower().endswith((*request.suffixes, ".avi", ".mp4"))

    def _read_class_index_file(self) -> ClassList:
        """Returns the classes of classInd.txt, which numbers them from 1; an empty list if there is no such file.

        Raises ConfigError if its lines are not 1 CLASS, 2 CLASS, and so on.
        """
        if not file_exists(self.files, _CLASSES):
            return ClassList()
        where = os.path.join(self.files.root, _CLASSES)
        rows = [line.split() for line in read_lines(self.files, _CLASSES, where) if line.strip()]
        if [row[:1] for row in rows] != [[str(number)] for number in range(1, len(rows) + 1)] or (
            any(len(row) != 2 for row in rows)
        ):
            raise ConfigError(
                f"{where}: its lines are not 1 CLASS, 2 CLASS, ...: mend it, or write data.class_list=FILE"
            )
        return ClassList(tuple(row[1] for row in rows), where=where)

    def _open_table(self) -> Table:
        return _Lines(self.files, os.path.basename(self.root), f"{self.request.key}={self.root}")

    def _parse_label(self, cell: Any, location: str) -> int | str:
        if self.from_one and isinstance(cell, str) and cell.isdigit():
            names = self.classes[int(cell) - 1 : int(cell)]
            return self.names.find_index_or_keep_label(
                names[0] if names else -1, f"{location}: number {cell} counts from 1"
            )
        return super()._parse_label(cell, location)

    def _derive_label_from_path(self, path: str, location: str) -> int | str | None:
        folder = os.path.basename(os.path.dirname(path))
        if self.request.labels == "auto" and folder:
            return self.names.find_index_or_keep_label(folder, location)
        return super()._derive_label_from_path(path, location)


class _Lines(Table):
    """Reads lines PATH or PATH NUMBER as a table with the column path and, if the first line has a number, the column
    label.
    """

    ragged = True

    def list_columns(self) -> list[str]:
        _, row = next(self.iterate_rows(()), (0, {}))
        return list(row)

    def iterate_rows(self, columns: Sequence[str], row_group: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, line in enumerate(read_lines(self.files, self.name, self.where), 1):
            match = _LINE.fullmatch(line)
            if match:
                yield number, {"path": match[1]} | ({} if match[2] is None else {"label": match[2]})
            elif line.strip():
                raise ConfigError(f"{self.where}, line {number}: no file and number in it: write PATH or PATH NUMBER")


def refuse_metadata_in_subfolders(root: str, files: Files, request: Request, metadata_files: list[str]) -> None:
    """Raises ConfigError if a subfolder has a metadata table or a dataset.json with labels or captions that the request
    asks for. Only the root may have such files.

    metadata_files: the relative paths of all files in the data that are called metadata.csv, dataset.json or alike.
    """
    for folder in sorted({os.path.dirname(name) for name in metadata_files} - {""}):
        tables = _open_metadata_tables(root, files, request, folder) if request.captions_file is None else []
        said = [(table.name, words) for table in tables if (words := _list_requested_fields(table, request))]
        if request.labels == "auto" and read_dataset_json_labels(Path(root, folder), request.key):
            said.append((os.path.join(folder, LABELS), ["labels"]))
        for name, words in said:
            raise ConfigError(
                f"{request.key}={root}: {name} tells the {' and '.join(words)} of files, and is read in the folder of "
                f"all data alone: write {request.key}={os.path.join(root, folder)}, or join such tables into "
                f"{os.path.join(root, os.path.basename(name))}"
            )


def _list_requested_fields(table: Table, request: Request) -> list[str]:
    """Returns what the request asks for and the table has a column for: ["labels"], ["captions"], both, or []."""
    wanted = ["label"] * (request.labels == "auto") + ["caption"] * request.captions
    return [f"{kind}s" for kind in wanted if _find_columns_of_field(kind, table, request)]


def _open_metadata_tables(root: str, files: Files, request: Request, folder: str = "") -> list[Table]:
    """Returns the tables in a folder that are called metadata.csv, .tsv, .jsonl or .parquet and have a column
    file_name.
    """
    tables = []
    for name in (os.path.join(folder, name) for name in METADATA):
        if file_exists(files, name):
            table = open_table(files, name, f"{request.key}={root}: {name}")
            if match_column_names(("file_name",), table.list_columns()):
                tables.append(table)
    return tables


def _parse_captions(cell: Any, location: str) -> tuple[str, ...]:
    """Returns the captions in a cell, without empty ones. Raises ConfigError if the cell holds neither a text nor a
    list of texts. location: names the cell's row in the message.
    """
    try:
        return extract_captions(cell)
    except ValueError as error:
        raise ConfigError(f"{location}: {error}: name the column of texts, data.columns={{caption: NAME}}") from None


def _is_file_with_suffix(root: str, files: Files, suffixes: tuple[str, ...]) -> bool:
    """Returns whether `root` is a single file whose name ends in one of the suffixes."""
    name = os.path.basename(root)
    return name.lower().endswith(suffixes) and not os.path.isdir(root) and file_exists(files, name)


def _find_columns_of_field(
    field: str, table: Table, request: Request, known_names: dict[str, tuple[str, ...]] = COLUMNS
) -> list[str]:
    """Returns the columns of a table that hold `field`: those that data.columns names for it, else the first with a
    known name; [] if there is none.

    field: "path", "label" or "caption".
    known_names: the usual names of columns, by field.
    Raises ConfigError if a column that data.columns names does not exist.
    """
    columns, names = table.list_columns(), request.columns.get(field)
    if names is None:
        return match_column_names(known_names[field], columns)[:1]
    names = [names] if isinstance(names, str) else list(names)
    if missing := [name for name in names if name not in columns]:
        raise ConfigError(
            f"{table.where} has no column {missing[0]}, which data.columns names, only "
            f"{join_first(columns, _NAMED) or 'nothing'}: write one of these"
        )
    return names
