"""Formats values as JSON, for messages to users who write JSON: `false` and "text", never `False` and 'text'."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from typing import TypeVar

SHOWN_CHARS = 80
_MAX_BITS = 1024  # of a larger integer, only the number of bits is shown, because computing its digits would take long

T = TypeVar("T")

_other = reprlib.Repr()
_other.maxstring = _other.maxother = SHOWN_CHARS


def shown(value: object) -> str:
    """Returns `value` as JSON in at most 80 characters; longer text is cut and ends with "...".

    The time does not grow with the size of `value`, because a user's value can have megabytes. A value that JSON cannot
    express (bytes, in the Python API) is written as in Python.
    """
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > SHOWN_CHARS:
            return text[: SHOWN_CHARS - 3] + "..."
    return text


def first_of(values: Collection[T], most: int, write: Callable[[T], str] = shown) -> str:
    """Returns the first `most` values with commas between them, and how many more values there are."""
    named = ", ".join(map(write, islice(values, most)))
    return f"{named} and {len(values) - most} more" if len(values) > most else named


def _pieces(value: object) -> Iterator[str]:
    if isinstance(value, str):
        # One character more than SHOWN_CHARS suffices for `shown` to notice that the text must be cut.
        yield json.dumps(value[: SHOWN_CHARS + 1], ensure_ascii=False)
    elif isinstance(value, Mapping):
        yield "{"
        for position, (key, item) in enumerate(value.items()):
            yield ", " if position else ""
            yield from _pieces(str(key) if isinstance(key, int) and not isinstance(key, bool) else key)
            yield ": "
            yield from _pieces(item)
        yield "}"
    elif isinstance(value, list | tuple):
        yield "["
        for position, item in enumerate(value):
            yield ", " if position else ""
            yield from _pieces(item)
        yield "]"
    else:
        yield _scalar(value)


def _scalar(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int):
        bits = value.bit_length()
        return str(value) if bits <= _MAX_BITS else f"an integer of {bits} bits"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else json.dumps(value)
    return _other.repr(value)
