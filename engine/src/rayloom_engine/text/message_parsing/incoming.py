"""IncomingText: generated text that arrives in pieces, and generators that read it.

A reader is a generator that yields whenever it needs more text. So the code of a reader looks as if all of the text
were there. The result does not depend on where the text was cut.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]  # a reader with a result of type T

BLANKS = " \t\r\n"


class NoCall(Exception):
    """The text is not a tool call. Raised only before the call has started."""


class IncomingText:
    """The text so far, and the position up to which it was read.

    Text before the position is dropped, unless `mark` was called.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_ended = False
        self.wait: Wait | None = None  # set while `until` waits and all text so far is emitted
        self._mark: int | None = None
        self._num_forgotten = 0

    def append(self, text: str) -> None:
        if self._mark is None:
            self._num_forgotten += self.at
            self.text = self.text[self.at :] + text
            self.at = 0
        else:
            self.text += text

    def pass_on(self, text: str) -> bool:
        """Emits new text for the reader that waits in `until`. Returns False if the reader must read the text."""
        if self.wait is None or self._mark is not None or self.wait.markers.may_begin(text):
            return False
        self._num_forgotten += len(text)
        self.wait.emit(text)
        return True

    def skip(self, num_chars: int) -> None:
        """Counts `num_chars` characters as read: other code has emitted them while `wait` was set."""
        self._num_forgotten += num_chars

    @property
    def is_marked(self) -> bool:
        return self._mark is not None

    @property
    def position(self) -> int:
        """Number of characters read since the beginning."""
        return self._num_forgotten + self.at

    def mark(self) -> None:
        """Keeps the text from the present position on, until `release` or `rewind`."""
        self._mark = self.at

    def release(self) -> None:
        self._mark = None

    def rewind(self) -> None:
        """Sets the position to the mark and removes the mark."""
        assert self._mark is not None
        self.at = self._mark
        self._mark = None


def blanks(incoming: IncomingText) -> Reading[str]:
    """Skips blanks. Returns the next character, without reading it; an empty text at the end."""
    while True:
        text = incoming.text
        while incoming.at < len(text):
            if text[incoming.at] not in BLANKS:
                return text[incoming.at]
            incoming.at += 1
        if incoming.is_ended:
            return ""
        yield


def one_of(incoming: IncomingText, markers: Sequence[str]) -> Reading[str]:
    """Reads one of `markers`, the longest that fits, and returns it. Returns an empty text if none follows."""
    while True:
        rest = incoming.text[incoming.at : incoming.at + max(map(len, markers), default=0)]
        open_markers = [marker for marker in markers if len(marker) > len(rest) and marker.startswith(rest)]
        if open_markers and not incoming.is_ended:
            yield
            continue
        found = max((marker for marker in markers if rest.startswith(marker)), key=len, default="")
        incoming.at += len(found)
        return found


def until(incoming: IncomingText, markers: Markers, emit: Callable[[str], None]) -> Reading[str]:
    """Emits text up to the first marker, reads the marker and returns it. Returns an empty text at the end.

    A suffix that may be the beginning of a marker is held back.
    """
    while True:
        held_at = len(incoming.text) if incoming.is_ended else markers.open_at(incoming.text, incoming.at)
        found = markers.pattern.search(incoming.text, incoming.at)
        # A marker found at `held_at` may be the beginning of a longer marker, so more text is needed.
        if found is not None and found.start() < held_at:
            emit(incoming.text[incoming.at : found.start()])
            incoming.at = found.end()
            return found[0]
        emit(incoming.text[incoming.at : held_at])
        incoming.at = held_at
        if incoming.is_ended:
            return ""
        incoming.wait = Wait(markers, emit) if held_at == len(incoming.text) else None
        yield
        incoming.wait = None


class Markers:
    """Texts that `until` searches for."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(dict.fromkeys(texts))
        longest_first = sorted(self.texts, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = frozenset(text[:length] for text in self.texts for length in range(1, len(text)))
        self._max_chars = max(map(len, self._beginnings), default=0)
        first_chars = "".join(re.escape(char) for char in sorted({text[0] for text in self.texts}))
        # Matches the first characters of markers. In a text without a match, no marker begins.
        self.find_first_char = re.compile(f"[{first_chars}]" if first_chars else r"(?!)").search

    def may_begin(self, text: str) -> bool:
        """True if a marker may begin in `text`: the text has the first character of a marker."""
        return self.find_first_char(text) is not None

    def open_at(self, text: str, at: int) -> int:
        """Returns the position of the longest suffix that is the beginning of a marker; len(text) if there is none."""
        for start in range(max(at, len(text) - self._max_chars), len(text)):
            if text[start:] in self._beginnings:
                return start
        return len(text)


@functools.lru_cache(maxsize=256)
def markers_of(texts: tuple[str, ...]) -> Markers:
    """Returns Markers that requests share. `texts` are tags of a model's formats, so there are few."""
    return Markers(texts)


@dataclass(frozen=True, slots=True)
class Wait:
    """The markers that `until` waits for, and the function that gets the text before a marker."""

    markers: Markers
    emit: Callable[[str], None]
