"""StepDrafts: adds drafts to a step of decodes. With a draft model, step_proposals.py asks the rank for these drafts.

A sequence gets no draft if one of these conditions holds:
  - the request or the engine's settings switch speculation off
  - the sequence was in flight when a process died
  - the sequence has a grammar that the core has not built yet
  - the newest token is still being sampled, so it is not known yet whether the sequence has ended
  - the logits of one of its drafts were not finite, although the logits of its sampled tokens were finite

The draft of a sequence with a grammar is cut to its legal prefix. If no token is legal, the draft is the text that the
grammar forces, if it forces any.

A step gets no drafts if one of these conditions holds:
  - the step computes tokens of a prompt: then a draft token costs as much as a token of the prompt
  - the engine searches for a poisonous request: drafts would add possible causes of a death
  - the step's rows of logits fill the ranks' memory for logits. This memory has room for `max_num_seqs` rows, or for
    the rows of the longest draft if the longest draft has more rows
  - the step has so many decodes that a draft token costs as much time as a decode: then arithmetic limits the step, not
    the reads of weights. Now and then such a step gets one draft of one token, so that the cost is measured again
    (trials.py)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from rayloom_engine.core.planning.running import RunningSequences
from rayloom_engine.core.planning.step_builder import StepBuilder
from rayloom_engine.core.scheduler_config import SchedulerConfig
from rayloom_engine.core.sequence import Sequence, SequenceState
from rayloom_engine.core.speculation.draft_grammars import DraftGrammars
from rayloom_engine.core.speculation.drafter import Drafter, Fit
from rayloom_engine.core.speculation.model_drafter import ModelDrafter
from rayloom_engine.core.speculation.trials import Trials
from rayloom_engine.core.stats import Counters
from rayloom_engine.core.step import StepPlan, StepResult
from rayloom_engine.core.step_seconds import StepSeconds

# Assumed cost of a draft token until the cost is measured, as a share of the time of a step with one decode.
_UNMEASURED_COST = 0.06
# A measured cost below this value is taken for a measurement error and replaced by this value.
_LEAST_COST = 0.01
# Number of sequences of a trial. A search for drafts may read a long prompt, so not all sequences are searched.
_NUM_TRIED = 2


class StepDrafts:
    """Chooses drafts for the sequences of a step."""

    def __init__(
        self,
        config: SchedulerConfig,
        running: RunningSequences,
        make_drafter: Callable[[], Drafter] | None,
        grammars: DraftGrammars | None,
    ) -> None:
        """`config.speculation` must be set. `make_drafter`, `grammars`: as in Scheduler."""
        assert config.speculation is not None
        self._config = config
        self._settings = config.speculation
        self._running = running
        self._make_drafter = make_drafter
        self._grammars = grammars
        self._trials = Trials()

    def add(self, builder: StepBuilder, costs: StepSeconds | None) -> None:
        """Adds drafts to a step, as far as budget and free blocks allow. All sequences must be in the step already."""
        if builder.has_prompts or not builder.budget:
            return
        cost = draft_cost(len(builder.num_tokens), costs)
        room = min(builder.budget, self._most_rows - len(builder.num_tokens))
        sequences = [sequence for sequence in builder.num_tokens if may_draft(sequence)]
        is_trial = cost >= 1
        if is_trial:
            sequences = self._tried(sequences)
            cost = _LEAST_COST
            room = min(1, room)
        if not sequences:
            return
        if self._grammars is not None:
            self._grammars.begin_step()
        for sequence in sequences:
            num_tokens = sequence.num_tokens
            most = min(
                self._settings.num_tokens,
                room,
                # The step samples one token more than the draft has, and the last token of a sequence is not computed.
                sequence.params.max_tokens - sequence.num_generated - 1,
                self._config.max_model_len - num_tokens - 1,
            )
            if most <= 0:
                continue
            if sequence.drafter is None:
                sequence.drafter = self._new_drafter(sequence)
            draft = sequence.drafter.draft(sequence.token_ids, cost, most, self._fit(sequence))
            if draft and not self._running.try_extend(sequence, num_tokens + len(draft)):
                draft = draft[: len(sequence.block_ids) * self._config.block_size - num_tokens]
            if draft:
                builder.add_draft(sequence, draft)
                room -= len(draft)
        if is_trial:
            self._trials.tried(has_draft=bool(builder.drafts))
        elif builder.drafts:
            self._trials.paid()

    def _tried(self, sequences: list[Sequence]) -> list[Sequence]:
        """Returns those of the sequences whose drafts are tried in this step although a draft costs too much."""
        return self._trials.in_turn(sequences, _NUM_TRIED) if self._trials.is_due() else []

    @property
    def _most_rows(self) -> int:
        """The rows of logits for which the ranks have memory."""
        return max(self._config.max_num_seqs, self._settings.most_rows)

    def forget_ranks(self) -> None:
        """Records that the ranks have lost all slots and blocks."""

    def ended(self, plan: StepPlan, sequences: Mapping[int, Sequence], result: StepResult, counters: Counters) -> None:
        """Counts the accepted tokens of an ended plan's drafts. From now on these drafts are not in flight any more.

        `sequences`: slot -> sequence. The draft of a dirty slot stays in flight until its sequence is moved back to the
        waiting queue. So the blocks of the draft do not count as proven.
        """
        num_accepted = Counter(sampled.slot for sampled in result.accepted)
        for step in plan.slots:
            sequence = sequences[step.slot]
            if not step.draft_token_ids or sequence.state is SequenceState.FINISHED:
                continue
            if step.slot not in result.dirty_slots:
                sequence.num_drafts = 0
            if step.slot in result.postponed_slots:
                continue  # nothing was verified
            counters.num_drafts += 1
            counters.draft_tokens += len(step.draft_token_ids)
            counters.accepted_tokens += num_accepted[step.slot]
            if sequence.drafter is not None:
                sequence.drafter.note(len(step.draft_token_ids), num_accepted[step.slot])

    def _fit(self, sequence: Sequence) -> Fit | None:
        """Returns the function that fits drafts to the sequence's grammar; None if it has no grammar."""
        if not sequence.params.grammar or self._grammars is None:
            return None
        if sequence.draft_grammar is None:
            sequence.draft_grammar = self._grammars.begin(sequence.params, sequence.num_prompt_tokens)
        return partial(sequence.draft_grammar.fit, sequence.token_ids)

    def _new_drafter(self, sequence: Sequence) -> Drafter | ModelDrafter:
        if self._make_drafter is not None:
            return self._make_drafter()
        if self._settings.has_draft_model:
            return ModelDrafter()
        num_expected = sequence.num_prompt_tokens + sequence.params.max_tokens
        return Drafter(self._settings, min(num_expected, self._config.max_model_len))


def may_draft(sequence: Sequence) -> bool:
    """True if the sequence may get a draft now."""
    return (
        sequence.num_tokens - sequence.num_computed == 1
        and sequence.params.speculation
        and not sequence.has_dirty_drafts
    )


def draft_cost(num_decodes: int, costs: StepSeconds | None) -> float:
    """Returns the time that a draft token adds to a step, as a multiple of the step's time per decode."""
    if costs is None or costs.draft_token_s is None:
        return _UNMEASURED_COST * num_decodes
    return max(_LEAST_COST, costs.draft_token_s * num_decodes / costs.decode_s(num_decodes))
