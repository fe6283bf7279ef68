"""LSUN's LMDB environments: a folder with a data.mdb, whose values are encoded images by keys of any kind.

    data.path=lsun/bedroom_train_lmdb           one environment, without classes; also a single file, FILE.lmdb
    data.path=lsun                              all *_lmdb in it, each of which is a class; *_val_lmdb are held out
    data.path=lsun/{tower,bridge}_val_lmdb/data.mdb     these

The file is only read, without its lock, and a value by its place, which the pages of the tree tell. The library `lmdb`
maps the file and checks no size: a truncated one ends every process that reads it (SIGBUS).
The format: mdb.c of LMDB 0.9, as machines of 64 bits write it that store the low byte first.
"""

import os
from collections.abc import Iterator
from struct import Struct
from typing import BinaryIO

from dstrain.data.files.listing import listing
from dstrain.data.files.local import Files
from dstrain.data.formats.base import Layout, Place, Request, Sample, exists, peek
from dstrain.data.formats.tars import MAX_BYTES
from dstrain.recipe import ConfigError

_DATA, _END, _UNSEEN, _SINGLE = "data.mdb", "_lmdb", "_val_lmdb", (".lmdb", ".mdb")
# Magic, version, page size; of the main tree flags, depth and root; last page, transaction.
_META = Struct("<16xII16xI48xHH32xQQQ")
_PAGE = Struct("<10xHHH")  # flags, end of the list of nodes, begin of the nodes
_NODE = Struct("<HHHH")  # bytes of a leaf's value, or page of a branch (48 bits); bytes of the key
_BRANCH, _LEAF = 1, 2  # flags of a page
_BIG, _TREES = 1, 6  # flags of a node: a value in pages of its own; no value but a tree
_MAGIC, _VERSION, _HEAD = 0xBEEFC0DE, 1, 16
_LEAST = 64  # bytes of an image; shorter values are numbers, such as the count of images
_TRIED = 10  # values, of which one must begin as an image does
_BEGINNINGS = (b"\xff\xd8", b"\x89PNG", b"RIFF", b"BM")


class Lmdbs(Layout):
    """A sample is a value: `file` its environment, `offset` and `size` its bytes in the data file."""

    kind = "LMDB"

    def __init__(self, root: str, files: Files, request: Request) -> None:
        super().__init__(root, files, request)
        names = tuple(sorted(_environments(root, files), key=lambda name: (_class_of(name), name)))
        train = tuple(name for name in names if not name.startswith("test_") and _UNSEEN not in name)
        self.names = train or names
        self._unseen = [name for name in names if train and _UNSEEN in name]
        self._several = len(self.names) > 1
        if self._several:
            self.classes = self.class_list.classes or tuple(sorted({_class_of(name) for name in self.names}))

    @classmethod
    def recognises(cls, root: str, files: Files, request: Request) -> bool:
        return bool(_environments(root, files))

    def parts(self) -> list[str]:
        return list(self.names)

    def unseen(self) -> str | None:
        folders = [name.removesuffix(f"/{_DATA}") for name in self._unseen]
        if len(folders) < 2:
            return os.path.join(self.root, folders[0]) if folders else None
        return os.path.join(self.root, f"{{{','.join(folders)}}}", _DATA)

    def samples(self, part: str) -> Iterator[Sample]:
        """ConfigError: no LMDB, a truncated or damaged one, or one whose values are no images."""
        number, label = self.names.index(part), _class_of(part) if self._several else None
        folder = f"{label}/" if label is not None else ""
        begins_well: list[bool] = []
        try:
            with listing(self.root, self.request.key), self.files.open(part) as file:
                for key, offset, size in _values(file):
                    if size < _LEAST:
                        continue
                    if not any(begins_well) and len(begins_well) < _TRIED:
                        file.seek(offset)
                        begins_well.append(file.read(4).startswith(_BEGINNINGS))
                        if len(begins_well) == _TRIED and not any(begins_well):
                            raise ConfigError("its values are no encoded images, as LSUN's are")
                    name = key.decode("utf-8", "backslashreplace")
                    yield Sample(Place(f"{folder}{name}", number, offset, size), self.label(label, name))
        except ConfigError as error:
            raise ConfigError(
                f"{self.request.key}={self.root}: {part} cannot be read: {error}; fetch it "
                "anew, or give a folder of images"
            ) from None

    def read(self, place: Place) -> bytes:
        if place.size > MAX_BYTES:
            raise ConfigError(f"it has {place.size:,} bytes, above the cap of {MAX_BYTES:,}")
        return self.files.span(self.names[place.file], place.offset, place.size)


