"""Reads rows of embeddings from .npy files, and captions from parquet files. See embeddings.py for the layout."""

import errno
import zipfile
import zlib
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dstrain.data.files.storage import refuse_special_file
from dstrain.data.source import BadSample
from dstrain.recipe import ConfigError

FOLDERS = {
    "image_embed": "img_emb",
    "text_embed": "text_emb",
    "text_encodings": "text_encodings",
    "text_mask": "text_mask",
}  # name in a batch -> folder
_ENDS = 1 << 16  # bytes at either end of a file of captions, for the fingerprint
_COLUMNS = ("caption", "TEXT", "text")
_MAPPED = 64  # files of a kind that a process keeps mapped: each is an open file
_AXES = {
    "image_embed": ("n", "D"),
    "text_embed": ("n", "T"),
    "text_encodings": ("n", "L", "E"),
    "text_mask": ("n", "L"),
}


class Rows:
    """Base class for rows that several files hold, numbered from 0 through all files. names: the files. lengths: the
    number of rows of each.
    """

    names: list[str]
    lengths: list[int]

    def __len__(self) -> int:
        return sum(self.lengths)

    @cached_property
    def end_row_by_file(self) -> np.ndarray:
        """Returns for each file the number after its last row. Rows are numbered through all files."""
        return np.cumsum(self.lengths)

    def locate_row(self, row: int) -> tuple[int, int]:
        """Returns (number of the file that holds a row, number of the row within this file)."""
        number = int(np.searchsorted(self.end_row_by_file, row, side="right"))
        return number, row - int(self.end_row_by_file[number] - self.lengths[number])

    def describe_row(self, row: int) -> str:
        """Returns the name of a row for messages: FILE[number within the file]."""
        number, inner = self.locate_row(row)
        return f"{self.names[number]}[{inner}]"


class Table(Rows):
    """Arrays (n, ...) of one kind, the `key` of FOLDERS. Rows are numbered through all arrays.

    Files below `root` are mapped when they are read; the 64 last used ones stay mapped. Without a root, `arrays` are
    the rows, in memory. Raises ConfigError if an array has a wrong shape or dtype for its kind, or if a file cannot be
    read.
    """

    def __init__(self, key: str, names: list[str], root: Path | None = None, arrays: list[np.ndarray] = ()) -> None:
        self.key, self.names, self.root = key, names, root
        self.shape, self.lengths, self.size = (), [], 0
        self.arrays: dict[int, np.ndarray] = dict(enumerate(arrays))  # in the order of their last use
        axes, kinds = _AXES[key], (np.bool_,) if key == "text_mask" else (np.float16, np.float32, np.float64)
        for number, name in enumerate(names):
            array = self.arrays[number] if root is None else map_npy_file(root, name)
            if array.ndim != len(axes) or array.dtype not in kinds:
                raise ConfigError(
                    f"data.path: {name} is {array.dtype} {array.shape}: {FOLDERS[key]} holds "
                    f"({', '.join(axes)}) of {'bool' if key == 'text_mask' else 'float16 or float32'}; "
                    "reshape it, or make it anew"
                )
            if number and array.shape[1:] != self.shape:
                raise ConfigError(
                    f"data.path: rows of {name} are {array.shape[1:]}, those of {names[0]} {self.shape}: "
                    "one encoder made them all?"
                )
            self.shape = array.shape[1:]
            self.lengths.append(len(array))
            self.size += array.nbytes

    def __getstate__(self) -> dict[str, Any]:
        # A mapped array would travel to a worker as a copy of the file.
        return {**self.__dict__, "arrays": {} if self.root is not None else self.arrays}

    def __getitem__(self, row: int) -> np.ndarray:
        number, inner = self.locate_row(row)
        return self._get_mapped_array(number)[inner]

    def _get_mapped_array(self, number: int) -> np.ndarray:
        """Returns the array of a file, mapped into memory. Keeps the 64 files that were used last mapped."""
        if self.root is None:
            return self.arrays[number]
        array = self.arrays.pop(number, None)
        if array is None:
            array = map_npy_file(self.root, self.names[number])
            while len(self.arrays) >= _MAPPED:
                del self.arrays[next(iter(self.arrays))]
        self.arrays[number] = array
        return array

    def require_usable_rows(self) -> None:
        """Reads all rows. Raises ConfigError, which names the row, if a row has NaN or infinity, or if an embedding is
        all zeros.
        """
        for number, name in enumerate(self.names):
            fault = find_faulty_row(convert_floats_to_float32(self._get_mapped_array(number)), self.key)
            if fault:
                raise ConfigError(
                    f"data.path: {name}[{fault[0]}] {fault[1]}: remove that row from every folder, or embed it again"
                )

    def hash_file_ends_into(self, digest: Any) -> None:
        """Updates the hash object `digest` with each file's name, length, row shape, first row and last row."""
        for number, name in enumerate(self.names):
            last = int(self.end_row_by_file[number]) - 1
            ends = b"".join(np.array(self[row]).tobytes() for row in (last + 1 - self.lengths[number], last))
            digest.update(f"{name} {self.lengths[number]} {self.shape} {zlib.crc32(ends)}\n".encode())

    def hash_rows_into(self, digest: Any, count: int | None) -> None:
        """Updates the hash object `digest` with `count` rows, evenly spaced, or with all if `count` is None. Does
        nothing for built-in data.
        """
        if self.root is None:
            return
        if count is None:
            for number in range(len(self.names)):
                digest.update(np.ascontiguousarray(self._get_mapped_array(number)))
        else:
            for row in np.linspace(0, len(self) - 1, min(count, len(self))).astype(int).tolist():
                digest.update(np.ascontiguousarray(self[row]))


