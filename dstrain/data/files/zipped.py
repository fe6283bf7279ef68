"""Members of zip files, found once by the directory at the file's end and then read by their places.

Nothing that a zip file says of itself is believed before it is checked: sizes, places, and how far a member inflates.
The format: PKWARE's APPNOTE, sections 4.3 to 4.5. Python's zipfile would keep an object of each member in every worker.
"""

import io
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from struct import error as StructError
from threading import Lock
from typing import BinaryIO, NamedTuple

import numpy as np

from dstrain.data.files.local import Files, LocalFiles
from dstrain.recipe import ConfigError

STORED, DEFLATED = 0, 8
_END = Struct("<4sHHHHIIH")  # end of the directory: disks, entries, bytes and place of it, comment
_LOCATOR = Struct("<4sIQI")  # of the zip64 record
_END64 = Struct("<4sQHHIIQQQQ")
_ENTRY = Struct("<4sHHHHHHIIIHHHHHII")
_LOCAL = Struct("<4sHHHHHIIIHH")
_FIELD = Struct("<HH")  # of an extra field: its kind and its bytes
_COMMENT, _SLACK = 1 << 16, 32  # bytes; of a member's extra field, above what common writers write
_BLOCK = 1 << 20
_MOST_ARRAY = 1 << 28  # bytes of an array
_LARGE = 1 << 24  # bytes that a member may inflate to while others do
_INFLATING = Lock()


class Member(NamedTuple):
    name: str
    offset: int  # of its local header
    packed: int  # bytes in the zip file
    size: int  # bytes, once inflated
    method: int
    encrypted: bool


class Members:
    """The names and places of some members, in little memory: a zip file may have millions."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.offsets, self.packed = array("q"), array("q")

    def add(self, member: Member) -> None:
        self.names.append(member.name)
        self.offsets.append(member.offset)
        self.packed.append(member.packed)

    def require_apart(self) -> None:
        """ConfigError: two members share bytes, by which a small file may hold any amount of data."""
        offsets, packed = np.frombuffer(self.offsets, np.int64), np.frombuffer(self.packed, np.int64)
        order = np.argsort(offsets, kind="stable")
        starts, ends = offsets[order], (offsets + packed + _LOCAL.size)[order]
        if (clash := np.flatnonzero(ends[:-1] > starts[1:])).size:
            names = [self.names[order[clash[0] + step]] for step in (0, 1)]
            raise ConfigError(
                f"its members {names[0][:100]} and {names[1][:100]} overlap: no program that packs files writes that"
            )


def directory(file: BinaryIO) -> Iterator[Member]:
    """Every member but folders. ConfigError: no zip file, a truncated or damaged one, or one of several disks."""
    length = file.seek(0, 2)
    start, size, shift = _directory_place(file, length)
    file.seek(start)
    left = size
    while left:
        try:
            (mark, _, _, flags, method, _, _, _, packed, whole, names, extras, comments, _, _, _, offset) = (
                _ENTRY.unpack(file.read(_ENTRY.size))
            )
        except StructError:
            raise ConfigError("its directory is cut off: it is truncated") from None
        rest = file.read(names + extras + comments)
        left -= _ENTRY.size + len(rest)
        if mark != b"PK\1\2" or len(rest) < names + extras + comments or left < 0:
            raise ConfigError("its directory is damaged")
        if 0xFFFFFFFF in (whole, packed, offset):
            whole, packed, offset = _wide(rest[names : names + extras], whole, packed, offset)
        name = rest[:names].decode("utf-8" if flags & 0x800 else "cp437", "replace")
        if offset + shift < 0 or offset + shift + _LOCAL.size + packed > start:
            raise ConfigError(f"its member {name[:100]} reaches beyond its data: it is truncated or damaged")
        if not name.endswith("/"):
            yield Member(name, offset + shift, packed, whole, method, bool(flags & 1))


def _directory_place(file: BinaryIO, length: int) -> tuple[int, int, int]:
    """First byte of the directory, its bytes, and how many bytes stand before the first member that it counts from."""
    file.seek(max(0, length - _END.size - _COMMENT))
    tail = file.read(_END.size + _COMMENT)
    place = tail.rfind(b"PK\5\6")
    if place < 0 or len(tail) - place < _END.size:
        raise ConfigError("it is no zip file, or a truncated one: its directory, at its end, is missing")
    _, disk, _, _, _, size, offset, _ = _END.unpack_from(tail, place)
    end = length - len(tail) + place
    file.seek(max(0, end - _LOCATOR.size))
    locator = file.read(_LOCATOR.size)
    if locator[:4] == b"PK\6\7" and len(locator) == _LOCATOR.size:  # the numbers of 64 bits stand elsewhere
        end = min(_LOCATOR.unpack(locator)[2], length)
        file.seek(end)
        content = file.read(_END64.size)
        if content[:4] != b"PK\6\6" or len(content) < _END64.size:
            raise ConfigError("its directory is damaged")
        _, _, _, _, disk, _, _, _, size, offset = _END64.unpack(content)
    if disk:
        raise ConfigError("it is one of several that are one zip file: join them with zip -s 0 OLD.zip --out NEW.zip")
    if size > end or offset + size > end:
        raise ConfigError("its directory is damaged")
    return end - size, size, end - size - offset


def _wide(extra: bytes, *values: int) -> list[int]:
    """Sizes and places of 64 bits, from the extra field, for those that 32 bits cannot hold."""
    place = 0
    while place + 4 <= len(extra):
        kind, size = _FIELD.unpack_from(extra, place)
        if kind == 1:
            field, wide = extra[place + 4 : place + 4 + size], []
            for value in values:
                if value == 0xFFFFFFFF:
                    value, field = int.from_bytes(field[:8].ljust(8, b"\xff"), "little"), field[8:]
                wide.append(value)
            return wide
        place += 4 + size
    return list(values)


def payload(files: Files, name: str, offset: int, packed: int, most: int) -> bytes:
    """The bytes of one member of the zip file `name`, of at most `most` bytes.

    ConfigError or zlib.error: its header lies, it is damaged, or it is larger.
    """
    if packed > most:
        raise ConfigError(f"it has {packed:,} bytes, above the cap of {most:,}")
    block = files.span(name, offset, _LOCAL.size + _SLACK + packed)  # a directory follows: so much is always there
    start, flags, method, crc = _local(block)
    if start + packed > len(block):
        block, start = files.span(name, offset + start, packed), 0
    content = block[start : start + packed]
    if method == DEFLATED:
        content = inflated(content, most)
    if not flags & 8 and zlib.crc32(content) != crc:  # flag 8: the sum follows the data
        raise ConfigError("its bytes were altered: it is damaged")
    return content


def _local(block: bytes) -> tuple[int, int, int, int]:
    """Of a local header: the first byte of the data behind it, flags, method and check sum."""
    mark, _, flags, method, _, _, crc, _, _, names, extras = _LOCAL.unpack_from(block)
    if mark != b"PK\3\4" or flags & 1 or method not in (STORED, DEFLATED):
        raise ConfigError("its local header is damaged")
    return _LOCAL.size + names + extras, flags, method, crc


def data_place(file: BinaryIO, member: Member) -> int:
    """The first byte of a member's data in an open zip file."""
    file.seek(member.offset)
    return member.offset + _local(file.read(_LOCAL.size))[0]


