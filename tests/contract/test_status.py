"""What the engine's /status says of requests is what the operator compares revisions by."""

from rayloom_engine.front.metrics import Metrics
from rayloom_engine.status import EngineStatus, KvCache, Requests
from rayloom_operator.api_rollout import Figures
from rayloom_operator.engine_status import engine_status


def said(requests):
    status = EngineStatus(
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
    return engine_status(200, status.model_dump_json().encode())


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

    assert read.requests.in_flight == 5
    assert (read.figures.requests, read.figures.errors) == (1, 1)
    assert [read.figures.ttft[edge] for edge in ("0.25", "0.5", "5", "7.5", "+Inf")] == [0, 2, 2, 3, 3]
    assert Figures.model_validate_json(read.figures.model_dump_json(by_alias=True)) == read.figures


def test_every_edge_is_a_number_and_the_last_is_all():
    edges = [*said(Requests.model_validate(_nothing())).figures.ttft]

    assert sorted(edges, key=float) == edges
    assert edges[-1] == "+Inf"


def _nothing():
    empty = Metrics("m").request_first_token_s.cumulative()
    return {"in_flight": 0, "running": 0, "waiting": 0, "finished": 0, "failed": 0, "first_token_seconds": empty}
