"""Acceptance: computes from the verified drafts of a sequence how many draft tokens are worth their time.

Let r be the probability that a draft token is accepted if all tokens before it in the draft are accepted. Then the i-th
token of a draft makes a later decode unnecessary with probability r ** i. A token is worth verifying if r ** i is
greater than the cost of a draft token. This cost is the time that a draft token adds to a step, divided by the time per
token of a step without drafts. So a draft has the largest length i with r ** i > cost. If even the first token is not
worth its cost, the sequence gets no drafts for its next 32 tokens. After these, it gets a short draft. If the tokens of
this draft are rejected as well, the next pause is twice as long.
"""

from __future__ import annotations

from math import log

# The first drafts of a sequence are as long as if every second token were accepted.
_FIRST_RATE = 0.5
# The rate is an average over about the last 5 verified tokens, because a text can change from copied words to new words
# within a sentence.
_WEIGHT = 0.2
_MOST_RATE = 0.99
# If no draft is worth its cost, the sequence generates this many tokens before drafts are tried again.
_FIRST_PAUSE = 32
_MOST_PAUSE = 1024
# When drafts are tried again, the rate is raised to this many times the cost. So one rejected token does not stop the
# drafts.
_TRIAL_RATE = 1.5


class Acceptance:
    """The acceptance of one sequence's drafts."""

    def __init__(self) -> None:
        # share of accepted tokens, among draft tokens whose predecessors in the draft were accepted
        self.rate = _FIRST_RATE
        self._pause = _FIRST_PAUSE
        self._resume_at: int | None = None  # number of tokens at which drafts are tried again; None: no pause

    def length(self, cost: float, num_tokens: int, most: int) -> int:
        """Returns how many tokens the next draft shall have, from 0 to `most`.

        `cost`: time of one draft token / time of a token without drafts. `num_tokens`: tokens of the sequence.
        """
        if self._resume_at is not None:
            if num_tokens < self._resume_at or cost >= 1:
                return 0
            self._resume_at = None
            self.rate = max(self.rate, min(_MOST_RATE, _TRIAL_RATE * cost))
        num = worthwhile(self.rate, cost, most)
        if not num and most and cost < 1:
            self._resume_at = num_tokens + self._pause
            self._pause = min(2 * self._pause, _MOST_PAUSE)
        return num

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """Records a verified draft, of which the first `num_accepted` tokens were accepted."""
        for _ in range(num_accepted):
            self.rate += _WEIGHT * (_MOST_RATE - self.rate)
        if num_accepted < num_drafted:
            self.rate -= _WEIGHT * self.rate
        if num_accepted:
            self._pause = _FIRST_PAUSE


def worthwhile(rate: float, cost: float, most: int) -> int:
    """Returns the largest number of draft tokens, at most `most`, whose last token is worth its cost."""
    if rate <= cost:
        return 0
    if cost <= 0:
        return most
    # rate ** num > cost, with a margin for the rounding of the logarithms.
    return min(most, max(1, int(log(cost) / log(rate) - 1e-9)))
