"""Hugging Face's data sets: what `save_to_disk` writes, Arrow files, parquet shards, names of the hub.

    FOLDER/state.json, data-00000-of-00002.arrow                of Dataset.save_to_disk
    FOLDER/dataset_dict.json, train/..., test/...               of DatasetDict.save_to_disk
    FOLDER/data/train-00000-of-00002.parquet, test-...          as on the hub; also FOLDER/data/train-*.parquet, FILE
    hf-dataset:USER/NAME, hf-dataset:USER/NAME:SPLIT            Arrow files to which `datasets` downloads it

If there are splits, train is read, and validation or test is held out. A word of a file's name tells its split, else
the innermost folder that is called as a split; all files name one, or none does. pyarrow reads all of them and knows
the columns by their types: images are bytes, or a struct of bytes and path; labels are ClassLabel, or a column `label`.
Every file must have the columns of the first. If files number the names of a ClassLabel differently, the names decide.
"""

import os
import re
from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any

from dstrain.data.files.listing import convert_oserror_to_config_error, join_first, walk_files
from dstrain.data.files.local import Files, LocalFiles
from dstrain.data.files.tables import match_column_names, open_parquet_file
from dstrain.data.formats.base import Layout, Place, Request, Sample, walk_some_files
from dstrain.data.formats.shards import refuse_or_record_missing_shards
from dstrain.data.formats.splits import SPLIT_COLUMNS, SPLITS, find_split_in_path
from dstrain.disk.small import parse_json
from dstrain.disk.texts import extract_captions
from dstrain.recipe import ConfigError, NotRead

HUB = "hf-dataset:"
_WHOLE_SPLITS = re.compile(r"\w+([.-]\w+)*(\+\w+([.-]\w+)*)*")
_TRIED = 8  # tables in which images are looked for, since some may be lists
_UNSEEN = ("validation", "test", "held_out")
_MAPPED = 256  # Arrow files that a process keeps open
_ROW = 1 << 24  # an offset is a row, plus _ROW times the place of its record batch or the number of its row group
_HUGE = 4 << 20  # bytes of a row group above which random order is worth a warning
_UNPACKING = Lock()  # Only one thread decodes a row group at a time, so that memory holds one.


