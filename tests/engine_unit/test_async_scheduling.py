"""Plans whose input is a token that is still being sampled: placeholders, their limits, and unchanged answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayloom_engine.core.decoding import DecodingParams, ThinkingBudget
from rayloom_engine.core.step import SlotStep, StepPlan
from rt_scheduler import SimulatedRank, expected_ids, ids_of, make_scheduler, make_sequence, run_to_end
from rt_stages import StagesInARow, answers, ids_by_request, load_stages, make_engine, stage_config
from rt_tiny import tiny_checkpoint

AHEAD = {"depth": 2, "num_ahead": 1}
PROMPT = (1, 2)


def _steps(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(step.start, len(step.new_token_ids), step.num_placeholders) for step in plan.slots]


def test_the_next_plan_has_a_placeholder_for_the_token_that_is_being_sampled() -> None:
    scheduler, rank = make_scheduler(**AHEAD), SimulatedRank()
    scheduler.add(make_sequence("a", PROMPT, max_tokens=4))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second.slots == (SlotStep(slot=0, start=2, num_tokens=1, num_placeholders=1, samples=True),)
    assert scheduler.schedule() is None, "two plans in flight are the limit"
    outputs = scheduler.update(rank.run(first))
    third = scheduler.schedule()
    assert third.slots == (SlotStep(slot=0, start=3, num_tokens=1, num_placeholders=1, samples=True),)
    outputs += scheduler.update(rank.run(second)) + scheduler.update(rank.run(third)) + run_to_end(scheduler, rank)
    assert ids_of(outputs, "a") == expected_ids(PROMPT, 4)


def test_an_id_that_the_core_knows_is_sent_although_the_rank_has_sampled_it() -> None:
    scheduler, rank = make_scheduler(**AHEAD), SimulatedRank()
    scheduler.add(make_sequence("a", PROMPT, max_tokens=4))
    scheduler.update(rank.run(scheduler.schedule()))
    (token,) = expected_ids(PROMPT, 1)
    plan = scheduler.schedule()
    assert plan.slots == (SlotStep(slot=0, start=2, num_tokens=1, new_token_ids=(token,), samples=True),)
    assert ids_of(scheduler.update(rank.run(plan)) + run_to_end(scheduler, rank), "a") == expected_ids(PROMPT, 4)[1:]


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "placeholders"),
    [
        (3, 44, [0, 1, 1]),  # the third token is the last one, so nothing is computed from it
        (1, 44, [0]),
        (9, 4, [0, 1]),  # the prompt and two tokens fill the context
    ],
)
def test_no_plan_is_made_for_a_token_that_cannot_have_a_successor(max_tokens, max_model_len, placeholders) -> None:
    scheduler, rank = make_scheduler(**AHEAD, max_model_len=max_model_len), SimulatedRank()
    scheduler.add(make_sequence("a", PROMPT, max_tokens=max_tokens))
    plans = [scheduler.schedule()]
    while scheduler.has_unfinished:
        following = scheduler.schedule()
        scheduler.update(rank.run(plans[-1]))
        if following is not None:
            plans.append(following)
    assert [step.num_placeholders for plan in plans for step in plan.slots] == placeholders


def test_a_stop_token_drops_what_was_planned_ahead_and_frees_its_blocks() -> None:
    stop = expected_ids(PROMPT, 3)[-1]
    scheduler, rank = make_scheduler(**AHEAD), SimulatedRank()
    params = DecodingParams(max_tokens=9, temperature=0.0, stop_token_ids=(stop,))
    scheduler.add(make_sequence("a", PROMPT, params=params))
    outputs = run_to_end(scheduler, rank)
    assert ids_of(outputs, "a") == expected_ids(PROMPT, 3)
    assert [output.finish_reason for output in outputs] == [None, None, "stop"]
    assert rank.num_computed_tokens == 2 + 2 + 1, "prompt, two tokens, and one of the dropped plan"
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


@pytest.mark.parametrize(
    "mask",
    [
        {"grammar": "start: /.*/"},
        {"thinking": ThinkingBudget(num_tokens=1, start="", ends=("x",), end_ids=(1,))},
    ],
)
def test_a_sequence_whose_mask_may_be_late_gets_no_placeholder(mask) -> None:
    scheduler = make_scheduler(**AHEAD)
    scheduler.add(make_sequence("a", PROMPT, params=DecodingParams(max_tokens=4, temperature=0.0, **mask)))
    assert scheduler.schedule() is not None
    assert scheduler.schedule() is None


def test_a_trial_of_suspects_plans_nothing_ahead() -> None:
    scheduler = make_scheduler(**AHEAD)
    scheduler.add(make_sequence("a", PROMPT, max_tokens=4))
    scheduler.restrict(frozenset({"a"}))
    assert scheduler.schedule() is not None
    assert scheduler.schedule() is None


def test_a_waiting_request_of_another_tenant_soon_gets_a_slot() -> None:
    scheduler, rank = make_scheduler(60, **AHEAD), SimulatedRank()
    for index in range(4):  # these sequences take all slots
        scheduler.add(make_sequence(f"a{index}", (1, index), max_tokens=50, tenant="a"))
    in_flight = [scheduler.schedule(), scheduler.schedule()]
    scheduler.add(make_sequence("b", (7, 8), max_tokens=2, tenant="b"))
    outputs: list = []
    for _ in range(4):
        outputs += scheduler.update(rank.run(in_flight.pop(0)))
        if (plan := scheduler.schedule()) is not None:
            in_flight.append(plan)
    assert ids_of(outputs, "b"), "it waited for two plans, and preempted a sequence of the other tenant"
    assert scheduler.counters.num_preemptions == 1


def test_a_placeholder_without_a_block_preempts_nobody() -> None:
    scheduler, rank = make_scheduler(num_blocks=3, max_model_len=12, **AHEAD), SimulatedRank()
    scheduler.add(make_sequence("old", prompt=(1, 2, 3, 4), max_tokens=4))  # its next token needs a second block
    scheduler.add(make_sequence("new", prompt=(5, 6, 7, 8), max_tokens=4))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert [len(first.slots), _steps(second)] == [2, [(4, 0, 1)]], "the last free block serves the older one"
    assert scheduler.counters.num_preemptions == 0
    outputs = scheduler.update(rank.run(first)) + scheduler.update(rank.run(second)) + run_to_end(scheduler, rank)
    assert [ids_of(outputs, "old"), ids_of(outputs, "new")] == [
        expected_ids(prompt, 4) for prompt in ((1, 2, 3, 4), (5, 6, 7, 8))
    ]


def test_a_block_that_a_placeholder_completes_is_found_by_the_next_prompt() -> None:
    scheduler, rank = make_scheduler(**AHEAD), SimulatedRank()
    scheduler.add(make_sequence("a", PROMPT, max_tokens=4))
    run_to_end(scheduler, rank)
    ids = (*PROMPT, *expected_ids(PROMPT, 4))
    scheduler.add(make_sequence("b", ids, max_tokens=1))
    run_to_end(scheduler, rank)
    assert scheduler.counters.prefix_hits == 4


def test_a_real_rank_gives_the_same_tokens_and_logprobs_with_placeholders(tmp_path: Path) -> None:
    ranks = load_stages(stage_config(tiny_checkpoint(tmp_path)))
    expected = answers(make_engine(StagesInARow(ranks)))
    executor = _CountsPlaceholders(ranks)
    engine = make_engine(executor, depth=2, num_ahead=1)
    got = answers(engine)
    assert executor.num_placeholders > 50
    assert engine.scheduler.counters.num_preemptions > 0
    assert ids_by_request(got) == ids_by_request(expected)
    assert _logprobs(got) == _logprobs(expected)


class _CountsPlaceholders(StagesInARow):
    num_placeholders = 0

    def run(self, plan):
        self.num_placeholders += sum(step.num_placeholders for step in plan.slots)
        return super().run(plan)


def _logprobs(outputs):
    return [entry for output in outputs["logprobs"] for entry in (*output.prompt_logprobs, *output.logprobs)]
