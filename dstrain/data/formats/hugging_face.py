"""Hugging Face's data sets on a disk or at an address: what `save_to_disk` writes, Arrow files, parquet shards.

    FOLDER/state.json, data-00000-of-00002.arrow                of Dataset.save_to_disk
    FOLDER/dataset_dict.json, train/..., test/...               of DatasetDict.save_to_disk
    FOLDER/data/train-00000-of-00002.parquet, test-...          as on the hub; also FOLDER/data/train-*.parquet, FILE

Where there are splits, the data are train, and held out is validation or test. pyarrow reads all of them and knows the
columns by their types: images are bytes, or a struct of bytes and path; labels are ClassLabel, or a column `label`.
"""

import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

from dstrain.data.files.local import Files, LocalFiles
from dstrain.data.formats.base import Layout, Place, Request, Sample, peek
from dstrain.recipe import ConfigError, NotRead

HUB = "hf-dataset:"
SPLITS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}  # words in names of files
_UNSEEN = ("validation", "test")
_TRIED = 8  # folders of each, before it is known that the data are such files
_DEEP = 3  # folders below each other in which files are looked for
_MAPPED = 256  # Arrow files that a worker keeps open
_ROW = 1 << 24  # rows of a record batch or row group; above them the place of that
_HUGE = 4 << 20  # bytes of a row group above which random order is worth a warning


class Tables(Layout):
    """Files with a column of images; a sample's name is that of its file and its row there."""

    suffix: str
    columns_read = ("image", "label", "caption")

    def __init__(self, root: str, files: Files, request: Request) -> None:
        super().__init__(root, files, request)
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_open", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def _reset(self) -> None:
        self._open: OrderedDict[Any, Any] = OrderedDict()  # of this process: files, or rows
        self._lock = threading.Lock()

    @cached_property
    def columns(self) -> Any:
        return _arrow().columns_of(self._schema(self._chosen()[0]), self.request, self.root)

    def parts(self) -> list[str]:
        self.classes = self.columns.classes
        return self._chosen()

    def _chosen(self) -> list[str]:
        splits = self._splits()
        chosen = splits.get("train") or (next(iter(splits.values())) if len(splits) == 1 else None)
        if chosen is None:
            raise ConfigError(
                f"{self.request.key}={self.root} has the splits {', '.join(sorted(splits))}, and no "
                "train: name the files of one of them, such as FOLDER/data/test-*.parquet"
            )
        return chosen

    def watched(self) -> list[str]:
        parts = self.parts()
        return [*sorted({"", *(part.rpartition("/")[0] for part in parts)}), *parts]

    def unseen(self) -> str | None:
        splits = self._splits()
        name = next((name for name in _UNSEEN if name in splits), None) if "train" in splits else None
        return None if name is None else self._path_of(name, splits[name])

    def _splits(self) -> dict[str, list[str]]:
        """The files of each split by its name; files whose names say none are a split "", where there is no other."""
        splits: dict[str, list[str]] = {}
        for name in files_below(self.files, self.suffix, _pattern(self.root)):
            words = re.split(r"[^a-z]+", name.lower()) if _pattern(self.root) is None else ()
            splits.setdefault(next((SPLITS[word] for word in words if word in SPLITS), ""), []).append(name)
        return {name: files for name, files in splits.items() if name} or splits

    def _path_of(self, split: str, names: list[str]) -> str:
        """What data.path would be for a split alone."""
        folder, _, common = os.path.commonprefix(names).rpartition("/")
        place = "/".join(filter(None, (self.root.rstrip("/"), folder)))
        if len(names) > 1 and common:
            common += f"*{self.suffix}"
        return f"{place}/{common}" if common else place

    def _schema(self, part: str) -> Any:
        raise NotImplementedError

    def _where(self, part: str) -> str:
        return f"{self.request.key}={self.root}: {part}"

    def _sample(self, place: Place, row: dict[str, Any]) -> Sample:
        """A sample of its label and captions."""
        columns, label, captions = self.columns, None, []
        if columns.label is not None:
            label = row[columns.label]
            label = int(label) if isinstance(label, bool) else label
            if not isinstance(label, int | str) or (
                isinstance(label, int) and not 0 <= label < (len(self.classes) or 1 << 31)
            ):
                raise ConfigError(
                    f"{self.request.key}={self.root}: {place.name} has the {columns.label} {label!r}, "
                    "which is no class (-1: it is kept secret): write data.labels=none to leave labels "
                    "out, or take another split"
                )
        for name in columns.captions:
            texts = row[name] if isinstance(row[name], list) else [row[name]]
            captions += [str(text or "").strip() for text in texts]
        # Without a text, it will be a bad sample.
        return Sample(place, label, tuple(captions) or ("",) * bool(columns.captions))

    def _image(self, value: Any) -> bytes | Path:
        """The bytes of an image, or where the table names a file instead, its path."""
        content = bytes_of(value)
        if content is not None:
            return content
        path = value.get("path") if isinstance(value, dict) else None
        if not path or not isinstance(self.files, LocalFiles):
            raise ConfigError("has neither bytes nor a file on this machine")
        return Path(self.files.root, path)

    @property
    def _read_columns(self) -> list[str]:
        return [name for name in (self.columns.label, *self.columns.captions) if name]


