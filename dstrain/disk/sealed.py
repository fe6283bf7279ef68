"""JSON files that show whether they are whole: a body, and a hash of it."""

import hashlib
import json
from typing import Any


def render_json_with_hash(body: dict[str, Any]) -> bytes:
    """Returns the bytes of a JSON file {"hash": ..., "body": ...} with a hash of the body's text. Equal bodies give
    equal bytes.
    """
    body = json.loads(json.dumps(body))  # keys become text, then are sorted
    return _put_hash_before(json.dumps(body, sort_keys=True, indent=1).encode())


def parse_json_if_hash_matches(content: bytes) -> dict[str, Any] | None:
    """Returns the body in the bytes of a file from `render_json_with_hash`; None if any byte is missing or altered."""
    text = content[85:-2]  # behind 64 digits of the hash
    try:
        return json.loads(text) if content == _put_hash_before(text) else None  # all bytes: not even a blank may differ
    except (ValueError, RecursionError):
        return None


def _put_hash_before(text: bytes) -> bytes:
    """Returns the bytes of the file whose body has this text."""
    digest = hashlib.blake2b(text, digest_size=32).hexdigest().encode()
    return b'{"hash": "%s",\n"body": %s}\n' % (digest, text)
