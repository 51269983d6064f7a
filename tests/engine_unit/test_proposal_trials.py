"""Proposals that cost too much or are refused: trials, pauses, and grammars that allow no proposal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import msgspec
import pytest

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.planning.step_proposals import StepProposals
from rayloom_engine.core.step import DraftWork
from rayloom_engine.core.step_seconds import StepMeter
from rayloom_engine.core.step_work import StepWork
from rt_proposals import PROMPT, asked_of, costs_of_proposals, drafts_of_plan, proposing_scheduler
from rt_scheduler import VOCAB, SimulatedRank, expected_ids, make_sequence


def test_a_first_measurement_that_is_too_high_heals() -> None:
    scheduler, rank = proposing_scheduler(num_blocks=110, window=8), SimulatedRank(guesses=(True,), window=8)
    scheduler.add(make_sequence("a", PROMPT, max_tokens=400))
    meter = StepMeter(StepWork(flops_per_token=100.0, flops_per_pair=2.0))
    asked = []
    while scheduler.has_unfinished:
        plan = scheduler.schedule(meter.costs())
        meter.submitted(plan)
        num = plan.slots[0].num_proposals or 0
        num_asked = sum(bool(step) for step in asked)
        asked.append(num)
        seconds = 9.0 if num_asked < 3 else 0.1  # for each pass; a step takes 1 s
        result = msgspec.structs.replace(
            rank.run(plan), draft_work=DraftWork(proposal_s=num * seconds, num_passes=num, num_served=1)
        )
        meter.ended(1.0, result.draft_work)
        scheduler.update(result)
    first, *others = [step for step, num in enumerate(asked) if num == 1]
    # Of seven measurements, three are wrong. So four trials of one token are enough.
    assert [step - first for step in others[:3]] == [64, 128, 192]
    assert asked[others[2] + 1] == 2
    assert scheduler.counters.accepted_tokens > 50


def test_the_proposal_of_a_trial_is_verified_in_the_next_step_whatever_the_verification_costs() -> None:
    scheduler, rank = proposing_scheduler(num_blocks=60), SimulatedRank(guesses=(True,))
    costs = dataclasses.replace(costs_of_proposals(0.1), draft_token_s=9.0)
    scheduler.add(make_sequence("a", PROMPT, max_tokens=150))
    scheduler.update(rank.run(scheduler.schedule(costs)))
    asked, drafted = [], []
    for step in range(1, 140):
        plan = scheduler.schedule(costs)
        asked += [step] * (asked_of(plan) == [1])
        drafted += [step] * (drafts_of_plan(plan) == [1])
        scheduler.update(rank.run(plan))
    assert (asked, drafted) == ([64, 128], [65, 129])


def test_a_trial_measures_a_pass_for_as_many_sequences_as_would_be_served() -> None:
    scheduler, rank = proposing_scheduler(num_blocks=100), SimulatedRank(guesses=(True,))
    for number in range(2):
        scheduler.add(make_sequence(str(number), (number,), max_tokens=90))
    scheduler.update(rank.run(scheduler.schedule()))
    asked = []
    for _ in range(64):
        plan = scheduler.schedule(costs_of_proposals(2.0))
        asked.append(asked_of(plan))
        scheduler.update(rank.run(plan))
    # The first prompt is computed whatever it costs, and the second was computed when no cost was known.
    assert asked == [[None, None]] * 63 + [[1, 1]]
    assert drafts_of_plan(scheduler.schedule(costs_of_proposals(2.0))) == [1, 1]


def test_an_unworthy_draft_model_pauses() -> None:
    scheduler, rank = proposing_scheduler(num_blocks=40), SimulatedRank(guesses=(False,))
    scheduler.add(make_sequence("a", PROMPT, max_tokens=100))
    asked = []
    while scheduler.has_unfinished:
        plan = scheduler.schedule(costs_of_proposals(0.25))
        asked += asked_of(plan)
        scheduler.update(rank.run(plan))
    pauses = "".join("-" if num is None else "x" for num in asked).strip("-")
    assert "-" * 31 in pauses, pauses
    assert 3 <= asked.count(1) + asked.count(2) < 20
    assert scheduler.counters.accepted_tokens == 0


class _Grammars:
    """Grammars that allow no proposal."""

    def __init__(self, forced: Callable[[Sequence[int]], tuple[int, ...]]) -> None:
        """`forced`: returns the text that the grammar forces after the token ids."""
        self._forced = forced

    def begin_step(self) -> None:
        pass

    def begin(self, params: DecodingParams, num_prompt_tokens: int) -> _Grammars:
        return self

    def fit(self, token_ids: Sequence[int], draft: tuple[int, ...], num: int) -> tuple[int, ...]:
        return self._forced(token_ids)


def _wrong(token_ids: Sequence[int]) -> tuple[int, ...]:
    return ((expected_ids(token_ids, 1)[0] + 2) % VOCAB,)


@pytest.mark.parametrize(
    ("forced", "num_drafted", "num_accepted"),
    [
        (lambda token_ids: (), 0, 0),
        # A step gives a forced token and a sampled token. The first and the last of the 100 tokens are sampled alone.
        (lambda token_ids: tuple(expected_ids(token_ids, 1)), 49, 49),
        # A verification costs 0.06. There are ten rates above it, and two after the pause.
        (_wrong, 12, 0),
    ],
    ids=["none", "right", "wrong"],
)
def test_proposals_that_a_grammar_does_not_allow_pause_and_forced_text_does_not_bring_them_back(
    forced, num_drafted, num_accepted
) -> None:
    scheduler, rank = proposing_scheduler(num_blocks=40, grammars=_Grammars(forced)), SimulatedRank(guesses=(False,))
    params = DecodingParams(max_tokens=100, temperature=0.0, grammar="start: /.*/")
    scheduler.add(make_sequence("a", PROMPT, params=params))
    num_asked = 0
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        num_asked += bool(plan.slots[0].num_proposals)
        scheduler.update(rank.run(plan))
    # A proposed token costs 0.16. The rates are 0.5, 0.4, 0.32, 0.256, 0.205 and 0.164. After the pause of 32 tokens
    # they are 0.24 and 0.192, and the next pause has 64 tokens.
    assert num_asked == 8
    assert scheduler.counters.draft_tokens == num_drafted
    assert scheduler.counters.accepted_tokens == num_accepted
    drafts = scheduler._drafts
    assert isinstance(drafts, StepProposals)
    assert drafts._mean.rate == 0.5, "no other sequence is judged by this grammar"
