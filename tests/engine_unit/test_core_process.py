"""The core's process with ranks that have no model: what it says of a loss, and when it gives up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from rayloom_engine.config import parse_config
from rayloom_engine.core.step import SampledToken, StepResult
from rayloom_engine.core_process import CoreProcess
from rayloom_engine.process import EXIT_GIVEN_UP, read_failure
from rayloom_engine.protocol.ranks import Computed, Run
from rt_fake_rank import TOKEN, FakeRank, make_listener
from rt_server import wait_until
from rt_tiny import tiny_checkpoint


def _computed(order: object) -> object | None:
    if not isinstance(order, Run):
        return None
    plan = order.plan
    sampled = tuple(SampledToken(step.slot, 1) for step in plan.slots if step.samples)
    return Computed(order.ticket, StepResult(step_id=plan.step_id, epoch=plan.epoch, sampled=sampled))


class CoreUnderTest:
    """A core in a thread, with two ranks attached."""

    def __init__(self, folder: Path, **settings: object) -> None:
        (folder / "token").write_text(TOKEN)
        model = str(tiny_checkpoint(folder / "model"))
        config = parse_config({"model": model, "executor": "mp", "pipeline_parallel_size": 2, **settings})
        listener, self.port = make_listener()
        self.process = CoreProcess(config, folder, f"unix:{folder}/core.sock", listener.detach())
        self.state = self.process._state
        self.exit_codes: list[int] = []
        self._thread = threading.Thread(target=lambda: self.exit_codes.append(self.process.run()), daemon=True)
        self._thread.start()
        self.ranks = [self.start_rank(0), self.start_rank(1)]
        self.wait_for("serving")

    def start_rank(
        self, rank: int, incarnation: int = 1, before: Callable[[object], None] = lambda _: None
    ) -> FakeRank:
        """`before` is called with each order before it is obeyed."""

        def answer(order: object) -> object | None:
            before(order)
            return _computed(order) if rank == 1 else None

        return FakeRank(self.port, rank, incarnation=incarnation, answer=answer)

    def wait_for(self, state: str) -> None:
        wait_until(lambda: self.state.state == state, 20.0, lambda: str(self.state.status()))


def test_a_loss_is_told_with_rank_node_and_phases_until_a_step_has_passed_every_rank(tmp_path: Path) -> None:
    core = CoreUnderTest(tmp_path)
    assert (core.state.lost, core.state.lost_node) == ("", "")
    core.ranks[1].die()
    core.wait_for("recovering")
    wait_until(lambda: 1 not in core.state.pool.attached, 5.0, lambda: str(core.state.status()))
    assert (core.state.lost, core.state.lost_node, core.state.epoch) == ("rank 1", "n", 1)
    may_compute = threading.Event()

    def hold(order: object) -> None:
        if isinstance(order, Run):
            may_compute.wait(20.0)

    core.start_rank(1, 2, hold)
    wait_until(lambda: core.state.phases[-1].name == "replay", 20.0, lambda: str(core.state.status()))
    assert (core.state.state, core.state.epoch) == ("recovering", 2), "not before tokens flow"
    may_compute.set()
    core.wait_for("serving")
    assert [phase.name for phase in core.state.phases] == ["suspect", "rendezvous", "warm_up", "replay"]
    assert all(phase.is_finished for phase in core.state.phases)


def test_ranks_that_do_not_come_back_in_time_end_the_engine(tmp_path: Path) -> None:
    core = CoreUnderTest(tmp_path, rebuild_seconds=1)
    core.ranks[1].die()
    wait_until(lambda: bool(core.exit_codes), 20.0, lambda: str(core.state.status()))
    assert core.exit_codes == [EXIT_GIVEN_UP]
    assert core.state.state == "failed"
    assert (
        read_failure(tmp_path)
        == "rank 1: not there in time (missing ranks: [1]); not mended within 1 s and 10 restarts"
    )
