"""A rank is lost while its peer waits for it: the peer keeps its process and weights.

The ranks are real processes: TP 2 over shared memory and over gloo, and PP 2. The tests print the measured seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.step import NewSlot, SlotStep, StepPlan
from rayloom_engine.protocol.ranks import Run
from rt_rank_servers import Fault, RankServers, RecoveringEngine
from rt_server import wait_until
from rt_stages import (
    UNTIL_PREEMPTED,
    StagesInARow,
    answers,
    ids_by_request,
    load_stages,
    make_engine,
    stage_config,
)
from rt_tiny import tiny_variant

HANG_SECONDS = 4  # on a busy machine, the heartbeat of a living rank was 2 s late


@dataclass(frozen=True)
class Layout:
    tensor: int
    pipeline: int
    victim: int
    uses_gloo: bool = False
    isa: str | None = None  # RAYLOOM_CPU_ISA


LAYOUTS = {
    "TP 2, shared memory": Layout(2, 1, victim=1),
    "TP 2, torch and gloo": Layout(2, 1, victim=0, uses_gloo=True, isa="torch"),
    "PP 2": Layout(1, 2, victim=0),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_variant(tmp_path_factory.mktemp("tiny"), "qwen2-some-windows")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    engine = make_engine(StagesInARow(load_stages(stage_config(folder))))
    return ids_by_request(answers(engine, max_tokens=UNTIL_PREEMPTED))


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def ranks(layout: str, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServers]:
    shape = LAYOUTS[layout]
    sizes = {"tensor_parallel_size": shape.tensor, "hang_seconds": HANG_SECONDS, "heartbeat_seconds": 0.2}
    config = stage_config(folder, shape.pipeline, kv_host_memory_bytes=1 << 20, **sizes)
    with pytest.MonkeyPatch.context() as patch:
        if shape.isa is not None:
            patch.setenv("RAYLOOM_CPU_ISA", shape.isa)
        servers = RankServers(config, tmp_path_factory.mktemp("ranks"), uses_gloo=shape.uses_gloo)
        yield servers
        servers.close()


@pytest.mark.parametrize("fault", ["killed", "stopped", "stuck"])
def test_the_peer_of_a_lost_rank_keeps_its_process_and_weights_and_no_token_changes(
    fault: Fault, layout: str, ranks: RankServers, expected: dict[str, list[int]], measured: Callable[[str], None]
) -> None:
    """A replacement on the same machine finds the host memory of the killed rank, and the ranks load its copies.

    A stopped or stuck process may still write to its memory, so its replacement makes another, and the copies are gone.
    """
    shape = LAYOUTS[layout]
    engine = RecoveringEngine(ranks, depth=shape.pipeline)
    memory = ranks.host_memory
    assert all(memory)
    before = {status.rank: status for status in ranks.pool.statuses()}
    step = engine.step
    num_steps = 0
    struck_at = 0.0

    def step_with_a_fault() -> object:
        nonlocal num_steps, struck_at
        num_steps += 1
        if num_steps == 7:
            ranks.strike(shape.victim, fault)
            struck_at = time.monotonic()
        return step()

    engine.step = step_with_a_fault  # type: ignore[assignment]
    assert ids_by_request(answers(engine, max_tokens=UNTIL_PREEMPTED)) == expected  # type: ignore[arg-type]
    assert [loss.rank for loss in engine.losses] == [shape.victim]
    after = {status.rank: status for status in ranks.pool.statuses()}
    survivor = 1 - shape.victim
    assert after[survivor].pid == before[survivor].pid
    assert after[survivor].weight_bytes_read == before[survivor].weight_bytes_read > 0
    assert after[shape.victim].pid != before[shape.victim].pid
    assert {rank.loaded.arithmetic.startswith("torch ") for rank in ranks.pool.attached.values() if rank.loaded} == {
        shape.isa == "torch"
    }
    assert ranks.host_memory[survivor] == memory[survivor]
    assert (ranks.host_memory == memory) is (fault == "killed")
    if fault == "killed":
        assert engine.tier.num_loaded > engine.num_loaded_before
    noticed_s = engine.lost_at - struck_at
    measured(f"{layout}, rank {fault}: noticed after {noticed_s:.2f} s, next token {engine.pause_s:.2f} s later")


def test_an_abort_after_a_step_or_for_an_earlier_group_is_harmless(
    layout: str, ranks: RankServers, expected: dict[str, list[int]]
) -> None:
    """The ranks are idle at the first Abort. The second Abort is for their earlier group."""
    ranks.meet()
    pids = [status.pid for status in ranks.pool.statuses()]
    last = ranks.pool.ticket()
    ranks.pool.abort_orders(last)
    engine = RecoveringEngine(ranks, depth=LAYOUTS[layout].pipeline)
    ranks.pool.abort_orders(last)
    assert ids_by_request(answers(engine, max_tokens=UNTIL_PREEMPTED)) == expected  # type: ignore[arg-type]
    assert engine.losses == []
    assert [status.pid for status in ranks.pool.statuses()] == pids


def test_a_rank_that_waits_for_a_stopped_peer_is_free_for_the_next_core(layout: str, ranks: RankServers) -> None:
    """The core dies before it has noticed that the peer is stopped, so the core sends no Abort."""
    shape = LAYOUTS[layout]
    ranks.meet()
    before = ranks.pool.attached[1 - shape.victim]
    new = NewSlot(
        slot=0,
        request_id="r",
        token_ids=(3, 4, 5),
        num_prompt_tokens=3,
        block_table=(0,),
        params=DecodingParams(max_tokens=9, temperature=0.0),
        eos_token_ids=(),
    )
    step = SlotStep(slot=0, start=0, num_tokens=3, samples=True)
    ranks.strike(shape.victim, "stopped")
    plan = StepPlan(step_id=1, epoch=ranks.epoch, new_slots=(new,), slots=(step,))
    ranks.pool.order(Run(ranks.pool.ticket(), plan))
    wait_until(ranks.has_struck, 20.0, lambda: "the rank runs on")
    wait_until(lambda: before.control.beat.waits, 20.0, lambda: "the peer does not wait")
    for rank in ranks.pool.attached.values():
        rank.close()
    wait_until(lambda: ranks.pool.take_arrivals() != [], 20.0, lambda: "the peer still waits")
    ranks.pool.drop(shape.victim)
    ranks.meet()
    after = ranks.pool.attached[1 - shape.victim]
    assert after is not before
    assert after.greeting.pid == before.greeting.pid
    assert after.loaded == before.loaded
