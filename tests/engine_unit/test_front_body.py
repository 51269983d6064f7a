"""Bodies that are costly to decode: the front refuses them by their shape, before it creates any of their objects."""

from __future__ import annotations

import pytest

from rayloom_engine.front.http.body import (
    MAX_CONTAINERS,
    MAX_FIELDS,
    MAX_STRINGS,
    MAX_VALUES,
    check_shape,
    parse_object,
)
from rayloom_engine.front.http.errors import ApiError


def many(part: bytes, num: int) -> bytes:
    return b'{"prompt":[' + b",".join([part] * num) + b"]}"


@pytest.mark.parametrize(
    ("part", "most"),
    [
        (b"[]", MAX_CONTAINERS - 2),  # in addition to the object and the list around them
        (b'{"a":1}', MAX_STRINGS - 1),  # in addition to the key "prompt"
        (b'"\\""', MAX_STRINGS - 1),
        (b"1", MAX_VALUES + 1),  # the check counts commas, and a list has one comma fewer than values
    ],
)
def test_the_parts_of_a_body_are_counted_outside_of_strings(part: bytes, most: int) -> None:
    most = min(most, MAX_CONTAINERS - 2) if b"{" in part else most
    check_shape(many(part, most))
    with pytest.raises(
        ApiError, match="too many parts; at most 65536 objects and lists, 65536 strings and 1179648 val"
    ):
        check_shape(many(part, most + 1))


def test_a_long_text_may_have_any_characters() -> None:
    text = '[{,"\\' * 300_000
    body = b'{"prompt":"' + text.replace("\\", "\\\\").replace('"', '\\"').encode() + b'"}'
    assert parse_object(body) == {"prompt": text}


def test_fields_are_counted() -> None:
    def body(num: int) -> bytes:
        return b"{" + b",".join(b'"%d":1' % number for number in range(num)) + b"}"

    assert len(parse_object(body(MAX_FIELDS))) == MAX_FIELDS
    with pytest.raises(ApiError, match="the body has 1025 fields; at most 1024 are allowed"):
        parse_object(body(MAX_FIELDS + 1))
