"""Stop strings in a text that arrives in pieces, found across the pieces' borders.

StopAutomaton is made once for a request, StopStrings holds the place of one of its sequences in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopAutomaton:
    """The automaton of Aho and Corasick for some strings. A state stands for the longest start of a string that the
    text ends with; state 0 is the empty one. Immutable once made, so sequences can share it.

    `depth` of a state is its number of characters, `found` the longest string that ends there, if any.
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
        """The state after one more character."""
        while char not in self._next[state]:
            if state == 0:
                return 0
            state = self._fallback[state]
        return self._next[state][char]

    def open(self, state: int) -> int:
        """`state`, or the longest state that it ends with of which a longer string may still come."""
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
        """Sets fallbacks, the shorter states first: each is one step after the fallback of its predecessor."""
        states = deque(self._next[0].values())
        while states:
            state = states.popleft()
            for char, following in self._next[state].items():
                self._fallback[following] = self.step(self._fallback[state], char)
                if self.found[following] is None:
                    self.found[following] = self.found[self._fallback[following]]
                states.append(following)


class StopStrings:
    """Passes text through, holding back what may be the start of a stop string.

    Each character costs the same however many stop strings there are and however long the text is, and the outcome
    depends on the text alone, not on how it was cut: the stop string that ends first wins, the longest of those that
    end together.
    """

    def __init__(self, automaton: StopAutomaton, *, include_in_output: bool = False) -> None:
        self._automaton = automaton
        self._include_in_output = include_in_output
        self._state = 0
        self._held = ""
        self.found: str | None = None  # the stop string that ended the text

    def add(self, piece: str, *, may_stop: bool = True) -> str:
        """The text that is now certain. With `may_stop` False (min_tokens) a stop string ending in `piece` is text."""
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
                self.found, self._held = stop, ""
                return text[: offset if self._include_in_output else offset - len(stop)]
        self._state = automaton.open(state)
        num_held = automaton.depth[self._state]
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """What is still held back, once no more text comes."""
        held, self._held = self._held, ""
        return held
