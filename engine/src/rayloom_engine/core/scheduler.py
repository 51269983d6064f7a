"""The scheduler: decides which sequences compute how many tokens in the next step, and keeps the books.

One rule does everything: a step hands out a budget of tokens so that each sequence's computed tokens catch up with its
known tokens. Prefill in chunks, prefix hits, preemption and replay after a crash are all the same subtraction.

A step, in order:
  1. running sequences that lack one token (decode), oldest first; then those that lack more (prefill, resume)
  2. waiting sequences, if nothing was preempted: prefix lookup or fork, then admission
When blocks run out the newest, least urgent running sequence is preempted: its blocks go back and it waits again.

Up to `depth` plans are in flight, one for each pipeline stage. Ranks run plans in order, so a plan may build on those
before it: the next chunk of a prompt follows the last one, a fork or a prefix hit reads blocks that are being written,
and blocks of an aborted sequence are given to another. What a plan cannot build on is a token that is still to be
chosen: a sequence that samples is left out until its result is booked. Decodes therefore form `depth` groups that take
turns, and no group is larger than its share, so that they stay equal while sequences come and go.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from rayloom_engine.core.block_pool import BlockPool
from rayloom_engine.core.chunking import chunk_size
from rayloom_engine.core.counters import Counters
from rayloom_engine.core.draft import Draft, InFlight, fair_share
from rayloom_engine.core.sequence import CORRUPT, Sequence, SequenceOutput, SequenceState
from rayloom_engine.core.spans import Span, spans_of
from rayloom_engine.core.step import StepPlan, StepResult
from rayloom_engine.core.window import first_seen_block, longest_hit, most_blocks
from rayloom_engine.errors import QueueFull, RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    num_blocks: int
    block_size: int  # tokens in a block
    max_num_seqs: int  # sequences in a step
    max_num_batched_tokens: int  # token budget of a step
    max_model_len: int  # tokens of a sequence, prompt included; always fits the pool
    max_queued: int  # waiting sequences; more are refused
    enable_prefix_caching: bool = True
    depth: int = 1  # plans in flight at most
    window: int | None = None  # positions that a token sees, itself included; None when a layer sees all

    def __post_init__(self) -> None:
        assert self.most_blocks(self.max_model_len) <= self.num_blocks, "the longest sequence must fit the pool"

    def most_blocks(self, num_tokens: int) -> int:
        """The most blocks that a sequence of `num_tokens` holds at once."""
        return most_blocks(num_tokens, self.window, self.max_num_batched_tokens, self.block_size)


class Scheduler:
    def __init__(self, config: SchedulerConfig, epoch: int = 0) -> None:
        self.config = config
        self.epoch = epoch
        self.pool = BlockPool(config.num_blocks)
        self.counters = Counters()
        self._sequences: dict[str, Sequence] = {}  # request id -> every unfinished sequence
        self._running: list[Sequence] = []  # sorted by order
        self._waiting: list[Sequence] = []  # sorted by order
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._slots_to_free: list[int] = []  # the ranks learn of them with the next plan
        self._next_number = 0
        self._step_id = 0
        self._in_flight: deque[InFlight] = deque()  # oldest first
        self._only: frozenset[str] | None = None  # request ids that may be scheduled; None = all

    # --- what the engine asks for ---

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
        # Sequences that fit into the next step do not count as queued: nothing was scheduled since they came.
        room = self.config.max_queued + self.config.max_num_seqs - len(self._running)
        if not is_resume and len(self._waiting) >= room:
            raise QueueFull(f"{len(self._waiting)} sequences wait already, at most {room} may", 1)
        sequence.number = self._next_number
        self._next_number += 1
        self._sequences[sequence.request_id] = sequence
        insort(self._waiting, sequence, key=_order)
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
        self._only = only
        if only is not None:
            in_flight = set(self.in_flight())
            for sequence in [s for s in self._running if s.request_id not in only and s not in in_flight]:
                self._set_aside(sequence)

    def in_flight(self) -> dict[Sequence, Span]:
        """The sequences of the plans that have no result yet, and their positions that these compute."""
        return spans_of(self._in_flight)

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing can be done now. The blocks it needs are allocated.

        None with plans in flight means that their results must come first.
        """
        depth, budget, max_decodes = self.config.depth, self.config.max_num_batched_tokens, len(self._running)
        if len(self._in_flight) == depth:
            return None
        if depth > 1:
            budget = fair_share(self._num_tokens_ahead(), depth, budget)
            max_decodes = -(-sum(1 for s in self._running if s.num_tokens - s.num_computed <= 1) // depth)
        draft = Draft(budget=budget, max_decodes=max_decodes)
        self._schedule_running(draft)
        if not draft.is_short:
            self._schedule_waiting(draft)
        if not draft.num_tokens:
            return None
        freed_slots, self._slots_to_free = tuple(self._slots_to_free), []
        self._step_id += 1
        plan = draft.to_plan(self._step_id, self.epoch, freed_slots, self.pool.take_unclear())
        for sequence in draft.num_tokens:
            self._register_full_blocks(sequence)
            self._give_back_unseen_blocks(sequence)
        self._in_flight.append(InFlight(plan, {s.slot: s for s in draft.num_tokens if s.slot is not None}))
        return plan

    def update(self, result: StepResult) -> list[SequenceOutput]:
        """Books the result of the oldest plan in flight: appends the sampled ids, finishes what is complete."""
        plan, sequences = self._in_flight[0].plan, self._in_flight[0].sequences
        assert (result.step_id, result.epoch) == (plan.step_id, plan.epoch), "a result out of turn"
        self._in_flight.popleft()
        for part in result.prompt_logprobs:
            sequence = sequences[part.slot]
            # A preempted prompt is computed twice; what is known already is not added again.
            known = len(sequence.prompt_logprobs) + 1
            sequence.prompt_logprobs.extend(part.entries[known - part.start :])
        outputs = []
        for sampled in result.sampled:
            sequence = sequences[sampled.slot]
            if sequence.state is SequenceState.FINISHED:
                continue  # aborted meanwhile
            is_first = sequence.num_generated == 0
            sequence.num_proven = sequence.num_tokens
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
        return outputs + self._end_corrupt([sequences[slot] for slot in result.corrupt_slots])

    def _end_corrupt(self, sequences: list[Sequence]) -> list[SequenceOutput]:
        """Ends sequences whose logits were not finite. Their KV may hold a NaN, so it is no prefix for others."""
        ended = [sequence for sequence in sequences if sequence.state is not SequenceState.FINISHED]
        for sequence in ended:
            self.pool.forget(sequence.held_block_ids)
            self._finish(sequence)
        self.counters.num_corrupt += len(ended)
        return [SequenceOutput(request_id=sequence.request_id, finish_reason=CORRUPT) for sequence in ended]

    def forget_ranks(self) -> None:
        """What the ranks computed is lost, and with it all plans in flight: every running sequence waits again.

        Their ids are kept, so they go on where they were. Blocks of a lost plan may hold anything: no prefix survives.
        """
        unproven = {block_id for in_flight in self._in_flight for block_id in in_flight.plan.cleared_blocks}
        self._in_flight.clear()
        for sequence in self._running:
            self._release_blocks(sequence)
            sequence.state = SequenceState.WAITING
            sequence.slot = None
            sequence.forget_blocks()
            insort(self._waiting, sequence, key=_order)
        self._running = []
        self._free_slots = list(range(self.config.max_num_seqs - 1, -1, -1))
        self._slots_to_free = []
        # A rank that lives keeps its memory, and with it what a lost plan was to clear.
        self.pool = BlockPool(self.config.num_blocks, unproven | self.pool.unproven())

    def check_integrity(self) -> None:
        """Raises AssertionError when queues, slots and blocks do not add up."""
        assert sorted([*self._running, *self._waiting], key=_order) == sorted(self._sequences.values(), key=_order)
        assert self._running == sorted(self._running, key=_order)
        assert self._waiting == sorted(self._waiting, key=_order)
        assert all(s.state is SequenceState.RUNNING and s.slot is not None for s in self._running)
        assert all(s.state is SequenceState.WAITING and s.slot is None and not s.block_ids for s in self._waiting)
        slots = [s.slot for s in self._running if s.slot is not None]
        assert sorted([*slots, *self._free_slots]) == list(range(self.config.max_num_seqs))
        for sequence in self._running:
            num_positions = len(sequence.block_ids) * self.config.block_size
            assert sequence.num_computed <= min(num_positions, sequence.num_tokens), f"{sequence.request_id}: no block"
            is_sampling = any(
                slot.samples and in_flight.sequences[slot.slot] is sequence
                for in_flight in self._in_flight
                for slot in in_flight.plan.slots
            )
            assert is_sampling == (sequence.num_computed == sequence.num_tokens), "a token is chosen once"
            assert sequence.first_block <= first_seen_block(
                sequence.num_computed, self.config.window, self.config.block_size
            ), f"{sequence.request_id}: a block that is still seen was given back"
        self.pool.check_integrity(s.held_block_ids for s in self._running)

    # --- how a step is made ---

    def _num_tokens_ahead(self) -> int:
        """Tokens in flight, and those to compute for who runs or may soon; what plans have to share."""
        waiting = self._waiting[: len(self._free_slots)]
        lacking = sum(s.num_tokens - s.num_computed for s in self._running) + sum(s.num_tokens for s in waiting)
        return lacking + sum(in_flight.plan.num_tokens for in_flight in self._in_flight)

    def _schedule_running(self, draft: Draft) -> None:
        allowed = [s for s in self._running if self._only is None or s.request_id in self._only]
        lacking = [(s.num_tokens - s.num_computed, s) for s in allowed]  # 0: its next token is being chosen
        decodes = [s for lack, s in lacking if lack == 1][: draft.max_decodes]
        prefills = [s for lack, s in lacking if lack > 1]
        for sequence in [*decodes, *prefills]:
            if draft.budget == 0:
                break
            num = self._chunk(sequence, sequence.num_computed, draft)
            if sequence.state is not SequenceState.RUNNING or num == 0:
                continue  # preempted by one before it, or it would cost the step too much attention
            while not self._try_extend(sequence, sequence.num_computed + num):
                draft.is_short = True
                victim = self._victim(sequence)
                if victim is not None:
                    self._preempt(victim, draft)
                if victim is None or victim is sequence:
                    break
            else:
                draft.num_tokens[sequence] = num
                draft.budget -= num

    def _chunk(self, sequence: Sequence, start: int, draft: Draft) -> int:
        return chunk_size(start, sequence.num_tokens, draft, self.config.max_num_batched_tokens, self.config.window)

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """Who is preempted for `sequence`: the newest that runs, at worst itself. None: it waits for those in flight.

        What is in flight writes its blocks, and its token must not be lost.
        """
        in_flight = set(self.in_flight())
        behind = self._running[self._running.index(sequence) :]
        free = [s for s in behind if s not in in_flight]
        is_waiting = free == [sequence] and len(behind) > 1
        return free[-1] if free and not is_waiting else None

    def _schedule_waiting(self, draft: Draft) -> None:
        # Some blocks stay free for the running ones to grow into, or admission would preempt what it just admitted.
        watermark = len(self._running)
        for sequence in [s for s in self._waiting if self._only is None or s.request_id in self._only]:
            if draft.budget == 0 or not self._free_slots:
                break
            leader = self._leader(sequence)
            if leader is not None and leader.num_computed < sequence.num_prompt_tokens - 1:
                continue  # its prompt is being computed for it; it joins in a later step
            first, found, source = self._known_blocks(sequence, leader)
            num_known = min((first + len(found)) * self.config.block_size, sequence.num_tokens - 1)
            if source is not None:
                num_known = sequence.num_prompt_tokens - 1
            num_blocks = self.config.most_blocks(sequence.num_tokens)
            needed = max(0, num_blocks - len(found)) + self.pool.num_cached_only(found)
            if needed + (watermark if self._running else 0) > self.pool.num_free:
                break  # the whole sequence must fit; nobody overtakes the one that waits for room
            num = self._chunk(sequence, num_known, draft)
            if num == 0:
                continue
            self.pool.hold(found)
            sequence.block_ids = [0] * first + found  # nobody reads the entries before `first`
            sequence.first_block = first
            sequence.num_computed = num_known
            # Blocks that were found are in the index already.
            sequence.num_registered_blocks = len(sequence.block_ids)
            is_extended = self._try_extend(sequence, num_known + num)
            assert is_extended, "admission checked the room"
            if source is not None:
                draft.copies[sequence] = (source, sequence.block_ids[first + len(found)])
            self._admit(sequence)
            watermark += 1
            self._count_lookup(sequence, num_known)
            draft.num_tokens[sequence] = num
            draft.budget -= num

    def _leader(self, sequence: Sequence) -> Sequence | None:
        """The running sequence with the same prompt that this one may share blocks with."""
        if sequence.fork_of is None or sequence.wants_prompt_logprobs or sequence.num_generated:
            return None
        leader = self._sequences.get(sequence.fork_of)
        if leader is None or leader.state is not SequenceState.RUNNING:
            return None
        num = sequence.num_prompt_tokens
        is_same = leader.num_prompt_tokens == num and leader.token_ids[:num] == sequence.token_ids[:num]
        # A leader that went far ahead has given back what the last token of the prompt sees.
        has_all = leader.first_block <= first_seen_block(num - 1, self.config.window, self.config.block_size)
        return leader if is_same and has_all else None

    def _known_blocks(self, sequence: Sequence, leader: Sequence | None) -> tuple[int, list[int], int | None]:
        """Blocks whose content is the sequence's beginning, and for a fork the block to copy the rest from.

        The first number is the index of the first such block: no token to come sees one before it.
        The last token is always computed, because its logits choose the next one. A fork writes into the block of that
        token first thing, so the copy of copy-on-write is made when it joins; the leader's table never changes.
        """
        block_size = self.config.block_size
        if leader is not None:
            num_shared = (sequence.num_prompt_tokens - 1) // block_size
            is_shared_whole = num_shared * block_size == sequence.num_prompt_tokens - 1
            first = first_seen_block(sequence.num_prompt_tokens - 1, self.config.window, block_size)
            source = None if is_shared_whole else leader.block_ids[num_shared]
            return first, leader.block_ids[first:num_shared], source
        if not self.config.enable_prefix_caching or sequence.wants_prompt_logprobs:
            return 0, [], None
        num_full = (sequence.num_tokens - 1) // block_size
        known = self.pool.known(sequence.hashes(num_full, block_size))
        first, end = longest_hit(known, self.config.window, block_size)
        return first, [block_id for block_id in known[first:end] if block_id is not None], None

    def _count_lookup(self, sequence: Sequence, num_known: int) -> None:
        self.counters.prefix_queries += sequence.num_tokens
        self.counters.prefix_hits += num_known
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(num_known, sequence.num_prompt_tokens)

    def _try_extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Gives the sequence blocks for its first `num_tokens` tokens. False, and nothing changed, without room."""
        num = -(-num_tokens // self.config.block_size) - len(sequence.block_ids)
        if num > self.pool.num_free:
            return False
        if num > 0:
            sequence.block_ids.extend(self.pool.allocate(num))
        return True

    def _admit(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        sequence.state = SequenceState.RUNNING
        sequence.slot = self._free_slots.pop()
        insort(self._running, sequence, key=_order)

    def _preempt(self, sequence: Sequence, draft: Draft) -> None:
        draft.budget += draft.num_tokens.pop(sequence, 0)
        self.counters.num_preemptions += 1
        self._set_aside(sequence)

    def _set_aside(self, sequence: Sequence) -> None:
        self._leave(sequence)
        sequence.state = SequenceState.WAITING
        insort(self._waiting, sequence, key=_order)

    def _finish(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.RUNNING:
            self._leave(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.state = SequenceState.FINISHED
        del self._sequences[sequence.request_id]

    def _leave(self, sequence: Sequence) -> None:
        """Takes a running sequence off the ranks: slot and blocks go back, full blocks stay in the prefix index."""
        assert sequence.slot is not None
        self._running.remove(sequence)
        self._free_slots.append(sequence.slot)
        if sequence.num_sent_blocks:
            self._slots_to_free.append(sequence.slot)
        self._release_blocks(sequence)
        sequence.slot = None
        sequence.forget_blocks()

    def _release_blocks(self, sequence: Sequence) -> None:
        num_proven = sequence.num_proven_blocks(self.config.block_size) - sequence.first_block
        self.pool.release(sequence.held_block_ids, max(0, num_proven))

    def _give_back_unseen_blocks(self, sequence: Sequence) -> None:
        """Releases the blocks that lie before the window of every token to come. Plans in flight come before those."""
        first = first_seen_block(sequence.num_computed, self.config.window, self.config.block_size)
        if first > sequence.first_block:
            num_proven = sequence.num_proven_blocks(self.config.block_size) - sequence.first_block
            self.pool.release(sequence.block_ids[sequence.first_block : first], max(0, num_proven))
            sequence.first_block = first

    def _register_full_blocks(self, sequence: Sequence) -> None:
        if not self.config.enable_prefix_caching:
            return
        # Ranks compute plans in order, so a block of this step may be found by the next one.
        num_full = sequence.num_computed // self.config.block_size
        hashes = sequence.hashes(num_full, self.config.block_size)
        for index in range(sequence.num_registered_blocks, num_full):
            self.pool.register(sequence.block_ids[index], hashes[index])
        sequence.num_registered_blocks = max(sequence.num_registered_blocks, num_full)

    def unfinished(self) -> Iterator[Sequence]:
        """Every sequence that is accepted and not complete, oldest first."""
        return iter(sorted(self._sequences.values(), key=_order))


def _order(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.order
