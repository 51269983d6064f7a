"""The core's side of its ranks, over real sockets, with ranks that have no model."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.step import NewSlot, StepPlan
from rayloom_engine.core_server.ranks import assembly
from rayloom_engine.core_server.ranks.remote_executor import RemoteExecutor
from rayloom_engine.errors import ConfigError, ModelError, RankLost
from rayloom_engine.protocol.channel import Channel, ChannelClosed, dial
from rayloom_engine.protocol.ranks import (
    Allocate,
    Beat,
    Done,
    Failed,
    Greeting,
    Join,
    OpenStore,
    Run,
    Welcomed,
)
from rt_fake_rank import TOKEN, FakeLauncher, FakeRank, Ranks, make_loaded, run_plan
from rt_readable import is_readable
from rt_server import wait_until


def _kinds(rank: FakeRank) -> list[str]:
    return [type(order).__name__ for order in rank.orders]


def test_ranks_load_then_meet_at_rank_0_then_take_the_blocks_that_all_have_room_for(ranks: Ranks) -> None:
    first = ranks.start(0, first=make_loaded(100))
    second = ranks.start(1, first=make_loaded(70))
    epoch, loaded = ranks.assemble()
    assert (epoch, [part.num_blocks for part in loaded]) == (1, [100, 70])
    assert _kinds(first) == ["OpenStore", "Join", "Allocate"]
    assert _kinds(second) == ["Join", "Allocate"]
    allocate = second.orders[-1]
    assert isinstance(allocate, Allocate) and (allocate.epoch, allocate.num_blocks) == (1, 70)
    join = first.orders[1]
    assert isinstance(join, Join) and (join.host, join.port) == ("127.0.0.1", 1234)
    assert [(status.rank, status.pid, status.node) for status in ranks.pool.statuses()] == [
        (0, 1000, "n"),
        (1, 1001, "n"),
    ]


@pytest.mark.parametrize(("is_rebuild", "loads"), [(False, [("load", 20, 20, "bytes")]), (True, [])])
def test_weights_that_are_loaded_before_the_first_report_count_as_loaded_by_this_start(
    ranks: Ranks, is_rebuild: bool, loads: list[object]
) -> None:
    ranks.start(0)
    ranks.start(1)
    told: list[tuple[str, int, int, str]] = []
    ranks.assemble(progress=lambda *now: told.append(now), is_rebuild=is_rebuild)
    assert [now for now in told if now[0] == "load"] == loads
    assert [now[0] for now in told][-2:] == ["rendezvous", "warm_up"]


def test_a_load_that_was_reported_is_reported_once(ranks: Ranks) -> None:
    is_loaded = threading.Event()
    ranks.start(0, is_loaded=is_loaded)
    ranks.start(1, is_loaded=is_loaded)
    told: list[tuple[str, int, int, str]] = []

    def note(*now: object) -> None:
        told.append(now)
        if now == ("load", 10, 40, "bytes"):
            is_loaded.set()

    ranks.assemble(progress=note)
    # After the load, the weights have another number of bytes than the files. This number causes no second report.
    assert {now for now in told if now[0] == "load"} == {("load", 10, 40, "bytes")}


@pytest.mark.parametrize(
    ("phases", "told"),
    [
        ({"load": 5}, ("load", 5, 20, "bytes")),
        ({"load": 5, "start": 0}, None),  # a rank without a beat so far has read no weights
        ({"start": 0}, None),
        ({"load": 5, "idle": 0}, ("load", 5, 20, "bytes")),
        ({"load": 5, "import": 0}, ("import", 0, 20, "bytes")),
        ({"warm_up": 3, "kv_cache": 2}, ("kv_cache", 2, 20, "bytes")),
        ({"idle": 0, "step": 0}, None),
    ],
)
def test_the_start_is_where_the_slowest_rank_is(phases: dict[str, int], told: object) -> None:
    beats = [
        Beat(phase=phase, step=0, memory_bytes=1, done=done, total=20, unit="bytes") for phase, done in phases.items()
    ]
    assert assembly.slowest_phase(beats) == told


def test_a_restarted_core_requests_the_blocks_of_the_first(ranks: Ranks) -> None:
    ranks.start(0)
    second = ranks.start(1)
    ranks.assemble(num_blocks=33)
    assert second.orders[-1].num_blocks == 33  # type: ignore[attr-defined]


@pytest.mark.parametrize(("kind", "error"), [("config", ConfigError), ("model", ModelError)])
def test_a_fault_that_the_user_must_fix_is_not_tried_again(ranks: Ranks, kind: str, error: type[Exception]) -> None:
    ranks.start(0)
    ranks.start(1, first=Failed(0, kind, "no such folder"))  # type: ignore[arg-type]
    with pytest.raises(error, match="no such folder"):
        ranks.assemble()


def test_ranks_that_would_send_each_other_tensors_of_different_types_are_refused(ranks: Ranks) -> None:
    # Without this check, a rank would abort in the first step, or would read the bytes of its peer as numbers of
    # another type.
    first = ranks.start(0, first=make_loaded(hidden_dtype="float32", arithmetic="C library, avx2"))
    ranks.start(1, first=make_loaded(hidden_dtype="bfloat16", arithmetic="torch"))
    with pytest.raises(ConfigError, match=r"^rank 1 .* in bfloat16 \(torch\), rank 0 in float32 \(C library, avx2\); "):
        ranks.assemble()
    assert _kinds(first) == [], "they do not meet"


def test_in_a_rebuild_a_rank_that_computes_in_another_type_is_replaced(ranks: Ranks) -> None:
    launcher = FakeLauncher(ranks.port, lambda fence: ranks.start(1, incarnation=2))
    ranks.start(0)
    ranks.start(1, first=make_loaded(hidden_dtype="bfloat16"))
    ranks.assemble(is_rebuild=True)
    assert [fence.rank for fence in launcher.fences] == [1]


def test_ranks_with_different_instruction_sets_serve_with_a_warning(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    ranks.start(0, first=make_loaded(arithmetic="C library 12ab, avx512"))
    ranks.start(1, first=make_loaded(arithmetic="C library 12ab, avx2"))
    ranks.assemble()
    (line,) = [message for message in caplog.messages if "RAYLOOM_CPU_ISA" in message]
    assert line.startswith("rank 0 computes with C library 12ab, avx512, rank 1 with C library 12ab, avx2: ")


def test_a_rank_that_dies_while_they_meet_is_replaced_and_the_other_is_kept(ranks: Ranks) -> None:
    def dies_at_join(order: object) -> None:
        if isinstance(order, Join):
            raise ChannelClosed("dead")

    survivor = ranks.start(0)
    launcher = FakeLauncher(ranks.port, lambda fence: replacements.append(ranks.start(1, incarnation=2)))
    replacements: list[FakeRank] = []
    ranks.start(1, answer=dies_at_join)
    epoch, _ = ranks.assemble()
    assert epoch == 1, "an epoch begins only when all have met"
    assert [(fence.rank, fence.incarnation) for fence in launcher.fences] == [(1, 1)]
    assert _kinds(survivor) == ["OpenStore", "Join", "OpenStore", "Join", "Allocate"]
    wait_until(lambda: bool(replacements), 30.0, lambda: "the launcher's thread has not come back")
    assert _kinds(replacements[0]) == ["Join", "Allocate"]


def test_failures_without_end_spend_the_budget(ranks: Ranks) -> None:
    def never_joins(order: object) -> Failed | None:
        return Failed(order.ticket, "rank", "RuntimeError: no route") if isinstance(order, Join) else None

    ranks.start(0)
    second = ranks.start(1, answer=never_joins)
    with pytest.raises(RankLost, match="rank 1: RuntimeError: no route"):
        ranks.assemble(budget=1)
    assert _kinds(second) == ["Join", "Join"]


def test_a_rank_that_fails_alone_twice_is_restarted(ranks: Ranks) -> None:
    def never_joins(order: object) -> Failed | None:
        return Failed(order.ticket, "rank", "RuntimeError: CUDA error") if isinstance(order, Join) else None

    ranks.start(0)
    launcher = FakeLauncher(ranks.port, lambda fence: ranks.start(1, incarnation=2))
    ranks.start(1, answer=never_joins)
    ranks.assemble()
    assert [(fence.rank, fence.incarnation) for fence in launcher.fences] == [(1, 1)]


def test_the_rank_that_hangs_in_the_rendezvous_is_replaced_and_not_the_rank_that_reports_it(ranks: Ranks) -> None:
    def complains(order: object) -> Failed | None:
        is_first_join = isinstance(order, Join) and _kinds(first) == ["OpenStore", "Join"]
        return Failed(order.ticket, "rank", "RuntimeError: nobody came") if is_first_join else None

    stuck = threading.Event()
    first = ranks.start(0, answer=complains)
    launcher = FakeLauncher(ranks.port, lambda fence: ranks.start(1, incarnation=2))
    ranks.start(1, answer=lambda order: stuck.wait(30.0) and None)
    ranks.assemble()
    stuck.set()
    assert [(fence.rank, fence.incarnation) for fence in launcher.fences] == [(1, 1)]


def test_several_ends_at_once_are_one_loss(ranks: Ranks) -> None:
    first, second = ranks.start(0), ranks.start(1)
    ranks.assemble()
    launcher = FakeLauncher(ranks.port, lambda fence: ranks.start(fence.rank, incarnation=2))
    first.die()
    second.die()
    ranks.assemble(budget=1, is_rebuild=True)
    assert sorted(fence.rank for fence in launcher.fences) == [0, 1]


def test_in_a_rebuild_a_rank_that_cannot_load_is_tried_again(ranks: Ranks) -> None:
    ranks.start(0)
    FakeLauncher(ranks.port, lambda fence: ranks.start(1, incarnation=2))
    ranks.start(1, first=Failed(0, "model", "the hub cannot be reached"))
    ranks.assemble(is_rebuild=True)


def test_a_loaded_message_counts_although_another_rank_fails_at_the_same_time(
    ranks: Ranks,
) -> None:
    FakeLauncher(ranks.port, lambda fence: ranks.start(0, incarnation=2))
    ranks.start(0, first=Failed(0, "model", "the hub cannot be reached"))
    ranks.start(1)
    wait_until(lambda: len(ranks.pool._arrived) == 2, 30.0, lambda: str(ranks.pool._arrived))
    ranks.pool.take_arrivals()
    for rank in ranks.pool.attached.values():
        (readable, *_) = rank.steps.filenos()
        assert is_readable(readable, 30.0), "both have said it before anybody looks"
    ranks.assemble(is_rebuild=True)


def test_the_rank_that_stands_still_in_the_warm_up_is_replaced_and_not_the_rank_that_waits_for_it(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "_MEET_SECONDS", 1.0)
    stuck = threading.Event()

    def wait(order: object) -> None:
        if isinstance(order, Allocate):
            stuck.wait(20.0)

    launcher = FakeLauncher(ranks.port, lambda fence: (stuck.set(), ranks.start(1, incarnation=2)))
    ranks.start(0, answer=wait).beat = Beat(phase="warm_up", step=0, memory_bytes=1, advance=5, waits=True)
    ranks.start(1, answer=wait).beat = Beat(phase="warm_up", step=0, memory_bytes=1, advance=7)
    ranks.assemble()
    assert [(fence.rank, fence.incarnation) for fence in launcher.fences] == [(1, 1)]


def test_in_a_rebuild_a_rank_whose_loading_stands_still_is_started_again(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "_STUCK_SECONDS", 0.5)
    ranks.start(0)
    launcher = FakeLauncher(ranks.port, lambda fence: ranks.start(1, incarnation=2))
    ranks.start(1, first=Done(0))  # the first message is not Loaded, so the rank counts as loading
    ranks.assemble(is_rebuild=True)
    assert [(fence.rank, fence.incarnation) for fence in launcher.fences] == [(1, 1)]


def test_in_a_rebuild_a_rank_that_never_dials_is_started_again(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "_MISSING_SECONDS", 0.3)
    ranks.start(0)
    launcher = FakeLauncher(ranks.port, lambda fence: ranks.start(1, incarnation=2))
    ranks.assemble(is_rebuild=True)
    assert [(fence.rank, fence.incarnation) for fence in launcher.fences] == [(1, None)]


def test_later_ranks_get_the_sizes_of_the_first_assembly(ranks: Ranks) -> None:
    ranks.pool.sizes = Welcomed(33, 512)
    assert ranks.start(0).welcomed == Welcomed(33, 512)


def test_a_start_that_was_fenced_cannot_come_back(ranks: Ranks) -> None:
    ranks.start(0)
    ranks.start(1)
    ranks.assemble()
    ranks.pool.drop(1)
    again = ranks.start(1)
    wait_until(
        lambda: bool(ranks.pool.take_arrivals()) or again.steps.has_ended, 30.0, lambda: "the fenced start is there"
    )
    assert list(ranks.pool.attached) == [0]
    launcher = FakeLauncher(ranks.port)  # a new launcher gets the fence, too
    wait_until(lambda: len(launcher.fences) == 1, 30.0, lambda: "no fence came")


@pytest.mark.parametrize("ranks", [1.0], indirect=True)
def test_a_rank_that_takes_nothing_does_not_stop_the_core(ranks: Ranks) -> None:
    stuck = threading.Event()
    ranks.start(0, answer=lambda order: isinstance(order, Run) and stuck.wait(60.0) and None)
    ranks.start(1)
    ranks.assemble()
    new = NewSlot(
        slot=0,
        request_id="r",
        token_ids=tuple(range(100_000, 3_000_000)),
        num_prompt_tokens=2_900_000,
        block_table=(0,),
        params=DecodingParams(max_tokens=1),
        eos_token_ids=(),
    )
    executor = RemoteExecutor(ranks.pool)
    ranks.pool.attached[0].steps.send(Run(0, StepPlan(step_id=0, epoch=1)))  # the rank is busy from here on
    began = time.monotonic()
    with pytest.raises(RankLost, match="rank 0"):
        run_plan(executor, StepPlan(step_id=1, epoch=1, new_slots=(new,)))
    stuck.set()
    assert time.monotonic() - began < 30.0


@pytest.mark.parametrize("ranks", [2.0], indirect=True)
def test_a_rank_whose_thread_burns_cpu_is_slow_and_one_that_does_not_is_lost(ranks: Ranks) -> None:
    is_blocked = threading.Event()

    def compute(order: object) -> None:
        """Uses CPU time for 4 s, then blocks."""
        if not isinstance(order, Run):
            return
        began = time.monotonic()
        while (cpu_s := time.monotonic() - began) < 4.0 and not is_blocked.is_set():
            second.beat = Beat(phase="step", step=0, memory_bytes=1, advance=7, cpu_s=cpu_s)
            is_blocked.wait(0.05)
        is_blocked.wait(60.0)

    ranks.start(0).beat = Beat(phase="step", step=0, memory_bytes=1, advance=7, waits=True)
    second = ranks.start(1, answer=compute)
    ranks.assemble()
    began = time.monotonic()
    with pytest.raises(RankLost, match="rank 1: alive, but it stands still") as caught:
        run_plan(RemoteExecutor(ranks.pool), StepPlan(step_id=1, epoch=1))
    is_blocked.set()
    assert time.monotonic() - began > 4.0
    assert not caught.value.is_silent


@pytest.mark.parametrize("ranks", [2.0], indirect=True)
def test_a_silent_rank_is_lost_after_hang_seconds_however_patient_the_step_is(ranks: Ranks) -> None:
    stuck = threading.Event()
    ranks.start(0)
    second = ranks.start(1, answer=lambda order: isinstance(order, Run) and stuck.wait(60.0) and None)
    ranks.assemble()
    ranks.pool.patience_s = 1000.0
    second.silence()
    with pytest.raises(RankLost, match="rank 1: no sign of life") as caught:
        run_plan(RemoteExecutor(ranks.pool), StepPlan(step_id=1, epoch=1))
    stuck.set()
    assert caught.value.is_silent


def test_ranks_that_do_not_come_are_named_after_the_deadline(ranks: Ranks) -> None:
    ranks.start(0)
    with pytest.raises(RankLost, match=r"missing ranks: \[1\]"):
        ranks.assemble(seconds=0.5, budget=0)


def test_a_start_that_was_given_up_cannot_push_out_the_newer_one(ranks: Ranks) -> None:
    ranks.start(0)
    ranks.start(1, incarnation=5)
    ranks.assemble()
    late = ranks.start(1, incarnation=4)
    wait_until(
        lambda: bool(ranks.pool.take_arrivals()) or late.steps.has_ended,
        5.0,
        lambda: "the late start is there",
    )
    assert ranks.pool.attached[1].greeting.incarnation == 5


@pytest.mark.parametrize(
    ("token", "greeting"),
    [
        ("wrong", Greeting(role="control", proof="", rank=0)),
        (TOKEN, Greeting(role="control", proof="", rank=2)),
        (TOKEN, Greeting(role="control", proof="", rank=-1)),
        (TOKEN, Greeting(role="steps", proof="", rank=0)),  # without a control connection
    ],
)
def test_a_connection_that_does_not_belong_is_refused(ranks: Ranks, token: str, greeting: Greeting) -> None:
    with pytest.raises(ChannelClosed):
        dial(f"127.0.0.1:{ranks.port}", token, greeting)
    assert ranks.pool.take_arrivals() == []


def test_a_stranger_cannot_make_the_core_read_much(ranks: Ranks) -> None:
    with socket.create_connection(("127.0.0.1", ranks.port)) as connection:
        channel = Channel(connection)
        channel.receive(30.0)
        connection.sendall((200 * 1024 * 1024).to_bytes(4, "big"))
        with pytest.raises(ChannelClosed):
            channel.receive(30.0)


def test_orders_have_tickets_of_their_own(ranks: Ranks) -> None:
    first = ranks.start(0)
    ranks.start(1)
    ranks.assemble()
    tickets = [order.ticket for order in first.orders]  # type: ignore[attr-defined]
    assert len(set(tickets)) == 3
    assert isinstance(first.orders[0], OpenStore)
