"""The plan of faults and the trend of memory of `make soak`."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from soak.fault_plan import NODE_S, POD_S, PROCESS_S, FaultPlan
from soak.memory_trend import trend


@settings(deadline=None)
@given(st.integers(0, 5), st.integers(0, 2**100 - 1))
def test_faults_keep_their_distances_and_pods_wait_for_a_whole_service(seed: int, whole: int) -> None:
    plan = FaultPlan(seed)
    moments = [(10.0 * number, bool(whole >> number & 1)) for number in range(100)]
    found = [(at, is_whole, plan.due(at, is_whole=is_whole)) for at, is_whole in moments]
    happened = [(at, is_whole, fault.level) for at, is_whole, fault in found if fault is not None]
    every = [0.0, *(at for at, _, _ in happened)]
    assert all(
        at - last >= PROCESS_S or level != "process" for last, (at, _, level) in zip(every, happened, strict=False)
    )
    assert all(is_whole for _, is_whole, level in happened if level != "process")
    nodes = [0.0, *(at for at, _, level in happened if level == "node")]
    assert all(later - earlier >= NODE_S for earlier, later in itertools.pairwise(nodes))
    pods = [0.0, *(at for at, _, level in happened if level != "process")]
    assert all(later - earlier >= POD_S or later in nodes for earlier, later in itertools.pairwise(pods))


def test_a_whole_service_gets_faults_of_every_level() -> None:
    plan = FaultPlan(3)
    found = [(at, fault.level) for at in range(0, 610, 10) if (fault := plan.due(float(at), is_whole=True))]
    assert [at for at, level in found if level == "node"] == [300, 600]
    assert [at for at, level in found if level == "pod"] == [120, 240, 420, 540]
    assert [at for at, level in found if level == "process"][:5] == [30, 60, 90, 150, 180]


def test_memory_that_grows_is_told_from_memory_that_is_noisy() -> None:
    grows = trend([(60.0 * minute, 100.0 + minute) for minute in range(60)])
    assert round(grows.mib_per_hour) == 60
    assert grows.verdict == "GROWS"
    noisy = trend([(60.0 * minute, 100.0 + 20.0 * (minute % 2)) for minute in range(60)])
    assert noisy.verdict == "flat"
    assert trend([(0.0, 100.0)]).verdict == "too few samples"
