"""Admission: moves sequences between the waiting queue and the running sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rayloom_engine.core.planning.chunking import chunk_of
from rayloom_engine.core.planning.overtaking import Line
from rayloom_engine.core.planning.running import RunningSequences
from rayloom_engine.core.planning.shared_blocks import SharedBlocks
from rayloom_engine.core.planning.step_builder import StepBuilder
from rayloom_engine.core.planning.waiting_queue import WaitingQueue
from rayloom_engine.core.scheduler_config import SchedulerConfig
from rayloom_engine.core.sequence import Sequence, SequenceState
from rayloom_engine.core.stats import Counters


class Admission:
    """Admits sequences that have room, and preempts others for them where the fairness between tenants demands it."""

    def __init__(
        self,
        config: SchedulerConfig,
        sequences: Mapping[str, Sequence],
        running: RunningSequences,
        waiting: WaitingQueue,
        counters: Counters,
        in_flight: Callable[[], Iterable[Sequence]],
    ) -> None:
        """`sequences`: request id -> every unfinished sequence. `in_flight`: sequences of plans in flight."""
        self._config = config
        self._sequences = sequences
        self._running = running
        self._waiting = waiting
        self._shared = SharedBlocks(config, sequences, running)
        self._counters = counters
        self._in_flight = in_flight

    def try_admit(
        self, sequence: Sequence, builder: StepBuilder, line: Line, max_tokens: int, rank: int | None = None
    ) -> None:
        """Admits the sequence if there is room for all of its tokens.

        With a `rank`, running sequences with a higher rank may be preempted for it. `max_tokens`: limit of the
        sequence's tokens in this step.
        """
        leader = self._shared.leader(sequence)
        if leader is not None and leader.num_computed < sequence.num_prompt_tokens - 1:
            return  # the leader computes the prompt; the sequence joins in a later step
        if not self._running.adapters.has_room(sequence.params.adapter):
            line.hold_for_adapter(sequence)
            return
        if not self._running.adapters.is_in_share(sequence.params.adapter, sequence.tenant):
            line.hold_for_share(sequence)
            return
        most = min(max_tokens, builder.room_for(sequence.tenant))
        if most == 0:
            return
        first_choice = None if sequence.fork_of is None else self._sequences.get(sequence.fork_of)
        if first_choice is not None:
            sequence.adopt_hashes(first_choice, self._config.block_size)
        shared = self._shared.known(sequence, leader)
        num_known = min(shared.end * self._config.block_size, sequence.num_tokens - 1)
        if shared.source is not None:
            num_known = sequence.num_prompt_tokens - 1
        num = chunk_of(sequence, num_known, builder, most, self._config)
        if num == 0:
            return  # the attention of its long context would make the step too slow
        if not line.may_pass(sequence) or not self.has_room(sequence, shared.present, builder, rank):
            line.hold(sequence)
            return
        num_loads = self._running.share(sequence, shared.first, shared.block_ids)
        sequence.num_computed = num_known
        is_extended = self._running.try_extend(sequence, num_known + num)
        assert is_extended, "admission checked the room"
        if shared.source is not None:
            builder.copies[sequence] = (shared.source, sequence.block_ids[shared.end])
        self._waiting.admit(sequence)
        self._running.admit(sequence)
        line.passed(sequence)
        self._count_lookup(sequence, num_known)
        self._counters.host_hits += num_loads * self._config.block_size
        builder.take(sequence, num, is_prompt=True)

    def has_room(self, sequence: Sequence, found: list[int], builder: StepBuilder, rank: int | None) -> bool:
        """True if a slot, and blocks for all tokens of the sequence, are free.

        With a `rank`, first preempts running sequences with a higher rank, if this makes enough room.
        """
        num_new = max(0, self._config.most_blocks(sequence.num_tokens) - len(found))
        # One block per running sequence stays free, so that these sequences can grow. Otherwise one of the next steps
        # would preempt the new sequence.
        needed = num_new + self._running.pool.num_cached_only(found) + len(self._running) + builder.num_kept_blocks
        num_slots = self._running.num_free_slots
        num_free = self._running.pool.num_free
        victims: list[Sequence] = []
        if rank is not None and (num_slots == 0 or num_free < needed):
            kept = set(found)
            for victim in self._preemptible(rank, builder):
                if num_slots and num_free >= needed:
                    break
                victims.append(victim)
                num_slots += 1
                num_free += self._running.num_sole(victim, kept)
        if num_slots == 0 or num_free < needed:
            return False
        for victim in victims:
            self.preempt(victim, builder)
        return True

    def _preemptible(self, rank: int, builder: StepBuilder) -> list[Sequence]:
        """Returns running sequences with ranks above `rank`, highest first, without those in flight or in this step."""
        in_flight = set(self._in_flight())
        higher = [s for its_rank, s in reversed(self._running.in_ranks()) if its_rank > rank and s not in in_flight]
        # The list ends before the first sequence that is in this step. Sequences with lower ranks keep their blocks,
        # because the sequence in this step may copy a block of theirs.
        num = next((index for index, s in enumerate(higher) if s in builder.num_tokens), len(higher))
        return higher[:num]

    def _count_lookup(self, sequence: Sequence, num_known: int) -> None:
        self._counters.prefix_queries += sequence.num_tokens
        self._counters.prefix_hits += num_known
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(num_known, sequence.num_prompt_tokens)

    def preempt(self, sequence: Sequence, builder: StepBuilder) -> None:
        builder.drop(sequence)
        self._counters.num_preemptions += 1
        sequence.num_preemptions += 1
        self.set_aside(sequence)

    def set_aside(self, sequence: Sequence) -> None:
        """Moves a running sequence back to the waiting queue. The sequence keeps its token ids."""
        self._running.leave(sequence)
        sequence.state = SequenceState.WAITING
        self._waiting.add(sequence)
