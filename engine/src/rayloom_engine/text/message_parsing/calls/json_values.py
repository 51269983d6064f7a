"""Reads JSON values whose text arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Callable

from rayloom_engine.text.message_parsing.incoming import BLANKS, IncomingText, NoCall, Reading

_STRING_RUN = re.compile(r'[^"\\]*')
_SCALARS = frozenset("0123456789+-.eEtrufalsn")  # the characters of numbers and of the words true, false and null
_CLOSES = {"}": "{", "]": "["}


def json_value(incoming: IncomingText, emit: Callable[[str], None]) -> Reading[bool]:
    """Emits the text of a value as it arrives. Returns False if the value does not end, or cannot be JSON."""
    scanner = ValueScanner()
    while True:
        start = incoming.at
        incoming.at = scanner.scan(incoming.text, start, incoming.is_ended)
        emit(incoming.text[start : incoming.at])
        if scanner.is_done:
            return True
        if scanner.is_broken or incoming.is_ended:
            return False
        yield


def json_text(incoming: IncomingText) -> Reading[str]:
    """Returns the text of a whole value. Raises NoCall if the value does not end, or cannot be JSON."""
    pieces: list[str] = []
    if not (yield from json_value(incoming, pieces.append)):
        raise NoCall
    return "".join(pieces)


class ValueScanner:
    """Finds the end of a value by its brackets and strings.

    The scanner checks neither numbers nor the order of commas and colons. So it also finds the end of some values that
    JSON refuses.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        self._open: list[str] = []  # brackets that are not closed yet
        self._is_string = False
        self._is_escaped = False
        self._is_scalar = False  # in a number or word outside brackets; it ends before a character not in _SCALARS

    def scan(self, text: str, at: int, is_end: bool) -> int:
        """Reads characters of the value from `at` on; returns the position after them. `is_end`: no text follows."""
        while at < len(text) and not self.is_done and not self.is_broken:
            at = self._string(text, at) if self._is_string else self._structure(text, at)
        if is_end and self._is_scalar:
            self.is_done = True
        return at

    def _string(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        run = _STRING_RUN.match(text, at)
        assert run is not None
        at = run.end()
        if at == len(text):
            return at
        if text[at] == "\\":
            self._is_escaped = True
        else:
            self._is_string = False
            self.is_done = not self._open
        return at + 1

    def _structure(self, text: str, at: int) -> int:
        char = text[at]
        if self._is_scalar and char not in _SCALARS:
            self.is_done = True
            return at
        if char == '"':
            self._is_string = True
        elif char in _CLOSES:
            self.is_broken = not self._open or self._open.pop() != _CLOSES[char]
            self.is_done = not self._open and not self.is_broken
        elif char in "{[":
            self._open.append(char)
        elif char in _SCALARS:
            self._is_scalar = not self._open
        else:
            self.is_broken = not self._open or char not in BLANKS + ",:"
        return at if self.is_broken else at + 1
