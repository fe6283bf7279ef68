"""Sealed JSON, against the body that was sealed and against every byte that may be altered."""

import pytest

from dstrain.disk.sealed import parse_json_if_hash_matches, render_json_with_hash

BODY = {"b": [1, 2.5, None, "\u00e4"], "a": {"x": True}}


def test_a_body_comes_back():
    """Oracle: the body itself; the bytes depend on its content alone, not on the order of its keys."""
    assert parse_json_if_hash_matches(render_json_with_hash(BODY)) == BODY
    assert render_json_with_hash(dict(reversed(BODY.items()))) == render_json_with_hash(BODY)
    assert parse_json_if_hash_matches(render_json_with_hash({1: (2, 3)})) == {"1": [2, 3]}


def test_every_altered_byte_is_seen():
    """Oracle: the bytes themselves, each altered, left out or doubled in turn."""
    content = render_json_with_hash(BODY)
    for place in range(len(content)):
        altered = bytes([content[place] ^ 1])
        for damaged in (altered, b"", content[place : place + 1] * 2):
            assert parse_json_if_hash_matches(content[:place] + damaged + content[place + 1 :]) is None


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"null", b"\xff\xfe", b'{"body": 3}', b"[" * 100_000])
def test_what_is_not_sealed(content):
    """Oracle: None, and no exception, whatever the bytes are."""
    assert parse_json_if_hash_matches(content) is None
