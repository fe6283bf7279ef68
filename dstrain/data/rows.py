"""Rows of embeddings and captions on disk: files of one kind, one after the other. See embeddings.py for the layout."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dstrain.data.bad_files import BadSample

FOLDERS = {"image_embed": "img_emb", "text_embed": "text_emb", "text_encodings": "text_encodings",
           "text_mask": "text_mask"}              # name in a batch -> folder
CAPTION_BYTES = 512                               # of a caption that is read, the rest is cut off
_COLUMNS = ("caption", "TEXT", "text")


class Table:
    """Arrays of one kind, one after the other: (n, ...) each, mapped when first read in a process."""

    def __init__(self, key: str, names: list[str], arrays: list[Any], root: Path | None = None) -> None:
        self.key, self.names, self.root = key, names, root
        self.shape, self.lengths = arrays[0].shape[1:], [len(array) for array in arrays]
        self.ends = np.cumsum(self.lengths)
        self.size = sum(array.nbytes for array in arrays)
        self.arrays: dict[int, Any] = dict(enumerate(arrays))
        for name, array in zip(names, arrays):
            if array.ndim < 2 or array.dtype not in (np.float16, np.float32, np.bool_) or \
                    (array.dtype == np.bool_) != (key == "text_mask"):
                raise ValueError(f"data.path: {name} is {array.dtype} {array.shape}: {FOLDERS[key]} holds rows of "
                                 f"{'bool' if key == 'text_mask' else 'float16 or float32'}")
            if array.shape[1:] != self.shape:
                raise ValueError(f"data.path: rows of {name} are {array.shape[1:]}, those of {names[0]} {self.shape}: "
                                 "one encoder made them all?")

    def __getstate__(self) -> dict[str, Any]:
        # A mapped array would travel to a worker as a copy of the file.
        return {**self.__dict__, "arrays": {} if self.root is not None else self.arrays}

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, row: int) -> np.ndarray:
        number, inner = self._place(row)
        if number not in self.arrays:
            self.arrays[number] = np.load(self.root / self.names[number], mmap_mode="r")
        return self.arrays[number][inner]

    def _place(self, row: int) -> tuple[int, int]:
        number = int(np.searchsorted(self.ends, row, side="right"))
        return number, row - int(self.ends[number] - self.lengths[number])

    def name(self, row: int) -> str:
        number, inner = self._place(row)
        return f"{self.names[number]}[{inner}]"

    def scan(self) -> None:
        """ValueError names the first row that cannot be used."""
        for number, name in enumerate(self.names):
            fault = fault_of(np.asarray(self.arrays[number]), self.key)
            if fault:
                raise ValueError(f"data.path: {name}[{fault[0]}] {fault[1]}: remove that row from every folder, or "
                                 "embed it again")

    def add_to(self, digest: Any) -> None:
        for number, name in enumerate(self.names):
            last = int(self.ends[number]) - 1
            ends = b"".join(np.array(self[row]).tobytes() for row in (last + 1 - self.lengths[number], last))
            digest.update(f"{name} {self.lengths[number]} {self.shape} {zlib.crc32(ends)}\n".encode())


class Captions:
    """The caption column of parquet files; a file's is kept in memory once it has been met."""

    def __init__(self, root: Path, names: list[str]) -> None:
        parquet = _parquet()
        self.root, self.names, self.columns, self.read = root, names, [], {}
        lengths = []
        for name in names:
            try:
                schema = parquet.ParquetFile(root / name)
            except (OSError, ValueError) as error:               # pyarrow's own errors are ValueErrors
                raise ValueError(f"data.path: {name} is no readable parquet file ({error})") from None
            column = next((column for column in _COLUMNS if column in schema.schema_arrow.names), None)
            if column is None:
                raise ValueError(f"data.path: {name} has no column {', '.join(_COLUMNS)}, only "
                                 f"{', '.join(schema.schema_arrow.names[:8])}")
            self.columns.append(column)
            lengths.append(schema.metadata.num_rows)
        self.lengths, self.ends = lengths, np.cumsum(lengths)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "read": {}}

    def __getitem__(self, row: int) -> Tensor:
        number = int(np.searchsorted(self.ends, row, side="right"))
        if number not in self.read:
            table = _parquet().read_table(self.root / self.names[number], columns=[self.columns[number]])
            self.read[number] = table.column(0).combine_chunks()
        inner = row - int(self.ends[number] - self.lengths[number])
        text = self.read[number][inner].as_py()
        if not text:
            raise BadSample(f"{self.names[number]}[{inner}]", "has no caption")
        return packed(text)


def packed(caption: str) -> Tensor:
    """A caption as batches hold it: uint8 (CAPTION_BYTES,), cut off between characters."""
    encoded = caption.encode("utf-8", "replace")[:CAPTION_BYTES].decode("utf-8", "ignore").encode("utf-8")
    return torch.from_numpy(np.frombuffer(encoded.ljust(CAPTION_BYTES, b"\0"), np.uint8).copy())


def fault_of(rows: np.ndarray, key: str) -> tuple[int, str] | None:
    """The first of rows (n, ...) that cannot be used, and why."""
    if rows.dtype == np.bool_:
        return None
    flat = rows.reshape(len(rows), -1)
    wrong = ~np.isfinite(flat).all(axis=1)
    if wrong.any():
        return int(wrong.argmax()), "holds NaN or infinity"
    empty = ~flat.any(axis=1)
    if key != "text_encodings" and empty.any():
        return int(empty.argmax()), "is all zeros, which has no direction"
    return None


def _parquet() -> Any:
    import pyarrow.parquet                        # slow to import, and only captions need it

    return pyarrow.parquet
