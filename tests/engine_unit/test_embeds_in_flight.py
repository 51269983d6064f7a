"""Embeddings in plans that wait for their rank: their bytes are limited, and no prompt waits forever."""

from __future__ import annotations

from collections import deque

import pytest

from rayloom_engine.core.embeds import MAX_WAITING_EMBEDS_BYTES, EmbeddedPrompt, Embeds
from rayloom_engine.core.scheduler import Scheduler
from rayloom_engine.core.step import StepPlan
from rt_scheduler import SimulatedRank, expected_ids, make_scheduler, make_sequence

ROW_BYTES = 64 * 1024  # 8 rows are MAX_WAITING_EMBEDS_BYTES
ANSWER = 6


def _embedded(num: int, row_bytes: int = ROW_BYTES) -> EmbeddedPrompt:
    return EmbeddedPrompt(Embeds("float32", row_bytes // 4, bytes(num * row_bytes)))


def _num_bytes(plan: StepPlan) -> int:
    return sum(len(step.embeds.data) for step in plan.slots if step.embeds is not None)


class _Run:
    """All sequences of a scheduler, computed with as many plans in flight as it allows."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.first_plans: list[int] = []  # bytes of embeddings of each plan made while none was in flight
        self.waiting: list[int] = []  # sums over all plans in flight but the oldest, after each further plan
        self.ids: dict[str, list[int]] = {}
        rank = SimulatedRank()
        plans: deque[StepPlan] = deque()
        for _ in range(1000):
            plan = scheduler.schedule()
            if plan is not None:
                plans.append(plan)
                if len(plans) == 1:
                    self.first_plans.append(_num_bytes(plan))
                else:
                    self.waiting.append(sum(map(_num_bytes, list(plans)[1:])))
            elif plans:
                for output in scheduler.update(rank.run(plans.popleft())):
                    self.ids.setdefault(output.sequence_id, []).extend(output.token_ids)
                scheduler.check_integrity()
            else:
                break
        assert not scheduler.has_unfinished


def test_only_a_plan_that_waits_for_no_other_has_more_rows_than_the_limit() -> None:
    scheduler = make_scheduler(num_blocks=20, max_num_batched_tokens=16, depth=2)
    scheduler.add(make_sequence("a", _embedded(40), max_tokens=ANSWER))
    run = _Run(scheduler)
    assert run.first_plans[0] == 16 * ROW_BYTES
    assert run.waiting[:3] == [8 * ROW_BYTES] * 3
    assert run.ids == {"a": expected_ids((0,) * 40, ANSWER)}


@pytest.mark.parametrize(("depth", "num_ahead"), [(2, 0), (2, 1), (3, 0), (3, 1), (5, 0)])
def test_plans_that_wait_fit_the_limit_together(depth: int, num_ahead: int) -> None:
    """Chunks, forks of one position, and prompts of token ids."""
    scheduler = make_scheduler(
        num_blocks=40, max_num_seqs=24, max_num_batched_tokens=19, depth=depth, num_ahead=num_ahead
    )
    prompts: dict[str, tuple[int, ...]] = {f"text {index}": (1 + index, 2, 3) for index in range(3)}
    prompts |= {f"rows {index}": _embedded(13 + index) for index in range(3)}
    for request_id, prompt in prompts.items():
        scheduler.add(make_sequence(request_id, prompt, max_tokens=ANSWER))
    for index in range(12):
        prompts[f"fork {index}"] = prompts["rows 0"]
        scheduler.add(make_sequence(f"fork {index}", prompts["rows 0"], max_tokens=ANSWER, fork_of="rows 0"))
    run = _Run(scheduler)
    assert max(run.waiting) <= MAX_WAITING_EMBEDS_BYTES
    assert max(run.waiting) > ROW_BYTES
    assert run.ids == {request_id: expected_ids(tuple(prompt), ANSWER) for request_id, prompt in prompts.items()}


def test_last_positions_of_many_prompts_count_too() -> None:
    """They are computed like decodes. Ten tenants share the first plan, so each prompt of two rows gets one of them."""
    scheduler = make_scheduler(num_blocks=40, max_num_seqs=10, max_num_batched_tokens=10, depth=2, num_ahead=1)
    for index in range(10):
        scheduler.add(make_sequence(str(index), _embedded(2), tenant=f"tenant {index}"))
    plans = [scheduler.schedule(), scheduler.schedule()]
    assert [[step.num_tokens for step in plan.slots] for plan in plans if plan is not None] == [[1] * 10, [1] * 8]


def test_rows_beyond_the_limit_go_one_by_one_beside_a_stream_of_other_plans() -> None:
    scheduler = make_scheduler(num_blocks=40, depth=2)
    scheduler.add(make_sequence("stream", (1, 2, 3), max_tokens=60))
    scheduler.add(make_sequence("late stream", (4, 2, 3), max_tokens=60))
    scheduler.add(make_sequence("rows", _embedded(12, 2 * MAX_WAITING_EMBEDS_BYTES), max_tokens=2))
    run = _Run(scheduler)
    assert set(run.waiting) == {0, 2 * MAX_WAITING_EMBEDS_BYTES}
    assert run.ids["rows"] == expected_ids((0,) * 12, 2)
    assert list(run.ids).index("rows") == 2 and len(run.ids["stream"]) == 60
