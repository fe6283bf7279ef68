"""Writes and reads shards of encoded files, the format of `dstrain pack`; `PackedFiles` reads samples by their offset.

    FOLDER/packing.json                written first: what the shards are made of
    FOLDER/files_00000.safetensors     so many samples each, the last one fewer
    FOLDER/pack.json                   written last, with a hash of itself: classes, and each shard's size and hash

Of data with a test of their own, `dstrain convert` writes two such folders, FOLDER/train/ and FOLDER/held_out/.

A shard holds its n samples in the order of the data, as any reader of safetensors sees it:

    bytes          uint8 (b,)      the files as they were, one after the other
    ends           int64 (n,)      where each one ends in `bytes`; an unreadable file has no bytes
    label          int64 (n,)      index into the classes, if the data have labels
    names          uint8           names of the files, UTF-8, one after the other
    name_ends      int64 (n,)      where each name ends
    captions       uint8           captions, UTF-8, one after the other, if the data have some
    caption_ends   int64 (m,)      where each caption ends
    captions_ends  int64 (n,)      how many captions there are up to each sample, its own included

The header always has 4096 bytes, so that a shard is written from its beginning to its end, and memory holds its
columns alone. The bytes of a shard are a function of its samples alone.
"""

import json
import os
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from dstrain.data.files.local import Files
from dstrain.data.formats.base import Layout, Place, Request, Sample, file_exists, list_first_folder_entries
from dstrain.disk import sealed, small
from dstrain.recipe import ConfigError, NotRead

INDEX, PACKING, FORMAT = "pack.json", "packing.json", 1
TRAIN, HELD_OUT = "train", "held_out"  # folders of shards in one folder, which then are its splits
_HEADER = 4096  # bytes of a shard before its arrays
_MAX_COLUMN_BYTES = 1 << 31
_TYPES = {
    "ends": "I64",
    "label": "I64",
    "name_ends": "I64",
    "caption_ends": "I64",
    "captions_ends": "I64",
    "bytes": "U8",
    "names": "U8",
    "captions": "U8",
}
_ENDS = {"names": "name_ends", "captions": "caption_ends"}
_COLUMNS = tuple(name for name in _TYPES if name != "bytes")  # numbers first, since they lie at multiples of 8
_MAX_FILE_BYTES = 1 << 28


class Packed(NamedTuple):
    """Describes one sample of a shard, without its bytes."""

    offset: int  # of its bytes in the shard
    size: int  # 0 if it could not be read when it was packed
    name: str
    label: int | None
    captions: tuple[str, ...]


def name_shard(number: int) -> str:
    """Returns the file name of the shard with this number: files_00002.safetensors for 2."""
    return f"files_{number:05d}.safetensors"


