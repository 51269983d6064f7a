"""Finds stop strings in a text that arrives in pieces, even if a stop string spans several pieces.

StopAutomaton is made once per request. StopStrings holds the state of one sequence of the request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopAutomaton:
    """The Aho-Corasick automaton for some strings (doi.org/10.1145/360825.360855). Immutable once made.

    Each state has a text: the longest suffix of the input that is a prefix of one of the strings. The text of state 0
    is empty. `depth`: state -> number of characters. `found`: state -> the longest string at the end of the state's
    text, or None.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self.depth = [0]
        self.found: list[str | None] = [None]
        for string in strings:
            self._add(string)
        self._link()

    @property
    def is_empty(self) -> bool:
        return len(self.depth) == 1

    def step(self, state: int, char: str) -> int:
        """Returns the state after one more character."""
        while char not in self._next[state]:
            if state == 0:
                return 0
            state = self._fallback[state]
        return self._next[state][char]

    def open(self, state: int) -> int:
        """Returns `state` if its text can still grow into a longer stop string.

        Otherwise returns the state of the longest suffix of this text that can grow; 0 if no suffix can grow.
        """
        while state and not self._next[state]:
            state = self._fallback[state]
        return state

    def _add(self, string: str) -> None:
        state = 0
        for char in string:
            if char not in self._next[state]:
                self._next[state][char] = len(self.depth)
                self._next.append({})
                self._fallback.append(0)
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
            state = self._next[state][char]
        self.found[state] = string

    def _link(self) -> None:
        """Sets each state's fallback: the state of the longest proper suffix of the state's text.

        The predecessor of a state has the same text without the last character. A step by this character from the
        predecessor's fallback gives the state's fallback. So states with shorter texts are linked first.
        """
        states = deque(self._next[0].values())
        while states:
            state = states.popleft()
            for char, following in self._next[state].items():
                self._fallback[following] = self.step(self._fallback[state], char)
                if self.found[following] is None:
                    self.found[following] = self.found[self._fallback[following]]
                states.append(following)


class StopStrings:
    """Passes text through, but holds back text that may be the start of a stop string.

    The cost per character does not depend on the number of stop strings or the length of the text. The result does not
    depend on how the text is cut into pieces: the stop string that ends first wins. If several stop strings end
    together, the longest of them wins.
    """

    def __init__(self, automaton: StopAutomaton, *, include_in_output: bool = False) -> None:
        self._automaton = automaton
        self._include_in_output = include_in_output
        self._state = 0
        self._held = ""
        self.found: str | None = None  # the stop string that ended the text

    def add(self, piece: str, *, may_stop: bool = True) -> str:
        """Returns the text that is certain by now.

        With `may_stop` False (min_tokens), a stop string that ends in `piece` counts as text.
        """
        if self.found is not None:
            return ""
        automaton = self._automaton
        if automaton.is_empty:
            return piece
        text = self._held + piece
        state = self._state
        for offset, char in enumerate(piece, start=len(self._held) + 1):
            state = automaton.step(state, char)
            stop = automaton.found[state]
            if stop is not None and may_stop:
                self.found = stop
                self._held = ""
                return text[: offset if self._include_in_output else offset - len(stop)]
        self._state = automaton.open(state)
        num_held = automaton.depth[self._state]
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """Returns the text that is still held back. Call it at the end of the text."""
        held, self._held = self._held, ""
        return held
