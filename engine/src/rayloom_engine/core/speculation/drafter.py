"""Drafter: proposes drafts of one sequence from its own token ids, and records how many draft tokens are accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rayloom_engine.core.speculation.acceptance import Acceptance
from rayloom_engine.core.speculation.ngram_index import NgramIndex

# Returns the tokens that a sequence's grammar allows or forces, given the found draft and the wanted number of tokens.
Fit = Callable[[tuple[int, ...], int], tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """The settings of speculation with n-grams or with a draft model."""

    num_tokens: int  # most tokens of a draft
    min_ngram: int  # a draft needs an earlier occurrence of at least this many of the sequence's last tokens
    max_ngram: int  # at most this many of the sequence's last tokens are compared with earlier tokens
    has_draft_model: bool = False  # True: a draft model proposes all drafts, and n-grams have no effect

    @property
    def most_rows(self) -> int:
        """Rows of logits of a sequence with the longest draft."""
        return 1 + self.num_tokens

    def __post_init__(self) -> None:
        assert self.num_tokens >= 1, "a draft has a token"
        assert 1 <= self.min_ngram <= self.max_ngram, "sizes of n-grams"


class Drafter:
    """Finds drafts in the sequence itself: the tokens that followed an earlier occurrence of its last tokens."""

    def __init__(self, config: SpeculationConfig, num_expected: int) -> None:
        """`num_expected`: tokens that the sequence may have when it ends."""
        self._index = NgramIndex(config.min_ngram, config.max_ngram, num_expected=num_expected)
        self.acceptance = Acceptance()

    def draft(self, token_ids: Sequence[int], cost: float, most: int, fit: Fit | None = None) -> tuple[int, ...]:
        """Returns a draft of at most `most` tokens; () if no draft is found or worth its cost (acceptance.py).

        `fit`: the sequence's grammar; None if the sequence has none.
        """
        num = self.acceptance.length(cost, len(token_ids), most)
        if not num or not self._index.read(token_ids):
            return ()
        found = self._index.draft(token_ids, num)
        return found if fit is None else fit(found, num)

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """Records that the first `num_accepted` tokens of the newest draft were accepted."""
        self.acceptance.note(num_drafted, num_accepted)
