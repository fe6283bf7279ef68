"""Lists the members of zip files by the directory at the file's end, and reads members by their offsets.

Nothing that a zip file says of itself is believed before it is checked: sizes, places, and how far a member inflates.
Python's zipfile reads the directory, once; it would keep an object of each member in every worker. The format: PKWARE's
APPNOTE, sections 4.3 to 4.5.
"""

import io
import zipfile
import zlib
from array import array
from collections.abc import Iterator
from struct import Struct
from struct import error as StructError
from threading import Lock
from typing import BinaryIO

import numpy as np

from dstrain.data.files.local import Files
from dstrain.recipe import ConfigError

_END = Struct("<4sHHHHIIH")  # at the end of the directory: two numbers of disks, two of entries, bytes, place, comment
_UNKNOWN = 0xFFFF  # Such a number of disks or entries stands elsewhere, in 64 bits.
_LOCAL = Struct("<4sHHHHHIIIHH")  # before a member's data
_SLACK = 32  # bytes of a member's extra field, above what common writers write
_LARGE = 1 << 24  # bytes that a member may inflate to while others do
_INFLATING = Lock()


class Members:
    """The names, offsets and compressed sizes of members, in little memory, since a zip file may have millions."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.offsets, self.packed = array("q"), array("q")  # of local headers; bytes in the zip file

    def add_member(self, member: zipfile.ZipInfo) -> None:
        """Adds the name, offset and compressed size of a member."""
        self.names.append(member.orig_filename)
        self.offsets.append(member.header_offset)
        self.packed.append(member.compress_size)

    def require_no_overlap(self) -> None:
        """Raises ConfigError if two members share bytes of the zip file."""
        offsets, packed = np.frombuffer(self.offsets, np.int64), np.frombuffer(self.packed, np.int64)
        order = np.argsort(offsets, kind="stable")
        starts, ends = offsets[order], (offsets + packed + _LOCAL.size)[order]
        clashes = np.flatnonzero(ends[:-1] > starts[1:])
        if clashes.size:
            one, other = order[clashes[0]], order[clashes[0] + 1]
            raise ConfigError(
                f"its members {self.names[one][:100]} and {self.names[other][:100]} overlap: no program that "
                "packs files writes that"
            )


def iterate_zip_members(file: BinaryIO) -> Iterator[zipfile.ZipInfo]:
    """Yields every member of a zip file except folders. Its `orig_filename` is the member's name with slashes, and
    without "./" at the beginning. Takes 0.6 KB of memory for each member.

    Raises ConfigError if
    - the file is no zip file, or is truncated or damaged,
    - the zip file is split into several files, or another zip file precedes it in the same file,
    - two members have the same name.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            members, end = archive.infolist(), archive.start_dir
            file.seek(-_END.size - len(archive.comment), io.SEEK_END)
            _, disk, _, _, count, *_ = _END.unpack(file.read(_END.size))
            file.seek(0)
            joined = file.read(4) == b"PK\3\4" and min((member.header_offset for member in members), default=1) > 0
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, StructError) as error:
        raise ConfigError(f"it is no zip file, or its directory, at its end, is cut off or damaged ({error})") from None
    if joined:
        raise ConfigError("another zip file stands before it in one file: keep each as a file of its own")
    if disk not in (0, _UNKNOWN):
        raise ConfigError("it is one of several that are one zip file: join them with zip -s 0 OLD.zip --out NEW.zip")
    if count not in (_UNKNOWN, len(members) & _UNKNOWN):
        raise ConfigError(f"its directory is damaged: of {count:,} entries, {len(members):,} can be read")
    names: set[str] = set()
    for member in members:
        if member.create_system == 0:  # Some programs of Windows write backslashes.
            member.orig_filename = member.orig_filename.replace("\\", "/")
        member.orig_filename = member.orig_filename.removeprefix("./")
        if not 0 <= member.header_offset <= end - _LOCAL.size - member.compress_size:
            name = member.orig_filename[:100]
            raise ConfigError(f"its member {name} reaches beyond its data: it is truncated or damaged")
        if not member.orig_filename.endswith("/"):
            if member.orig_filename in names:
                raise ConfigError(f"it has two members {member.orig_filename[:100]}")
            names.add(member.orig_filename)
            yield member


def read_zip_member(files: Files, zip_name: str, offset: int, compressed_size: int, max_size: int) -> bytes:
    """Returns the uncompressed content of one member of the zip file `zip_name`.

    offset: the byte at which the member's local header begins.
    compressed_size: the member's compressed size in bytes.
    max_size: the most bytes that the content may have.
    Raises ConfigError if the header or the content is damaged, or if the content is larger than `max_size`.
    """
    if compressed_size > max_size:
        raise ConfigError(f"it has {compressed_size:,} bytes, above the cap of {max_size:,}")
    # A directory follows the last member, so this much is always there.
    block = files.read_span(zip_name, offset, _LOCAL.size + _SLACK + compressed_size)
    mark, _, flags, method, _, _, checksum, _, _, names, extras = _LOCAL.unpack_from(block)
    if mark != b"PK\3\4" or flags & 1 or method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ConfigError("its local header is damaged")
    start = _LOCAL.size + names + extras
    if start + compressed_size > len(block):
        block, start = files.read_span(zip_name, offset + start, compressed_size), 0
    content = block[start : start + compressed_size]
    if method == zipfile.ZIP_DEFLATED:
        content = inflate(content, max_size)
    if not flags & 8 and zlib.crc32(content) != checksum:  # Flag 8 says that the sum follows the data.
        raise ConfigError("its bytes were altered: it is damaged")
    return content


def inflate(compressed: bytes, max_size: int) -> bytes:
    """Decompresses Deflate data that have no header, and returns their content. Raises ConfigError if the data are
    damaged or cut off, or if the content has more than `max_size` bytes.
    """
    stream = zlib.decompressobj(-15)
    try:
        whole = stream.decompress(compressed, min(max_size, _LARGE) + 1)
        if len(whole) > _LARGE:
            with _INFLATING:  # Many threads read, and each may meet a bomb.
                whole += stream.decompress(stream.unconsumed_tail, max_size + 1 - len(whole))
    except zlib.error as error:
        raise ConfigError(f"its compressed data are damaged ({error})") from None
    if len(whole) > max_size:
        raise ConfigError(f"it inflates to more than {max_size:,} bytes")
    if not stream.eof:
        raise ConfigError("its compressed data are cut off")
    return whole
