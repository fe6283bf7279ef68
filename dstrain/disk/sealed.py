"""JSON files that show whether they are whole: a body, and a hash of it."""

import hashlib
import json
from typing import Any


def render_json_with_hash(body: dict[str, Any]) -> bytes:
    """Returns the bytes of a JSON file {"hash": ..., "body": ...} with a hash of the body's text. Equal bodies give
    equal bytes.
    """
    body = json.loads(json.dumps(body))  # keys become text, then are sorted
    text = json.dumps(body, sort_keys=True, indent=1)
    digest = hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
    return f'{{"hash": "{digest}",\n"body": {text}}}\n'.encode()


def parse_json_if_hash_matches(content: bytes) -> dict[str, Any] | None:
    """Returns the body in the bytes of a file from `render_json_with_hash`; None if any byte is missing or altered."""
    try:
        body = json.loads(content)["body"]
        return body if content == render_json_with_hash(body) else None  # all bytes: not even a blank may differ
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
