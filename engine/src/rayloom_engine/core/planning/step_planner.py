"""StepPlanner: fills a step with tokens of sequences, and admits and preempts sequences for it.

It works in the order that scheduler.py describes: waiting sequences of tenants with fewer running sequences, then
running sequences, then the other waiting sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

from rayloom_engine.core.cached_tokens import CachedTokens
from rayloom_engine.core.planning.admission import Admission
from rayloom_engine.core.planning.backlog import Backlog, Prompt
from rayloom_engine.core.planning.chunking import chunk_of
from rayloom_engine.core.planning.overtaking import Line
from rayloom_engine.core.planning.prompt_time import PromptTime
from rayloom_engine.core.planning.running import RunningSequences
from rayloom_engine.core.planning.short_prompts import kept_for_short_prompts
from rayloom_engine.core.planning.step_builder import StepBuilder, in_turn
from rayloom_engine.core.planning.waiting_queue import WaitingQueue
from rayloom_engine.core.scheduler_config import SchedulerConfig
from rayloom_engine.core.sequence import Sequence, SequenceState
from rayloom_engine.core.step_seconds import StepSeconds


class StepPlanner:
    """Moves sequences between the waiting queue and the running sequences, and allocates tokens and blocks to them."""

    def __init__(
        self,
        config: SchedulerConfig,
        sequences: Mapping[str, Sequence],
        running: RunningSequences,
        waiting: WaitingQueue,
        admission: Admission,
        in_flight: Callable[[], Iterable[Sequence]],
    ) -> None:
        """`sequences`: request id -> every unfinished sequence. `in_flight`: sequences of plans in flight."""
        self.only: frozenset[str] | None = None  # request ids that may be scheduled; None = all
        self._config = config
        self._sequences = sequences
        self._running = running
        self._waiting = waiting
        self._in_flight = in_flight
        self._admission = admission

    def fill(self, builder: StepBuilder, costs: StepSeconds | None = None) -> None:
        """Distributes the step's token budget over sequences. Leaves `builder` empty if nothing can be computed now.

        With `costs`, the time that prompts take beside decodes is limited (backlog.py).
        """
        allowed = [s for _, s in self._running.in_ranks() if self.only is None or s.request_id in self.only]
        lacking = [len(s.token_ids) - s.num_computed for s in allowed]
        if self._config.num_ahead and self._may_run_ahead():
            decodes = [s for lack, s in zip(lacking, allowed, strict=True) if self._is_decode(lack, s)]
        else:  # a sequence with lack <= 0 is left out, because its next token is in flight
            decodes = [s for lack, s in zip(lacking, allowed, strict=True) if lack == 1 and not s.waits_for_form]
        prefills = [s for lack, s in zip(lacking, allowed, strict=True) if lack > 1]
        num_decodes = min(len(decodes), builder.max_decodes)
        num_prompt_tokens = max(1, builder.budget - num_decodes)
        if costs and (prefills or self._waiting):
            self._limit_prompts(builder, costs, decodes[:num_decodes], prefills)
            if builder.prompt_time is not None:
                num_prompt_tokens = min(num_prompt_tokens, builder.prompt_time.most(0))
        tenants = {s.tenant for s in prefills} | set(self._waiting.tenants())
        if len(tenants) > 1:
            builder.share = -(-num_prompt_tokens // len(tenants))
        self._admit_due(builder, num_decodes)
        if not builder.num_tokens and 0 < builder.budget <= num_decodes:
            # The decodes alone would use the whole budget of every step. Admit one waiting sequence with one token, so
            # that waiting sequences take turns with the decodes.
            self._schedule_waiting(builder, max_admissions=1, max_tokens=1)
        turns = in_turn(decodes, prefills, builder.budget, builder.max_decodes)
        if num_decodes < builder.budget:  # decodes come first, then prefills
            self._schedule_running(builder, turns[:num_decodes])
            if not builder.is_short:
                self._schedule_short(builder, prefills)
            turns = [s for s in prefills if s not in builder.num_tokens]
        self._schedule_running(builder, turns)
        if builder.is_short:
            return
        self._schedule_waiting(builder)
        if builder.share is not None:
            # Other tenants get the unused part of a tenant's share.
            builder.share = None
            self._extend(builder, [*builder.num_tokens, *prefills])
            self._schedule_waiting(builder)

    def _may_run_ahead(self) -> bool:
        """True if a step may compute placeholders.

        False in a trial, so that a death has the fewest suspects. False also if a sequence waits and there are
        sequences of several tenants. The waiting sequence may have to preempt running sequences, but sequences in
        flight cannot be preempted.
        """
        if self.only is not None:
            return False
        return not self._waiting or len({*self._running.num_of_tenants(), *self._waiting.tenants()}) < 2

    def _is_decode(self, lack: int, sequence: Sequence) -> bool:
        """True if a step can compute the newest token of the sequence, or its newest placeholder."""
        if lack == 1:
            return not sequence.waits_for_form
        return lack <= 0 and sequence.may_run_ahead(self._config.num_ahead, self._config.max_model_len)

    def wake_one(self) -> bool:
        """Lets `fill` schedule the first sequence that waits for its grammar. Returns False if none waits.

        Called for a step in which nothing else can be computed. The step's result names the sequences that still wait.
        """
        for sequence in self._running:
            if sequence.waits_for_form and self._is_allowed(sequence):
                sequence.waits_for_form = False
                return True
        return False

    def _limit_prompts(
        self, builder: StepBuilder, costs: StepSeconds, decodes: list[Sequence], prefills: list[Sequence]
    ) -> None:
        """Limits the prompts of the step by the rules of backlog.py. `decodes`, `prefills`: running sequences."""
        prompts = [Prompt(s.num_tokens - s.num_computed, s.num_tokens) for s in prefills]
        prompts += [Prompt(s.num_tokens, s.num_tokens) for s in self._waiting_with_room()]
        if not prompts:
            return
        num_streams = sum(1 for s in decodes if s.num_generated)
        backlog = Backlog(num_streams=num_streams, num_decodes=len(decodes), prompts=tuple(prompts))
        seconds = backlog.seconds(costs) if decodes else None
        if seconds is not None:
            builder.prompt_time = PromptTime(costs, seconds, self._config.window)
        builder.leaves_last_tokens = backlog.leaves_last_tokens(builder.budget)

    def _waiting_with_room(self) -> Iterator[Sequence]:
        """Yields the waiting sequences whose prompts could be computed now.

        This is an estimate, because prefix hits and the order of the queue are left out.
        """
        num_free = self._running.pool.num_free
        for sequence in islice(self._waiting, self._running.num_free_slots):
            num_free -= self._config.most_blocks(sequence.num_tokens)
            adapters, adapter = self._running.adapters, sequence.params.adapter
            if not (adapters.has_room(adapter) and adapters.is_in_share(adapter, sequence.tenant)):
                continue
            if num_free >= 0 and sequence.fork_of is None:  # a fork shares the prompt of its leader
                yield sequence

    def _schedule_running(self, builder: StepBuilder, turns: list[Sequence]) -> None:
        for sequence in turns:
            if builder.budget == 0:
                break
            if sequence.state is not SequenceState.RUNNING:
                continue  # it was preempted for an earlier sequence of this loop
            lack = len(sequence.token_ids) - sequence.num_computed
            if lack <= 1 and not builder.most_with_embeds(sequence, sequence.num_computed, 1):
                continue  # the last position of a prompt; the next step has room for its embedding
            if lack <= 1 and sequence.num_computed < len(sequence.block_ids) * self._config.block_size:
                builder.take(sequence, 1, is_prompt=False)  # the usual decode: the last block has room
                continue
            if lack <= 0:
                # No sequence is preempted for a placeholder: the block is allocated once the id of the token is known.
                if self._running.try_extend(sequence, sequence.num_computed + 1):
                    builder.take(sequence, 1, is_prompt=False)
                else:
                    builder.is_short = True
                continue
            num = 1
            if lack > 1:
                num = chunk_of(
                    sequence, sequence.num_computed, builder, builder.room_for(sequence.tenant), self._config
                )
            while num > 0 and not self._running.try_extend(sequence, sequence.num_computed + num):
                builder.is_short = True
                victim = self._victim(sequence)
                if victim is not None:
                    self._admission.preempt(victim, builder)
                if victim is None or victim is sequence:
                    break
            else:
                if num > 0:
                    builder.take(sequence, num, is_prompt=lack > 1)

    def _schedule_short(self, builder: StepBuilder, prefills: list[Sequence]) -> None:
        """Gives tokens to short prompts and to the long prompt that they overtake (short_prompts.py).

        Does nothing if there is no long prompt or no short one. Preempts nothing. The long prompt comes first, so that
        its half is also a half of the attention and of the time that prompts may take.
        """
        prefills = [s for s in prefills if s.state is SequenceState.RUNNING]  # the others were preempted in this step
        if not prefills:
            return
        # An urgent prompt that was admitted later does not count as the first.
        long = min(prefills, key=lambda sequence: (sequence.arrival, sequence.number))
        num_alone = chunk_of(long, long.num_computed, builder, builder.room_for(long.tenant), self._config)
        short = kept_for_short_prompts(long.num_tokens - long.num_computed, num_alone)
        if short is None or not self._take_chunk(long, builder, num_alone - short.num_tokens):
            return
        left = short.num_tokens
        for sequence in prefills:
            if sequence.num_tokens - sequence.num_computed <= short.most_left:
                left -= self._take_chunk(sequence, builder, min(left, builder.room_for(sequence.tenant)))
        # Running prompts keep the free blocks that they need for all their tokens. Otherwise they would soon preempt
        # the short prompts that are admitted now.
        builder.num_kept_blocks = sum(self._running.num_missing(sequence) for sequence in prefills)
        left = self._admit_short(builder, short.most_left, left)
        builder.num_kept_blocks = 0
        if left == short.num_tokens:
            builder.drop(long)  # there is no short prompt
            return
        for sequence in [long, *builder.num_tokens]:
            self._take_chunk(sequence, builder, builder.room_for(sequence.tenant))

    def _admit_short(self, builder: StepBuilder, most_left: int, left: int) -> int:
        """Admits short prompts, with at most `left` tokens of them in this step. Returns how many of these remain."""
        line = Line(self._config.max_num_seqs)
        cached = CachedTokens(self._config, self._running.pool)
        for _, sequence in self._waiting.in_turns(self._running.num_of_tenants()):
            if left <= 0 or builder.is_full or not self._running.num_free_slots or line.is_closed:
                break
            if not self._is_allowed(sequence) or self._waits_for_leader(sequence):
                continue
            num_cached = cached.of(sequence)
            if sequence.num_tokens - num_cached > most_left:
                if self._admission.has_room(sequence, [], builder, None):
                    line.hold_for_tokens(sequence)
                else:
                    line.hold(sequence)
                continue
            if chunk_of(sequence, num_cached, builder, left, self._config) == 0:
                break  # the attention of long contexts, or the time of prompts, is used up
            budget = builder.budget
            self._admission.try_admit(sequence, builder, line, left)
            left -= budget - builder.budget
        return left

    def _waits_for_leader(self, sequence: Sequence) -> bool:
        """True if choice 0 of the same request has yet to compute the prompt, which this sequence then shares."""
        leader = None if sequence.fork_of is None else self._sequences.get(sequence.fork_of)
        return leader is not None and leader.num_computed < sequence.num_prompt_tokens - 1

    def _take_chunk(self, sequence: Sequence, builder: StepBuilder, most: int) -> int:
        """Adds up to `most` further tokens of a prompt to the step, without preemption. Returns their number."""
        end = sequence.num_computed + builder.num_tokens.get(sequence, 0)
        num = chunk_of(sequence, end, builder, most, self._config)
        if num <= 0 or not self._running.try_extend(sequence, end + num):
            return 0
        builder.take(sequence, num, is_prompt=True)
        return num

    def _extend(self, builder: StepBuilder, sequences: list[Sequence]) -> None:
        """Gives running sequences the rest of the budget. Skips a sequence for which too few blocks are free."""
        for sequence in sequences:
            if sequence.state is SequenceState.RUNNING:
                self._take_chunk(sequence, builder, builder.budget)

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """Returns the sequence to preempt for `sequence`: the one with the highest rank, maybe `sequence` itself.

        Returns None if `sequence` must wait for sequences in flight. Sequences in flight cannot be preempted: plans
        write to their blocks, and tokens that are being sampled would be lost.
        """
        in_flight = set(self._in_flight())
        ranked = [s for _, s in self._running.in_ranks()]
        behind = ranked[ranked.index(sequence) :]
        free = [s for s in behind if s not in in_flight]
        is_waiting = free == [sequence] and len(behind) > 1
        return free[-1] if free and not is_waiting else None

    def _admit_due(self, builder: StepBuilder, num_decodes: int) -> None:
        """Admits waiting sequences that will have a lower rank than some running sequence has (see scheduler.py).

        Called before the running sequences get tokens.
        """
        num_of_tenant = self._running.num_of_tenants()
        if len({*num_of_tenant, *self._waiting.tenants()}) < 2:
            return
        line = Line(self._config.max_num_seqs)
        num_admitted = 0
        for rank, sequence in self._waiting.in_turns(num_of_tenant):
            if len(builder.num_tokens) > num_admitted:
                num_admitted = len(builder.num_tokens)
                num_of_tenant = self._running.num_of_tenants()
            if builder.is_full or line.is_closed or rank + 1 >= max(num_of_tenant.values(), default=0):
                break
            if self._is_allowed(sequence):
                # The admitted sequence gets the part of the budget that the decodes of this step leave, but at least
                # one token.
                self._admission.try_admit(sequence, builder, line, max(1, builder.budget - num_decodes), rank)

    def _schedule_waiting(
        self, builder: StepBuilder, max_admissions: int | None = None, max_tokens: int | None = None
    ) -> None:
        if builder.is_full or not self._running.num_free_slots or not self._waiting:
            return
        line = Line(self._config.max_num_seqs)
        most = len(self._running) + (len(self._waiting) if max_admissions is None else max_admissions)
        for _, sequence in self._waiting.in_turns(self._running.num_of_tenants()):
            if builder.is_full or not self._running.num_free_slots or line.is_closed or len(self._running) == most:
                break
            if self._is_allowed(sequence):
                self._admission.try_admit(sequence, builder, line, builder.budget if max_tokens is None else max_tokens)

    def _is_allowed(self, sequence: Sequence) -> bool:
        return self.only is None or sequence.request_id in self.only
