"""The scheduler: decides which sequences compute how many tokens in the next step, and keeps the books.

One rule does everything: a step hands out a budget of tokens so that each sequence's computed tokens catch up with its
known tokens. Prefill in chunks, prefix hits, preemption and replay after a crash are all the same subtraction.

A step, in order:
  1. waiting sequences of tenants that have fewer running than others; where room is short they take it from those
  2. running sequences that lack one token (decode), oldest first; then those that lack more (prefill, resume).
     When decodes are as many as the budget or more, everybody takes turns: who has waited longest comes first
  3. waiting sequences, if nothing was preempted: prefix lookup or fork, then admission
When blocks run out the newest, least urgent running sequence is preempted: its blocks go back and it waits again.

Tenants (waiting_queue.py) share slots, blocks and prompt tokens. The rank of a running sequence is the number of
sequences of its tenant that run before it. A waiting sequence is admitted in step 1 when a running one of another
tenant has a higher rank than it will have; without room it preempts the one of the highest rank. Each such exchange
makes the tenants' numbers more equal, so it is never made back. With one tenant nothing of this happens.

Up to `depth` plans are in flight, one for each pipeline stage. Ranks run plans in order, so a plan may build on those
before it: the next chunk of a prompt follows the last one, a fork or a prefix hit reads blocks that are being written,
and blocks of an aborted sequence are given to another. What a plan cannot build on is a token that is still to be
chosen: a sequence that samples is left out until its result is booked. Decodes therefore form `depth` groups that take
turns, and no group is larger than its share, so that they stay equal while sequences come and go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from rayloom_engine.core.block_pool import BlockPool
from rayloom_engine.core.counters import Counters
from rayloom_engine.core.draft import Draft, InFlight, fair_share
from rayloom_engine.core.running import RunningSequences, order_of
from rayloom_engine.core.scheduler_config import SchedulerConfig
from rayloom_engine.core.sequence import CORRUPT, Sequence, SequenceOutput, SequenceState
from rayloom_engine.core.spans import Span, spans_of
from rayloom_engine.core.step import StepPlan, StepResult
from rayloom_engine.core.step_planner import StepPlanner
from rayloom_engine.core.waiting_queue import WaitingQueue, has_room
from rayloom_engine.errors import QueueFull, RequestError


class Scheduler:
    def __init__(self, config: SchedulerConfig, epoch: int = 0) -> None:
        self.config = config
        self.epoch = epoch
        self.counters = Counters()
        self._sequences: dict[str, Sequence] = {}  # request id -> every unfinished sequence
        self._running = RunningSequences(config)
        self._waiting = WaitingQueue()
        self._next_number = 0
        self._step_id = 0
        self._in_flight: deque[InFlight] = deque()  # oldest first
        self._planner = StepPlanner(
            config, self._sequences, self._running, self._waiting, self.counters, self.in_flight
        )

    # --- what the engine asks for ---

    @property
    def pool(self) -> BlockPool:
        return self._running.pool

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        """Plans that have no result yet."""
        return len(self._in_flight)

    @property
    def has_unfinished(self) -> bool:
        """Whether a sequence is not complete, or a result is still to come."""
        return bool(self._sequences or self._in_flight)

    def add(self, sequence: Sequence, is_resume: bool = False) -> None:
        """Accepts a sequence into the queue.

        Raises RequestError when it can never run, QueueFull when the queue is full and this is not a resume.
        """
        longest = self.config.max_model_len
        if sequence.num_prompt_tokens == 0:
            raise RequestError("the prompt is empty; give at least one token", "prompt")
        if sequence.num_tokens >= longest:
            raise RequestError(
                f"{sequence.num_tokens} tokens leave no room to generate; at most {longest - 1}", "prompt"
            )
        if sequence.request_id in self._sequences:
            raise RequestError(f"the id {sequence.request_id!r} is in use by an unfinished request", "request_id")
        if not is_resume:
            self._check_room(sequence.tenant)
        first_choice = None if sequence.fork_of is None else self._sequences.get(sequence.fork_of)
        if first_choice is not None and sequence.prompt_ids == first_choice.prompt_ids:
            sequence.prompt_ids = first_choice.prompt_ids  # one object, so that they are compared at no cost
        sequence.number = self._next_number
        self._next_number += 1
        self._sequences[sequence.request_id] = sequence
        self._waiting.add(sequence)
        self.counters.prompt_tokens += sequence.num_prompt_tokens

    def abort(self, request_id: str) -> bool:
        """Forgets a sequence and gives its blocks back at once, also while it is in flight: its result is dropped.

        False when it is unknown or finished already.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._finish(sequence)
        return True

    def restrict(self, only: frozenset[str] | None) -> None:
        """From here on only these request ids are scheduled (None = all). Others that run make room and wait.

        Who is in flight stays until its token is booked, or it would be chosen twice; call this before every step.
        """
        self._planner.only = only
        if only is not None:
            in_flight = set(self.in_flight())
            for sequence in [s for s in self._running if s.request_id not in only and s not in in_flight]:
                self._planner.set_aside(sequence)

    def in_flight(self) -> dict[Sequence, Span]:
        """The sequences of the plans that have no result yet, and their positions that these compute."""
        return spans_of(self._in_flight)

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can be done now. The blocks it needs are allocated.

        None with plans in flight means that their results must come first.
        """
        if len(self._in_flight) == self.config.depth:
            return None
        num_preemptions = -1
        while num_preemptions < self.counters.num_preemptions:
            num_preemptions = self.counters.num_preemptions
            draft = self._empty_draft()
            self._planner.fill(draft)
            if draft.num_tokens:
                break
            # Those whose turn it was had no blocks and made room. Others may compute now; each round leaves fewer.
        if not draft.num_tokens:
            return None
        self._step_id += 1
        freed_slots = self._running.take_freed_slots()
        plan = draft.to_plan(self._step_id, self.epoch, freed_slots, self.pool.take_unclear(), self._running)
        for sequence in draft.num_tokens:
            self._running.register_full_blocks(sequence)
            self._running.give_back_unseen_blocks(sequence)
        self._in_flight.append(InFlight(plan, {s.slot: s for s in draft.num_tokens if s.slot is not None}))
        return plan

    def _empty_draft(self) -> Draft:
        depth = self.config.depth
        budget = self.config.max_num_batched_tokens
        max_decodes = len(self._running)
        if depth > 1:
            budget = fair_share(self._num_tokens_ahead(), depth, budget)
            max_decodes = -(-sum(1 for s in self._running if s.num_tokens - s.num_computed <= 1) // depth)
        return Draft(budget=budget, max_decodes=max_decodes)

    def update(self, result: StepResult) -> list[SequenceOutput]:
        """Books the result of the oldest plan in flight: appends the sampled ids, finishes what is complete.

        A sequence that ends as corrupt gets nothing else of this result, nor of those that come after it.
        """
        plan, sequences = self._in_flight[0].plan, self._in_flight[0].sequences
        assert (result.step_id, result.epoch) == (plan.step_id, plan.epoch), "a result out of turn"
        self._in_flight.popleft()
        outputs = self._end_corrupt([sequences[slot] for slot in result.corrupt_slots])
        for part in result.prompt_logprobs:
            sequence = sequences[part.slot]
            if sequence.state is SequenceState.FINISHED:
                continue  # aborted, or corrupt: the positions before these may be missing
            # A preempted prompt is computed twice; what is known already is not added again.
            known = len(sequence.prompt_logprobs) + 1
            assert part.start <= known, f"prompt logprobs from {part.start} on, known are those before {known}"
            sequence.prompt_logprobs.extend(part.entries[known - part.start :])
        for sampled in result.sampled:
            sequence = sequences[sampled.slot]
            if sequence.state is SequenceState.FINISHED:
                continue  # aborted meanwhile, or corrupt
            is_first = sequence.num_generated == 0
            self._running.prove(sequence)
            sequence.token_ids.append(sampled.token_id)
            self.counters.generation_tokens += 1
            reason = sequence.finish_reason(self.config.max_model_len)
            outputs.append(
                SequenceOutput(
                    request_id=sequence.request_id,
                    token_ids=(sampled.token_id,),
                    logprobs=(sampled.logprobs,) if sampled.logprobs is not None else (),
                    prompt_logprobs=tuple(sequence.prompt_logprobs) if is_first else (),
                    finish_reason=reason,
                    stop_token_id=sampled.token_id if reason == "stop" else None,
                    num_cached_tokens=(sequence.num_cached_tokens or 0) if is_first else 0,
                )
            )
            if reason is not None:
                self._finish(sequence)
        return outputs

    def _end_corrupt(self, sequences: list[Sequence]) -> list[SequenceOutput]:
        """Ends sequences whose logits were not finite. Their KV may hold a NaN, so it is no prefix for others.

        That is true of blocks that a sequence has given back as well.
        """
        ended = [sequence for sequence in sequences if sequence.state is not SequenceState.FINISHED]
        for sequence in ended:
            self.pool.forget(sequence.known_hashes)
            self._finish(sequence)
        self.counters.num_corrupt += len(ended)
        return [SequenceOutput(request_id=sequence.request_id, finish_reason=CORRUPT) for sequence in ended]

    def forget_ranks(self) -> None:
        """What the ranks computed is lost, and with it all plans in flight: every running sequence waits again.

        Their ids are kept, so they go on where they were. Blocks of a lost plan may hold anything: no prefix survives.
        """
        unproven = {block_id for in_flight in self._in_flight for block_id in in_flight.plan.cleared_blocks}
        self._in_flight.clear()
        for sequence in self._running.forget_all(unproven):
            sequence.state = SequenceState.WAITING
            self._waiting.add(sequence)

    def check_integrity(self) -> None:
        """Raises AssertionError when queues, slots and blocks do not add up."""
        assert sorted([*self._running, *self._waiting], key=order_of) == sorted(self._sequences.values(), key=order_of)
        assert len(self._waiting) == len(list(self._waiting))
        assert all(s.state is SequenceState.WAITING and s.slot is None and not s.block_ids for s in self._waiting)
        self._running.check_integrity()
        for sequence in self._running:
            is_sampling = any(
                slot.samples and in_flight.sequences[slot.slot] is sequence
                for in_flight in self._in_flight
                for slot in in_flight.plan.slots
            )
            assert is_sampling == (sequence.num_computed == sequence.num_tokens), "a token is chosen once"

    def _check_room(self, tenant: str) -> None:
        """Raises QueueFull when the queue, or the tenant's part of it, is full."""
        num_own = self._waiting.num_of(tenant)
        num_waiting = len(self._waiting)
        num_free_slots = self._running.num_free_slots
        max_queued = self.config.max_queued
        if num_waiting >= max_queued + num_free_slots:
            raise QueueFull(f"{num_waiting} sequences wait already, at most {max_queued + num_free_slots} may", 1)
        # Without keys there is one tenant, and the queue is not shared.
        if tenant and not has_room(num_own, num_waiting, num_free_slots, max_queued):
            raise QueueFull(
                f"{num_own} sequences of this API key wait already, and the queue's other places are kept for other "
                "keys; try again when some of them run",
                1,
            )

    def _num_tokens_ahead(self) -> int:
        """Tokens in flight, and those to compute for who runs or may soon; what plans have to share."""
        waiting = islice(self._waiting.in_turns(self._running.num_of_tenants()), self._running.num_free_slots)
        lacking = sum(s.num_tokens - s.num_computed for s in self._running) + sum(s.num_tokens for _, s in waiting)
        return lacking + sum(in_flight.plan.num_tokens for in_flight in self._in_flight)

    def _finish(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.RUNNING:
            self._running.leave(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.state = SequenceState.FINISHED
        del self._sequences[sequence.request_id]

    def running(self) -> Iterator[Sequence]:
        """The sequences that have a slot, oldest first."""
        return iter(self._running)

    def unfinished(self) -> Iterator[Sequence]:
        """Every sequence that is accepted and not complete, oldest first."""
        return iter(sorted(self._sequences.values(), key=order_of))
