"""Overtaking: smaller sequences may start before a sequence that waits for KV blocks, but cannot starve it.

At most `max_overtakers` sequences may overtake a waiting sequence, and together the overtakers may have at most as many
tokens as the waiting sequence. After that, no later sequence is admitted before it.

A sequence may also wait for an adapter slot. Any number of sequences without an adapter may overtake it, but at most
`max_overtakers` sequences with an adapter. After that, no sequence with an adapter is admitted before the waiting
sequence. So adapter slots become unused as running sequences end.

A sequence may also wait for tokens of a step, although it has room, because a long prompt is computed before it. Then
at most `max_overtakers` short prompts (short_prompts.py) may overtake it.

A sequence may also wait although adapter slots are unused, because the share of its tenant is exhausted. Then the rules
for sequences with an adapter apply only to sequences of the same tenant.
"""

from __future__ import annotations

from rayloom_engine.core.sequence import Sequence

# A step stops reading the waiting queue after this many sequences that had no room or could not overtake.
_MAX_HELD = 8


class Line:
    """The held sequences: a step has read them from the queue, but not admitted them. Decides who may overtake them."""

    def __init__(self, max_overtakers: int) -> None:
        self._max_overtakers = max_overtakers
        self._held: list[Sequence] = []
        self._held_for_tokens: list[Sequence] = []
        self._held_for_adapter: list[Sequence] = []
        self._held_for_share: list[Sequence] = []

    @property
    def is_closed(self) -> bool:
        """True if this step may admit no further sequence, however small."""
        if len(self._held) + len(self._held_for_tokens) >= _MAX_HELD or self._is_overtaken_enough():
            return True
        return any(self._allowance(sequence) <= 0 for sequence in self._held)

    def may_pass(self, sequence: Sequence) -> bool:
        """True if `sequence` may overtake all held sequences."""
        if sequence.params.adapter is not None:
            most = self._max_overtakers
            if any(held.num_overtakers >= most for held in self._before_adapter_of(sequence)):
                return False
        if self._is_overtaken_enough():
            return False
        return all(sequence.num_tokens <= self._allowance(held) for held in self._held)

    def hold(self, sequence: Sequence) -> None:
        """Adds a sequence that is not admitted in this step: it found no room, or may not overtake a held sequence."""
        self._held.append(sequence)

    def hold_for_tokens(self, sequence: Sequence) -> None:
        """Adds a sequence that is not admitted in this step because its prompt is not short."""
        self._held_for_tokens.append(sequence)

    def hold_for_adapter(self, sequence: Sequence) -> None:
        """Adds a sequence that is not admitted in this step because all adapter slots are in use."""
        self._held_for_adapter.append(sequence)

    def hold_for_share(self, sequence: Sequence) -> None:
        """Adds a sequence that is not admitted in this step because its tenant may use no further adapter slot."""
        self._held_for_share.append(sequence)

    def passed(self, sequence: Sequence) -> None:
        """Adds one to the number of overtakers of every held sequence, because `sequence` was admitted before them."""
        for held in self._held:
            held.num_overtakers += 1
            held.num_overtaking_tokens += sequence.num_tokens
        for held in self._held_for_tokens:
            held.num_overtakers += 1
        if sequence.params.adapter is not None:
            for held in self._before_adapter_of(sequence):
                held.num_overtakers += 1

    def _before_adapter_of(self, sequence: Sequence) -> list[Sequence]:
        """Returns the held sequences that wait for an adapter slot and that `sequence` overtakes.

        `sequence` has an adapter.
        """
        return [*self._held_for_adapter, *(held for held in self._held_for_share if held.tenant == sequence.tenant)]

    def _is_overtaken_enough(self) -> bool:
        """True if as many sequences as allowed have overtaken a sequence that waits for tokens."""
        return any(held.num_overtakers >= self._max_overtakers for held in self._held_for_tokens)

    def _allowance(self, held: Sequence) -> int:
        """Returns the limit for the tokens of the next sequence that overtakes `held`."""
        if held.num_overtakers >= self._max_overtakers:
            return 0
        return held.num_tokens - held.num_overtaking_tokens