class Tables(Layout):
    """Reads files that are tables with a column of images. A sample is named by its file and its position there."""

    suffix: str
    labels_written = True
    columns_read = ("image", "label", "caption")

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state that is pickled to the workers, without what only listing needs."""
        return {name: value for name, value in self.__dict__.items() if name != "_files_by_split"}

    @cached_property
    def columns(self) -> Any:
        """Returns the columns to read, chosen by the first file. Every other file must have the same ones."""
        return self._choose_columns(self._list_chosen_split_files()[0])

    def list_partitions(self) -> list[str]:
        self.classes = self.class_list.classes or self.columns.classes
        return self._list_chosen_split_files()

    def list_files_watched_for_changes(self) -> list[str]:
        partitions = self.list_partitions()
        return [*sorted({"", *(partition.rpartition("/")[0] for partition in partitions)}), *partitions]

    def find_held_out_path(self) -> str | None:
        splits = self._files_by_split
        name = next((name for name in _UNSEEN if name in splits), None) if "train" in splits else None
        return None if name is None else self._compose_data_path_of_split(name, splits[name])

    def compose_data_advice(self) -> str:
        chosen, remarks = self._list_chosen_split_files(), [super().compose_data_advice()]
        if others := [f"{name} {len(files)}" for name, files in self._files_by_split.items() if files != chosen]:
            remarks.append(f"files of other splits are not among them, {', '.join(others)}")
        return "; ".join(filter(None, remarks))

    def _list_chosen_split_files(self) -> list[str]:
        """Returns the files that are read: those of the split train, or of the only split. Raises ConfigError if there
        are several splits and none is called train.
        """
        splits = self._files_by_split
        chosen = splits.get("train") or (next(iter(splits.values())) if len(splits) == 1 else None)
        if chosen is None:
            raise ConfigError(
                f"{self.request.key}={self.root} has the splits {', '.join(sorted(splits))}, and no "
                "train: name the files of one of them, such as FOLDER/data/test-*.parquet"
            )
        return chosen

    @cached_property
    def _files_by_split(self) -> dict[str, list[str]]:
        """Returns the files of each split: {"train": [...], "test": [...]}. All files stand under "" if data.path is a
        pattern of file names, or if no file's path names a split.

        Raises ConfigError if some files name a split, and other files with images do not.
        """
        splits: dict[str, list[str]] = {}
        with convert_oserror_to_config_error(self.root, self.request.key):
            for name in iterate_file_names_by_suffix(self.files, self.suffix):
                splits.setdefault("" if self.files.pattern else find_split_in_path(name), []).append(name)
        if len(splits) > 1 and "" in splits:
            unnamed = [name for name in splits.pop("") if self._has_image_column(name)]
            if unnamed:
                named = [name for files in splits.values() for name in files]
                pattern = os.path.join(self.root, os.path.dirname(unnamed[0]), f"*{self.suffix}")
                raise ConfigError(
                    f"{self.request.key}={self.root}: {join_first(named, 3)} name a split, and "
                    f"{join_first(unnamed, 3)} do not: write {self.request.key}='{pattern}' for all files there, or "
                    "move some away"
                )
        return splits

    def _has_image_column(self, name: str) -> bool:
        from dstrain.data.formats.columns import find_image_columns

        return bool(find_image_columns(self._open_table_file(name).schema, self.request))

    def _compose_data_path_of_split(self, split: str, file_names: list[str]) -> str:
        """Returns the data.path that selects the files `file_names` of one split alone: a file, a folder, a pattern
        such as FOLDER/test-*.parquet, or a list of files ROOT/{A,B}.
        """
        folder, _, common = os.path.commonprefix(file_names).rpartition("/")  # noqa: RUF071 (letters are meant)
        start = f"{folder}/" if folder else ""
        name = f"{common}*{self.suffix}" if len(file_names) > 1 and common else common
        others = {other for files in self._files_by_split.values() for other in files} - set(file_names)
        if any(other.startswith(start + common) for other in others) or (len(file_names) > 1 and not start + common):
            folder, name = "", f"{{{','.join(file_names)}}}"
        return "/".join(filter(None, (self.root.rstrip("/"), folder, name)))

    def _open_table_file(self, name: str) -> Any:
        """Opens a file of the data as an ArrowFile or a ParquetFile."""
        raise NotImplementedError

    def _choose_columns(self, name: str) -> Any:
        from dstrain.data.formats.columns import choose_columns

        return choose_columns(self._open_table_file(name).schema, self.request, self._describe_file(name))

    def _open_file_and_list_classes(self, file_name: str) -> tuple[Any, list[int | str]]:
        """Opens a file of the data. Returns (the file, classes): classes[n] is the class that the number n means in the
        file's column of labels. `classes` is [] if this column is no ClassLabel.

        With data.class_list, a class is its name; else it is the number that the first file gives to this name.
        For the first file, also counts unread files beside it as left out, and checks for missing shards.
        Raises ConfigError if the file's columns, or the names of its classes, do not fit those of the first file.
        """
        if file_name == self._list_chosen_split_files()[0]:
            self.record_unread_files_beside_shards()
            refuse_or_record_missing_shards(self, self._list_chosen_split_files())
        first, own = self.columns, self._choose_columns(file_name)
        if own._replace(classes=first.classes) != first:
            raise ConfigError(
                f"{self._describe_file(file_name)} has {own.describe()}, and {self._list_chosen_split_files()[0]} "
                f"{first.describe()}: write it anew with the same columns, or take it away"
            )
        names, unknown = own.classes, set(own.classes) - set(first.classes)
        if unknown or bool(names) != bool(first.classes) or (names != first.classes and len(set(names)) < len(names)):
            raise ConfigError(
                f"{self._describe_file(file_name)} names its labels {join_first(names) or 'not at all'}, and "
                f"{self._list_chosen_split_files()[0]} {join_first(first.classes) or 'not at all'}, so that its "
                "numbers may mean others: write it anew with the same ClassLabel, or take it away"
            )
        if self.class_list.classes:
            return self._open_table_file(file_name), list(names)
        return self._open_table_file(file_name), [
            at if names == first.classes else first.classes.index(name) for at, name in enumerate(names)
        ]

    def _describe_file(self, name: str) -> str:
        return f"{self.request.key}={self.root}: {name}"

    def _make_sample(self, place: Place, row: dict[str, Any], classes: list[int | str]) -> Sample:
        """Returns a sample with its label and captions, made from a row of the table. classes: see `_parse_label`.

        Raises ConfigError if the label is no class, or if the row belongs to another split than the rows before it.
        """
        columns, captions, at = self.columns, [], f"{self.request.key}={self.root}: {place.name}"
        label = None if columns.label is None else self._parse_label(row[columns.label], classes, at)
        if self.request.labels != "auto":
            label = self.resolve_label(label, place.name)
        if self._split is not None:
            self.require_split_of_first_row(self._split, row[self._split], at)
        for name in columns.captions:
            captions += extract_captions(row[name])
        if columns.captions and not captions:
            captions = [""]  # Without a text, it will be a bad sample.
        return Sample(place, label, tuple(captions))

    def _parse_label(self, cell: Any, classes: list[int | str], location: str) -> int | str:
        """Returns the class that the value of a cell means: with data.class_list, its index there. location: names
        the row in messages. classes: the class of each number, as `_open_file_and_list_classes` returns it.

        Raises ConfigError if the value is no class, such as -1, which often stands for a secret label.
        """
        label = self.class_list.parse_label_value(cell, location) if isinstance(cell, str) else None
        if label is None and isinstance(cell, int) and 0 <= cell < (len(classes) or 1 << 31):
            label = self.class_list.find_index_or_keep_label(classes[cell] if classes else cell, location)
        if label is None:
            raise ConfigError(
                f"{location} has the {self.columns.label} {cell!r}, which is no class (-1: it is kept secret): write "
                "data.labels=none to leave labels out, or take another split"
            )
        return label

    def _extract_image_or_path(self, cell: Any) -> bytes | Path:
        """Returns the encoded bytes of the image in a cell. If the cell holds only the path of an image file, returns
        this path.

        Raises ConfigError if the cell holds neither, or holds a path although the table is not on this machine.
        """
        content = _extract_encoded_image(cell)
        if content is not None:
            return content
        path = cell.get("path") if isinstance(cell, dict) else None
        if not path or not isinstance(self.files, LocalFiles):
            raise ConfigError("has neither bytes nor a file on this machine")
        return Path(self.files.root, path)

    def _choose_columns_for_listing(self, columns: list[str]) -> list[str]:
        """Returns the columns to read when the samples are listed: label, captions and last the column of splits, as
        far as they exist. Sets `_split` to the column of splits or None, and notes a column of cross-validation folds.

        columns: all columns of the file.
        """
        own = [name for name in (self.columns.label, *self.columns.captions) if name]
        self.record_cross_validation_column(columns, own)
        self._split = next((name for name in match_column_names(SPLIT_COLUMNS, columns) if name not in own), None)
        return own if self._split is None else [*own, self._split]


class ArrowTables(Tables):
    """Reads Arrow files. The `offset` of a sample is B / 8 * 2^24 + R, for row R of the record batch that begins at
    byte B.
    """

    kind = "Arrow files, as Dataset.save_to_disk writes"
    suffix = ".arrow"

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        return any(name.lower().endswith(cls.suffix) for name in walk_some_files(files))

    def iterate_samples(self, partition: str) -> Iterator[Sample]:
        from dstrain.data.files.arrow import list_rows

        file, names = self._open_file_and_list_classes(partition)
        columns = self._choose_columns_for_listing(file.schema.names)
        for at, batch in file.iterate_batches():
            for row, values in enumerate(list_rows(batch.select(columns))):
                yield self._make_sample(Place(f"{partition}/{at}/{row}", 0, at // 8 * _ROW + row), values, names)

    def read(self, place: Place) -> bytes | Path:
        at, row = divmod(place.offset, _ROW)
        file = self._open_table_file(place.name.rsplit("/", 2)[0])
        return self._extract_image_or_path(file.read_batch_cell(at * 8, row, self.columns.image))

    @cached_property
    def _files_by_split(self) -> dict[str, list[str]]:
        names = {name for name, _ in self.files.list_names()}
        if "dataset_dict.json" in names:
            splits = [str(name) for name in self._read_json_list("dataset_dict.json", "splits")]
            return self._normalize_split_names({name: self._list_saved_arrow_files(f"{name}/") for name in splits}, "/")
        return {"": self._list_saved_arrow_files("")} if "state.json" in names else super()._files_by_split

    def _normalize_split_names(self, files_by_split: dict[str, list[str]], separator: str) -> dict[str, list[str]]:
        """Returns the files by split with standard names of the splits, such as "validation" for "val".

        Raises ConfigError if two splits get the same name. separator: what stands before a split in data.path, "/" or
        ":", for the message.
        """
        named: dict[str, str] = {}
        for name in files_by_split:
            other = named.setdefault(SPLITS.get(name.lower(), name), name)
            if other != name:
                key, root = self.request.key, self.root
                raise ConfigError(
                    f"{key}={root}: the splits {other} and {name} are called alike, and one of them would be read: "
                    f"write {key}={root}{separator}{other}, or join them"
                )
        return {split: files_by_split[name] for split, name in named.items()}

    def _compose_data_path_of_split(self, split: str, file_names: list[str]) -> str:
        folder = file_names[0].rpartition("/")[0]
        if ("state.json", False) in self.files.list_names(folder):
            return f"{self.root}/{folder}"
        return super()._compose_data_path_of_split(split, file_names)

    def _list_saved_arrow_files(self, folder: str) -> list[str]:
        """Returns the Arrow files in a folder that Dataset.save_to_disk has written, as its state.json lists them."""
        files = self._read_json_list(f"{folder}state.json", "_data_files")
        return [f"{folder}{os.path.basename(str(file['filename']))}" for file in files]

    def _read_json_list(self, name: str, key: str) -> list[Any]:
        """Returns the list at a key of a JSON file that save_to_disk has written. Raises ConfigError if there is none,
        or if the data set chooses only some rows of its files.
        """
        try:
            with self.files.open(name) as file:
                content = parse_json(file.read(1 << 24))
            values = content[key]
            if not isinstance(values, list) or not values:
                raise ValueError(f"{key} is no list")
        except NotRead:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.request.key}={self.root}: {name} cannot be read ({error}): save the data anew with save_to_disk"
            ) from None
        if rows := next((key for key in content if key.startswith("_indices") and content[key]), None):
            raise ConfigError(
                f"{self.request.key}={self.root}: {name} chooses rows by {rows}, and their files hold others, too: "
                "save load_from_disk(FOLDER).flatten_indices() anew with save_to_disk"
            )
        return values

    def _open_table_file(self, name: str) -> Any:
        return _open_arrow_file(self.files, name, self._describe_file(name))


class HubTables(ArrowTables):
    """Reads a data set of the Hugging Face hub, which `datasets` downloads into its cache, on each machine by itself.

    Without a network, a data set that is in that cache already is read.
    """

    kind = "hf-dataset:USER/NAME"

    def __init__(self, root: str, files: Files, request: Request) -> None:
        super().__init__(root, files, request)
        self._find_or_download_data_set()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not os.path.isdir(self.files.root):  # This is another machine.
            self._find_or_download_data_set()

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        return root.startswith(HUB)

    def _find_or_download_data_set(self) -> None:
        """Finds the data set in the cache of `datasets`, or downloads it into that cache. Sets `files` to a folder in
        the cache, and `_by_split` to the Arrow files of each split.

        Raises ConfigError if data.path asks for a part of a split, if `datasets` is not installed, or if loading fails.
        """
        name, _, split = self.root.removeprefix(HUB).partition(":")
        where = f"{self.request.key}={self.root}"
        if split and not _WHOLE_SPLITS.fullmatch(split):  # `datasets` marks rows of files, which are read whole here.
            whole = re.sub(r"\[.*?\]", "", split)
            raise ConfigError(
                f"{where} names a part of a split: write {self.request.key}={HUB}{name}:{whole} for all of it, or keep "
                "the part by save_to_disk of `datasets` and name its folder; data.held_out=0.02 holds out a share"
            )
        try:
            import datasets
        except ImportError:
            raise ConfigError(f"{where} needs datasets: pip install 'dstrain[hf]'") from None
        # Versions below 4 would ask whether a script of the data set may run. Nobody is asked, and none runs.
        datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False
        try:
            data = datasets.load_dataset(name, split=split or None)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ConfigError(
                f"{where} cannot be loaded ({text}): without a network only what `datasets` has "
                "in its cache is there; give a folder of parquet files, or what save_to_disk wrote"
            ) from None
        splits = {split: data} if split else dict(data)
        self._by_split = {name: [file["filename"] for file in part.cache_files] for name, part in splits.items()}
        self.files = LocalFiles(
            os.path.commonpath({os.path.dirname(p) for paths in self._by_split.values() for p in paths})
        )

    @cached_property
    def _files_by_split(self) -> dict[str, list[str]]:
        root = self.files.root
        splits = {name: [os.path.relpath(path, root) for path in paths] for name, paths in self._by_split.items()}
        return self._normalize_split_names(splits, ":")

    def _compose_data_path_of_split(self, split: str, file_names: list[str]) -> str:
        return f"{self.root}:{next(name for name in self._by_split if SPLITS.get(name.lower()) == split)}"


class ParquetTables(Tables):
    """Reads parquet files. If the bytes of an image stand unchanged in the file, the `offset` and `size` of the sample
    are those of the bytes. Else `size` is -1, and `offset` is G * 2^24 + R, for row R of row group G.
    """

    kind = "parquet shards of images"
    suffix = ".parquet"

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        names = list(islice((name for name in walk_some_files(files) if name.lower().endswith(cls.suffix)), _TRIED))
        if not names:
            return False
        from dstrain.data.files.arrow import can_hold_bytes
        from dstrain.data.formats.columns import find_image_columns

        schemas = (open_parquet_file(files, name, f"{request.key}={root}: {name}").schema for name in names)
        if "image" in request.columns or any(find_image_columns(schema, request) for schema in schemas):
            return True
        is_file = root.lower().endswith(cls.suffix) and "path" not in request.columns
        first = open_parquet_file(files, names[0], f"{request.key}={root}: {names[0]}")
        return is_file and any(can_hold_bytes(field.type) for field in first.schema)

    def compose_data_advice(self) -> str:
        remarks, file = [super().compose_data_advice()], self._open_table_file(self.list_partitions()[0])
        size = file.count_uncompressed_bytes(0, [self.columns.image])
        if size >= _HUGE and file.is_column_compressed(self.columns.image):
            remarks.append(
                f"images are compressed in row groups of {size / 1e6:.0f} MB, and each sample costs the decoding of "
                "one: `dstrain pack` writes them as shards that are read sample by sample"
            )
        return "; ".join(filter(None, remarks))

    def iterate_samples(self, partition: str) -> Iterator[Sample]:
        (file, names), image, count = self._open_file_and_list_classes(partition), self.columns.image, 0
        file.require_not_concatenated()
        columns = self._choose_columns_for_listing(file.schema.names)
        for group in range(file.num_row_groups):
            chunk = file.read_chunk_if_uncompressed(group, image)
            for row, values in enumerate(file.iterate_rows(group, [*columns, *([image] if chunk else [])])):
                offset, size = group * _ROW + row, -1
                content = _extract_encoded_image(values[image]) if chunk else None
                if content is not None:
                    at = chunk.find_value_offset(content)
                    if at is None:
                        chunk = None  # It is coded, and so is the rest of the row group.
                    else:
                        offset, size = at, len(content)
                yield self._make_sample(Place(f"{partition}/{count}", 0, offset, size), values, names)
                count += 1

    def read(self, place: Place) -> bytes | Path:
        from dstrain.data.files.arrow import read_value

        name = place.name.rpartition("/")[0]
        if place.size >= 0:
            return self.files.read_span(name, place.offset, place.size)
        group, row = divmod(place.offset, _ROW)
        with _UNPACKING:
            column = _read_row_group_column(self.files, name, self._describe_file(name), group, self.columns.image)
            if row >= len(column):
                raise ConfigError("is not in the file any more")
            return self._extract_image_or_path(read_value(column, row))

    def _open_table_file(self, name: str) -> Any:
        return open_parquet_file(self.files, name, self._describe_file(name))


def iterate_file_names_by_suffix(files: Files, *suffixes: str, folder: str = "") -> Iterator[str]:
    """Yields the files below `folder`, sorted by name, that end in one of the suffixes, in upper or lower case."""
    if isinstance(files, LocalFiles) and not (files.listed or files.pattern):
        names = walk_files(Path(files.root), folder, suffixes)
        yield from sorted(names, key=lambda name: name.replace("/", "\0"))
        return
    for name, is_folder in files.list_names(folder):
        path = f"{folder}/{name}" if folder else name
        if is_folder:
            yield from iterate_file_names_by_suffix(files, *suffixes, folder=path)
        elif name.lower().endswith(suffixes):
            yield path


def _extract_encoded_image(cell: Any) -> bytes | None:
    """Returns the encoded bytes of the image in a cell; None if the cell holds only the path of a file, or nothing."""
    return cell.get("bytes") if isinstance(cell, dict) else cell


@lru_cache(_MAPPED)
def _open_arrow_file(files: Files, name: str, display_name: str) -> Any:
    from dstrain.data.files.arrow import ArrowFile

    return ArrowFile(files.fetch_local_path(name), display_name)


@lru_cache(1)
def _read_row_group_column(files: Files, name: str, display_name: str, row_group: int, column: str) -> Any:
    """Returns one column of a parquet row group as a ChunkedArray, and caches the last result. Raises ConfigError if
    the decoded column has more than 1 GiB.
    """
    import pyarrow

    from dstrain.data.files.arrow import MAX_GROUP

    batches, size = [], 0
    for batch in open_parquet_file(files, name, display_name).iterate_batches(row_group, [column]):
        batches.append(batch.column(0))
        size += batch.nbytes
        if size > MAX_GROUP:
            raise ConfigError(f"{name} has row groups beyond {MAX_GROUP / 1e9:.3g} GB: write it anew")
    return pyarrow.chunked_array(batches)
