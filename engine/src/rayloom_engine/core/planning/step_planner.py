"""StepPlanner: fills a step with tokens of sequences; admits and preempts sequences for it.

The order is that of scheduler.py: waiting sequences of tenants with fewer running ones, running ones, waiting ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rayloom_engine.core.planning.chunking import chunk_size
from rayloom_engine.core.planning.draft import Draft, in_turn
from rayloom_engine.core.planning.overtaking import Line
from rayloom_engine.core.planning.running import RunningSequences
from rayloom_engine.core.planning.waiting_queue import WaitingQueue
from rayloom_engine.core.scheduler_config import SchedulerConfig
from rayloom_engine.core.sequence import Sequence, SequenceState
from rayloom_engine.core.stats import Counters
from rayloom_engine.core.window import first_seen_block, longest_hit


class StepPlanner:
    """Moves sequences between the waiting queue and the running ones, and gives them tokens and blocks."""

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
        self.only: frozenset[str] | None = None  # request ids that may be scheduled; None = all
        self._config = config
        self._sequences = sequences
        self._running = running
        self._waiting = waiting
        self._counters = counters
        self._in_flight = in_flight

    def fill(self, draft: Draft) -> None:
        """Distributes the draft's budget. The draft stays empty when nothing can be computed now."""
        lacking = [(s.num_tokens - s.num_computed, s) for _, s in self._running.in_ranks() if self._is_allowed(s)]
        decodes = [s for lack, s in lacking if lack == 1]  # lack 0: its next token is being sampled
        prefills = [s for lack, s in lacking if lack > 1]
        num_decodes = min(len(decodes), draft.max_decodes)
        tenants = {s.tenant for s in prefills} | set(self._waiting.tenants())
        if len(tenants) > 1:
            draft.share = -(-max(1, draft.budget - num_decodes) // len(tenants))
        self._admit_due(draft, num_decodes)
        if not draft.num_tokens and 0 < draft.budget <= num_decodes:
            # Decodes would use the whole budget until they end, so all sequences alternate instead.
            self._schedule_waiting(draft, max_admissions=1, max_tokens=1)
        self._schedule_running(draft, in_turn(decodes, prefills, draft.budget, draft.max_decodes))
        if draft.is_short:
            return
        self._schedule_waiting(draft)
        if draft.share is not None:
            # The unused part of a tenant's share is for the others.
            draft.share = None
            self._extend(draft, [*draft.num_tokens, *prefills])
            self._schedule_waiting(draft)

    def _schedule_running(self, draft: Draft, turns: list[Sequence]) -> None:
        for sequence in turns:
            if draft.budget == 0:
                break
            if sequence.state is not SequenceState.RUNNING:
                continue  # preempted by a sequence before it
            lack = sequence.num_tokens - sequence.num_computed
            num = 1
            if lack > 1:
                num = self._chunk(sequence, sequence.num_computed, draft, draft.room_for(sequence.tenant))
            while num > 0 and not self._running.try_extend(sequence, sequence.num_computed + num):
                draft.is_short = True
                victim = self._victim(sequence)
                if victim is not None:
                    self._preempt(victim, draft)
                if victim is None or victim is sequence:
                    break
            else:
                if num > 0:
                    draft.take(sequence, num, is_prompt=lack > 1)

    def _extend(self, draft: Draft, sequences: list[Sequence]) -> None:
        """Gives running sequences the rest of the budget, as far as there are blocks."""
        for sequence in sequences:
            if sequence.state is SequenceState.RUNNING:
                end = sequence.num_computed + draft.num_tokens.get(sequence, 0)
                num = self._chunk(sequence, end, draft, draft.budget)
                if num > 0 and self._running.try_extend(sequence, end + num):
                    draft.take(sequence, num, is_prompt=True)

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """The sequence to preempt for `sequence`: the newest of the tenant with the most, possibly itself.

        None when `sequence` must wait for sequences in flight: they write their blocks, and their tokens must not be
        lost.
        """
        in_flight = set(self._in_flight())
        ranked = [s for _, s in self._running.in_ranks()]
        behind = ranked[ranked.index(sequence) :]
        free = [s for s in behind if s not in in_flight]
        is_waiting = free == [sequence] and len(behind) > 1
        return free[-1] if free and not is_waiting else None

    def _admit_due(self, draft: Draft, num_decodes: int) -> None:
        """Admits waiting sequences of a lower rank than running ones, before the running ones get any budget."""
        num_of_tenant = self._running.num_of_tenants()
        if len({*num_of_tenant, *self._waiting.tenants()}) < 2:
            return
        line = Line(self._config.max_num_seqs)
        num_admitted = 0
        for rank, sequence in self._waiting.in_turns(num_of_tenant):
            if len(draft.num_tokens) > num_admitted:
                num_admitted = len(draft.num_tokens)
                num_of_tenant = self._running.num_of_tenants()
            if draft.budget == 0 or line.is_closed or rank + 1 >= max(num_of_tenant.values(), default=0):
                break
            if self._is_allowed(sequence):
                # Decodes of this step keep their tokens as long as one is left for the admitted sequence.
                self._try_admit(sequence, draft, line, max(1, draft.budget - num_decodes), rank)

    def _schedule_waiting(self, draft: Draft, max_admissions: int | None = None, max_tokens: int | None = None) -> None:
        line = Line(self._config.max_num_seqs)
        most = len(self._running) + (len(self._waiting) if max_admissions is None else max_admissions)
        for _, sequence in self._waiting.in_turns(self._running.num_of_tenants()):
            if draft.budget == 0 or not self._running.num_free_slots or line.is_closed or len(self._running) == most:
                break
            if self._is_allowed(sequence):
                self._try_admit(sequence, draft, line, draft.budget if max_tokens is None else max_tokens)

    def _try_admit(
        self, sequence: Sequence, draft: Draft, line: Line, max_tokens: int, rank: int | None = None
    ) -> None:
        """Admits the sequence if all of it fits. With a rank, it may preempt running sequences of higher ranks."""
        leader = self._leader(sequence)
        if leader is not None and leader.num_computed < sequence.num_prompt_tokens - 1:
            return  # the leader computes the prompt; the sequence joins in a later step
        most = min(max_tokens, draft.room_for(sequence.tenant))
        if most == 0:
            return
        first_choice = None if sequence.fork_of is None else self._sequences.get(sequence.fork_of)
        if first_choice is not None:
            sequence.adopt_hashes(first_choice, self._config.block_size)
        first, found, source = self._known_blocks(sequence, leader)
        num_known = min((first + len(found)) * self._config.block_size, sequence.num_tokens - 1)
        if source is not None:
            num_known = sequence.num_prompt_tokens - 1
        num = self._chunk(sequence, num_known, draft, most)
        if num == 0:
            return  # its attention would cost the step too much
        if not line.may_pass(sequence) or not self._has_room(sequence, found, draft, rank):
            line.hold(sequence)
            return
        self._running.pool.hold(found)
        sequence.block_ids = [0] * first + found  # entries before `first` are never read
        sequence.first_block = first
        sequence.num_computed = num_known
        # Found blocks are in the index already.
        sequence.num_registered_blocks = len(sequence.block_ids)
        is_extended = self._running.try_extend(sequence, num_known + num)
        assert is_extended, "admission checked the room"
        if source is not None:
            draft.copies[sequence] = (source, sequence.block_ids[first + len(found)])
        self._waiting.admit(sequence)
        self._running.admit(sequence)
        line.passed(sequence)
        self._count_lookup(sequence, num_known)
        draft.take(sequence, num, is_prompt=True)

    def _has_room(self, sequence: Sequence, found: list[int], draft: Draft, rank: int | None) -> bool:
        """True if a slot and blocks for all of the sequence are free; with a rank, preempts others if that suffices."""
        num_new = max(0, self._config.most_blocks(sequence.num_tokens) - len(found))
        # Some blocks stay free for running sequences to grow, or the next step would preempt the admitted sequence.
        needed = num_new + self._running.pool.num_cached_only(found) + len(self._running)
        num_slots = self._running.num_free_slots
        num_free = self._running.pool.num_free
        victims: list[Sequence] = []
        if rank is not None and (num_slots == 0 or num_free < needed):
            kept = set(found)
            for victim in self._preemptible(rank, draft):
                if num_slots and num_free >= needed:
                    break
                victims.append(victim)
                num_slots += 1
                num_free += self._running.num_sole(victim, kept)
        if num_slots == 0 or num_free < needed:
            return False
        for victim in victims:
            self._preempt(victim, draft)
        return True

    def _preemptible(self, rank: int, draft: Draft) -> list[Sequence]:
        """Running sequences of a higher rank, highest first, without those in flight or in the draft."""
        in_flight = set(self._in_flight())
        higher = [s for its_rank, s in reversed(self._running.in_ranks()) if its_rank > rank and s not in in_flight]
        # A sequence before one that was just admitted may be the source of its block copies.
        num = next((index for index, s in enumerate(higher) if s in draft.num_tokens), len(higher))
        return higher[:num]

    def _leader(self, sequence: Sequence) -> Sequence | None:
        """The running sequence with the same prompt whose blocks this one may share."""
        if sequence.fork_of is None or sequence.wants_prompt_logprobs or sequence.num_generated:
            return None
        leader = self._sequences.get(sequence.fork_of)
        if leader is None or leader.state is not SequenceState.RUNNING or leader.order > sequence.order:
            return None
        is_alike = (leader.tenant, leader.cache_key) == (sequence.tenant, sequence.cache_key)
        # A leader that is far ahead has released blocks that the last token of the prompt sees.
        first = first_seen_block(sequence.num_prompt_tokens - 1, self._config.window, self._config.block_size)
        return leader if is_alike and leader.first_block <= first and sequence.has_prompt_of(leader) else None

    def _known_blocks(self, sequence: Sequence, leader: Sequence | None) -> tuple[int, list[int], int | None]:
        """(first, blocks, source): blocks with the sequence's beginning, from index `first`; a fork's block to copy.

        No later token sees a block before `first`. The last token is always computed, because the next one is sampled
        from its logits. A fork first writes into the block of that token, so the copy of copy-on-write is made when it
        joins, and the leader's table never changes. The fork computes that block itself, and copies nothing, while the
        leader's own tokens in it may be a NaN.
        """
        block_size = self._config.block_size
        if leader is not None:
            num_shared = (sequence.num_prompt_tokens - 1) // block_size
            is_shared_whole = num_shared * block_size == sequence.num_prompt_tokens - 1
            first = first_seen_block(sequence.num_prompt_tokens - 1, self._config.window, block_size)
            if is_shared_whole or not _has_doubtful_rest(leader, num_shared, block_size):
                source = None if is_shared_whole else leader.block_ids[num_shared]
                return first, leader.block_ids[first:num_shared], source
            first = first_seen_block(num_shared * block_size, self._config.window, block_size)
            if leader.first_block <= first:
                return first, leader.block_ids[first:num_shared], None
        if not self._config.enable_prefix_caching or sequence.wants_prompt_logprobs:
            return 0, [], None
        num_full = (sequence.num_tokens - 1) // block_size
        known = self._running.pool.known(sequence.hashes(num_full, block_size), sequence.own_blocks)
        first, end = longest_hit(known, self._config.window, block_size)
        return first, [block_id for block_id in known[first:end] if block_id is not None], None

    def _count_lookup(self, sequence: Sequence, num_known: int) -> None:
        self._counters.prefix_queries += sequence.num_tokens
        self._counters.prefix_hits += num_known
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(num_known, sequence.num_prompt_tokens)

    def _preempt(self, sequence: Sequence, draft: Draft) -> None:
        draft.drop(sequence)
        self._counters.num_preemptions += 1
        self.set_aside(sequence)

    def set_aside(self, sequence: Sequence) -> None:
        """Makes a running sequence wait again; it keeps its ids."""
        self._running.leave(sequence)
        sequence.state = SequenceState.WAITING
        self._waiting.add(sequence)

    def _is_allowed(self, sequence: Sequence) -> bool:
        return self.only is None or sequence.request_id in self.only

    def _chunk(self, sequence: Sequence, start: int, draft: Draft, max_tokens: int) -> int:
        """Number of tokens that this step computes from position `start`; 0 when attention would cost too much."""
        config = self._config
        chunk = chunk_size(start, sequence.num_tokens, draft, config.max_num_batched_tokens, config.window)
        return min(max_tokens, chunk)


def _has_doubtful_rest(leader: Sequence, index: int, block_size: int) -> bool:
    """True if the block at `index`, which has the end of the leader's prompt, has later tokens that are not proven.

    The last token of the prompt does not count: a fork computes it again.
    """
    end = min(leader.num_computed, (index + 1) * block_size)
    return end > leader.num_prompt_tokens and leader.num_proven < end
