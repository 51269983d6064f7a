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


@pytest.mark.parametrize(
    ("body", "byte"),
    [
        (rb'{"prompt": "\ud83d"}', 18),
        (rb'{"prompt": "\ud83d"}    ', 18),
        (rb'{"prompt": "\uD83D and a longer rest"}', 18),
        (rb'{"prompt": "\ude00"}', 18),
        (rb'{"prompt": "\\\ud83d"}', 20),
        (rb'{"\udbff":1}', 8),
        (rb'{"prompt": "\ud83d\ud83d"}', 24),
        (rb'{"prompt": "\ud83d\u0041"}', 18),
        ('{"prompt": "\u00e9\\ud83d\\n"}'.encode(), 20),
    ],
)
def test_half_of_a_surrogate_pair_is_named_with_its_place_and_what_to_send(body: bytes, byte: int) -> None:
    with pytest.raises(ApiError) as caught:
        parse_object(body)
    assert str(caught.value) == (
        f"the body has half of a surrogate pair in the escape before byte {byte}, which is not a character; send both "
        r'halves, as in "\ud83d\ude00", or leave the escape out'
    )


@pytest.mark.parametrize(
    "body", [rb'{"prompt": "\ud83d', rb'{"prompt": "\ud83d\ude', rb'{"prompt": "\\ud83d x', b'{"p": "x']
)
def test_a_body_that_ends_too_early_is_not_json(body: bytes) -> None:
    with pytest.raises(ApiError, match="the body is not JSON: Input data was truncated"):
        parse_object(body)
    assert parse_object(rb'{"prompt": "\ud83d\ude00 \\ud83d"}') == {"prompt": "\U0001f600 \\ud83d"}
