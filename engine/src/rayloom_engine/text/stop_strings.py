"""StopStrings: finds stop strings in a text that arrives in pieces, across the pieces' borders."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text through, holding back what may be the start of a stop string.

    One automaton (Knuth, Morris, Pratt) per stop string, so each character costs the same however long the text is, and
    the outcome depends on the text alone, not on how it was cut: the stop string that ends first wins, the longest of
    those that end together.
    """

    def __init__(self, strings: Sequence[str], *, include_in_output: bool = False) -> None:
        self._strings = tuple(strings)
        self._include_in_output = include_in_output
        self._fallbacks = tuple(_fallbacks(string) for string in self._strings)
        self._matched = [0] * len(self._strings)  # characters at the text's end that match each string's start
        self._held = ""
        self.found: str | None = None  # the stop string that ended the text

    def add(self, piece: str, *, may_stop: bool = True) -> str:
        """The text that is now certain. With `may_stop` False (min_tokens) a stop string ending in `piece` is text."""
        if self.found is not None:
            return ""
        if not self._strings:
            return piece
        text = self._held + piece
        for offset, char in enumerate(piece, start=len(self._held) + 1):
            stop = self._step(char)
            if stop is not None and may_stop:
                self.found, self._held = stop, ""
                return text[: offset if self._include_in_output else offset - len(stop)]
        num_held = max(self._matched)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """What is still held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> str | None:
        """Advance every automaton by one character; the longest stop string that ends with it."""
        longest: str | None = None
        for index, string in enumerate(self._strings):
            matched, fallbacks = self._matched[index], self._fallbacks[index]
            while matched and string[matched] != char:
                matched = fallbacks[matched - 1]
            if string[matched] == char:
                matched += 1
            if matched == len(string):
                matched = fallbacks[matched - 1]
                if longest is None or len(string) > len(longest):
                    longest = string
            self._matched[index] = matched
        return longest


def _fallbacks(string: str) -> tuple[int, ...]:
    """For each prefix, the length of its longest proper suffix that is a prefix too."""
    fallbacks = [0] * len(string)
    matched = 0
    for index in range(1, len(string)):
        while matched and string[index] != string[matched]:
            matched = fallbacks[matched - 1]
        if string[index] == string[matched]:
            matched += 1
        fallbacks[index] = matched
    return tuple(fallbacks)
