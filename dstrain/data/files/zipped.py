"""Members of zip files, found once by the directory at the file's end and then read by their places.

Nothing that a zip file says of itself is believed before it is checked: sizes, places, and how far a member inflates.
Python's zipfile reads the directory, once; it would keep an object of each member in every worker. The format: PKWARE's
APPNOTE, sections 4.3 to 4.5.
"""

import io
import zipfile
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
_LOCAL = Struct("<4sHHHHHIIIHH")
_END = Struct("<4sHHHHIIH")  # at the end of the directory: two numbers of disks, two of entries, bytes, place, comment
_UNKNOWN = 0xFFFF  # Such a number of disks or entries stands elsewhere, in 64 bits.
_SLACK = 32  # bytes of a member's extra field, above what common writers write
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


def list_members(file: BinaryIO) -> Iterator[Member]:
    """Yields every member but folders.

    zipfile holds 0.6 KB a member meanwhile. Raises ConfigError if it is no zip file, truncated, damaged, or one of
    several disks.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members, end = archive.infolist(), archive.start_dir
            file.seek(-_END.size - len(archive.comment), io.SEEK_END)
            end_record = _END.unpack(file.read(_END.size))
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, StructError) as error:
        raise ConfigError(f"it is no zip file, or its directory, at its end, is cut off or damaged ({error})") from None
    disk, count = end_record[1], end_record[4]
    if disk not in (0, _UNKNOWN):
        raise ConfigError("it is one of several that are one zip file: join them with zip -s 0 OLD.zip --out NEW.zip")
    if count not in (_UNKNOWN, len(members) & _UNKNOWN):
        raise ConfigError(f"its directory is damaged: of {count:,} entries, {len(members):,} can be read")
    for member in members:
        name = member.orig_filename
        if not 0 <= member.header_offset <= end - _LOCAL.size - member.compress_size:
            raise ConfigError(f"its member {name[:100]} reaches beyond its data: it is truncated or damaged")
        if not name.endswith("/"):
            yield Member(
                name,
                member.header_offset,
                member.compress_size,
                member.file_size,
                member.compress_type,
                bool(member.flag_bits & 1),
            )


def read_member(files: Files, name: str, offset: int, packed: int, most: int) -> bytes:
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
        content = inflate(content, most)
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


def inflate(content: bytes, most: int) -> bytes:
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
            self.places = {member.name: (member.offset, member.packed) for member in list_members(file)}

    def content(self, name: str, most: int) -> bytes:
        """The bytes of a member. KeyError: there is none of this name; errors of `payload`."""
        return read_member(self.files, self.name, *self.places[name], most)

    def read(self, name: str) -> np.ndarray:
        """An array of numbers, (2C, h, w). ConfigError, ValueError: it is no such; a header is not believed."""
        content = self.content(name, _MOST_ARRAY)
        file = io.BytesIO(content)
        np.lib.format.read_magic(file)
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(file)
        if by_columns or dtype.kind not in "fiu" or len(shape) != 3:
            raise ConfigError("is no array of numbers of the right shape")
        return np.frombuffer(content, dtype, offset=file.tell()).reshape(shape)
