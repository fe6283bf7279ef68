"""Parses labels and texts as people write them: one parser of each, for every layout of data and for prompts.

A text is UTF-8, or UTF-16 behind a byte order mark, and that mark is no part of it. A caption or a prompt ends where a
line ends, at a line feed or a carriage return. Other separators, such as U+2028 or a form feed, belong to the text.

A label is a whole number or the name of a class. 10, "10", 10.0 and "10.0" are one number; true is the name "true", as
tables write it. If all labels of the data are numbers, they are numbers; otherwise all are names (index/columns.py).
"""

import codecs
import math
import re
from collections.abc import Container
from pathlib import Path
from typing import Any

from dstrain.disk import small

TEXT_NAMES = ("caption", "captions", "text", "prompt")  # of a column, or of an entry in a JSON object; the first counts
_LONGEST_LABEL = 1000  # characters
LONGEST_TEXT = 16 * small.MEGABYTE  # of a file
_NUMBER = re.compile(r"-?[0-9]{1,19}(\.0*)?")  # a whole number as tables write it
_FRACTION = re.compile(r"[-+]?[0-9]*\.[0-9]*[1-9][0-9]*")  # a score, which would be a class of its own in each row
_LINE_ENDS = re.compile(r"\r\n|\r|\n")
_MISSING = ("nan", "<na>")  # what pandas and numpy write of a value that is not there, in lower case
_LIST = re.compile(r"\[[-+0-9., ]*\]")  # of numbers, such as a box


def decode_text(content: bytes) -> str:
    """Returns the text in the bytes of a text file: UTF-16 if they begin with its byte order mark, else UTF-8. Leaves
    out the byte order mark.

    Raises UnicodeDecodeError, a ValueError, if the bytes cannot be decoded, or if the text contains a NUL: then they
    are binary numbers, or UTF-16 without a byte order mark.
    """
    marked = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = content.decode("utf-16" if marked else "utf-8-sig")
    if "\0" in text:
        at = content.index(0)
        raise UnicodeDecodeError("utf-8", content, at, at + 1, "a NUL is in no text; UTF-16 has a byte order mark")
    return text


def strip_space_and_bom(text: str) -> str:
    """Returns a text without white space and byte order marks at both ends."""
    return text.strip().strip("\ufeff").strip()


def split_nonblank_lines(text: str) -> tuple[str, ...]:
    """Returns the lines of a text without white space at their ends, each a caption or a prompt. Leaves out blank
    lines.
    """
    return tuple(line for line in map(strip_space_and_bom, _LINE_ENDS.split(text)) if line)


def extract_captions(value: Any) -> tuple[str, ...]:
    """Returns the captions in a cell of a table or a value of JSON: a text, or a list of texts. Leaves out None, blank
    texts, and words for a missing value ("nan", "<NA>"). Returns () if nothing remains.

    Raises ValueError if the value, or an entry of the list, is neither a text nor None.
    """
    texts = [text for text in (value if isinstance(value, list) else [value]) if text is not None]
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"{str(text)[:60]} is no caption")
    # Half a character, which JSON may hold, becomes a question mark, as in the index.
    texts = [text.encode("utf-8", "replace").decode() for text in map(strip_space_and_bom, texts)]
    return tuple(text for text in texts if text and text.lower() not in _MISSING)


def extract_json_captions(content: Any) -> tuple[str, ...]:
    """Returns the captions in a parsed JSON object: the text, or the texts of a list, at the key "caption", else
    "captions", "text" or "prompt". Leaves out values that are not texts. Returns () if `content` is no object or has
    none of these keys.
    """
    if isinstance(content, dict):
        value = next((content[name] for name in TEXT_NAMES if name in content), None)
        texts = value if isinstance(value, list) else [value]
        return extract_captions([text for text in texts if isinstance(text, str)])
    return ()


def parse_caption_file(name: str, content: bytes) -> tuple[str, ...]:
    """Returns the captions in the bytes of a text file beside a sample. A file whose `name` ends in .json is an object
    as in `extract_json_captions`; in any other file each line is a caption. Raises ValueError if the bytes are no text,
    or no JSON.
    """
    text = decode_text(content)
    if not name.lower().endswith(".json"):
        return split_nonblank_lines(text)
    return extract_json_captions(small.parse_json_without_repeated_keys(text))


def parse_label(value: Any, names: Container[str] = ()) -> str | None:
    """Returns a label from a table or JSON as text, a whole number without its fraction: 10.0 and "10.0" give "10".
    Returns None if `value` is None, NaN or blank.

    names: the known classes, which are returned unchanged, even "10.0". Raises ValueError for any other type, a list of
    numbers, a number with a fraction, a word for a missing value, or more than 1000 characters.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if not isinstance(value, str | int | float):
        raise ValueError(f"{str(value)[:60]} is no label")
    text = strip_space_and_bom(str(value).lower() if isinstance(value, bool) else str(value))
    if text in names:
        return text
    if text.lower() in _MISSING or _LIST.fullmatch(text):
        raise ValueError(f"the label {text} is no class, but a value that is not there, or a list")
    if len(text) > _LONGEST_LABEL:
        raise ValueError(f"a label has {len(text):,} characters")
    if _FRACTION.fullmatch(text) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(f"the label {text} is neither a whole number nor a name")
    number = parse_whole_number(text)
    return text or None if number is None else str(number)


def parse_whole_number(text: str) -> int | None:
    """Returns the whole number that a text spells, such as 10 for "10" and "10.0"; None if it spells none."""
    return int(text.partition(".")[0]) if _NUMBER.fullmatch(text) else None


def read_text_file(path: Path) -> str:
    """Reads a text file, UTF-8 or UTF-16, without white space at its ends. Raises OSError if it cannot be read or has
    more than 16 MB, ValueError if it is no text.
    """
    return strip_space_and_bom(decode_text(small.read_bytes(path, LONGEST_TEXT)))