def _environments(root: str, files: Files) -> tuple[str, ...]:
    """The data files, in order of their names; none where this is no LMDB."""
    top = peek(files)
    if (_DATA, False) in top:
        return (_DATA,)
    if top and all(name.endswith(_SINGLE) and not folder for name, folder in top):
        return tuple(name for name, _ in top)
    folders = [name for name, folder in top if folder and name.endswith(_END)]
    return tuple(f"{name}/{_DATA}" for name in folders if exists(files, f"{name}/{_DATA}"))


def _class_of(part: str) -> str:
    name = part.removesuffix(f"/{_DATA}").rpartition("/")[2]
    return name.removesuffix(_END).removesuffix("_train").removesuffix("_val").removesuffix(".lmdb")


def _values(file: BinaryIO) -> Iterator[tuple[bytes, int, int]]:
    """Key, first byte and bytes of each value of the main tree, in the order of the keys.

    ConfigError: it is no LMDB, or its pages are not those of a tree. Memory does not grow with their number.
    """
    length = file.seek(0, 2)
    size, root, last, flags = _meta(file, length)
    if flags & 4:
        raise ConfigError("it holds several values for a key")
    left = last + 1  # pages: each is visited once, so that no circle is

    def page(number: int) -> bytes:
        nonlocal left
        left -= 1
        if not 0 <= number <= last or left < 0:
            raise ConfigError("its pages are damaged")
        file.seek(number * size)
        content = file.read(size)
        kind, lower, upper = _PAGE.unpack_from(content)
        if kind & 3 not in (_BRANCH, _LEAF) or not _HEAD <= lower <= upper <= size:
            raise ConfigError("its pages are damaged")
        return content

    waiting = [] if root == (1 << 64) - 1 else [iter((root,))]
    while waiting:
        number = next(waiting[-1], None)
        if number is None:
            waiting.pop()
            continue
        content = page(number)
        nodes = list(_nodes(content))
        if _PAGE.unpack_from(content)[0] & _BRANCH:
            waiting.append(iter([low | high << 16 | bits << 32 for low, high, bits, *_ in nodes]))
            continue
        for low, high, bits, key, start in nodes:
            count, place = low | high << 16, number * size + start
            if bits & _BIG:
                place = int.from_bytes(content[start : start + 8], "little") * size + _HEAD
            if not bits & _TREES:
                if place + count > length or (not bits & _BIG and start + count > size):
                    raise ConfigError("its pages are damaged")
                yield key, place, count


def _nodes(page: bytes) -> Iterator[tuple[int, int, int, bytes, int]]:
    """Of each node its numbers and flags, its key, and where in the page its value begins."""
    _, lower, _ = _PAGE.unpack_from(page)
    for place in range(_HEAD, lower, 2):
        start = int.from_bytes(page[place : place + 2], "little")
        if start + _NODE.size > len(page):
            raise ConfigError("its pages are damaged")
        low, high, bits, keys = _NODE.unpack_from(page, start)
        begin = start + _NODE.size
        if begin + keys > len(page):
            raise ConfigError("its pages are damaged")
        yield low, high, bits, page[begin : begin + keys], begin + keys


def _meta(file: BinaryIO, length: int) -> tuple[int, int, int, int]:
    """Page size, page of the root, last page and flags of the tree: those of the last complete transaction."""
    file.seek(0)
    size = _META.unpack(file.read(_META.size).ljust(_META.size, b"\0"))[2]
    newest = None
    for place in (0, size):
        file.seek(place)
        content = file.read(_META.size).ljust(_META.size, b"\0")
        magic, version, _, flags, _, root, last, transaction = _META.unpack(content)
        if magic == _MAGIC and version == _VERSION and (newest is None or transaction > newest[-1]):
            newest = (root, last, flags, transaction)
    if newest is None or not 512 <= size <= 1 << 16:
        raise ConfigError("it is no LMDB of a 64-bit machine")
    root, last, flags, _ = newest
    if (last + 1) * size > length:
        raise ConfigError(f"it is truncated: it has {length:,} bytes, and pages for {(last + 1) * size:,}")
    return size, root, last, flags