class ArrowTables(Tables):
    """`offset` is a row in the record batch that begins at a byte: byte / 8 * 2^24 + row."""

    kind = "Arrow files, as Dataset.save_to_disk writes"
    suffix = ".arrow"

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        return of_images(request) and _first_below(files, cls.suffix, _pattern(root)) is not None

    def _splits(self) -> dict[str, list[str]]:
        names = {name for name, _ in self.files.names()}
        if "dataset_dict.json" in names:
            splits = self._json("dataset_dict.json", "splits")
            return {SPLITS.get(str(name).lower(), str(name)): self._saved(f"{name}/") for name in splits}
        return {"": self._saved("")} if "state.json" in names else super()._splits()

    def _path_of(self, split: str, names: list[str]) -> str:
        saved = self.files.names(names[0].rpartition("/")[0])
        return (
            f"{self.root}/{names[0].rpartition('/')[0]}"
            if ("state.json", False) in saved
            else super()._path_of(split, names)
        )

    def _saved(self, folder: str) -> list[str]:
        files = self._json(f"{folder}state.json", "_data_files")
        return [f"{folder}{os.path.basename(str(file['filename']))}" for file in files]

    def _json(self, name: str, key: str) -> list[Any]:
        try:
            with self.files.open(name) as file:
                content = json.loads(file.read(1 << 24))[key]
            if not isinstance(content, list) or not content:
                raise ValueError(f"{key} is no list")
            return content
        except NotRead:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.request.key}={self.root}: {name} cannot be read ({error}): save the data anew with save_to_disk"
            ) from None

    def _schema(self, part: str) -> Any:
        return self._file(part).schema

    def samples(self, part: str) -> Iterator[Sample]:
        for at, batch in self._file(part).batches():
            kept = [batch.schema.get_field_index(name) for name in self._read_columns]
            if -1 in kept or batch.schema.get_field_index(self.columns.image) < 0:
                raise ConfigError(f"{self._where(part)} has other columns than the first file")
            for row, values in enumerate(_arrow().values_of(batch.select(kept))):
                yield self._sample(Place(f"{part}/{at}/{row}", 0, at // 8 * _ROW + row), values)

    def read(self, place: Place) -> bytes | Path:
        at, row = divmod(place.offset, _ROW)
        file = self._file(place.name.rsplit("/", 2)[0])
        return self._image(file.row(at * 8, row, self.columns.image).as_py())

    def _file(self, part: str) -> Any:
        with self._lock:
            if part not in self._open:
                self._open[part] = _arrow().ArrowFile(self.files.local(part), self._where(part))
                if len(self._open) > _MAPPED:
                    self._open.popitem(last=False)
            return self._open[part]


class ParquetTables(Tables):
    """`offset` and `size` are the bytes of an image that is stored as it is; else size is -1 and `offset` a row in a
    row group: group * 2^24 + row.
    """

    kind = "parquet shards of images"
    suffix = ".parquet"

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        first = _first_below(files, cls.suffix, _pattern(root)) if of_images(request) else None
        if first is None:
            return False
        schema = _arrow().ParquetRows(files, first, f"{request.key}={root}: {first}").schema
        named = root.lower().endswith(cls.suffix) and "path" not in request.columns and _arrow().holds_bytes(schema)
        return named or "image" in request.columns or bool(_arrow().image_columns(schema, request))

    def _schema(self, part: str) -> Any:
        return _arrow().ParquetRows(self.files, part, self._where(part)).schema

    def advice(self) -> str:
        part = self.parts()[0]
        file = _arrow().ParquetRows(self.files, part, self._where(part))
        size, is_plain = file.stored(self.columns.image)
        return (
            ""
            if is_plain or size < _HUGE
            else (
                f"images are compressed in row groups of {size / 1e6:.0f} MB, "
                "and each sample costs the decoding of one: "
                "launch/pack.py writes them as shards that are read sample by sample"
            )
        )

    def samples(self, part: str) -> Iterator[Sample]:
        file, image, count = _arrow().ParquetRows(self.files, part, self._where(part)), self.columns.image, 0
        missing = {image, *self._read_columns} - set(file.schema.names)
        if missing:
            raise ConfigError(
                f"{self._where(part)} has no column {', '.join(sorted(missing))}, as "
                f"the first file has; it has {', '.join(file.schema.names)}"
            )
        for group in range(len(file)):
            chunk, row = file.plain(group, image), 0
            for batch in file.rows(group, [*self._read_columns, *([image] if chunk else [])]):
                for number, values in enumerate(_arrow().values_of(batch.select(self._read_columns))):
                    offset, size = group * _ROW + row, -1
                    content = bytes_of(_arrow().value_at(batch.column(image), number).as_py()) if chunk else None
                    if content is not None:
                        at = chunk.place(content)
                        chunk = chunk if at is not None else None  # coded: the rest of the row group is, too
                        offset, size = (offset, size) if at is None else (at, len(content))
                    yield self._sample(Place(f"{part}/{count}", 0, offset, size), values)
                    row, count = row + 1, count + 1

    def read(self, place: Place) -> bytes | Path:
        part = place.name.rpartition("/")[0]
        if place.size >= 0:
            return self.files.span(part, place.offset, place.size)
        group, row = divmod(place.offset, _ROW)
        with self._lock:
            return self._image(_arrow().value_at(*self._in_batches(part, group, row)).as_py())

    def _in_batches(self, part: str, group: int, row: int) -> tuple[Any, int]:
        """The column of images with a row of a row group, and the row's place in it; the last row group is kept."""
        if self._open.get("group") != (part, group):
            self._open.clear()
            batches, size = [], 0
            for batch in _arrow().ParquetRows(self.files, part, self._where(part)).rows(group, [self.columns.image]):
                batches.append(batch.column(0))
                size += batch.nbytes
                if size > _arrow().MAX_GROUP:
                    raise ConfigError(f"{part} has row groups beyond {_arrow().MAX_GROUP / 1e9:.3g} GB: write it anew")
            self._open.update(group=(part, group), batches=batches)
        for column in self._open["batches"]:
            if row < len(column):
                return column, row
            row -= len(column)
        raise ConfigError("is not in the file any more")


class HubTables(ArrowTables):
    """A data set of the hub, which `datasets` downloads into its own cache as Arrow files; each machine has its own."""

    kind = "hf-dataset:USER/NAME"

    def __init__(self, root: str, files: Files, request: Request) -> None:
        super().__init__(root, files, request)
        self._load()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not os.path.isdir(self.files.root):  # this is another machine
            self._load()

    def _load(self) -> None:
        self._by_split = hub_files(self.root, self.request)
        folders = [os.path.dirname(path) for paths in self._by_split.values() for path in paths]
        self.files = LocalFiles(os.path.commonpath(folders))

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        return root.startswith(HUB) and of_images(request)

    def _splits(self) -> dict[str, list[str]]:
        return {
            SPLITS.get(split.lower(), split): [os.path.relpath(path, self.files.root) for path in paths]
            for split, paths in self._by_split.items()
        }

    def _path_of(self, split: str, names: list[str]) -> str:
        return f"{self.root}:{next(name for name in self._by_split if SPLITS.get(name.lower()) == split)}"


def hub_files(root: str, request: Request) -> dict[str, list[str]]:
    """The Arrow files of each split of a data set of the hub, downloaded where they are not in the cache yet."""
    name, _, split = root.removeprefix(HUB).partition(":")
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"{request.key}={root} needs datasets: pip install 'dstrain[hf]'") from None
    try:
        data = datasets.load_dataset(name, split=split or None)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(
            f"{request.key}={root} cannot be loaded ({text}): without a network only what `datasets` has "
            "in its cache is there; give a folder of parquet files, or what save_to_disk wrote"
        ) from None
    splits = {split: data} if split else dict(data)
    return {split: [entry["filename"] for entry in part.cache_files] for split, part in splits.items()}


def bytes_of(value: Any) -> bytes | None:
    """The encoded image of a cell; None: it is not in the table."""
    return value.get("bytes") if isinstance(value, dict) else value


def files_below(
    files: Files, suffix: str, pattern: str | None = None, folder: str = "", deep: int = _DEEP
) -> Iterator[str]:
    """The files with a suffix, in the order of their names; `pattern`: those directly in the folder that it fits."""
    for name, is_folder in files.names(folder):
        path = f"{folder}/{name}" if folder else name
        if is_folder and deep and pattern is None:
            yield from files_below(files, suffix, None, path, deep - 1)
        elif not is_folder and name.lower().endswith(suffix) and (pattern is None or fnmatch(name, pattern)):
            yield path


def _first_below(files: Files, suffix: str, pattern: str | None, folder: str = "", deep: int = _DEEP) -> str | None:
    """A file with a suffix, looked for in some folders and some names of each: the data may be anything, and large."""
    if folder:
        names = files.names(folder) if files.far else peek(LocalFiles(Path(files.root, folder)))
    else:
        names = peek(files)
    for name, is_folder in names:
        if not is_folder and name.lower().endswith(suffix) and (pattern is None or fnmatch(name, pattern)):
            return f"{folder}/{name}".lstrip("/")
    folders = [name for name, is_folder in names if is_folder][:_TRIED] if deep and pattern is None else []
    found = (_first_below(files, suffix, None, f"{folder}/{name}".lstrip("/"), deep - 1) for name in folders)
    return next(filter(None, found), None)


def _arrow() -> Any:
    """What needs pyarrow, whose import takes half a second that other data do without."""
    from dstrain.data.formats import arrow_files

    return arrow_files


def of_images(request: Request) -> bool:
    """Whether images are wanted, and not clips."""
    return ".png" in request.suffixes


def _pattern(root: str) -> str | None:
    """The last part of a path with *, such as train-*.parquet."""
    return root.rpartition("/")[2] if "*" in root else None
