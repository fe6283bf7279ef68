"""Reads small text files that others wrote, with bounded memory, and without waiting for a pipe."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

MEGABYTE = 1 << 20
_KINDS = ((stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"), (stat.S_ISDIR, "a folder"))
_MAX_DEPTH = 64  # levels of lists and sections in a JSON file


class RepeatedKey(ValueError):
    """A JSON object that gives one of its keys two values."""


def read_bytes(path: str | os.PathLike, most: int) -> bytes:
    """Reads a regular file of at most `most` bytes.

    Raises OSError if it is missing, not readable, larger, or not a regular file: reading a pipe without a writer would
    block, and a device has no end.
    """
    require_regular_file(path)
    with open(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most // MEGABYTE} MB", str(path))
    return content


def read_text(path: str | os.PathLike, most: int = 16 * MEGABYTE, errors: str = "strict") -> str:
    """Reads the text (UTF-8) of a regular file of at most `most` bytes. errors: as of bytes.decode. Raises OSError as
    `read_bytes` does, and UnicodeDecodeError if `errors` is "strict" and the bytes are not UTF-8.
    """
    return read_bytes(path, most).decode("utf-8", errors)


def read_json(path: str | os.PathLike, most: int = 16 * MEGABYTE, **hooks: Any) -> Any:
    """Reads and parses a JSON file of at most `most` bytes. hooks: arguments of json.loads. Raises OSError as
    `read_text` does, and ValueError if the file is not UTF-8 or not JSON, or is nested deeper than _MAX_DEPTH.
    """
    return parse_json(read_text(path, most), **hooks)


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """Parses a JSON text. hooks: arguments of json.loads. Raises ValueError if the text is not JSON, or if its lists
    and objects are nested deeper than _MAX_DEPTH.
    """
    too_deep = ValueError(f"lists or sections are nested deeper than {_MAX_DEPTH}")
    try:
        value = json.loads(text, **hooks)
    except RecursionError:
        raise too_deep from None
    depth, level = 0, [value]
    while level := [
        inner
        for outer in level
        if isinstance(outer, (dict, list))
        for inner in (outer.values() if isinstance(outer, dict) else outer)
    ]:
        if (depth := depth + 1) > _MAX_DEPTH:
            raise too_deep
    return value


def parse_json_of_distinct_keys(text: str | bytes) -> Any:
    """Parses a JSON text of a user's data. Raises ValueError as `parse_json`, RepeatedKey if an object
    repeats a key.
    """
    return parse_json(text, object_pairs_hook=require_distinct_keys)


def require_distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the (key, value) pairs of a JSON object as a dict, for json's object_pairs_hook. Raises RepeatedKey if a
    key has two different values, of which json itself would take the last one. Equal values of a
    repeated key are accepted.
    """
    section = dict(pairs)
    if len(section) < len(pairs):
        for name, value in pairs:
            if value != section[name]:
                raise RepeatedKey(f"the key {name} stands there twice, with two values: keep one")
    return section


def describe_special_file(path: str | os.PathLike) -> str | None:
    """Returns None if `path` is a regular file, else what it is: "a folder", "a pipe", ... Callers ask before they open
    a file, since opening a pipe may block, and reading a device may not end.

    Raises OSError if nothing exists at `path`, or if `path` contains a NUL.
    """
    try:
        mode = os.stat(path).st_mode
    except ValueError:  # a NUL, which Python finds before the system is asked
        raise OSError(errno.EINVAL, "a path cannot hold a NUL", str(path)) from None
    if stat.S_ISREG(mode):
        return None
    return next((name for test, name in _KINDS if test(mode)), "a device")


def require_regular_file(path: str | os.PathLike) -> None:
    """Raises OSError if `path` is missing or is not a regular file."""
    if kind := describe_special_file(path):
        raise OSError(errno.EISDIR if kind == "a folder" else errno.EINVAL, f"it is {kind}, and no file", str(path))


def read_stripped_text(path: Path, most: int = 4096) -> str | None:
    """Returns the text of a file of at most `most` bytes without white space at its ends; None if the file cannot be
    read, is larger, or is not UTF-8.
    """
    try:
        return read_text(path, most).strip()
    except (OSError, ValueError):
        return None
