"""EngineAnswers: puts the outputs of engines into mailboxes, and deals with refused sequences.

A message about an earlier attempt, or from an engine that no longer has the sequence, changes nothing.
"""

from __future__ import annotations

from rayloom_engine.front.core_link.engine_choice import is_current
from rayloom_engine.front.core_link.engine_link import EngineLink
from rayloom_engine.front.core_link.engine_pool import EnginePool
from rayloom_engine.front.core_link.placement import Placement
from rayloom_engine.front.core_link.refusals import may_ask_others, refusal
from rayloom_engine.front.core_link.request_mailbox import DueReaders, Mailbox
from rayloom_engine.front.core_link.sequences import ClientSequence
from rayloom_engine.protocol.messages import Outputs, Refused, SequenceOutput


class EngineAnswers:
    """Receives the messages of engines about a front's unfinished sequences. For one event loop."""

    def __init__(self, pool: EnginePool, sequences: dict[str, ClientSequence], placement: Placement) -> None:
        """`sequences`: the unfinished sequences by id. Sequences whose last output has come are removed from it."""
        self._pool = pool
        self._sequences = sequences
        self._placement = placement
        self._readers = DueReaders()

    def outputs(self, link: EngineLink, message: Outputs) -> None:
        """Puts the outputs of a step into the mailboxes of their sequences."""
        engine = link.name
        first: list[Mailbox] = []  # mailboxes that get the first output of an attempt
        others: list[Mailbox] = []
        for output in message.outputs:
            sequence = self._sequences.get(output.sequence_id)
            if sequence is None:
                continue  # the sequence was aborted
            place = sequence.place
            if place.attempt != output.attempt or place.engine != engine:  # the check of `is_current`, inlined
                continue  # the sequence was submitted again meanwhile
            due = others
            if not place.is_decoding:
                due = first
                link.estimate.has_token(sequence.sequence_id)
                place.is_decoding = True
                sequence.is_accepted = True  # the answer has begun, so no later engine may refuse the sequence
            whole: SequenceOutput | None = output
            if not output.token_ids or output.prompt_logprobs:
                whole = sequence.logprob_parts.take(output)
            if whole is None:
                continue  # a part of the prompt's logprobs; the client gets all parts with the first token
            place.num_losses = 0
            sequence.generated_ids += whole.token_ids
            if whole.finish_reason is not None:
                link.estimate.ended(sequence.sequence_id)
                del self._sequences[whole.sequence_id]
            if sequence.mailbox.put(sequence.lane, whole):
                due.append(sequence.mailbox)
        self._readers.add(first, others)

    def refused(self, link: EngineLink, message: Refused) -> None:
        """Gives a refused sequence to another engine, or lets it wait for one, or fails it."""
        sequence = self._sequences.get(message.sequence_id)
        if sequence is None or not is_current(link, sequence, message.attempt):
            return
        link.estimate.refused(sequence.sequence_id)
        sequence.place.note_refusal(message, link.name, link.fingerprint)
        is_full = message.reason == "queue_full"
        if not is_full and not (self._pool.rules.is_gateway and may_ask_others(message, sequence.place)):
            self._placement.fail(sequence, refusal(message))
            return
        self._pool.withdraw(sequence, is_moved=True)
        other = self._pool.engine_for(sequence) if self._pool.rules.is_gateway else None
        # An engine that has the adapter but cannot take the sequence at this moment gets it later, or at once if only
        # its queue is full.
        is_adapter = message.reason == "adapter"
        may_wait = sequence.is_accepted if is_full else is_adapter and self._pool.may_load_adapter(sequence)
        if other is None and not may_wait:
            self._placement.fail(sequence, refusal(message))
            return
        # A core never refuses an accepted sequence for a full queue. So if this sequence is accepted, it was marked as
        # accepted only after the submission. If there is no other engine, an engine with a full queue that has refused
        # the sequence gets it again. This engine must then accept the sequence.
        if other is None:
            sequence.place.refused_by.clear()
        self._placement.place_again([sequence])
