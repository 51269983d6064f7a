"""Estimates the size of a template operation's result before it is computed. Pure functions.

Python can build a text of 2 GB in one operation, which cannot be interrupted. So an operation is refused before it
runs, if its arguments could give too large a result. If an operation is not listed here, its result is at most a few
times as large as its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from jinja2.exceptions import SecurityError

MAX_WIDTH = 10_000  # limit for the width of a field or line, and for the size of a group
MAX_INDENT = 16  # most characters of an indentation or a separator
MAX_DIGITS = 100  # most digits of a rounded number

_WIDE_FIELD = re.compile(r"\d{5,}")
_GIVEN_FIELD = re.compile(r"%[^a-zA-Z%]*\*|:[^{}]*\{")  # matches a field whose width is given by an argument

Growth = Callable[[tuple[Any, ...], Mapping[str, Any]], int]


def weight(value: object, most: int) -> int:
    """Returns roughly how many characters `value` has when it is written out. Stops counting above `most`.

    A list may contain one long text many times. Each repetition counts, because each takes memory in the written text.
    """
    total = 0
    left = [value]
    while left and total <= most:
        part = left.pop()
        if isinstance(part, str | bytes):
            total += len(part)
        elif isinstance(part, Mapping):
            total += len(part)
            left.extend(part)
            left.extend(part.values())
        elif isinstance(part, list | tuple | set | frozenset):
            total += len(part)
            left.extend(part)
        else:
            total += 1
    return total


def growth(name: str, values: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    """Returns the number of characters that the filter or method `name` adds to its arguments.

    `values[0]` is the value to which the filter or method is applied. Raises SecurityError if the filter or method must
    not be used with these arguments.
    """
    known = _GROWTH.get(name)
    return 0 if known is None else known(values, named)


def check_percent(text: str | bytes, value: object) -> None:
    """Raises SecurityError if `text % value` has fields wider than any prompt needs."""
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    if _WIDE_FIELD.search(text) or (_GIVEN_FIELD.search(text) and _widest(value) > MAX_WIDTH):
        raise SecurityError(f"it formats a field of more than {MAX_WIDTH} characters")


def _widest(value: object) -> int:
    parts = value if isinstance(value, tuple | list) else (value,)
    return max((abs(part) for part in parts if isinstance(part, int)), default=0)


def _numbers(values: tuple[Any, ...], named: Mapping[str, Any]) -> list[int]:
    return [abs(value) for value in (*values[1:], *named.values()) if isinstance(value, int)]


def _padding(values: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    return max(_numbers(values, named), default=80)


def _groups(values: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    if max(_numbers(values, named), default=0) > MAX_WIDTH:
        raise SecurityError(f"it makes groups of more than {MAX_WIDTH}")
    return 0


def _tabs(values: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    tabs: int = values[0].count(b"\t" if isinstance(values[0], bytes) else "\t")
    return tabs * _padding(values, named)


def _replaced(values: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    text, old, new = (*values, *named.values(), "", "")[:3]
    if not isinstance(text, str | bytes):
        text = str(text)
    if not isinstance(old, type(text)) or not isinstance(new, str | bytes):
        return 0  # The arguments are invalid, so the call of `replace` will raise an error.
    found: int = text.count(old)
    return found * len(new)


def _formatted(values: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    for part in (values[1:], tuple(named.values())):
        check_percent(str(values[0]), part)
    return 0


def _indented(values: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    width = (*values[1:], named.get("width", 4))[0]
    by = len(width) if isinstance(width, str) else abs(int(width))
    return (str(values[0]).count("\n") + 1) * by


def _wrapped(values: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    if any(isinstance(value, str) and len(value) > MAX_INDENT for value in (*values[1:], *named.values())):
        raise SecurityError(f"it wraps lines with more than {MAX_INDENT} characters")
    return 0


def _json(values: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    for value in (*values[1:], *named.values()):
        parts = value if isinstance(value, tuple | list) else (value,)
        for part in parts:
            if (len(part) if isinstance(part, str) else part if isinstance(part, int) else 0) > MAX_INDENT:
                raise SecurityError(f"it indents or separates JSON by more than {MAX_INDENT} characters")
    return 0


def _rounded(values: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    if max(_numbers(values, named), default=0) > MAX_DIGITS:
        raise SecurityError(f"it rounds to more than {MAX_DIGITS} digits")
    return 0


def _summed(values: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    start = (*values[2:], named.get("start", 0))[0]
    if not isinstance(start, int | float):
        raise SecurityError("it sums up other things than numbers")
    return 0


def _refused(values: tuple[Any, ...], _named: Mapping[str, Any]) -> int:
    raise SecurityError(f"it uses a method of {type(values[0]).__name__} that no prompt needs")


_GROWTH: dict[str, Growth] = {
    "batch": _groups,
    "center": _padding,
    "expandtabs": _tabs,
    "format": _formatted,
    "indent": _indented,
    "ljust": _padding,
    "replace": _replaced,
    "rjust": _padding,
    "round": _rounded,
    "slice": _groups,
    "sum": _summed,
    "to_bytes": _refused,
    "tojson": _json,
    "translate": _refused,
    "wordwrap": _wrapped,
    "zfill": _padding,
}
