"""Placement: puts a front's unfinished sequences on engines, and moves them when their engine is lost or leaves."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from rayloom_engine.errors import PoisonousRequest, RequestError
from rayloom_engine.front.core_link.engine_choice import MOST_LOSSES
from rayloom_engine.front.core_link.engine_link import EngineLink
from rayloom_engine.front.core_link.engine_pool import EnginePool
from rayloom_engine.front.core_link.recoveries import RecoveryLog
from rayloom_engine.front.core_link.sequences import (
    ClientSequence,
    by_prompt,
    encoded,
    in_turns_of_keys,
    num_requests,
)

logger = logging.getLogger(__name__)


class Placement:
    """Gives sequences to engines. A sequence that no engine has is held: it waits for an engine. For one event loop."""

    def __init__(self, pool: EnginePool, sequences: dict[str, ClientSequence], recoveries: RecoveryLog) -> None:
        """`sequences`: the unfinished sequences by id, in order of arrival. Placement removes failed sequences."""
        self._pool = pool
        self._sequences = sequences
        self._recoveries = recoveries

    def waiting(self) -> list[ClientSequence]:
        """The sequences that no engine has, in the order in which engines should get them."""
        waiting = [sequence for sequence in self._sequences.values() if sequence.place.engine is None]
        return in_turns_of_keys(waiting, self._sequences.values()) if self._pool.rules.is_gateway else waiting

    def hold(self, sequences: Iterable[ClientSequence]) -> None:
        """Records that the sequences wait from now on. If a sequence waits already, the start of its wait stays."""
        now_s = time.monotonic()
        for sequence in sequences:
            if sequence.place.waits_since_s is None:
                sequence.place.waits_since_s = now_s

    def place_again(self, sequences: Iterable[ClientSequence]) -> None:
        """Submits sequences that no engine has. If no engine can compute a sequence, it continues to wait.

        Marks the sequences as accepted, so that no core refuses them for a full queue. A sequence that a full engine
        has refused is not marked.
        """
        left = [sequence for sequence in sequences if self._sequences.get(sequence.sequence_id) is sequence]
        num_placed = 0
        for choices in by_prompt(sequence for sequence in left if sequence.place.engine is None):
            is_elsewhere = bool(choices[0].place.refused_by)  # the same engines have refused all sequences of a group
            for sequence in choices:
                sequence.is_accepted = sequence.is_accepted or not is_elsewhere
            link = self._pool.place_for(choices)
            if link is None:
                self.hold(choices)
                continue
            try:
                # A sequence's leader (`fork_of`) may be finished. The new core does not know a finished sequence, so
                # such a `fork_of` is left out.
                self._pool.give(link, choices, encoded(choices, known=self._sequences))
            except RequestError as error:
                self._pool.take_back(link, choices)
                for sequence in choices:
                    logger.error("sequence %s is lost: %s", sequence.sequence_id, error)
                    self.fail(sequence, error)
            else:
                num_placed += len(choices)
        if num_placed:
            self._recoveries.replayed(num_requests(left))
            logger.info("submitted %d unfinished sequences again", num_placed)

    def move_away(self, link: EngineLink, *, is_loss: bool = False) -> None:
        """Moves sequences from an unusable engine to other engines. Sequences that no other engine can compute stay."""
        now_s = time.monotonic()
        for sequence in self.of(link):
            sequence.place.refused_by.clear()
        moved = [sequence for sequence in self.of(link) if self._pool.engine_for(sequence) is not None]
        for sequence in moved:
            self._pool.withdraw(sequence, is_moved=True)
            if is_loss:
                self.count_loss(sequence, now_s)
        self.place_again(moved)

    def of(self, link: EngineLink) -> list[ClientSequence]:
        """The sequences that this engine has."""
        return [sequence for sequence in self._sequences.values() if sequence.place.engine == link.name]

    def count_loss(self, sequence: ClientSequence, now_s: float) -> None:
        """Counts the loss of a sequence's engine. After too many losses in a row, ends the sequence with an error."""
        sequence.place.num_losses += 1
        sequence.place.last_loss_s = now_s
        if self._pool.rules.is_gateway and sequence.place.num_losses >= MOST_LOSSES:
            self.fail(sequence, PoisonousRequest(f"{MOST_LOSSES} engines in a row were lost with this request"))

    def fail(self, sequence: ClientSequence, error: Exception) -> None:
        """Fails a sequence that no engine has any more: its mailbox gets `error`."""
        del self._sequences[sequence.sequence_id]
        sequence.mailbox.fail(error)
