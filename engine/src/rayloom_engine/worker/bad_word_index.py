"""BadWordIndex: finds the bad words of a sequence by their second-last token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class BadWordIndex:
    """Finds words that the next token would complete. Compares only words whose second-last token came last."""

    def __init__(self, bad_words: tuple[tuple[int, ...], ...]) -> None:
        self._singles = tuple(word[-1] for word in bad_words if len(word) == 1)
        self._by_newest: dict[int, list[tuple[int, ...]]] = {}  # second-last token -> words
        for word in bad_words:
            if len(word) > 1:
                self._by_newest.setdefault(word[-2], []).append(word)

    def completed(self, generated: npt.NDArray[np.int64]) -> tuple[int, ...]:
        """Returns the last token of each word whose other tokens are at the end of `generated`."""
        if not len(generated):
            return self._singles
        words = self._by_newest.get(int(generated[-1]))
        if words is None:
            return self._singles
        longest = max(map(len, words)) - 1
        end = tuple(generated[-longest:].tolist())
        return (*self._singles, *(word[-1] for word in words if end[-len(word) + 1 :] == word[:-1]))