def map_npy_file(root: Path, name: str) -> np.ndarray:
    """Returns the array of a .npy file, mapped into memory read-only. Raises ConfigError, which names the file, if it
    cannot be read, is no .npy file, or has no rows, or if too many files are open.
    """
    try:
        refuse_special_file(root / name)
        array = np.load(root / name, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, ArithmeticError, zipfile.BadZipFile) as error:
        if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
            raise ConfigError(
                f"data.path: {name} cannot be opened, since too many files are open: raise the limit "
                "(ulimit -n), or set a smaller data.workers"
            ) from None
        reason = " ".join(str(error).split())[:150]
        if "pickle" in reason:  # numpy's remedy would execute what the file says
            reason = "it is of another kind, or holds Python objects"
        raise ConfigError(f"data.path: {name} is no readable .npy file ({reason}): write it with numpy.save") from None
    if not isinstance(array, np.ndarray):  # np.load reads a zip of arrays under any name
        raise ConfigError(f"data.path: {name} is a zip file (.npz, or torch's): save each array as .npy")
    if not array.ndim or not len(array):
        raise ConfigError(f"data.path: {name} holds no rows; remove it")
    return array


def read_embeddings(path: Path) -> Tensor:
    """Returns the embeddings in a .npy file as float32 (N, D). Raises ConfigError if the file holds no floats (N, D), N
    > 0, or if a row has NaN or infinity or is all zeros.
    """
    array = map_npy_file(path.parent, path.name)
    if array.ndim != 2 or array.dtype not in (np.float16, np.float32, np.float64):
        raise ConfigError(f"{path} is {array.dtype} {array.shape}, and embeddings are float (N, D)")
    values = convert_floats_to_float32(array)
    if fault := find_faulty_row(values, "image_embed"):
        raise ConfigError(f"{path}: row {fault[0]} {fault[1]}: leave it out, or embed it again")
    return torch.from_numpy(values)


def convert_floats_to_float32(values: np.ndarray) -> np.ndarray:
    """Returns a copy of an array as float32, or as bool if it is bool. Values too large for float32 become infinity."""
    with np.errstate(over="ignore"):
        return np.array(values, dtype=bool if values.dtype == bool else np.float32)


