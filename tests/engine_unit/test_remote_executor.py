"""Plans on ranks that have no model, over real sockets: answers, failures, silence and standstill."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from rayloom_engine.core.step import StepPlan
from rayloom_engine.core_server.ranks import assembly
from rayloom_engine.core_server.ranks.remote_executor import RemoteExecutor
from rayloom_engine.errors import RankLost
from rayloom_engine.protocol import channel as channel_module
from rayloom_engine.protocol.ranks import (
    Beat,
    Computed,
    Failed,
    Run,
)
from rt_fake_rank import Ranks, result_of, run_plan
from rt_server import wait_until


def test_a_plan_goes_to_all_and_the_last_answers(ranks: Ranks) -> None:
    first, second = ranks.start(0), ranks.start(1)
    ranks.assemble()
    plan = StepPlan(step_id=7, epoch=1)
    assert run_plan(RemoteExecutor(ranks.pool), plan) == result_of(plan)
    wait_until(lambda: len(first.orders) == 4, 30.0, lambda: str(first.orders))
    assert isinstance(first.orders[-1], Run) and first.orders[-1].plan == plan
    assert isinstance(second.orders[-1], Run)


def test_some_ranks_in_shared_memory_and_some_over_tcp(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.start(0)
    monkeypatch.setattr(channel_module, "open_memory", lambda *_: None)  # as in another container
    second = ranks.start(1)
    ranks.assemble()
    assert [ranks.pool.attached[rank].steps.transport for rank in (0, 1)] == ["shared memory", "TCP"]
    for step_id in range(3):
        plan = StepPlan(step_id=step_id, epoch=1)
        assert run_plan(RemoteExecutor(ranks.pool), plan) == result_of(plan)
    second.die()
    with pytest.raises(RankLost, match="rank 1"):
        run_plan(RemoteExecutor(ranks.pool), StepPlan(step_id=3, epoch=1))


def test_an_answer_from_before_a_loss_is_not_taken_for_a_new_one(ranks: Ranks) -> None:
    def also_answers_the_last_one(order: object) -> None:
        if isinstance(order, Run):
            second.steps.send(Computed(order.ticket - 1, result_of(StepPlan(step_id=6, epoch=1))))

    ranks.start(0)
    second = ranks.start(1, answer=also_answers_the_last_one)
    ranks.assemble()
    assert run_plan(RemoteExecutor(ranks.pool), StepPlan(step_id=7, epoch=1)).step_id == 7


def test_results_of_several_plans_come_in_the_order_of_the_plans(ranks: Ranks) -> None:
    first, _ = ranks.start(0), ranks.start(1)
    ranks.assemble()
    executor = RemoteExecutor(ranks.pool)
    for step_id in (1, 2):
        executor.submit(StepPlan(step_id=step_id, epoch=1))
    wait_until(lambda: len(first.orders) == 5, 30.0, lambda: str(first.orders))
    assert executor.collect().step_id == 1
    executor.submit(StepPlan(step_id=3, epoch=1))
    assert [executor.collect().step_id for _ in range(2)] == [2, 3]


def test_a_failure_in_a_later_plan_ends_the_wait_for_the_oldest(ranks: Ranks) -> None:
    def fails_in_step_2(order: object) -> Failed | None:
        is_second = isinstance(order, Run) and order.plan.step_id == 2
        return Failed(order.ticket, "rank", "ValueError: broken") if is_second else None

    never = threading.Event()
    ranks.start(0, answer=fails_in_step_2)
    ranks.start(1, answer=lambda order: isinstance(order, Run) and never.wait(60.0) and None)
    ranks.assemble()
    executor = RemoteExecutor(ranks.pool)
    for step_id in (1, 2):
        executor.submit(StepPlan(step_id=step_id, epoch=1))
    with pytest.raises(RankLost, match="rank 0: ValueError: broken"):
        executor.collect()
    never.set()


def test_a_result_in_flight_at_a_loss_is_not_taken_for_a_new_one(ranks: Ranks) -> None:
    ranks.start(0)
    ranks.start(1)
    ranks.assemble()
    executor = RemoteExecutor(ranks.pool)
    for step_id in (1, 2):
        executor.submit(StepPlan(step_id=step_id, epoch=1))
    assert executor.collect().step_id == 1
    executor.forget_all()
    ranks.assemble(is_rebuild=True)
    assert run_plan(executor, StepPlan(step_id=3, epoch=2)).step_id == 3


def test_a_peer_that_is_gone_is_blamed_before_the_rank_that_complains(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def complains(order: object) -> Failed | None:
        is_run = isinstance(order, Run)
        return Failed(order.ticket, "rank", "RuntimeError: connection closed by peer") if is_run else None

    def die_meanwhile(_seconds: float) -> None:
        first.die()
        first.wait_until_dead()

    first = ranks.start(0)
    ranks.start(1, answer=complains)
    ranks.assemble()
    with pytest.raises(RankLost, match="rank 1: RuntimeError: connection closed") as complaint:
        run_plan(RemoteExecutor(ranks.pool), StepPlan(step_id=1, epoch=1))
    # The complaint arrives before the end of the peer's connection.
    monkeypatch.setattr(assembly, "time", SimpleNamespace(sleep=die_meanwhile))
    blamed = assembly.replace_lost(ranks.pool, complaint.value)
    assert (blamed.rank, blamed.is_alive) == (0, False)
    assert (list(ranks.pool.attached), ranks.pool.suspects) == ([1], set())


def test_a_rank_that_fails_alone_is_used_again(ranks: Ranks) -> None:
    def fails(order: object) -> Failed | None:
        return Failed(order.ticket, "rank", "ValueError: broken") if isinstance(order, Run) else None

    ranks.start(0)
    ranks.start(1, answer=fails)
    ranks.assemble()
    with pytest.raises(RankLost, match="rank 1: ValueError: broken") as lost:
        run_plan(RemoteExecutor(ranks.pool), StepPlan(step_id=1, epoch=1))
    assert lost.value.is_alive


@pytest.mark.parametrize("ranks", [1.0], indirect=True)
def test_a_silent_rank_is_lost_after_hang_seconds_also_while_idle(ranks: Ranks) -> None:
    ranks.start(0)
    second = ranks.start(1)
    ranks.assemble()
    executor = RemoteExecutor(ranks.pool)
    executor.check()
    silent_at = time.monotonic()
    second.silence()
    with pytest.raises(RankLost, match="rank 1: no sign of life"):
        while time.monotonic() < silent_at + 10.0:
            executor.check()
    assert time.monotonic() - silent_at > 0.8


@pytest.mark.parametrize("ranks", [1.0], indirect=True)
def test_a_rank_that_beats_and_stands_still_is_lost_once_a_plan_is_due(ranks: Ranks) -> None:
    first, second = ranks.start(0), ranks.start(1, answer=lambda order: isinstance(order, Run) and stuck.wait(30.0))
    stuck = threading.Event()
    ranks.assemble()
    executor = RemoteExecutor(ranks.pool)
    first.beat = Beat(phase="step", step=0, memory_bytes=1, advance=8, waits=True)
    second.beat = Beat(phase="step", step=0, memory_bytes=1, advance=3)
    began = time.monotonic()
    while time.monotonic() < began + 1.5:
        executor.check()  # no result is due, so no rank counts as standing still
    began = time.monotonic()
    with pytest.raises(RankLost, match="rank 1: alive, but it stands still") as lost:
        run_plan(executor, StepPlan(step_id=1, epoch=1))
    stuck.set()
    assert 0.9 < time.monotonic() - began < 5.0
    assert not lost.value.is_alive, "it is to be replaced"


@pytest.mark.parametrize("ranks", [2.0], indirect=True)
def test_a_step_may_take_long_while_a_rank_advances(ranks: Ranks) -> None:
    ranks.start(0)
    slow = ranks.start(1, answer=lambda order: isinstance(order, Run) and done.wait(30.0) and None)
    done = threading.Event()
    ranks.assemble()

    def advance() -> None:
        for count in range(30):  # 3 s
            slow.beat = Beat(phase="step", step=0, memory_bytes=1, advance=count)
            time.sleep(0.1)
        done.set()

    threading.Thread(target=advance, daemon=True).start()
    assert run_plan(RemoteExecutor(ranks.pool), StepPlan(step_id=1, epoch=1)).step_id == 1


def test_a_rank_that_dials_again_counts_as_lost_but_alive(ranks: Ranks) -> None:
    ranks.start(0)
    ranks.start(1)
    ranks.assemble()
    ranks.start(1, incarnation=2)
    with pytest.raises(RankLost, match="rank 1") as lost:
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:
            RemoteExecutor(ranks.pool).check()
    assert lost.value.is_alive
    assert ranks.pool.attached[1].greeting.incarnation == 2


def test_a_plan_goes_to_all_survivors_although_a_rank_is_gone(ranks: Ranks) -> None:
    """A surviving rank without the plan would not compute its part. Its peers would wait for this part."""
    first = ranks.start(0)
    last = ranks.start(1)
    ranks.assemble()
    first.die()
    first.wait_until_dead()
    executor = RemoteExecutor(ranks.pool)
    tried: list[int] = []
    with pytest.raises(RankLost, match="rank 0"):
        for step_id in range(1, 100):  # the first sends may still succeed, although nobody reads the messages
            tried.append(step_id)
            executor.submit(StepPlan(step_id=step_id, epoch=1))
    wait_until(
        lambda: any(isinstance(order, Run) and order.plan.step_id == tried[-1] for order in last.orders),
        5.0,
        lambda: str(last.orders[-1]),
    )