class ShardWriter:
    """Writes one shard to an open file: call `add_sample` for each sample, then `close`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._size = file, 0
        self._numbers = {name: array("q") for name in _COLUMNS if _TYPES[name] == "I64"}
        self._texts = {"names": bytearray(), "captions": bytearray()}
        file.write(bytes(_HEADER))

    def add_sample(self, name: str, content: bytes, label: int | None, captions: tuple[str, ...]) -> None:
        """Writes the encoded bytes of a sample to the file, and keeps the other arguments in memory until `close`
        writes them.

        content: the encoded bytes; b"" if the sample is unreadable.
        label: None if samples have no labels. Either all samples of a shard have one, or none has.
        captions: () if samples have no captions. Either all samples of a shard have some, or none has.
        """
        self._file.write(content)
        self._size += len(content)
        self._numbers["ends"].append(self._size)
        self._append_text("names", "name_ends", os.fsencode(name))
        if label is not None:
            self._numbers["label"].append(label)
        for caption in captions:
            self._append_text("captions", "caption_ends", caption.encode("utf-8", "replace"))
        if captions:
            self._numbers["captions_ends"].append(len(self._numbers["caption_ends"]))

    def _append_text(self, text_column: str, ends_column: str, text: bytes) -> None:
        """Appends `text` to a column, and the new length of that column, in bytes, to the column `ends_column`."""
        self._texts[text_column] += text
        self._numbers[ends_column].append(len(self._texts[text_column]))

    def close(self) -> None:
        """Writes the columns and the header of the shard, which must have at least one sample. Leaves the file open."""
        padding = bytes(-self._size % 8)
        self._file.write(padding)
        columns = {name: values for name, values in self._numbers.items() if values}
        columns |= {name: self._texts[name] for name, ends in _ENDS.items() if ends in columns}
        for name in _COLUMNS:
            if name in columns:
                self._file.write(columns[name])
        lengths = {"bytes": self._size + len(padding)} | {
            name: len(columns[name]) * (8 if _TYPES[name] == "I64" else 1) for name in _COLUMNS if name in columns
        }
        ends = list(accumulate(lengths.values()))
        header = {
            name: {
                "dtype": _TYPES[name],
                "shape": [length // (8 if _TYPES[name] == "I64" else 1)],
                "data_offsets": [end - length, end],
            }
            for (name, length), end in zip(lengths.items(), ends)
        }
        text = json.dumps(header).encode()
        self._file.seek(0)
        self._file.write((_HEADER - 8).to_bytes(8, "little") + text.ljust(_HEADER - 8))


def iterate_packed_samples(files: Files, shard_name: str) -> Iterator[Packed]:
    """Yields the place, name, label and captions of each sample of a shard, without reading the images or clips
    themselves.

    Raises ConfigError if the shard is damaged.
    """
    try:
        columns = _read_shard_columns(files, shard_name)
        ends = columns["ends"].tolist()
        names, labels, captions = columns["names"].tobytes(), columns.get("label"), columns.get("captions_ends")
        texts = columns["captions"].tobytes() if captions is not None else b""
        for number, (end, name_end) in enumerate(zip(ends, columns["name_ends"].tolist(), strict=True)):
            begin, name_begin = (ends[number - 1], int(columns["name_ends"][number - 1])) if number else (0, 0)
            own = () if captions is None else range(int(captions[number - 1]) if number else 0, int(captions[number]))
            if not 0 <= begin <= end <= columns["bytes"] or not 0 <= name_begin <= name_end <= len(names):
                raise ValueError("ends that lead backwards")
            yield Packed(
                _HEADER + begin,
                end - begin,
                os.fsdecode(names[name_begin:name_end]),
                None if labels is None else int(labels[number]),
                tuple(_decode_caption(texts, columns["caption_ends"], place) for place in own),
            )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(f"{shard_name} is no shard of `dstrain pack`, or is damaged ({error})") from None


def _decode_caption(texts: bytes, ends: np.ndarray, caption_number: int) -> str:
    """Returns caption number `caption_number` of a shard.

    texts: all captions of the shard in UTF-8, joined. ends: the offset in `texts`, in bytes, at which each caption
    ends.
    """
    return texts[int(ends[caption_number - 1]) if caption_number else 0 : int(ends[caption_number])].decode("utf-8")


def _read_shard_columns(files: Files, shard_name: str) -> dict[str, Any]:
    """Returns the columns of a shard by name, as arrays. The entry "bytes" is no array, but a number: the total bytes
    of all samples.

    Raises ValueError if the header gives a column an impossible place, or more than 2 GiB.
    """
    header = small.parse_json(files.read_span(shard_name, 8, _HEADER - 8))
    columns: dict[str, Any] = {"bytes": header["bytes"]["data_offsets"][1]}
    for column in _COLUMNS:
        if column in header:
            begin, end = header[column]["data_offsets"]
            if not 0 <= begin <= end or end - begin > _MAX_COLUMN_BYTES:
                raise ValueError(f"a column {column} from {begin} to {end}")
            columns[column] = np.frombuffer(
                files.read_span(shard_name, _HEADER + begin, end - begin),
                np.int64 if _TYPES[column] == "I64" else np.uint8,
            )
    return columns


def hash_file(path: Path) -> str:
    """Returns the BLAKE2b hash of a file's content, as 64 hexadecimal digits."""
    digest = blake2b(digest_size=32)
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_pack_json(files: Files) -> dict[str, Any]:
    """Returns the parsed content of pack.json: the classes, and the size and hash of each shard.

    Raises ConfigError if the file does not exist yet, is damaged, or was written by a version with another format.
    """
    try:
        with files.open(INDEX) as file:
            body = sealed.parse_json_if_hash_matches(file.read(small.MEGABYTE << 8))
    except FileNotFoundError:
        raise ConfigError(
            "is not packed to the end: give the command that began it once more, and it goes on where it stopped"
        ) from None
    if body is None:
        raise ConfigError(f"has a {INDEX} that is truncated or altered: give the command that wrote it once more")
    if body.get("format") != FORMAT:
        raise ConfigError(f"has format {body.get('format')}, this version reads {FORMAT}: pack the data again")
    try:
        names = [shard["name"] for shard in body["shards"] if type(shard["size"]) is int]
        sound = names == [name_shard(number) for number in range(len(body["shards"]))] and body["noun"]
        sound = sound and all(type(name) is str for name in body["classes"])
    except (KeyError, TypeError):
        sound = False
    if not sound:
        raise ConfigError(f"has a {INDEX} that `dstrain pack` has not written: pack the data again")
    return body


