"""ModelDrafter: the drafts of one sequence if a draft model proposes them.

The rank that samples runs the draft model. At the end of a step it proposes the tokens after the sequence's newest
token, and the step's result has this proposal. The next step of the sequence verifies it. A proposal belongs to the
token ids of the sequence, not to a step, so it stays valid after a preemption.

If the sequence has a grammar that does not allow the first proposed token, the proposal counts as one rejected token.
Otherwise a grammar that allows no proposal would be asked for proposals in every step. The draft is then the text that
the grammar forces. Forced text costs no pass of the draft model, so it has an acceptance of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from rayloom_engine.core.speculation.acceptance import Acceptance, worthwhile
from rayloom_engine.core.speculation.drafter import Fit

# A sequence without an answer to this many questions for a proposal in a row gets no more proposals.
_MOST_UNANSWERED = 2


class ModelDrafter:
    """Keeps the newest proposal for a sequence, and records how many draft tokens are accepted."""

    def __init__(self) -> None:
        self.acceptance = Acceptance()  # of the proposed tokens
        self.is_forced = False  # True if the newest draft is text that the grammar forces
        self._forced = Acceptance()  # of the tokens that the grammar forces
        # True if the draft model computes the sequence; None: not decided yet (step_proposals.py)
        self.follows: bool | None = None
        self._num_unanswered = 0  # plans in a row that asked for a proposal and got none
        self._proposed: tuple[int, ...] = ()
        self._num_tokens = 0  # number of the sequence's tokens that precede the proposal

    def propose(self, num_tokens: int, proposed: tuple[int, ...]) -> None:
        """Stores a proposal for the tokens after the sequence's first `num_tokens` tokens."""
        self._num_tokens = num_tokens
        self._proposed = proposed
        self._num_unanswered = 0

    def note_unanswered(self) -> None:
        """Records that the rank was asked for a proposal and gave none, although it did not have to catch up.

        For example, the draft model has failed, or its longest context has ended. Then it also answers no later plan.
        """
        self._num_unanswered += 1
        if self._num_unanswered == _MOST_UNANSWERED:
            self.follows = False

    def draft(self, token_ids: Sequence[int], cost: float, most: int, fit: Fit | None = None) -> tuple[int, ...]:
        """Returns a draft of at most `most` tokens; () if there is none, or if no token is worth its cost.

        `cost`: time of the verification of a draft token / time of a token without drafts. The time of the proposal is
        spent. `fit`: the sequence's grammar, which may also force tokens without a proposal.
        """
        self.is_forced = False
        num = worthwhile(self.acceptance.rate, cost, most)
        found = self._proposed[:num] if self._num_tokens == len(token_ids) else ()
        if fit is None:
            return found
        num_forced = self._forced.length(cost, len(token_ids), most)
        if not found and not num_forced:
            return ()
        fitted = fit(found, max(len(found), num_forced))
        if found and fitted[:1] == found[:1]:
            return fitted
        if found:
            self.acceptance.note(1, 0)
            self._proposed = ()  # the sequence may be postponed, but the proposal counts once
        self.is_forced = True
        return fitted[:num_forced]

    def note(self, num_drafted: int, num_accepted: int) -> None:
        """Records that the first `num_accepted` tokens of the newest draft were accepted."""
        (self._forced if self.is_forced else self.acceptance).note(num_drafted, num_accepted)
