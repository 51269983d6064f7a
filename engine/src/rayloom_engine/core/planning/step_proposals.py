"""StepProposals: adds drafts of a draft model to a step, and asks the draft model for the drafts of the next step.

At the end of a step of decodes, the rank that samples runs the draft model once for each token of the longest proposal.
A pass computes a token for all sequences that still want one. So the cost of a draft token has two parts: its part of a
pass of the draft model, and its verification in the next step (step_drafts.py).

All proposals of a step together have at most as many tokens as the next step can verify (`_room_after`). The sequences
share these tokens equally, because a pass costs the same whether it serves one sequence or all. If the tokens are fewer
than the sequences, fewer sequences have to be worth the whole pass.

A step with tokens of a prompt proposes nothing, because each pass would delay the first token of the prompt. In such a
step the draft model only computes the tokens of the prompts, because it needs their KV for its proposals. It leaves out
a prompt in two cases. Then it also makes no proposals for the sequence:
  - so many sequences run that no draft is worth its cost
  - the draft model would need longer for the prompt than the drafts of an average answer can save

If a draft costs too much, the sequences ask for one token now and then, so that the cost is measured again (trials.py).
If already its verification costs too much, only one sequence asks.

If a sequence has asked for proposals twice and got none, it asks no more. The rank computes missing KV of the draft
model when a step asks for a proposal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from rayloom_engine.core.planning.drafted_blocks import DraftedBlocks
from rayloom_engine.core.planning.running import RunningSequences
from rayloom_engine.core.planning.step_builder import StepBuilder
from rayloom_engine.core.planning.step_drafts import StepDrafts, draft_cost
from rayloom_engine.core.scheduler_config import SchedulerConfig
from rayloom_engine.core.sequence import Sequence, SequenceState
from rayloom_engine.core.speculation.draft_grammars import DraftGrammars
from rayloom_engine.core.speculation.drafter import Drafter
from rayloom_engine.core.speculation.gain import MeanAcceptance, saved_share
from rayloom_engine.core.speculation.model_drafter import ModelDrafter
from rayloom_engine.core.speculation.trials import Trials
from rayloom_engine.core.stats import Counters
from rayloom_engine.core.step import StepPlan, StepResult
from rayloom_engine.core.step_seconds import StepSeconds

# Assumed time of a pass of the draft model until the time is measured, as a share of the time of a step without drafts.
_UNMEASURED_COST = 0.1
# The draft model computes the prompt of at least one in so many sequences. So the costs and the acceptance, by which
# other prompts are left out, are measured again.
_TRIAL_EVERY = 16


class StepProposals(StepDrafts):
    """Chooses drafts and proposals for the sequences of a step, if the engine has a draft model."""

    def __init__(
        self,
        config: SchedulerConfig,
        running: RunningSequences,
        make_drafter: Callable[[], Drafter] | None,
        grammars: DraftGrammars | None,
    ) -> None:
        """`config.speculation` must be set. `make_drafter`, `grammars`: as in Scheduler."""
        super().__init__(config, running, make_drafter, grammars)
        self.drafted_blocks = DraftedBlocks(config.block_size, config.window)
        self._mean = MeanAcceptance()
        self._proposal_trials = Trials()
        self._asked_in_trial: Sequence | None = None  # a sequence whose proposal is verified whatever it costs
        self._counters = Counters()  # those of the scheduler, once a step has ended

    def add(self, builder: StepBuilder, costs: StepSeconds | None) -> None:
        """Adds the proposed drafts, and then new proposals. All sequences must be in the step already."""
        super().add(builder, costs)
        sequences = [sequence for sequence in builder.num_tokens if _may_propose(sequence)]
        if builder.has_prompts:
            self._follow([sequence for sequence in sequences if builder.computes_prompt_of(sequence)], builder, costs)
        else:
            self._ask(sequences, builder, costs)

    def forget_ranks(self) -> None:
        self.drafted_blocks.forget()

    def ended(self, plan: StepPlan, sequences: Mapping[int, Sequence], result: StepResult, counters: Counters) -> None:
        """Counts accepted tokens as StepDrafts does, and stores proposals. The step's tokens are not appended yet."""
        super().ended(plan, sequences, result, counters)
        self._counters = counters
        self.drafted_blocks.ended(plan, result.draft_work)
        num_accepted = Counter(sampled.slot for sampled in result.accepted)
        with_token = {sampled.slot for sampled in result.sampled}
        proposed = {proposal.slot: proposal.token_ids for proposal in result.proposals}
        lagging = () if result.draft_work is None else result.draft_work.lagging_slots
        for step in plan.slots:
            sequence = sequences[step.slot]
            drafter = sequence.drafter
            if not isinstance(drafter, ModelDrafter):
                continue
            if step.draft_token_ids and not drafter.is_forced and step.slot not in result.postponed_slots:
                self._mean.note(len(step.draft_token_ids), num_accepted[step.slot])
            if sequence.state is SequenceState.FINISHED:
                continue
            if step.slot in proposed:
                # The slot also has a sampled token that follows the accepted tokens.
                drafter.propose(sequence.num_tokens + num_accepted[step.slot] + 1, proposed[step.slot])
            elif step.num_proposals and step.slot in with_token and step.slot not in lagging:
                drafter.note_unanswered()

    def _follow(self, sequences: list[Sequence], builder: StepBuilder, costs: StepSeconds | None) -> None:
        """Lets the draft model compute the tokens of prompts. `sequences`: those with such tokens in the step.

        A sequence is left out for good if the draft model leaves out a part of its prompt. It would have to compute
        this part in steps of decodes, and delay other sequences.
        """
        num_decodes = len(self._running)
        costs_too_much = proposal_cost(num_decodes, costs) >= 1
        for sequence in sequences:
            drafter = _drafter_of(sequence)
            if costs_too_much and not _is_trial(sequence):
                drafter.follows = False
            elif drafter.follows is None:
                drafter.follows = self._is_worth_its_prompt(sequence, num_decodes, costs)
            if drafter.follows:
                builder.proposals[sequence] = 0

    def _ask(self, sequences: list[Sequence], builder: StepBuilder, costs: StepSeconds | None) -> None:
        """Asks for proposals for the sequences of a step of decodes."""
        room = self._room_after(builder)
        if not room:
            return
        num_decodes = len(builder.num_tokens)
        cost = proposal_cost(num_decodes, costs, min(room, num_decodes))
        if cost >= 1:
            if self._proposal_trials.is_due():
                self._try_proposals(sequences, builder, room if draft_cost(num_decodes, costs) < 1 else 1)
            return
        asking = []
        for sequence in sequences:
            drafter = _drafter_of(sequence)
            if drafter.follows is None:
                drafter.follows = self._is_worth_its_prompt(sequence, num_decodes, costs)
            if drafter.follows:
                asking.append(sequence)
        for num_before, sequence in enumerate(asking):
            share = -(-room // (len(asking) - num_before))
            most = min(share, self._most(sequence, builder))
            if most:
                num = _drafter_of(sequence).acceptance.length(cost, sequence.num_tokens, most)
                room -= self._propose(sequence, builder, num)
        if builder.proposals:
            self._proposal_trials.paid()

    def _room_after(self, builder: StepBuilder) -> int:
        """Returns how many draft tokens the next step can verify if it has the same sequences and the same budget."""
        budget = builder.budget + sum(builder.num_tokens.values())
        return max(0, min(budget, self._most_rows) - len(builder.num_tokens))

    def _try_proposals(self, sequences: list[Sequence], builder: StepBuilder, room: int) -> None:
        """Asks for one token for each of `room` sequences that the draft model follows, in spite of the cost.

        A pass for one sequence would not show how long a pass for many takes.
        """
        following = [s for s in sequences if _drafter_of(s).follows and self._most(s, builder)]
        tried = self._proposal_trials.in_turn(following, room)
        asked = [sequence for sequence in tried if self._propose(sequence, builder, 1)]
        self._asked_in_trial = asked[0] if asked else None
        self._proposal_trials.tried(has_draft=bool(asked))

    def _tried(self, sequences: list[Sequence]) -> list[Sequence]:
        """Returns the sequence that a trial has asked for a proposal, so that its verification is measured, too."""
        asked = self._asked_in_trial
        if asked not in sequences:
            return []
        self._asked_in_trial = None
        return [sequence for sequence in sequences if sequence is asked]

    def _propose(self, sequence: Sequence, builder: StepBuilder, num: int) -> int:
        """Asks for `num` tokens, or as many as there are blocks for. Returns their number.

        If all tokens of the step's draft are accepted, `num_tokens + num_drafted + num` tokens have KV afterwards. The
        other running sequences need free blocks for their next tokens, so that no sequence is preempted.
        """
        num_drafted = len(builder.drafts.get(sequence, ()))
        before = sequence.num_tokens + num_drafted
        if num and not self._running.try_extend(sequence, before + num, num_kept=len(self._running) - 1):
            num = min(num, len(sequence.block_ids) * self._config.block_size - before)
        if num <= 0:
            return 0
        builder.proposals[sequence] = num
        return num

    def _most(self, sequence: Sequence, builder: StepBuilder) -> int:
        """Returns the most tokens of a proposal that can be accepted, if all tokens of the step's draft are accepted.

        The step samples one token after the draft. The next step samples one token more than its draft has. The last
        token of a sequence is not computed.
        """
        num_drafted = len(builder.drafts.get(sequence, ()))
        left = min(
            sequence.params.max_tokens - sequence.num_generated, self._config.max_model_len - sequence.num_tokens
        )
        return max(0, min(self._settings.num_tokens, left - num_drafted - 2))

    def _is_worth_its_prompt(self, sequence: Sequence, num_decodes: int, costs: StepSeconds | None) -> bool:
        """Returns whether drafts can save more time than the draft model needs for the tokens that it must compute."""
        if costs is None or costs.draft_prompt_s is None or _is_trial(sequence):
            return True
        num_expected = sequence.params.max_tokens - sequence.num_generated
        if self._counters.num_outputs:
            num_expected = min(num_expected, round(self._counters.mean_output_tokens))
        share = saved_share(self._mean.rate, proposal_cost(num_decodes, costs), self._settings.num_tokens)
        saved_s = num_expected * share * costs.decode_s(num_decodes) / max(1, num_decodes)
        return saved_s > self.drafted_blocks.num_missing(sequence) * costs.draft_prompt_s


def drafts_of(
    config: SchedulerConfig,
    running: RunningSequences,
    make_drafter: Callable[[], Drafter] | None,
    grammars: DraftGrammars | None,
) -> StepDrafts | None:
    """Returns the drafts that the settings ask for; None if speculation is off."""
    if config.speculation is None:
        return None
    kind = StepProposals if config.speculation.has_draft_model else StepDrafts
    return kind(config, running, make_drafter, grammars)


def proposal_cost(num_decodes: int, costs: StepSeconds | None, num_served: int | None = None) -> float:
    """Returns the cost of a draft token that is proposed and then verified, as a multiple of a step's time per decode.

    A pass of the draft model gives each of `num_served` sequences a token; None: each of the `num_decodes` sequences.
    """
    served = num_served or num_decodes
    pass_s = None if costs is None else costs.pass_s(served)
    pass_cost = _UNMEASURED_COST if costs is None or pass_s is None else pass_s / costs.decode_s(num_decodes)
    return pass_cost * num_decodes / served + draft_cost(num_decodes, costs)


def _drafter_of(sequence: Sequence) -> ModelDrafter:
    if sequence.drafter is None:
        sequence.drafter = ModelDrafter()
    assert isinstance(sequence.drafter, ModelDrafter)
    return sequence.drafter


def _is_trial(sequence: Sequence) -> bool:
    """True if the draft model computes the prompt of the sequence whatever it costs."""
    return sequence.number % _TRIAL_EVERY == 0


def _may_propose(sequence: Sequence) -> bool:
    """True if the draft model may compute the sequence. It cannot compute prompts that are given as embeddings."""
    return sequence.params.speculation and not sequence.has_dirty_drafts and sequence.embeds is None