def find_packed_splits(path: str, files: Files) -> tuple[str, str] | None:
    """Returns the paths of train/ and held_out/ in the folder `path` if both hold shards of `dstrain pack`; None for
    other data.
    """
    top = list_first_folder_entries(files)
    for name in (TRAIN, HELD_OUT):
        if (name, True) not in top or not file_exists(files, f"{name}/{PACKING}"):
            return None
    return os.path.join(path, TRAIN), os.path.join(path, HELD_OUT)


class PackedFiles(Layout):
    """Reads the samples of shards. For a sample, `file` is the number of its shard; `offset` and `size` are its bytes
    there.
    """

    kind = "shards of dstrain pack"

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        return file_exists(files, INDEX) or (file_exists(files, PACKING) and file_exists(files, name_shard(0)))

    def list_partitions(self) -> list[str]:
        """Returns the names of the shards, and sets `classes`.

        Raises ConfigError if
        - packing was interrupted,
        - a shard is missing or has another size,
        - the shards hold clips and images are asked for, or the reverse,
        - the recipe has labels of its own, by data.labels or data.class_list, where these data are not one of several
          sources: shards keep the labels with which they were packed.
        """
        where = f"{self.request.key}={self.root}"
        try:
            body = read_pack_json(self.files)
        except ConfigError as error:
            raise ConfigError(f"{where} {error}") from None
        if body["noun"] != self.request.noun:
            remedy = "write data.num_frames=17, say" if body["noun"] == "clips" else "leave data.num_frames out"
            raise ConfigError(f"{where} holds {body['noun']}, not {self.request.noun}: {remedy}")
        chosen = {"labels": self.request.labels not in ("auto", "none"), "class_list": self.request.class_list}
        if any(chosen.values()) and self.request.key == "data.path" and not self.request.mixed:
            raise ConfigError(
                f"{where} keeps the labels with which it was packed, and data."
                f"{next(name for name in chosen if chosen[name])} is of no use here: leave it out, or "
                "give it to `dstrain pack`"
            )
        for shard in body["shards"]:
            try:
                size = self.files.read_stat(shard["name"]).size
            except NotRead:
                raise
            except OSError:
                size = None
            if size != shard["size"]:
                problem = "is missing" if size is None else f"has {size} bytes instead of {shard['size']}"
                raise ConfigError(f"{where}: {shard['name']} {problem}: give the command that wrote it once more")
        self.classes = () if self.request.labels == "none" else tuple(body["classes"])
        return [shard["name"] for shard in body["shards"]]

    def iterate_samples(self, partition: str) -> Iterator[Sample]:
        number = int(partition.removeprefix("files_").partition(".")[0])
        try:
            for packed in iterate_packed_samples(self.files, partition):
                yield Sample(
                    Place(packed.name, number, packed.offset, packed.size),
                    None if self.request.labels == "none" else packed.label,
                    packed.captions if self.request.captions else (),
                )
        except ConfigError as error:
            raise ConfigError(f"{self.request.key}={self.root}: {error}") from None

    def read(self, place: Place) -> bytes:
        if not 0 < place.size <= _MAX_FILE_BYTES:
            problem = "it could not be read when it was packed" if not place.size else f"has {place.size} bytes"
            raise ConfigError(f"{problem}; at most {_MAX_FILE_BYTES} are read")
        return self.files.read_span(name_shard(place.file), place.offset, place.size)

    def list_files_watched_for_changes(self) -> list[str]:
        return [INDEX, *self.list_partitions()]
