"""The plan of faults, the trend of memory and the verdict of `make soak`."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from local_kubernetes.machine.shell import ClusterError
from soak import run
from soak.fault_plan import NODE_S, POD_S, PROCESS_S, FaultPlan
from soak.memory import mean_size
from soak.memory_trend import trend
from soak.run import Soak, report
from soak.verdict import ROLES, shortcomings


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


FAULT = {"a rank is killed": 3}
ENOUGH = {role: [(20.0 * number, 100.0) for number in range(1, 31)] for role in ROLES}


def test_a_run_with_a_fault_and_enough_samples_has_no_shortcoming() -> None:
    assert shortcomings(600.0, FAULT, ENOUGH) == []


@pytest.mark.parametrize("faults", [{}, {"a rank is killed: no victim (no pod)": 3}])
def test_a_run_without_a_fault_that_had_a_victim_fails(faults: dict[str, int]) -> None:
    assert shortcomings(600.0, faults, ENOUGH) == ["no fault happened"]


@pytest.mark.parametrize("seconds", [60.0, 3600.0])
def test_a_role_that_was_never_measured_fails_runs_of_any_length(seconds: float) -> None:
    found = shortcomings(seconds, FAULT, {"engine": ENOUGH["engine"], "operator": ENOUGH["operator"], "gateway": []})
    assert found == ["the memory of the gateway was never measured"]
    assert len(shortcomings(seconds, FAULT, {})) == 3


def test_too_few_samples_fail_a_run_of_ten_minutes_and_no_shorter_one() -> None:
    # Of 12 samples, 7 are at 120 s or later.
    samples = {**ENOUGH, "operator": ENOUGH["operator"][:12]}
    assert shortcomings(600.0, FAULT, samples) == [
        "the memory of the operator has 7 samples after 120 s; a run of 10 minutes or more needs 8"
    ]
    assert shortcomings(599.0, FAULT, samples) == []
    assert shortcomings(600.0, FAULT, {**ENOUGH, "operator": ENOUGH["operator"][:13]}) == []


def test_memory_that_grows_fails() -> None:
    grows = [(20.0 * number, 100.0 + number) for number in range(1, 31)]
    assert shortcomings(600.0, FAULT, {**ENOUGH, "engine": grows}) == ["the memory of the engine grows"]


def test_the_size_of_a_role_leaves_out_members_that_are_not_whole_and_says_why_there_is_none() -> None:
    assert mean_size([[100.0, 50.0], [300.0, 50.0]], 2) == 250.0
    assert mean_size([[100.0, 50.0], [300.0], [300.0, "pod b: gone"]], 2) == 150.0
    assert mean_size([[300.0, "pod b: gone"]], 2) == "pod b: gone"
    assert mean_size([[300.0]], 2) == "1 of its 2 pods are ready"
    assert mean_size([]) == "no pod is ready"


class _Refusing:
    """A service whose cluster refuses every command."""

    namespace = "soak"

    def __getattr__(self, name: str) -> Any:
        raise ClusterError("kubectl get pods\nForbidden: no right to list pods")


def test_a_soak_whose_memory_cannot_be_measured_says_why_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    service: Any = _Refusing()
    nothing: Any = SimpleNamespace()
    soak = Soak(service, nothing, 0)
    soak._sample(20.0)
    soak.faults = FAULT
    soak.records = {"streams": [{"failure": "", "tokens": ["a"], "index": 0, "broken": []}]}
    assert not report(soak, [["a"]], 600.0)
    printed = capsys.readouterr().out
    assert "no sample of the engine, most recently: Forbidden: no right to list pods" in printed
    assert "WRONG: the memory of the operator was never measured" in printed

    soak.samples = {role: list(samples) for role, samples in ENOUGH.items()}
    assert report(soak, [["a"]], 600.0)
    soak.faults = {}
    assert not report(soak, [["a"]], 600.0)


def test_a_run_too_short_for_a_fault_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["--minutes", "0.5"])
    assert "--minutes is 0.5, and must be at least 1" in capsys.readouterr().err
