"""The figures that `make bench-operator` reads from an operator's /metrics."""

from operator_processes.scrape import Scrape
from rayloom_operator.kube import client
from rayloom_operator.telemetry.metrics import Metrics


def test_each_request_that_may_change_the_cluster_counts_as_a_write():
    metrics = Metrics()
    verbs = {*client._VERBS.values(), "list", "watch"}
    for verb in verbs:
        for code in ("200", "409", "none"):
            metrics.count_request(verb, code)
    found = Scrape(metrics.text().decode(), 0.0)
    assert found.total("api_requests_total") == 3 * len(verbs)
    assert found.total("api_requests_total", 'verb="update"') == 3
    # create, update, patch and delete
    assert found.num_writes() == 3 * 4
