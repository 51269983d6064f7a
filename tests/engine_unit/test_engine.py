"""The engine around the scheduler: probes, resumes of complete sequences, and a step that fails or is interrupted."""

from __future__ import annotations

import time

import msgspec
import pytest

from rayloom_engine.core.engine import Engine, LocalExecutor
from rayloom_engine.core.step import StepPlan, StepResult
from rayloom_engine.core.step_work import StepWork
from rt_scheduler import SimulatedRank, expected_ids, ids_of, make_scheduler, make_sequence


class FlakyRank(SimulatedRank):
    """A rank that raises once, in the middle of a plan. Before the next plan it must get forget_all."""

    def __init__(self, fail_at: int) -> None:
        super().__init__()
        self._fail_at = fail_at
        self._num_runs = 0

    def run(self, plan: StepPlan) -> StepResult:
        self._num_runs += 1
        result = super().run(plan)
        if self._num_runs == self._fail_at:
            raise KeyboardInterrupt
        return result


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("fail_at", [1, 2, 3, 5])
def test_after_an_interrupted_step_sequences_continue_or_can_be_aborted(fail_at: int, depth: int) -> None:
    engine = Engine(make_scheduler(depth=depth), LocalExecutor(FlakyRank(fail_at)), clock=time.monotonic)
    for request_id, prompt in (("a", range(10)), ("b", (4, 5)), ("gone", (6, 7))):
        engine.add(make_sequence(request_id, prompt, max_tokens=6))
    outputs = []
    with pytest.raises(KeyboardInterrupt):
        while True:
            outputs += engine.step()
    engine.scheduler.check_integrity()
    assert engine.abort("gone")
    while engine.has_unfinished:
        outputs += engine.step()
        engine.scheduler.check_integrity()
    assert ids_of(outputs, "a") == expected_ids(range(10), 6)
    assert ids_of(outputs, "b") == expected_ids((4, 5), 6)
    assert engine.stats().num_free_blocks == 11


class WaitingRank(SimulatedRank):
    """A rank whose steps take 1.6 s: 1.5 s of computing and sampling, and a wait of 0.1 s for a grammar."""

    def run(self, plan: StepPlan) -> StepResult:
        return msgspec.structs.replace(super().run(plan), forward_s=1.0, sample_s=0.6, waited_s=0.1)


def test_a_wait_for_a_grammar_makes_no_step_slower_in_the_measured_rates() -> None:
    work = StepWork(flops_per_token=1.0)
    engine = Engine(make_scheduler(max_num_seqs=1), LocalExecutor(WaitingRank()), clock=time.monotonic, work=work)
    engine.add(make_sequence("a", range(8), max_tokens=3))
    while engine.has_unfinished:
        engine.step()
    assert engine.stats().decode_tokens_per_s == pytest.approx(1 / 1.5)
    assert engine.stats().prefill_tokens_per_s == pytest.approx(8 / 1.5)


class SlowRank(SimulatedRank):
    """A rank whose steps advance the clock by a second."""

    def __init__(self, times: list[float]) -> None:
        super().__init__()
        self._times = times

    def run(self, plan: StepPlan) -> StepResult:
        self._times[0] += 1.0
        return super().run(plan)


def test_the_first_output_tells_how_long_the_sequence_waited_for_its_first_step() -> None:
    times = [0.0]
    engine = Engine(make_scheduler(max_num_seqs=1), LocalExecutor(SlowRank(times)), clock=lambda: times[0])
    engine.add(make_sequence("a", range(3), max_tokens=4))
    engine.add(make_sequence("b", range(3), max_tokens=2))
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    waits = [(output.sequence_id, output.queue_s) for output in outputs]
    assert waits == [*[("a", 0.0)] * 4, ("b", 4.0), ("b", 0.0)]


def test_steps_are_counted_by_their_tokens() -> None:
    engine = Engine(make_scheduler(enable_prefix_caching=False), LocalExecutor(SimulatedRank()), clock=time.monotonic)
    engine.add(make_sequence("a", range(19), max_tokens=2))
    while engine.has_unfinished:
        engine.step()
    stats = engine.stats()
    assert stats.step_tokens == 8 + 8 + 3 + 1
    assert stats.step_token_counts[:3] == (1, 3, 0)  # up to 1 token, up to 8, up to 16
    assert sum(stats.step_token_counts) == stats.num_steps == 4


def test_a_probe_has_no_output() -> None:
    times = iter(range(100))
    engine = Engine(make_scheduler(), LocalExecutor(SimulatedRank()), clock=lambda: float(next(times)))
    assert engine.last_token_at is None
    engine.add_probe()
    assert engine.step() == []
    assert engine.last_token_at is not None
    assert not engine.has_unfinished
    assert engine.step() == []


def test_a_part_of_a_prompt_is_tokens_that_passed_all_ranks() -> None:
    times = iter(range(100))
    engine = Engine(make_scheduler(), LocalExecutor(SimulatedRank()), clock=lambda: float(next(times)))
    engine.add(make_sequence("a", range(10), max_tokens=1))  # a step computes 8 tokens
    assert engine.step() == []
    assert engine.last_token_at is not None


def test_a_resume_that_was_complete_is_finished_at_once() -> None:
    engine = Engine(make_scheduler(), LocalExecutor(SimulatedRank()), clock=time.monotonic)
    output = engine.add(make_sequence("a", (1, 2), max_tokens=2, generated_ids=(7, 8)), is_resume=True)
    assert output is not None
    assert (output.finish_reason, output.token_ids) == ("length", ())
    assert not engine.has_unfinished


class SlowExecutor(LocalExecutor):
    """An executor that returns a result after 10 s. During 4 s of this time, the last stage computed."""

    def __init__(self, now: list[float]) -> None:
        super().__init__(SimulatedRank())
        self._now = now

    def submit(self, plan: StepPlan) -> None:
        self._now[0] += 1.0
        super().submit(plan)

    def collect(self) -> StepResult:
        self._now[0] += 10.0
        return msgspec.structs.replace(super().collect(), forward_s=3.0, sample_s=1.0)


@pytest.mark.parametrize(("depth", "host_seconds"), [(1, 2 * (1.0 + 6.0)), (2, 2 * 1.0)])
def test_waiting_for_other_stages_is_not_time_of_the_host(depth: int, host_seconds: float) -> None:
    now = [0.0]
    engine = Engine(make_scheduler(depth=depth), SlowExecutor(now), clock=lambda: now[0])
    engine.add(make_sequence("a", (1, 2), max_tokens=2))
    while engine.has_unfinished:
        engine.step()
    stats = engine.stats()
    assert (stats.num_steps, stats.step_tokens, stats.forward_seconds) == (2, 3, 6.0)
    assert stats.host_seconds == host_seconds


def test_the_result_of_an_aborted_sequence_is_still_collected() -> None:
    engine = Engine(make_scheduler(depth=2), LocalExecutor(SimulatedRank()), clock=time.monotonic)
    engine.add(make_sequence("a", (1, 2)))
    engine.add(make_sequence("b", (3, 4)))
    outputs = [engine.step(), engine.step()]  # both sequences are in flight now, each in a step of its own
    assert (engine.scheduler.num_in_flight, [len(part) for part in outputs]) == (1, [2, 1])
    assert engine.abort("a") and engine.abort("b")
    assert engine.has_unfinished
    assert engine.step() == []
    assert not engine.has_unfinished
