"""Encodes JSON documents in pieces, so that a large document never fills the memory or blocks the event loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec

ITEMS_AT_ONCE = 2048  # encoding this many numbers, or objects of two or three fields, takes 2 ms


class LazyList:
    """A JSON list whose items are produced during encoding, `step` at a time. It can be encoded once."""

    def __init__(self, items: Iterable[Any], step: int) -> None:
        self._items = iter(items)
        self._step = step

    def parts(self) -> Iterator[list[Any]]:
        """The items in order, in lists of at most `step`."""
        while part := list(islice(self._items, self._step)):
            yield part


def lazy(items: Iterable[Any], num_items: int, size: int = 1) -> list[Any] | LazyList:
    """Returns a plain list if the items are few, else a LazyList. `size`: number of values in each item."""
    step = max(1, ITEMS_AT_ONCE // size)
    return list(items) if num_items <= step else LazyList(items, step)


def lazy_ids(token_ids: Sequence[int]) -> list[Any] | LazyList:
    """Returns token ids as a JSON list, lazy if it is long."""
    return lazy(token_ids, len(token_ids))


def pieces(document: Any) -> Iterator[bytes]:
    """Yields the JSON text of a document whose objects and lists may contain LazyLists."""
    try:
        whole = msgspec.json.encode(document, enc_hook=_refuse_lazy)
    except _IsLazy:
        whole = b""
    if whole:
        yield whole
    elif isinstance(document, dict):
        yield from _object_pieces(document)
    else:
        parts = document.parts() if isinstance(document, LazyList) else iter([document])
        yield from _list_pieces(parts)


def parts(document: Any, num_bytes: int) -> Iterator[bytes]:
    """Yields the JSON text of a document in parts of `num_bytes`. The last part may be smaller."""
    buffer = bytearray()
    for piece in pieces(document):
        buffer += piece
        while len(buffer) >= num_bytes:
            yield bytes(buffer[:num_bytes])
            del buffer[:num_bytes]
    if buffer:
        yield bytes(buffer)


class _IsLazy(Exception):
    """The document contains a LazyList."""


def _refuse_lazy(value: Any) -> Any:
    raise _IsLazy if isinstance(value, LazyList) else TypeError(f"{type(value).__name__} is not JSON")


def _object_pieces(document: dict[str, Any]) -> Iterator[bytes]:
    separator = b"{"
    for key, value in document.items():
        yield separator + msgspec.json.encode(key) + b":"
        yield from pieces(value)
        separator = b","
    yield b"}"


def _list_pieces(parts_of_list: Iterator[list[Any]]) -> Iterator[bytes]:
    separator = b"["
    for part in parts_of_list:
        try:
            items = msgspec.json.encode(part, enc_hook=_refuse_lazy)[1:-1]
        except _IsLazy:
            items = b""
        if items:
            yield separator + items
            separator = b","
            continue
        for item in part:
            yield separator
            yield from pieces(item)
            separator = b","
    yield b"]" if separator == b"," else b"[]"
