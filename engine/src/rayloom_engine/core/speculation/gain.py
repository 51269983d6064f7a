"""The gain of drafts for a whole answer: it must be greater than the time in which the draft model reads the prompt."""

from __future__ import annotations

# The rate before the first draft, as in acceptance.py, and the number of verified tokens for which it counts.
_FIRST_RATE = 0.5
_FIRST_WEIGHT = 4.0
# After 100 drafts, a draft counts about a third as much as the newest draft.
_KEPT = 0.99


class MeanAcceptance:
    """The share of accepted tokens in the drafts of all sequences, where new drafts count more than old drafts."""

    def __init__(self) -> None:
        self._num_accepted = _FIRST_RATE * _FIRST_WEIGHT
        self._num_verified = _FIRST_WEIGHT  # accepted tokens, and the first rejected token of each draft

    @property
    def rate(self) -> float:
        """The probability that a draft token is accepted if all tokens before it in the draft are accepted."""
        return self._num_accepted / self._num_verified

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """Records a verified draft, of which the first `num_accepted` tokens were accepted."""
        self._num_accepted = _KEPT * self._num_accepted + num_accepted
        self._num_verified = _KEPT * self._num_verified + num_accepted + (num_accepted < num_drafted)


def saved_share(rate: float, cost: float, most: int) -> float:
    """Returns the share of its decoding time that an answer saves by drafts of the best length, at most `most` tokens.

    `cost`: time of one draft token / time of a token without drafts. A step with a draft of n tokens takes 1 + n x cost
    such times, and gives 1 + rate + rate^2 + ... + rate^n tokens.
    """
    best = 0.0
    power = num_tokens = 1.0
    for num in range(1, most + 1):
        power *= rate
        num_tokens += power
        best = max(best, 1 - (1 + num * cost) / num_tokens)
    return best
