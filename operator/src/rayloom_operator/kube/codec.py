"""JSON as the API server reads and writes it."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import msgspec

# The API server reads a server-side apply as YAML. If these characters are not escaped, YAML refuses them or reads them
# as blanks.
_NOT_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


class ListPage(msgspec.Struct):
    """A page of a list."""

    metadata: dict[str, Any]
    items: list[msgspec.Raw] | None


class WatchEvent(msgspec.Struct):
    """A line of a watch."""

    type: str
    object: msgspec.Raw


def encoded(body: Any) -> bytes:
    """Returns the JSON of a request's body."""
    text = msgspec.json.encode(body).decode()
    return _NOT_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


def decoded(text: bytes | msgspec.Raw, shape: Any) -> Any:
    """Returns the fields of an answer that are in `shape`. A null that `shape` does not allow counts as absent.

    Raises ValueError or RecursionError.
    """
    try:
        return _decoder(shape).decode(text)
    except msgspec.ValidationError:
        return msgspec.convert(_without_nulls(msgspec.json.decode(text)), shape)


@cache
def _decoder(shape: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(shape)


def _without_nulls(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _without_nulls(each) for name, each in found.items() if each is not None}
    if isinstance(found, list):
        return [_without_nulls(each) for each in found if each is not None]
    return found
