"""The operator compares revisions by the request counts in the engine's /status."""

import json

import pytest

from rayloom_engine.front.operations.metrics import Metrics
from rayloom_engine.status import EngineStatus, KvCache, Load, RecoveryPhase, Requests
from rayloom_operator.api.rollout.stored import RequestCountsStatus
from rayloom_operator.engines.request import MAX_BYTES, MAX_FULL_BYTES
from rayloom_operator.engines.status import engine_status
from rayloom_operator.errors import EngineUnavailable


def engine_document(requests):
    return EngineStatus(
        engine_version="0",
        state="serving",
        reason="",
        executor="uni",
        epoch=1,
        step=1,
        last_token_age_seconds=1.0,
        uptime_seconds=1.0,
        model=None,
        startup=[],
        ranks=[],
        requests=requests,
        kv_cache=KvCache(num_blocks=1, num_free_blocks=1, block_size=16, usage=0.0),
        recoveries=[],
        api_url="",
    )


def said(requests):
    return engine_status(200, engine_document(requests).model_dump_json().encode())


def said_by_engine():
    counts = dict.fromkeys(("in_flight", "running", "waiting", "finished", "failed"), 0)
    return engine_document(Requests(**counts, first_token_seconds={})).model_dump()


def test_the_operator_reads_the_figures_that_the_engine_counts():
    metrics = Metrics("m")
    for seconds in (0.3, 0.3, 7.0):
        metrics.request_first_token_s.observe(seconds)
    metrics.observe_failure(ZeroDivisionError())
    read = said(
        Requests(
            in_flight=5,
            running=2,
            waiting=1,
            finished=int(metrics.finished.value()),
            failed=int(metrics.failed.value()),
            first_token_seconds=metrics.request_first_token_s.cumulative(),
        )
    )

    assert (read.requests.in_flight, read.requests.running, read.requests.waiting) == (5, 2, 1)
    assert (read.request_counts.requests, read.request_counts.errors) == (1, 1)
    first_tokens = read.request_counts.first_token_seconds
    assert [first_tokens[edge] for edge in ("0.25", "0.5", "5", "7.5", "+Inf")] == [0, 2, 2, 3, 3]
    stored = RequestCountsStatus.of(read.request_counts).model_dump_json(by_alias=True)
    assert RequestCountsStatus.model_validate_json(stored).counts() == read.request_counts


def test_every_edge_is_a_number_and_the_last_is_all():
    edges = [*said(Requests.model_validate(_nothing())).request_counts.first_token_seconds]

    assert sorted(edges, key=float) == edges
    assert edges[-1] == "+Inf"


def _nothing():
    empty = Metrics("m").request_first_token_s.cumulative()
    return {"in_flight": 0, "running": 0, "waiting": 0, "finished": 0, "failed": 0, "first_token_seconds": empty}


def test_the_minimal_document_of_a_large_engine_is_one_that_the_operator_takes():
    """The engine has 128 ranks on nodes with the longest possible names, and has recovered a hundred times."""
    rank = {"host": "h" * 63, "pid": 12345, "phase": "step", "heartbeat_age_seconds": 0.123456, "step": 1 << 30}
    rank |= {"memory_bytes": 1 << 40, "advance": 1 << 40, "communication_seconds": 12345.678, "weight_bytes_read": 0}
    phases = [RecoveryPhase(name="load_weights", seconds=1.25)] * 7
    recovery = {"cause": "c" * 200, "process": "rank 17", "node": "n" * 63, "at": 1.7e9, "seconds": 12.5}
    whole = EngineStatus.model_validate(
        said_by_engine()
        | {
            "ranks": [rank | {"rank": number, "node": f"{number:03}" + "n" * 60} for number in range(128)],
            "recoveries": [recovery | {"replayed_requests": 64, "phases": phases}] * 100,
        }
    )
    minimal = whole.minimal_json().encode()

    full = whole.model_dump_json().encode()

    # An engine of the previous version always sends the full document, even if the operator prefers the minimal one.
    assert MAX_FULL_BYTES > 2 * len(full) > 2 * MAX_BYTES > 4 * len(minimal)
    read = engine_status(200, minimal, max_ranks=128)
    assert read == engine_status(200, full)
    assert [node[:3] for node in read.nodes] == [f"{number:03}" for number in range(128)]


def test_the_operator_reads_the_load_that_the_engine_tells():
    figures = {
        "queued_tokens": 7,
        "running_tokens": 8,
        "max_running_tokens": 9,
        "mean_output_tokens": 10.5,
        "prefill_tokens_per_second": 11.5,
        "decode_tokens_per_second": None,
    }
    assert Load.model_fields.keys() == figures.keys()
    document = said_by_engine() | {"load": Load(**figures).model_dump()}
    assert engine_status(200, json.dumps(document).encode()).load.model_dump() == figures
    assert engine_status(200, json.dumps(said_by_engine()).encode()).load.max_running_tokens == 0
    earlier = {key: value for key, value in said_by_engine().items() if key != "load"}
    assert engine_status(200, json.dumps(earlier).encode()).load.max_running_tokens == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("queued_tokens", -1),
        ("running_tokens", 1 << 60),
        ("max_running_tokens", "9"),
        ("mean_output_tokens", -0.5),
        ("prefill_tokens_per_second", 0),
        ("decode_tokens_per_second", 1e300),
    ],
)
def test_a_load_out_of_bounds_is_not_believed(name, value):
    document = said_by_engine() | {"load": {name: value}}
    with pytest.raises(EngineUnavailable, match=f"load.{name}"):
        engine_status(200, json.dumps(document).encode())