def inflated(content: bytes, most: int) -> bytes:
    """Deflated bytes, unpacked. ConfigError: they are damaged, cut off, or become more than `most`."""
    stream = zlib.decompressobj(-15)
    try:
        whole = stream.decompress(content, min(most, _LARGE) + 1)
        if len(whole) > _LARGE:
            with _INFLATING:  # many threads read, and each may meet a bomb
                whole += stream.decompress(stream.unconsumed_tail, most + 1 - len(whole))
    except zlib.error as error:
        raise ConfigError(f"its compressed data are damaged ({error})") from None
    if len(whole) > most:
        raise ConfigError(f"it inflates to more than {most:,} bytes")
    if not stream.eof:
        raise ConfigError("its compressed data are cut off")
    return whole


def blocks(file: BinaryIO, member: Member) -> Iterator[bytes]:
    """The bytes of a member of an open zip file, block by block, as many as its directory says.

    ConfigError: they are more or fewer, or damaged.
    """
    left, size = member.packed, 0
    file.seek(data_place(file, member))
    stream = zlib.decompressobj(-15) if member.method == DEFLATED else None
    while stream is None or not stream.eof:
        block = stream.unconsumed_tail if stream is not None else b""
        if not block:
            block = file.read(min(left, _BLOCK))
            left -= len(block)
        try:
            content = stream.decompress(block, _BLOCK) if stream is not None else block
        except zlib.error as error:
            raise ConfigError(f"its compressed data are damaged ({error})") from None
        if not block and not content:
            break
        size += len(content)
        if size > member.size:
            raise ConfigError(f"it inflates to more than the {member.size:,} bytes that its directory says")
        yield content
    if size < member.size:
        raise ConfigError(f"it has {size:,} bytes, and its directory says {member.size:,}")


class ZippedArrays:
    """The .npy members of a zip file on a disk, by their names; its table, too. ConfigError: it is no zip file."""

    def __init__(self, path: Path) -> None:
        self.files, self.name = LocalFiles(path), path.name
        with self.files.open(self.name) as file:
            self.places = {member.name: (member.offset, member.packed) for member in directory(file)}

    def content(self, name: str, most: int) -> bytes:
        """The bytes of a member. KeyError: there is none of this name; errors of `payload`."""
        return payload(self.files, self.name, *self.places[name], most)

    def read(self, name: str) -> np.ndarray:
        """An array of numbers, (2C, h, w). ConfigError, ValueError: it is no such; a header is not believed."""
        content = self.content(name, _MOST_ARRAY)
        file = io.BytesIO(content)
        np.lib.format.read_magic(file)
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(file)
        if by_columns or dtype.kind not in "fiu" or len(shape) != 3:
            raise ConfigError("is no array of numbers of the right shape")
        return np.frombuffer(content, dtype, offset=file.tell()).reshape(shape)
