"""NgramIndex: finds earlier occurrences of a sequence's last tokens, and the tokens that followed them.

The positions of equal n-grams form a chain, newest first, as in LZ77 compressors. One array maps the hash of an n-gram
to the head of the chain. Another array maps each position to the next older position in the chain. A new token costs
one hash, and the index needs 4 to 12 bytes for a token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

# The most tokens that one call of `read` adds. So a long prompt is read in several steps, each at most 2 ms longer.
MAX_READ = 4096
# The most earlier occurrences that one search compares. In tables and code, an n-gram may occur very often.
_MAX_CANDIDATES = 32
_LEAST_HEADS = 1 << 10
_MOST_HEADS = 1 << 16


class NgramIndex:
    """An index of the token ids of one sequence, to which new ids are only appended."""

    def __init__(
        self, min_size: int, max_size: int, *, num_expected: int = 0, max_candidates: int = _MAX_CANDIDATES
    ) -> None:
        """`min_size`, `max_size`: tokens of the n-grams. `num_expected`: tokens that the sequence may have in all.

        `max_candidates`: limit of the earlier occurrences of the last `min_size` tokens that a search compares.
        """
        assert 1 <= min_size <= max_size, f"n-grams of {min_size} to {max_size} tokens"
        self._min_size = min_size
        self._max_size = max_size
        self._max_candidates = max_candidates
        num_heads = _LEAST_HEADS
        while num_heads < min(num_expected, _MOST_HEADS):
            num_heads *= 2
        # hash of an n-gram -> position of the last token of the newest n-gram with this hash; -1: there is none
        self._heads = array("i", [-1]) * num_heads
        # position of an n-gram's last token -> position of the last token of the next older n-gram with the same hash;
        # -1: there is none
        self._before = array("i")

    def read(self, token_ids: Sequence[int]) -> bool:
        """Adds the tokens that are new since the last call. Returns False if some are left for the next call."""
        size = self._min_size
        mask = len(self._heads) - 1
        first = len(self._before)
        end = min(len(token_ids), first + MAX_READ)
        for position in range(first, end):
            if position + 1 < size:
                self._before.append(-1)
                continue
            head = hash(tuple(token_ids[position + 1 - size : position + 1])) & mask
            self._before.append(self._heads[head])
            self._heads[head] = position
        return end == len(token_ids)

    def draft(self, token_ids: Sequence[int], num: int) -> tuple[int, ...]:
        """Returns the `num` tokens that followed the longest earlier occurrence of the last tokens; () without one.

        Of several occurrences of that length, the newest counts. All of `token_ids` must have been read. If fewer than
        `num` tokens follow the occurrence, the draft repeats these tokens.
        """
        start = self._found(token_ids)
        if start is None:
            return ()
        found: list[int] = []
        for position in range(start, start + num):
            beyond = position - len(token_ids)
            found.append(token_ids[position] if beyond < 0 else found[beyond])
        return tuple(found)

    def _found(self, token_ids: Sequence[int]) -> int | None:
        """Returns the position after the longest earlier occurrence of the last tokens; None if there is none."""
        newest = len(token_ids) - 1
        assert newest == len(self._before) - 1, "tokens that the index has not read"
        longest = self._min_size - 1
        found = None
        position = self._before[newest] if newest >= 0 else -1
        for _ in range(self._max_candidates):
            if position < 0 or longest == self._max_size:
                break
            size = self._num_equal(token_ids, position, newest)
            if size > longest:
                longest = size
                found = position + 1
            position = self._before[position]
        return found

    def _num_equal(self, token_ids: Sequence[int], position: int, newest: int) -> int:
        """Returns how many tokens in a row are equal, backwards from `position` and `newest`; at most `max_size`."""
        most = min(self._max_size, position + 1)
        size = 0
        while size < most and token_ids[position - size] == token_ids[newest - size]:
            size += 1
        return size
