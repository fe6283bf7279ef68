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


def read_bytes(path: str | os.PathLike, max_bytes: int) -> bytes:
    """Reads a whole file. Raises OSError if it is missing, cannot be read, has more than `max_bytes` bytes, or is no
    regular file, since reading a pipe or a device might never end.
    """
    require_regular_file(path)
    with open(path, "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes // MEGABYTE} MB", str(path))
    return content


def read_text(path: str | os.PathLike, max_bytes: int = 16 * MEGABYTE, errors: str = "strict") -> str:
    """Reads a UTF-8 text file of at most `max_bytes` bytes. errors: as in bytes.decode. Raises OSError as `read_bytes`,
    and UnicodeDecodeError if `errors` is "strict" and the file is not UTF-8.
    """
    return read_bytes(path, max_bytes).decode("utf-8", errors)


def read_json(path: str | os.PathLike, max_bytes: int = 16 * MEGABYTE, **hooks: Any) -> Any:
    """Reads a JSON file of at most `max_bytes` bytes and returns its value. hooks: arguments of json.loads. Raises
    OSError as `read_bytes`, and ValueError if the file is no UTF-8, no JSON, or nested deeper than 64 levels.
    """
    return parse_json(read_text(path, max_bytes), **hooks)


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """Returns the value of a JSON text. hooks: arguments of json.loads. Raises ValueError if the text is no JSON, or if
    its lists and objects are nested deeper than 64 levels.
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


def parse_json_without_repeated_keys(text: str | bytes) -> Any:
    """Returns the value of a JSON text. Raises RepeatedKey if an object gives one key two different values, ValueError
    as `parse_json`.
    """
    return parse_json(text, object_pairs_hook=build_dict_without_repeated_keys)


def build_dict_without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the (key, value) pairs of a JSON object as a dict. Raises RepeatedKey if a key has two different values,
    where json itself would take the last. For json's object_pairs_hook.
    """
    section = dict(pairs)
    if len(section) < len(pairs):
        for name, value in pairs:
            if value != section[name]:
                raise RepeatedKey(f"the key {name} stands there twice, with two values: keep one")
    return section


def describe_special_file(path: str | os.PathLike) -> str | None:
    """Returns what a path is if it is no regular file, such as "a folder" or "a FIFO"; None for a regular file. Does
    not open it, since that may block for a pipe.

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
    """Raises OSError if nothing exists at `path`, or if it is no regular file, such as a folder or a pipe."""
    if kind := describe_special_file(path):
        raise OSError(errno.EISDIR if kind == "a folder" else errno.EINVAL, f"it is {kind}, and no file", str(path))


def read_stripped_text(path: Path, max_bytes: int = 4096) -> str | None:
    """Returns the text of a small file without white space at its ends; None if the file cannot be read, has more than
    `max_bytes` bytes, or is not UTF-8.
    """
    try:
        return read_text(path, max_bytes).strip()
    except (OSError, ValueError):
        return None
