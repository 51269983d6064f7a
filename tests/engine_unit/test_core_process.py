"""The core's process with ranks without a model: reports of lost ranks, blamed sequences, and limits of recovery."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from rayloom_engine.common.process import EXIT_GIVEN_UP, drain_mark, read_failure
from rayloom_engine.config import parse_config
from rayloom_engine.core.decoding import DecodingParams
from rayloom_engine.core.step import SampledToken, StepPlan, StepResult
from rayloom_engine.core_server import process as core_process
from rayloom_engine.core_server.process import CoreProcess
from rayloom_engine.core_server.run_folder import KeptSizes, RunFolder
from rayloom_engine.errors import ModelError
from rayloom_engine.models.checkpoint import source
from rayloom_engine.protocol.channel import ChannelClosed
from rayloom_engine.protocol.messages import Submit
from rayloom_engine.protocol.ranks import Computed, Fence, Run, Welcomed
from rt_fake_rank import TOKEN, FakeLauncher, FakeRank, make_listener, make_loaded
from rt_server import wait_until
from rt_tiny import tiny_checkpoint

POISON = 99


class CoreUnderTest:
    """A core in a thread, with two ranks and a launcher that starts them again."""

    def __init__(self, folder: Path, commit: str | None = None, **settings: object) -> None:
        """`commit`: the commit that the ranks report."""
        (folder / "token").write_text(TOKEN)
        model = str(tiny_checkpoint(folder / "model"))
        config = parse_config({"model": model, "executor": "mp", "pipeline_parallel_size": 2, **settings})
        listener, self._port = make_listener()
        self.process = CoreProcess(config, folder, f"unix:{folder}/core.sock", listener.detach())
        self.state = self.process._state
        self.suspicion = self.process._box.suspicion
        self.exit_codes: list[int] = []
        self.restarts_ranks = True
        self.has_memory = True
        self.is_deadly: Callable[[StepPlan], bool] = lambda plan: False  # returns True for plans that kill rank 1
        self.before_run: Callable[[], None] = lambda: None  # called by rank 1
        threading.Thread(target=lambda: self.exit_codes.append(self.process.run()), daemon=True).start()
        self._commit = commit
        self._launcher = FakeLauncher(self._port, self._restart)
        self.ranks = [self._start_rank(rank, 1) for rank in (0, 1)]
        self.wait_for("serving")

    def submit(self, sequence_id: str, *prompt_ids: int) -> None:
        """Submits a sequence like a front with connection number 1."""
        params = DecodingParams(max_tokens=4, temperature=0.0)
        self.process._inbox.put(1, Submit(sequence_id=sequence_id, prompt_ids=prompt_ids, params=params))

    def wait_for(self, state: str) -> None:
        self.wait_until(lambda: self.state.state == state)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, 60.0, lambda: f"{self.state.status()} {self.suspicion}")

    def _restart(self, fence: Fence) -> None:
        if self.restarts_ranks:
            # The rank starts in another thread, because this thread must be free to read the next fence.
            number = (fence.incarnation or 0) + 1
            threading.Thread(target=self._start_rank, args=(fence.rank, number), daemon=True).start()

    def _start_rank(self, rank: int, incarnation: int) -> FakeRank:
        def answer(order: object) -> object | None:
            if not isinstance(order, Run):
                return None
            plan = order.plan
            if rank == 0:
                return None
            self.before_run()
            if self.is_deadly(plan):
                raise ChannelClosed("killed")
            sampled = tuple(SampledToken(step.slot, 1) for step in plan.slots if step.samples)
            return Computed(order.ticket, StepResult(step_id=plan.step_id, epoch=plan.epoch, sampled=sampled))

        num_oom_kills = 7 if self.has_memory else 6 + incarnation
        return FakeRank(
            self._port,
            rank,
            incarnation=incarnation,
            first=make_loaded(commit=self._commit),
            answer=answer,
            num_oom_kills=num_oom_kills,
        )


def test_the_status_of_a_loss_has_rank_node_and_phases_until_a_step_has_passed_every_rank(tmp_path: Path) -> None:
    core = CoreUnderTest(tmp_path)
    may_compute = threading.Event()
    core.before_run = lambda: may_compute.wait(60.0) and None
    core.ranks[1].die()
    core.wait_for("recovering")
    assert (core.state.lost, core.state.lost_node) == ("rank 1", "n")
    core.wait_until(lambda: core.state.phases[-1].name == "replay")
    assert (core.state.state, core.state.epoch) == ("recovering", 2), "not before tokens flow"
    may_compute.set()
    core.wait_for("serving")
    assert [phase.name for phase in core.state.phases] == ["suspect", "rendezvous", "warm_up", "replay"]
    assert all(phase.is_finished for phase in core.state.phases)


def test_a_core_that_starts_during_a_drain_says_so_before_its_front_does(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    drain_mark(tmp_path).touch()
    process = CoreProcess(parse_config({"model": str(tmp_path)}), tmp_path, f"unix:{tmp_path}/core.sock", None)
    assert process._state.status().is_draining


@pytest.mark.parametrize("takes_adapters", [False, True])
def test_the_status_says_whether_the_engine_has_room_for_adapters(takes_adapters: bool, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    config = parse_config({"model": str(tmp_path), "allow_runtime_lora_updating": takes_adapters})
    process = CoreProcess(config, tmp_path, f"unix:{tmp_path}/core.sock", None)
    assert process._state.status().takes_adapters is takes_adapters


def test_a_status_that_serves_has_the_token_that_proves_it(tmp_path: Path) -> None:
    core = CoreUnderTest(tmp_path)
    told: list[float | None] = []
    flush, before = core.process._io.flush_status, core.state.last_token_at

    def note_and_flush() -> None:
        if core.state.state == "serving":
            told.append(core.state.last_token_at)
        flush()

    core.process._io.flush_status = note_and_flush  # type: ignore[method-assign]
    core.ranks[1].die()
    core.wait_until(lambda: len(told) == 1)
    assert before is not None and told[0] is not None and told[0] > before


def test_a_poisonous_request_is_ended_and_its_trial_spends_no_budget(tmp_path: Path) -> None:
    core = CoreUnderTest(tmp_path, restart_budget=2)
    core.is_deadly = lambda plan: any(POISON in new.token_ids for new in plan.new_slots)
    core.submit("fine", 1, 2)
    core.submit("poison", 1, POISON)
    core.wait_until(lambda: core.suspicion.condemned == ["poison"])
    core.wait_for("serving")
    assert core.state.epoch == 4, "three deaths"
    core.wait_until(lambda: core.state.stats.num_running + core.state.stats.num_waiting == 0)
    assert core.suspicion.condemned == ["poison"]
    assert core.exit_codes == []


def test_ranks_that_die_of_anything_end_the_engine_and_no_request_is_blamed(tmp_path: Path) -> None:
    core = CoreUnderTest(tmp_path, restart_budget=3)
    core.is_deadly = lambda plan: True
    core.submit("innocent", 1, 2)
    core.wait_until(lambda: core.exit_codes == [EXIT_GIVEN_UP])
    said = read_failure(tmp_path)
    assert "restart budget of 3 exhausted" in said
    assert "memory" not in said, "what was killed before the first rank came is no fault of this engine"
    assert core.suspicion.condemned == []


def test_the_failure_of_an_engine_names_kills_for_want_of_memory(tmp_path: Path) -> None:
    core = CoreUnderTest(tmp_path, restart_budget=2)
    core.has_memory, core.is_deadly = False, lambda plan: True
    core.submit("innocent", 1, 2)
    core.wait_until(lambda: core.exit_codes == [EXIT_GIVEN_UP])
    said = read_failure(tmp_path)
    assert "restart budget of 2 exhausted. The kernel has killed processes on h for want of memory (2 so far)" in said
    assert "raise its memory limit" in said


def test_ranks_that_do_not_come_back_in_time_end_the_engine(tmp_path: Path) -> None:
    core = CoreUnderTest(tmp_path, rebuild_seconds=1)
    core.restarts_ranks = False
    core.ranks[1].die()
    core.wait_until(lambda: bool(core.exit_codes))
    assert core.exit_codes == [EXIT_GIVEN_UP]
    assert core.state.state == "failed"
    cause = "rank 1: not there in time (missing ranks: [1]); not mended within 1 s and 5 restarts"
    assert read_failure(tmp_path) == cause


def test_an_engine_keeps_the_commit_of_its_model_when_the_branch_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint(tmp_path / "hub")
    newest = ["c1"]
    monkeypatch.setattr(source, "download", lambda name, revision, *_: (folder, revision or newest[0]))
    first = CoreUnderTest(tmp_path, commit="c1", model="acme/model")
    newest[0] = "c2"
    late = first._start_rank(1, 2)
    assert late.welcomed.commit == "c1"
    second = CoreUnderTest(tmp_path, commit="c1", model="acme/model")
    assert second.state.model is not None
    assert second.state.model.commit == "c1"
    assert first.exit_codes == second.exit_codes == []


def test_a_rank_that_finds_a_restarted_core_before_its_model_is_found_gets_sizes_and_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    RunFolder(tmp_path).keep_sizes(KeptSizes(num_kv_blocks=10, max_model_len=64, commit="c1"))
    has_attached = threading.Event()

    def download(*_: object) -> NoReturn:
        has_attached.wait(60.0)
        raise ModelError("the hub does not answer")

    monkeypatch.setattr(source, "download", download)
    config = parse_config({"model": "acme/model", "executor": "mp", "pipeline_parallel_size": 2})
    listener, port = make_listener()
    core = CoreProcess(config, tmp_path, f"unix:{tmp_path}/core.sock", listener.detach())
    thread = threading.Thread(target=core.run, daemon=True)
    thread.start()
    rank = FakeRank(port, 1, incarnation=2)
    assert rank.welcomed == Welcomed(num_kv_blocks=10, max_model_len=64, commit="c1")
    has_attached.set()
    thread.join(60.0)
    rank.die()


@pytest.mark.parametrize(("has_served", "code", "state"), [(False, 78, "failed"), (True, 1, "starting")])
def test_a_model_that_was_served_and_cannot_be_read_now_is_tried_again(
    tmp_path: Path, has_served: bool, code: int, state: str
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    if has_served:
        RunFolder(tmp_path).keep_sizes(KeptSizes(num_kv_blocks=10, max_model_len=64))
    process = CoreProcess(parse_config({"model": str(tmp_path)}), tmp_path, f"unix:{tmp_path}/core.sock", None)
    assert process.run() == code
    assert process._state.state == state, "the front ends all requests of an engine that has failed"
    assert not process.is_up(), "a core that was up is restarted in spite of code 78"
    assert "config.json" in read_failure(tmp_path)


@pytest.mark.parametrize(("has_served", "code"), [(False, 78), (True, 1)])
def test_a_core_that_has_served_and_cannot_read_the_key_of_gateways_now_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_served: bool, code: int
) -> None:
    key = tmp_path / "front-key"
    (tmp_path / "config.json").write_text(parse_config({"front_key_file": str(key)}).model_dump_json())
    if has_served:
        RunFolder(tmp_path).keep_sizes(KeptSizes(num_kv_blocks=10, max_model_len=64))
    for effect_on_this_process in ("end_with_parent", "set_up_logging"):
        monkeypatch.setattr(core_process, effect_on_this_process, lambda *_: None)
    arguments = ["--run-dir", str(tmp_path), "--core-address", "unix:core.sock", "--parent", "1", "--front-fd", "0"]
    monkeypatch.setattr(sys, "argv", ["core", *arguments])
    assert core_process.main() == code
    assert str(key) in read_failure(tmp_path)
