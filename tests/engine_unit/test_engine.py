"""The engine around the scheduler: probes, complete resumes, and a step that fails or is interrupted."""

from __future__ import annotations

import pytest

from rayloom_engine.core.step import StepPlan, StepResult
from rayloom_engine.engine import Engine
from rt_scheduler import SimulatedRank, expected_ids, ids_of, make_scheduler, make_sequence


class FlakyRank(SimulatedRank):
    """Raises once, in the middle of a plan, and must be told to forget."""

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


@pytest.mark.parametrize("fail_at", [1, 2, 3, 5])
def test_after_an_interrupted_step_sequences_go_on_or_can_be_aborted(fail_at: int) -> None:
    engine = Engine(make_scheduler(), FlakyRank(fail_at))
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


def test_a_probe_is_a_token_that_nobody_else_sees() -> None:
    times = iter(range(100))
    engine = Engine(make_scheduler(), SimulatedRank(), clock=lambda: float(next(times)))
    assert engine.last_token_at is None
    engine.add_probe()
    assert engine.step() == []
    assert engine.last_token_at is not None
    assert not engine.has_unfinished
    assert engine.step() == []


def test_a_resume_that_was_complete_is_finished_at_once() -> None:
    engine = Engine(make_scheduler(), SimulatedRank())
    output = engine.add(make_sequence("a", (1, 2), max_tokens=2, generated_ids=(7, 8)), is_resume=True)
    assert output is not None
    assert (output.finish_reason, output.token_ids) == ("length", ())
    assert not engine.has_unfinished