class Captions(Rows):
    """The captions in a column of parquet files: caption, else TEXT, else text. When the first caption of a file is
    read, all captions of this file are kept in memory.

    Raises ConfigError if a file cannot be read, or if it has no such column of text. Reading a row raises BadSample if
    it has no caption.
    """

    def __init__(self, root: Path, names: list[str]) -> None:
        parquet = _import_parquet()
        self.root, self.names, self.lengths, self.columns, self.cached = root, names, [], [], {}
        for name in names:
            try:
                refuse_special_file(root / name)
                schema = parquet.ParquetFile(root / name)
            except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
                raise ConfigError(f"data.path: {name} is no readable parquet file ({error})") from None
            column = next((column for column in _COLUMNS if column in schema.schema_arrow.names), None)
            if column is None:
                raise ConfigError(
                    f"data.path: {name} has no column {', '.join(_COLUMNS)}, only "
                    f"{', '.join(schema.schema_arrow.names[:8])}"
                )
            _require_text_column(name, schema.schema_arrow.field(column))
            self.columns.append(column)
            self.lengths.append(schema.metadata.num_rows)

    @staticmethod
    def has_caption_columns(root: Path, names: list[str]) -> bool:
        """Returns whether every file has a column of captions. Returns True if reading a file fails: then the
        constructor will raise the error.
        """
        try:
            for name in names:
                refuse_special_file(root / name)
            return all(set(_COLUMNS) & set(_import_parquet().read_schema(root / name).names) for name in names)
        except (OSError, ValueError):
            return True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "cached": {}}

    def __getitem__(self, row: int) -> Tensor:
        number, inner = self.locate_row(row)
        if number not in self.cached:
            table = _import_parquet().read_table(self.root / self.names[number], columns=[self.columns[number]])
            self.cached[number] = table.column(0).combine_chunks()
        text = self.cached[number][inner].as_py()
        if not text:
            raise BadSample(self.describe_row(row), "has no caption")
        return pack_caption(text)

    def hash_file_ends_into(self, digest: Any) -> None:
        """Updates the hash object `digest` with each file's name, number of rows, size, first and last 64 KiB."""
        for name, length in zip(self.names, self.lengths):
            with open(self.root / name, "rb") as file:
                head = file.read(_ENDS)
                size = file.seek(0, 2)
                file.seek(max(0, size - _ENDS))
                ends = blake2b(head + file.read(_ENDS), digest_size=8)
            digest.update(f"{name} {length} {size} {ends.hexdigest()}\n".encode())


def pack_caption(caption: str) -> Tensor:
    """Returns a caption as a tensor: its UTF-8 bytes, uint8 (bytes,)."""
    return torch.tensor(list(caption.encode("utf-8", "replace")), dtype=torch.uint8)


def find_faulty_row(rows: np.ndarray, table_name: str) -> tuple[int, str] | None:
    """Returns (number, reason) of a faulty row of `rows` (n, ...); None if there is none. A row is faulty if it has NaN
    or infinity, or if it is all zeros and no text encoding. Rows of bool are never faulty.

    table_name: the name of the table, such as "image_embed" or "text_encodings"
    """
    if rows.dtype == np.bool_:
        return None
    flat = rows.reshape(len(rows), -1)
    wrong = ~np.isfinite(flat).all(axis=1)
    if wrong.any():
        return int(wrong.argmax()), "holds NaN or infinity"
    empty = ~flat.any(axis=1)
    if table_name != "text_encodings" and empty.any():
        return int(empty.argmax()), "is all zeros, which has no direction"
    return None


def _require_text_column(name: str, field: Any) -> None:
    """Raises ConfigError if a column of a parquet file does not hold texts. field: pyarrow's description of the
    column.
    """
    import pyarrow.types

    kind = field.type.value_type if pyarrow.types.is_dictionary(field.type) else field.type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_null(kind)):
        raise ConfigError(f"data.path: column {field.name} of {name} holds {field.type}: write captions as strings")


def _import_parquet() -> Any:
    import pyarrow.parquet  # slow to import, and only captions need it

    return pyarrow.parquet
