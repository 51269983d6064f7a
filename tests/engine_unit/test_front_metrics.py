"""The front's metrics as Prometheus text, counters across a restart of the core, hung ranks, and nested bodies."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rayloom_engine.core.stats import STEP_TOKEN_BOUNDS, SchedulerStats
from rayloom_engine.errors import QueueFull, RequestError
from rayloom_engine.front.core_link.recoveries import RecoveryLog, RecoveryRecord
from rayloom_engine.front.http.body import check_shape
from rayloom_engine.front.http.errors import ApiError
from rayloom_engine.front.http.headers import bearer_token
from rayloom_engine.front.operations.admin import is_own_request
from rayloom_engine.front.operations.lifecycle import stall_of
from rayloom_engine.front.operations.metrics import Metrics
from rayloom_engine.front.operations.status_document import NO_CORE
from rayloom_engine.protocol.gateway_requests import GatewayRequests
from rayloom_engine.protocol.messages import RankReport
from rt_metrics import MODEL_NAME, busy


def test_counters_of_the_core_never_fall_over_a_restart() -> None:
    metrics = Metrics("m")
    status = msgspec.structs.replace(NO_CORE, epoch=1, state="serving", stats=SchedulerStats(prefix_hits=5))
    for epoch, hits in ((1, 5), (1, 7), (2, 3), (2, 4)):
        stats = SchedulerStats(prefix_hits=hits)
        metrics.observe_core(msgspec.structs.replace(status, epoch=epoch, stats=stats), core_pid=epoch)
    assert 'rayloom:prefix_cache_hits_total{model_name="m"} 11' in metrics.text()


def test_counters_of_the_core_are_not_counted_again_after_the_loss_of_a_rank() -> None:
    metrics = Metrics("m")
    before_loss = SchedulerStats(num_steps=9, prefix_queries=70, prefix_hits=50, num_preemptions=2, draft_tokens=9)
    in_recovery = msgspec.structs.replace(NO_CORE, epoch=1, state="recovering", stats=before_loss)
    metrics.observe_core(in_recovery, core_pid=7)
    # The process of the core is the same, so its counters continue in the epoch of the new ranks.
    stats = msgspec.structs.replace(before_loss, num_steps=11, prefix_queries=75)
    metrics.observe_core(msgspec.structs.replace(in_recovery, epoch=2, state="serving", stats=stats), core_pid=7)
    text = metrics.text()
    assert 'rayloom:prefix_cache_hits_total{model_name="m"} 50.0\n' in text
    assert 'rayloom:prefix_cache_queries_total{model_name="m"} 75.0\n' in text
    assert 'rayloom:num_preemptions_total{model_name="m"} 2.0\n' in text
    assert 'rayloom:spec_decode_num_draft_tokens_total{model_name="m"} 9.0\n' in text


def test_requests_of_gateways_never_fall_over_a_restart_of_the_core() -> None:
    metrics = Metrics("m")
    for core_pid, num_finished, num_failed in ((7, 5, 1), (7, 6, 1), (8, 0, 0), (8, 3, 2)):
        counts = (num_finished - num_failed, *[0] * 20)
        found = GatewayRequests(
            num_finished=num_finished,
            num_failed=num_failed,
            first_token_counts=counts,
            first_token_s=sum(counts) / 2000,
        )
        metrics.observe_core(msgspec.structs.replace(NO_CORE, gateway_requests=found), core_pid)
    assert (metrics.finished.value(), metrics.failed.value()) == (9, 3)
    for histogram in (metrics.first_token_s, metrics.request_first_token_s):
        assert set(histogram.cumulative().values()) == {6}
        assert histogram.sum == pytest.approx(0.003)


def test_a_new_core_is_counted_from_zero_although_no_counter_falls() -> None:
    metrics = Metrics("m")
    old = msgspec.structs.replace(NO_CORE, epoch=1, stats=SchedulerStats(num_steps=9, prefix_queries=5))
    new = msgspec.structs.replace(NO_CORE, epoch=2, stats=SchedulerStats(num_steps=40, prefix_queries=8))
    metrics.observe_core(old, core_pid=7)
    metrics.observe_core(new, core_pid=8)
    assert 'rayloom:prefix_cache_queries_total{model_name="m"} 13.0\n' in metrics.text()


def test_steps_by_their_tokens_never_fall_over_a_restart_of_the_core() -> None:
    metrics = Metrics("m")
    for core_pid, num_steps in ((7, 2), (7, 5), (8, 1)):
        counts = (0, num_steps, *[0] * (len(STEP_TOKEN_BOUNDS) - 1))
        stats = SchedulerStats(step_tokens=8 * num_steps, step_token_counts=counts)
        metrics.observe_core(msgspec.structs.replace(NO_CORE, stats=stats), core_pid)
    text = metrics.text()
    assert "# TYPE rayloom:iteration_tokens_total histogram\n" in text
    assert 'rayloom:iteration_tokens_total_bucket{le="1",model_name="m"} 0.0\n' in text
    assert 'rayloom:iteration_tokens_total_bucket{le="8",model_name="m"} 6.0\n' in text
    assert 'rayloom:iteration_tokens_total_sum{model_name="m"} 48.0\n' in text


def test_the_phases_of_a_sequence_add_up() -> None:
    metrics = Metrics("m")
    metrics.observe_phases(queue_s=0.25, prefill_s=0.5, decode_s=2.0, num_preemptions=3)
    text = metrics.text()
    for name, value in (("queue", 0.25), ("prefill", 0.5), ("decode", 2.0), ("inference", 2.5)):
        assert f'rayloom:request_{name}_time_seconds_sum{{model_name="m"}} {value}\n' in text
    assert 'rayloom:request_num_preemptions_bucket{le="2",model_name="m"} 0.0\n' in text
    assert 'rayloom:request_num_preemptions_bucket{le="3",model_name="m"} 1.0\n' in text


def test_only_a_full_queue_counts_as_a_rejection() -> None:
    metrics = Metrics("m")
    name = 'rayloom:admission_rejections_total{model_name="m",reason="queue_full"}'
    assert f"{name} 0.0\n" in metrics.text()
    metrics.observe_failure(QueueFull("full", 1))
    metrics.observe_failure(RequestError("no"))
    assert f"{name} 1.0\n" in metrics.text()
    assert metrics.finished.value() == 0


def test_each_rank_shows_its_age_and_its_waits_for_others() -> None:
    metrics = Metrics("m")
    rank = RankReport(
        rank=1,
        node="n",
        host="h",
        pid=1,
        phase="idle",
        heartbeat_age_s=0.5,
        step=1,
        memory_bytes=1,
        communication_s=2.5,
    )
    status = msgspec.structs.replace(NO_CORE, epoch=1, state="serving", ranks=(rank,))
    metrics.observe_heartbeats(status, 1.0)
    assert 'rayloom:rank_heartbeat_age_seconds{model_name="m",rank="1"} 1.5' in metrics.text()
    assert 'rayloom:rank_communication_seconds{model_name="m",rank="1"} 2.5' in metrics.text()
    metrics.observe_heartbeats(msgspec.structs.replace(status, ranks=()), 1.0)
    assert 'rank="1"' not in metrics.text()  # the heartbeat of a lost rank would show a constant age


def test_losses_before_tokens_flow_are_one_recovery() -> None:
    log = RecoveryLog()
    log.begin("core_lost", "core", "here", at=100.0, now_s=10.0)
    log.replayed(3)
    log.begin("core_lost", "core", "here", at=101.0, now_s=11.0)
    log.replayed(2)
    ended = log.end(12.5)
    assert ended is not None
    assert (ended.seconds, ended.replayed_requests) == (2.5, 3)
    assert log.end(13.0) is None
    assert len(log.recoveries) == 1


@pytest.mark.parametrize(("process", "cause"), [("rank 3", "rank_lost"), ("core", "core_lost"), ("", "process_lost")])
def test_a_recovery_is_counted_by_the_kind_of_process(process: str, cause: str) -> None:
    metrics = Metrics("m")
    metrics.observe_recovery(
        RecoveryRecord(cause="it died", process=process, node="here", at=100.0, started_s=1.0, seconds=2.0)
    )
    assert f'rayloom:recoveries_total{{cause="{cause}",model_name="m"}} 1.0' in metrics.text()


@pytest.mark.parametrize(
    ("body", "is_deep"),
    [
        (b"[[[]]]", False),
        (b"[[[[]]]]", True),
        (b'["[[[[", [[]]]', False),
        (rb'["\"[[[[", "\\", [[[]]]]', True),
        (b"[],[],[],[],[]", False),
        (b'{"a":{"b":[{}]}}', True),
        (b"]]]][[[", False),
    ],
)
def test_depth_counts_brackets_outside_strings(body: bytes, is_deep: bool) -> None:
    if is_deep:
        with pytest.raises(ApiError, match="nested too deeply; at most 3 levels"):
            check_shape(body, 3)
    else:
        check_shape(body, 3)


@pytest.mark.parametrize(
    ("phase", "heartbeat_s", "token_s", "age_s", "is_stalled"),
    [
        ("step", 13.0, 1.0, 60.0, True),
        ("step", 59.0, 900.0, 1.0, False),
        ("idle", 70.0, 10.0, 3.0, False),
        ("idle", 70.0, 58.0, 3.0, True),
        ("idle", 70.0, None, 3.0, True),
        ("start", 70.0, None, 3.0, False),
    ],
)
def test_a_rank_hangs_when_it_is_still_though_work_is_due(
    phase: str, heartbeat_s: float, token_s: float | None, age_s: float, is_stalled: bool
) -> None:
    rank = RankReport(
        rank=0, node="n", host="n", pid=1, phase=phase, heartbeat_age_s=heartbeat_s, step=1, memory_bytes=1
    )
    expected = "rank 0 has not advanced for 73 s" if is_stalled else ""
    core = msgspec.structs.replace(NO_CORE, state="serving", ranks=(rank,), last_token_age_s=token_s)
    assert stall_of(core, age_s) == expected
    assert stall_of(msgspec.structs.replace(core, last_work_age_s=60.1 - age_s), age_s) == expected
    at_work = msgspec.structs.replace(core, last_work_age_s=60.0 - age_s)
    assert not stall_of(at_work, age_s), "a long step shows work"


@pytest.mark.parametrize(
    ("host", "origin", "is_own"),
    [
        ("127.0.0.1:8081", None, True),
        ("localhost:8081", None, True),
        ("[::1]:8081", None, True),
        ("evil.example:8081", None, False),
        ("127.0.0.1.evil.example", None, False),
        ("", None, False),
        ("127.0.0.1:8081", "https://evil.example", False),
        ("127.0.0.1:8081", "null", False),
    ],
)
def test_a_request_of_a_web_page_is_no_request_of_this_machine(host: str, origin: str | None, is_own: bool) -> None:
    assert is_own_request(host, origin) is is_own


def test_a_key_is_compared_byte_for_byte() -> None:
    sent = "Bearer schlüsselà".encode().decode("latin-1")  # the application receives a header's bytes in this form
    assert bearer_token(sent) == "schlüsselà".encode()


def test_the_exposition_is_that_of_the_writer_before_prometheus_client() -> None:
    """The earlier writer made tests/data/engine_metrics.txt from these observations. The test ignores newer metrics."""
    metrics = Metrics(MODEL_NAME)
    busy(metrics, RecoveryRecord)
    before = _families((Path(__file__).parents[1] / "data" / "engine_metrics.txt").read_text())
    names = {name for name, *_ in before}
    assert [family for family in _families(metrics.text()) if family[0] in names] == before


def _families(text: str) -> list[tuple[str, str, str, list[tuple[str, dict[str, str], float]]]]:
    """(name, kind, meaning, samples) of each family, with the unchanged texts of all labels."""
    return [
        (family.name, family.type, family.documentation, [(s.name, s.labels, s.value) for s in family.samples])
        for family in text_string_to_metric_families(text)
    ]
