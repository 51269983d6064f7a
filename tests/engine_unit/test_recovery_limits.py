"""The losses of ranks that end the engine: because of time, the restart budget, or ranks that belong to a job."""

from __future__ import annotations

import math

import pytest

from rayloom_engine.config import parse_config
from rayloom_engine.core_server.recovery import RecoveryLimits


def limits(**settings: object) -> RecoveryLimits:
    return RecoveryLimits.of(parse_config({"pipeline_parallel_size": 2, "restart_budget": 2, **settings}))


def test_only_a_rebuild_has_a_deadline() -> None:
    mended = limits(rebuild_seconds=60)
    assert mended.deadline(100.0, is_rebuild=True) == 160.0
    assert mended.deadline(100.0, is_rebuild=False) == math.inf


def test_deaths_count_in_the_budget_unless_they_leave_fewer_suspects() -> None:
    mended = limits()
    deaths = [False, True, False, True, True, False]
    spent = [mended.count_death(now, is_narrower=is_narrower) for now, is_narrower in enumerate(deaths)]
    assert spent == ["", "", "", "", "", "restart budget of 2 exhausted"]


@pytest.mark.parametrize("is_narrower", [True, False])
def test_the_first_loss_ends_a_job(is_narrower: bool) -> None:
    job = limits(executor="external")
    assert job.count_death(0.0, is_narrower=is_narrower) == "start the job again"
    assert job.not_assembled() == "start the job again"


def test_ranks_that_are_not_assembled_are_reported_with_both_limits() -> None:
    assert limits(rebuild_seconds=1.5).not_assembled() == "not mended within 1.5 s and 2 restarts"
