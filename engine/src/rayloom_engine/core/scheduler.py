"""Scheduler: decides which sequences compute how many tokens in the next step, and accounts for slots and blocks.

One rule covers everything: a step distributes a budget of tokens so that each sequence's computed tokens catch up with
its known tokens. Chunked prefill, prefix hits, preemption and replay after a crash all follow from the difference
between these two numbers.

Each step gives tokens to sequences in this order:
  1. waiting sequences of tenants that run fewer sequences than another tenant; if there is no room, they preempt
     sequences of tenants that run more
  2. running sequences that lack one token (decode), oldest first; then sequences that lack more (prefill, resume).
     If the decodes alone would use up the budget, decodes and prefills take turns: the sequence whose last step is
     longest ago comes first. While a long prompt is computed, half of the tokens that decodes leave are kept for much
     shorter prompts, running or waiting (planning/short_prompts.py)
  3. other waiting sequences, if blocks did not run out: prefix lookup or fork, then admission
When blocks run out, the newest, least urgent running sequence is preempted: its blocks are released and it waits again.

Tenants (waiting_queue.py) share slots, blocks and prompt tokens. The rank of a running sequence is the number of
running sequences of the same tenant that come before it. Part 1 admits a waiting sequence if a running sequence of
another tenant has a higher rank than the waiting sequence will have. If there is no room, the running sequence with the
highest rank is preempted. Each such exchange makes the tenants' numbers of running sequences more equal, so no exchange
is ever reversed. With one tenant, part 1 does nothing.

Up to `depth` plans are in flight, one for each pipeline stage. Ranks run plans in order, so a plan may depend on
earlier plans. It may compute the next chunk of a prompt, read blocks that are still being written (fork, prefix hit),
or reuse the blocks of an aborted sequence. But a plan cannot depend on a token that is not sampled yet. While the next
token of a sequence is being sampled, the sequence is left out of plans until the result arrives. So the decoding
sequences form groups, one for each stage, and the groups take turns. No group may exceed its equal share, so that the
groups stay equal while sequences come and go.

With `num_ahead` > 0, a plan may compute a token that is still being sampled: a placeholder, whose id the rank fills in.
The ranks then get the next plan before the core has read the last plan's result (asynchronous scheduling). If the
result ends the sequence, the sequence's results from later plans are dropped.

A sequence with a LoRA adapter runs only while the adapter is in one of the ranks' adapter slots (adapter_slots.py). If
all slots are used by other adapters, the sequence waits, and other sequences may overtake it (planning/overtaking.py).

With `speculation`, a step of decodes also computes drafts: guesses of the tokens after the newest token. The ranks
sample at every position of a draft. The result has the guesses before the first wrong guess, and one more token. Until
the result arrives, the draft is in flight (`Sequence.num_drafts`): its tokens do not count as known tokens or as
computed tokens. With a draft model, a plan also asks the sampling rank to propose the tokens of the next draft.

A sequence is postponed while the sampling rank builds the sequence's grammar. The step's result then has no token for
this sequence. When the grammar is built, a later step computes the sequence's newest token again. Until then the other
sequences continue without it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from rayloom_engine.core.block_pool import BlockPool
from rayloom_engine.core.embeds import most_plan_bytes
from rayloom_engine.core.load import LoadCount, SchedulerLoad
from rayloom_engine.core.output import SequenceOutput, output_of
from rayloom_engine.core.planning.admission import Admission
from rayloom_engine.core.planning.running import RunningSequences
from rayloom_engine.core.planning.spans import Span, spans_of
from rayloom_engine.core.planning.step_builder import InFlight, StepBuilder, fair_share
from rayloom_engine.core.planning.step_planner import StepPlanner
from rayloom_engine.core.planning.step_proposals import drafts_of
from rayloom_engine.core.planning.waiting_queue import WaitingQueue
from rayloom_engine.core.probe import is_probe
from rayloom_engine.core.scheduler_config import SchedulerConfig
from rayloom_engine.core.sequence import BROKEN_ADAPTER, BROKEN_FORM, CORRUPT, Sequence, SequenceState, order_of
from rayloom_engine.core.speculation.draft_grammars import DraftGrammars
from rayloom_engine.core.speculation.drafter import Drafter
from rayloom_engine.core.stats import Counters
from rayloom_engine.core.step import SampledToken, StepPlan, StepResult
from rayloom_engine.core.step_seconds import StepSeconds
from rayloom_engine.errors import RequestError


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        epoch: int = 0,
        make_drafter: Callable[[], Drafter] | None = None,
        grammars: DraftGrammars | None = None,
    ) -> None:
        """`make_drafter`: makes the drafter of a sequence if `config.speculation` is set; None: n-gram drafters.

        `grammars`: cuts drafts to legal tokens; None: drafts are not cut.
        """
        self.config = config
        self.epoch = epoch
        self.counters = Counters()
        self._sequences: dict[str, Sequence] = {}  # request id -> every unfinished sequence
        self._running = RunningSequences(config)
        self._waiting = WaitingQueue()
        self._next_number = 0
        self._step_id = 0
        self._in_flight: deque[InFlight] = deque()  # oldest first
        queues = self._sequences, self._running, self._waiting
        self._admission = Admission(config, *queues, self.counters, self.in_flight)
        self._planner = StepPlanner(config, *queues, self._admission, self.in_flight)
        self._drafts = drafts_of(config, self._running, make_drafter, grammars)

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
    def num_queued_tokens(self) -> int:
        """Tokens still to compute. Running sequences that lack only one token (decodes) do not count."""
        lacking = (sequence.num_tokens - sequence.num_computed for sequence in self._running)
        return self._waiting.num_tokens + sum(num for num in lacking if num > 1)

    @property
    def num_in_flight(self) -> int:
        """Number of plans whose result has not arrived."""
        return len(self._in_flight)

    @property
    def has_unfinished(self) -> bool:
        """True if there is an unfinished sequence or a plan in flight."""
        return bool(self._sequences or self._in_flight)

    def add(self, sequence: Sequence, is_resume: bool = False) -> None:
        """Adds a sequence to the waiting queue.

        Raises RequestError if the sequence can never run, and QueueFull if the queue is full. For a resume, QueueFull
        is never raised.
        """
        longest = self.config.max_model_len
        if sequence.num_prompt_tokens == 0:
            raise RequestError("the prompt is empty; give at least one token", "prompt")
        if sequence.num_tokens >= longest:
            raise RequestError(
                f"{sequence.num_tokens} tokens leave no room to generate; at most {longest - 1}", "prompt"
            )
        if sequence.params.adapter is not None and not self._running.adapters.num_slots:
            raise RequestError(
                "this engine takes no adapters; start it with --lora or --allow-runtime-lora-updating", "model"
            )
        if sequence.request_id in self._sequences:
            raise RequestError(f"the id {sequence.request_id!r} is in use by an unfinished request", "request_id")
        if not is_resume:
            self._waiting.check_room(sequence.tenant, self._running.num_free_slots, self.config.max_queued)
        first_choice = None if sequence.fork_of is None else self._sequences.get(sequence.fork_of)
        if first_choice is not None and sequence.prompt_ids == first_choice.prompt_ids:
            sequence.prompt_ids = first_choice.prompt_ids  # prompts that are one object are compared fast
        sequence.number = self._next_number
        self._next_number += 1
        self._sequences[sequence.request_id] = sequence
        self._waiting.add(sequence)
        self.counters.prompt_tokens += sequence.num_prompt_tokens

    def abort(self, request_id: str) -> bool:
        """Removes a sequence and releases its blocks at once. Its tokens from plans in flight will be dropped.

        Returns False if the sequence is unknown or already finished.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._finish(sequence)
        return True

    def restrict(self, only: frozenset[str] | None) -> None:
        """Schedules only these request ids from now on (None = all) and makes other running sequences wait again.

        A sequence in flight keeps its slot until its token is appended; otherwise the token would be sampled twice. A
        later call takes the slot away, so call `restrict` before every step.
        """
        self._planner.only = only
        if only is not None:
            in_flight = set(self.in_flight())
            for sequence in [s for s in self._running if s.request_id not in only and s not in in_flight]:
                self._admission.set_aside(sequence)

    def in_flight(self) -> dict[Sequence, Span]:
        """Returns a map: sequence of the plans in flight -> the positions that these plans compute."""
        return spans_of(self._in_flight)

    def waiting_for_forms(self) -> dict[Sequence, Span]:
        """Returns a map: sequence whose grammar the sampling rank builds -> its position to be computed again.

        These sequences are in no plan, but their grammars may be the cause if the rank dies now.
        """
        return {s: (s.num_computed, s.num_computed + 1) for s in self._running.waiting_for_forms()}

    def schedule(self, costs: StepSeconds | None = None) -> StepPlan | None:
        """Returns the next plan, with its blocks allocated, or None if nothing can be computed now.

        If plans are in flight, None means that the next plan has to wait for their results. `costs`: measured costs, by
        which the tokens of prompts beside decodes are limited (backlog.py); None: only the token budget limits them.
        """
        if len(self._in_flight) == self.config.depth:
            return None
        builder = self._filled(costs)
        if not builder.num_tokens and not self._in_flight and self._planner.wake_one():
            builder = self._filled(costs)
        if not builder.num_tokens:
            return None
        if self._drafts is not None and self._planner.only is None:
            self._drafts.add(builder, costs)
        self._step_id += 1
        freed_slots = self._running.take_freed_slots()
        builder.adapter_loads = self._running.adapters.take_loads()
        builder.host_orders = self._running.take_host_orders(self._step_id, builder.num_tokens.values())
        plan = builder.to_plan(self._step_id, self.epoch, freed_slots, self.pool.take_unclear(), self._running)
        self._running.planned(builder.num_tokens)
        self._in_flight.append(InFlight(plan, {s.slot: s for s in builder.num_tokens if s.slot is not None}))
        return plan

    def _filled(self, costs: StepSeconds | None) -> StepBuilder:
        """Returns a builder with the tokens of a step; empty if nothing can be computed now."""
        num_preemptions = -1
        while num_preemptions < self.counters.num_preemptions:
            num_preemptions = self.counters.num_preemptions
            builder = self._new_builder()
            self._planner.fill(builder, costs)
            if builder.num_tokens:
                break
            # The plan is empty, perhaps because sequences found no blocks and were preempted. Try again with the
            # remaining sequences: each round has fewer running sequences, so the loop ends.
        return builder

    def _new_builder(self) -> StepBuilder:
        num_groups = self.config.num_groups
        budget = self.config.max_num_batched_tokens
        max_decodes = len(self._running)
        if num_groups > 1:
            budget = fair_share(self._num_tokens_left(), num_groups, budget)
            max_decodes = -(-sum(1 for s in self._running if s.num_tokens - s.num_computed <= 1) // num_groups)
        most_embeds_bytes = most_plan_bytes(self.config.depth, len(self._in_flight))
        return StepBuilder(budget=budget, max_decodes=max_decodes, most_embeds_bytes=most_embeds_bytes)

    def update(self, result: StepResult) -> list[SequenceOutput]:
        """Applies the result of the oldest plan in flight: appends sampled ids and finishes complete sequences.

        Sequences that are corrupt, or whose grammar or adapter has failed, are ended first. The other entries of these
        sequences, in this result and in later results, are ignored.
        """
        plan, sequences = self._in_flight[0].plan, self._in_flight[0].sequences
        assert (result.step_id, result.epoch) == (plan.step_id, plan.epoch), "a result out of order"
        self._in_flight.popleft()
        self._running.confirm_plan(result.step_id)
        outputs = self._end_corrupt([sequences[slot] for slot in result.corrupt_slots])
        for broken in result.broken_forms:
            outputs += self._fail(sequences[broken.slot], BROKEN_FORM, broken.message)
        outputs += self._end_without_adapter(result, sequences)
        for slot in result.postponed_slots:
            if sequences[slot].state is not SequenceState.FINISHED:
                sequences[slot].postpone()
        self._running.wait_for_forms(result.waiting_slots)
        for part in result.prompt_logprobs:
            sequence = sequences[part.slot]
            if sequence.state is SequenceState.FINISHED:
                continue  # The sequence was aborted or is corrupt, so logprobs of earlier positions may be missing.
            # A prompt that was preempted is computed twice. Its logprobs are added only once.
            known = len(sequence.prompt_logprobs) + 1
            assert part.start <= known, f"prompt logprobs from {part.start} on, known are those before {known}"
            sequence.prompt_logprobs.extend(part.entries[known - part.start :])
        if self._drafts is not None:
            self._drafts.ended(plan, sequences, result, self.counters)
        for sampled in result.accepted:
            sequence = sequences[sampled.slot]
            if sequence.state is not SequenceState.FINISHED:
                sequence.num_computed += 1
                self._append(sequence, sampled, outputs)
        for sampled in result.sampled:
            sequence = sequences[sampled.slot]
            if sequence.state is not SequenceState.FINISHED:  # neither aborted since the plan, nor ended above
                self._append(sequence, sampled, outputs)
        for slot in result.dirty_slots:
            if sequences[slot].state is not SequenceState.FINISHED:
                # The sequence's blocks may hold a NaN, so they are cleared before another sequence uses them. If its
                # logits without a draft are not finite either, the sequence ends as corrupt.
                sequences[slot].has_dirty_drafts = True
                self._admission.set_aside(sequences[slot])
        return outputs

    def _append(self, sequence: Sequence, sampled: SampledToken, outputs: list[SequenceOutput]) -> None:
        """Appends a sampled token to its sequence, and its output to `outputs`. The token may end the sequence."""
        self._running.prove(sequence)
        sequence.token_ids.append(sampled.token_id)
        if sequence.num_computed >= len(sequence.token_ids):  # a placeholder, or an accepted draft token
            self._running.learned(sequence)
        reason = sequence.finish_reason(self.config.max_model_len)
        outputs.append(output_of(sequence, sampled, reason))
        self.counters.generation_tokens += 1
        if reason is not None:
            if not is_probe(sequence.request_id):
                self.counters.note_output(sequence.num_generated)
            self._finish(sequence)

    def _end_corrupt(self, sequences: list[Sequence]) -> list[SequenceOutput]:
        """Ends sequences whose logits were not finite.

        Their KV blocks may hold a NaN, so all these blocks are removed from the prefix index, even released ones.
        """
        ended = [sequence for sequence in sequences if sequence.state is not SequenceState.FINISHED]
        for sequence in ended:
            self.pool.forget(sequence.known_hashes)
            self._finish(sequence)
        self.counters.num_corrupt += len(ended)
        return [SequenceOutput(sequence_id=sequence.request_id, finish_reason=CORRUPT) for sequence in ended]

    def _end_without_adapter(self, result: StepResult, sequences: dict[int, Sequence]) -> list[SequenceOutput]:
        """Ends sequences whose adapter could not be loaded.

        Their KV blocks hold the values of the plain model, so all these blocks are removed from the prefix index.
        """
        outputs = []
        for broken in result.broken_adapters:
            for slot in broken.slots:
                sequence = sequences[slot]
                self.pool.forget(sequence.known_hashes)
                if sequence.params.adapter is not None:
                    self._running.adapters.could_not_load(sequence.params.adapter)
                outputs += self._fail(sequence, BROKEN_ADAPTER, broken.message)
        return outputs

    def _fail(self, sequence: Sequence, reason: str, message: str) -> list[SequenceOutput]:
        """Ends a sequence with an error. Returns its last output; nothing if the sequence has ended already."""
        if sequence.state is SequenceState.FINISHED:
            return []
        self._finish(sequence)
        return [SequenceOutput(sequence_id=sequence.request_id, finish_reason=reason, message=message)]

    def forget_ranks(self) -> None:
        """Drops slots, blocks and plans in flight because the ranks have lost them. Running sequences wait again.

        Sequences keep their token ids and are computed again from these ids. Blocks of a lost plan may hold anything,
        so no cached prefix survives.
        """
        unproven = {block_id for in_flight in self._in_flight for block_id in in_flight.plan.cleared_blocks}
        self._in_flight.clear()
        if self._drafts is not None:
            self._drafts.forget_ranks()
        for sequence in self._running.forget_all(unproven):
            sequence.state = SequenceState.WAITING
            self._waiting.add(sequence)

    def load(self, costs: StepSeconds | None = None) -> SchedulerLoad:
        """Returns the work that is left. `costs`: measured costs; None: a decode counts as much as a prompt's token."""
        count = LoadCount(self.config, self.pool)
        count.add_running(self._running)
        count.add_waiting(self._waiting)
        return count.load(1.0 if costs is None else costs.decode_token_cost)

    def check_integrity(self) -> None:
        """Raises AssertionError if queues, slots and blocks contradict each other."""
        assert sorted([*self._running, *self._waiting], key=order_of) == sorted(self._sequences.values(), key=order_of)
        assert len(self._waiting) == len(list(self._waiting))
        assert all(s.state is SequenceState.WAITING and s.slot is None and not s.block_ids for s in self._waiting)
        self._running.check_integrity()
        for sequence in self._running:
            num_samplings = sum(
                slot.samples and in_flight.sequences[slot.slot] is sequence
                for in_flight in self._in_flight
                for slot in in_flight.plan.slots
            )
            assert num_samplings == sequence.num_placeholders <= 1 + self.config.num_ahead, "a token is sampled once"

    def _num_tokens_left(self) -> int:
        """Number of tokens that are in flight or still to compute.

        Counts running sequences, and the waiting sequences that fit the free slots.
        """
        waiting = islice(self._waiting.in_turns(self._running.num_of_tenants()), self._running.num_free_slots)
        lacking = sum(max(0, s.num_tokens - s.num_computed) for s in self._running)
        lacking += sum(s.num_tokens for _, s in waiting)
        return lacking + sum(in_flight.plan.num_tokens for in_flight in self._in_flight)

    def _finish(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.RUNNING:
            self._running.leave(sequence)
        else:
            self._waiting.remove(sequence)
        self._running.finished(sequence)
        sequence.state = SequenceState.FINISHED
        del self._sequences[sequence.request_id]

    def note_starts(self, plan: StepPlan, now: float) -> None:
        """Records the time in the queue of each sequence whose first step is in `plan`."""
        for new in plan.new_slots:
            sequence = self._sequences.get(new.request_id)
            if sequence is not None and sequence.queue_s is None:
                sequence.queue_s = now - sequence.queued_at

    def running(self) -> Iterator[Sequence]:
        """The sequences that have a slot, sorted by `Sequence.order`."""
        return iter(self._running)

    def unfinished(self) -> Iterator[Sequence]:
        """All waiting and running sequences, sorted by `Sequence.order`."""
        return iter(sorted(self._sequences.values(), key=order_of))
