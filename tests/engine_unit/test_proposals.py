"""Proposals of a draft model in a scheduler's plans: the rules for asking, and the drafts that come of them."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.planning.drafted_blocks import DraftedBlocks
from rayloom_engine.core.planning.step_proposals import StepProposals, proposal_cost
from rayloom_engine.core.scheduler import Scheduler
from rayloom_engine.core.speculation.gain import MeanAcceptance, saved_share
from rayloom_engine.core.step import DraftWork, SlotStep, StepPlan
from rayloom_engine.core.step_seconds import StepSeconds
from rt_proposals import PROMPT, asked_of, costs_of_proposals, drafts_of_plan, proposing_scheduler
from rt_scheduler import SimulatedRank, expected_ids, ids_of, make_sequence, run_to_end


def test_a_step_proposes_the_draft_of_the_next_step() -> None:
    scheduler, rank = proposing_scheduler(), SimulatedRank(guesses=(True,))
    scheduler.add(make_sequence("a", PROMPT, max_tokens=9))
    plan = scheduler.schedule()
    assert (asked_of(plan), drafts_of_plan(plan)) == ([0], [0]), "the draft model computes the prompt"
    outputs = scheduler.update(rank.run(plan))
    plan = scheduler.schedule()
    # The 4 known tokens fill a block. The draft model computes the sampled token and the first proposed token, too.
    assert (asked_of(plan), drafts_of_plan(plan), plan.slots[0].new_block_ids) == ([2], [0], (1,))
    outputs += scheduler.update(rank.run(plan))
    plan = scheduler.schedule()
    assert plan.slots[0].draft_token_ids == tuple(expected_ids(PROMPT, 4)[2:])
    outputs += scheduler.update(rank.run(plan)) + run_to_end(scheduler, rank)
    assert ids_of(outputs, "a") == expected_ids(PROMPT, 9)
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "asked"),
    [(9, 44, 2), (4, 44, 1), (3, 44, None), (9, 8, 2), (9, 7, 1), (9, 6, None)],
)
def test_no_proposal_is_longer_than_the_rest_of_the_answer(max_tokens, max_model_len, asked) -> None:
    scheduler, rank = proposing_scheduler(max_model_len=max_model_len), SimulatedRank(guesses=(True,))
    scheduler.add(make_sequence("a", PROMPT, max_tokens=max_tokens))
    scheduler.update(rank.run(scheduler.schedule()))
    assert asked_of(scheduler.schedule()) == [asked]


def test_a_sequence_that_must_not_speculate_is_left_to_the_model_alone() -> None:
    scheduler, rank = proposing_scheduler(), SimulatedRank(guesses=(True,))
    params = DecodingParams(max_tokens=8, temperature=0.0, speculation=False)
    scheduler.add(make_sequence("off", PROMPT, params=params))
    scheduler.add(make_sequence("on", (4, 5, 6), max_tokens=8))
    plan = scheduler.schedule()
    assert asked_of(plan) == [None, 0]
    scheduler.update(rank.run(plan))
    assert asked_of(scheduler.schedule()) == [None, 2]


def test_a_step_with_a_prompt_proposes_nothing_and_keeps_the_proposals_of_the_step_before() -> None:
    scheduler, rank = proposing_scheduler(), SimulatedRank(guesses=(True,))
    scheduler.add(make_sequence("a", PROMPT, max_tokens=12))
    for _ in range(2):
        scheduler.update(rank.run(scheduler.schedule()))
    scheduler.add(make_sequence("b", (4, 5, 6), max_tokens=12))
    plan = scheduler.schedule()
    assert (asked_of(plan), drafts_of_plan(plan)) == ([None, 0], [0, 0])
    scheduler.update(rank.run(plan))
    plan = scheduler.schedule()
    assert asked_of(plan) == [2, 2]
    assert drafts_of_plan(plan) == [0, 0], "the proposal was for the token before"


def test_a_draft_in_the_step_shortens_the_proposal_at_the_end_of_the_answer() -> None:
    scheduler, rank = proposing_scheduler(), SimulatedRank(guesses=(True,))
    scheduler.add(make_sequence("a", PROMPT, max_tokens=9))
    found = []
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        found += zip(drafts_of_plan(plan), asked_of(plan), strict=True)
        scheduler.update(rank.run(plan))
    # The steps give 1, 1, 3, 3 and 1 tokens. In the fourth step, 4 tokens are missing, and it may give 3 of them.
    assert found == [(0, 0), (0, 2), (2, 2), (2, None), (0, None)]


def _two_answers(num_blocks: int, speculation: bool) -> tuple[Scheduler, list[list[int | None]]]:
    """The scheduler after two answers of 8 tokens, and what each step of decodes asked for."""
    scheduler = proposing_scheduler(num_blocks=num_blocks, max_model_len=12)
    rank = SimulatedRank(guesses=(True,))
    params = DecodingParams(max_tokens=8, temperature=0.0, speculation=speculation)
    for name, prompt in (("a", (1, 2)), ("b", (3, 4))):
        scheduler.add(make_sequence(name, prompt, params=params, cache_key=name.encode()))
    outputs = []
    asked = []
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        asked.append(asked_of(plan))
        outputs += scheduler.update(rank.run(plan))
    assert ids_of(outputs, "a") == expected_ids((1, 2), 8)
    assert ids_of(outputs, "b") == expected_ids((3, 4), 8)
    return scheduler, asked


@pytest.mark.parametrize(("num_blocks", "first_asked"), [(6, [2, 2]), (5, [2, 2]), (4, [2, 1]), (3, [1, 1])])
def test_a_proposal_preempts_nobody(num_blocks: int, first_asked: list[int]) -> None:
    # After the prompts, each sequence has 3 tokens in a block of 4, so the proposal of 2 tokens needs another block.
    # The block that the other sequence needs for its next tokens stays free.
    drafted, asked = _two_answers(num_blocks, speculation=True)
    assert asked[1] == first_asked
    alone, _ = _two_answers(num_blocks, speculation=False)
    assert drafted.counters.num_preemptions <= alone.counters.num_preemptions == (num_blocks < 6)


@pytest.mark.parametrize(
    ("num", "proposal_s", "budget", "asked"),
    [
        (1, 0.1, 64, [2]),
        (2, 0.1, 64, [1, 1]),
        (3, 0.1, 64, [1, None, None]),
        (3, 0.2, 64, [None, None, None]),
        (4, 0.1, 64, [None, None, None, None]),
        (2, 0.1, 3, [1, None]),
    ],
)
def test_a_step_asks_for_no_more_tokens_than_the_next_step_can_verify(num, proposal_s, budget, asked) -> None:
    # The ranks have logits of 4 rows. If 3 sequences leave room for one draft token, this token must be worth a whole
    # pass: 0.1 / 1.2 of a step, which is a quarter of a token's time, and 0.125 for the verification. The rate is 1/2.
    scheduler = proposing_scheduler(num_blocks=20, max_num_seqs=4, max_num_batched_tokens=budget)
    rank = SimulatedRank(guesses=(True,))
    for number in range(num):
        scheduler.add(make_sequence(str(number), (number,), max_tokens=9))
    scheduler.update(rank.run(scheduler.schedule(costs_of_proposals(proposal_s))))
    plan = scheduler.schedule(costs_of_proposals(proposal_s))
    assert asked_of(plan) == asked
    scheduler.update(rank.run(plan))
    assert drafts_of_plan(scheduler.schedule(costs_of_proposals(proposal_s))) == [each or 0 for each in asked]


def _asked_in_turn(scheduler: Scheduler, rank: SimulatedRank, num: int) -> list[int | None]:
    found = []
    for _ in range(num):
        plan = scheduler.schedule()
        found += asked_of(plan)
        scheduler.update(rank.run(plan))
    return found


def test_a_sequence_that_gets_no_proposal_twice_is_asked_no_more() -> None:
    scheduler, rank = proposing_scheduler(), SimulatedRank(guesses=())
    scheduler.add(make_sequence("a", PROMPT, max_tokens=12))
    assert _asked_in_turn(scheduler, rank, 5) == [0, 2, 2, None, None]


def test_a_slot_that_lags_behind_is_asked_until_it_has_caught_up() -> None:
    class Lagging(SimulatedRank):
        def run(self, plan):
            result = super().run(plan)
            if plan.step_id > 5:
                return result
            work = DraftWork(lagging_slots=tuple(step.slot for step in plan.slots if step.num_proposals))
            return msgspec.structs.replace(result, draft_work=work)

    scheduler, rank = proposing_scheduler(), Lagging(guesses=())
    scheduler.add(make_sequence("a", PROMPT, max_tokens=12))
    assert _asked_in_turn(scheduler, rank, 8) == [0, 2, 2, 2, 2, 2, 2, None]


def test_the_search_for_a_poisonous_request_runs_no_draft_model() -> None:
    scheduler, rank = proposing_scheduler(), SimulatedRank(guesses=(True,))
    scheduler.add(make_sequence("a", PROMPT, max_tokens=9))
    scheduler.restrict(frozenset("a"))
    for _ in range(3):
        plan = scheduler.schedule()
        assert asked_of(plan) == [None]
        scheduler.update(rank.run(plan))
        scheduler.restrict(frozenset("a"))


def test_a_draft_token_costs_its_proposal_and_its_verification() -> None:
    assert proposal_cost(1, None) == pytest.approx(0.1 + 0.06)
    assert proposal_cost(1, costs_of_proposals(0.3)) == pytest.approx(0.3 + 0.05)
    # A step of two decodes takes 1.1 s, and a pass of the draft model serves both.
    assert proposal_cost(2, costs_of_proposals(0.3)) == pytest.approx(0.3 / 1.1 + 0.1 / 1.1)


def _after_another(scheduler: Scheduler, rank: SimulatedRank, **other) -> None:
    """Adds a sequence that is not the first, because the draft model computes the first one whatever it costs."""
    scheduler.add(make_sequence("before", (7,), max_tokens=1))
    run_to_end(scheduler, rank)
    scheduler.add(make_sequence("a", PROMPT, **other))


def test_a_draft_model_as_slow_as_the_model_computes_nothing() -> None:
    scheduler, rank = proposing_scheduler(), SimulatedRank(guesses=(True,))
    _after_another(scheduler, rank, max_tokens=9)
    for _ in range(3):
        plan = scheduler.schedule(costs_of_proposals(0.96))
        assert asked_of(plan) == [None]
        scheduler.update(rank.run(plan))


def test_a_sequence_whose_prompt_cost_too_much_in_one_step_gets_no_proposals() -> None:
    scheduler, rank = proposing_scheduler(), SimulatedRank(guesses=(True,))
    _after_another(scheduler, rank, max_tokens=9)
    asked = []
    for cost in (0.96, 0.1, 0.1):
        plan = scheduler.schedule(costs_of_proposals(cost))
        asked += asked_of(plan)
        scheduler.update(rank.run(plan))
    assert asked == [None, None, None]


def _follows(costs: StepSeconds, prompt: tuple[int, ...], max_tokens: int, number: int = 1) -> bool:
    """Whether the draft model computes the prompt of the `number`-th sequence."""
    scheduler, rank = proposing_scheduler(num_blocks=40, num_tokens=4, max_num_batched_tokens=100), SimulatedRank()
    for _ in range(number):
        scheduler.add(make_sequence("before", (7,), max_tokens=20))
        run_to_end(scheduler, rank)
    assert scheduler.counters.mean_output_tokens == 20
    scheduler.add(make_sequence("a", prompt, max_tokens=max_tokens))
    asked = asked_of(scheduler.schedule(costs))
    return asked == [0]


def test_a_prompt_that_costs_more_than_its_drafts_can_save_is_left_out() -> None:
    # A draft token costs 0.1 + 0.05 of a step of 1 s. With a rate of 1/2 the best drafts have 2 tokens: a step of 1.3 s
    # gives 1.75 tokens, which saves 26 % of the time. So 20 tokens save 5.1 s, which is 52 tokens of 0.1 s.
    costs = dataclasses.replace(costs_of_proposals(0.1), draft_prompt_s=0.1)
    assert saved_share(0.5, 0.15, 4) == pytest.approx(1 - 1.3 / 1.75)
    short, long = tuple(range(51)), tuple(range(52))
    assert _follows(costs, short, max_tokens=100)
    assert not _follows(costs, long, max_tokens=100)
    assert not _follows(costs, short, max_tokens=10)
    assert _follows(dataclasses.replace(costs, draft_prompt_s=None), long, max_tokens=100)
    assert _follows(costs, long, max_tokens=100, number=16), "a trial"


@pytest.mark.parametrize(("speculation", "follows"), [(True, True), (False, False)])
def test_a_cached_prompt_costs_nothing_only_if_the_draft_model_has_computed_it(speculation, follows) -> None:
    # As in the test before, at most 51 tokens are worth their time. Of the 60 tokens, 56 are in the prefix cache.
    costs = dataclasses.replace(costs_of_proposals(0.1), draft_prompt_s=0.1)
    scheduler = proposing_scheduler(num_blocks=40, num_tokens=4, max_num_batched_tokens=100)
    rank = SimulatedRank(guesses=(True,))
    prompt = tuple(range(60))
    params = DecodingParams(max_tokens=20, temperature=0.0, speculation=speculation)
    scheduler.add(make_sequence("before", prompt, params=params))
    run_to_end(scheduler, rank)
    scheduler.add(make_sequence("a", prompt, max_tokens=100))
    plan = scheduler.schedule(costs)
    assert plan.slots[0].start == 56
    assert asked_of(plan) == [0 if follows else None]


def test_a_block_with_a_new_owner_or_a_load_or_of_a_lost_rank_has_no_kv_of_the_draft_model() -> None:
    blocks = DraftedBlocks(block_size=4, window=None)
    step = SlotStep(slot=0, start=4, num_tokens=5)
    sequence = make_sequence("a", range(13))
    sequence.block_ids, sequence.num_computed = [2, 3, 4, 5], 12

    def num_missing(whole: tuple[int, ...], **plan) -> int:
        blocks.ended(StepPlan(step_id=1, epoch=1, **plan), DraftWork(whole_blocks=whole))
        return blocks.num_missing(sequence)

    assert num_missing((2, 3, 4)) == 1
    assert num_missing((), slots=(msgspec.structs.replace(step, new_block_ids=(3,)),)) == 9
    assert num_missing((3,)) == 1
    assert num_missing((), host_loads=((0, 4),), slots=(step,)) == 5, "a copy has KV of the target model alone"
    assert num_missing((4,)) == 1
    new = make_sequence("new", range(9))
    new.slot, new.block_ids = 0, [2, 3, 4]
    assert num_missing((), new_slots=(new.new_slot(),), slots=(step,)) == 9, "the prefix hit has the block 2"
    scheduler, rank = proposing_scheduler(), SimulatedRank(guesses=(True,))
    scheduler.add(make_sequence("a", PROMPT, max_tokens=9))
    _asked_in_turn(scheduler, rank, 3)
    drafts = scheduler._drafts
    assert isinstance(drafts, StepProposals)
    assert drafts.drafted_blocks.ids == {0}
    scheduler.forget_ranks()
    assert drafts.drafted_blocks.ids == set()


def test_a_sequence_whose_prompt_was_left_out_gets_no_proposals() -> None:
    scheduler, rank = proposing_scheduler(num_blocks=40), SimulatedRank(guesses=(True,))
    costs = dataclasses.replace(costs_of_proposals(0.1), draft_prompt_s=9.0)
    for name in "ab":
        scheduler.add(make_sequence(name, PROMPT, max_tokens=9))
    asked = set()
    while scheduler.has_unfinished:
        plan = scheduler.schedule(costs)
        asked |= {(step.slot, step.num_proposals is None) for step in plan.slots}
        scheduler.update(rank.run(plan))
    assert asked >= {(0, False), (1, True)} and (1, False) not in asked, "the first sequence is a trial"


def test_new_drafts_count_more_than_old_ones_in_the_mean_acceptance() -> None:
    mean = MeanAcceptance()
    assert mean.rate == 0.5
    mean.note(4, 2)  # two tokens of three verified tokens
    assert mean.rate == pytest.approx((0.99 * 2 + 2) / (0.99 * 4 + 3))
    for _ in range(1000):
        mean.note(3, 3)
    assert mean.rate > 0.999
    for _ in range(100):
        mean.note(3, 0)
    assert 0.5 < mean.rate < 0.85
