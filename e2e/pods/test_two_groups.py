"""Two engine replicas of a service: while one replica is missing, the other serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from clients.client_pod import Client
from clients.load import NUM_STREAMS, StreamTokens, problem_of, undisturbed
from clients.namespaces import new_namespace
from clients.service import READY_SECONDS, ROOT, Service, manifest, wait
from disruptions.fault_under_load import FaultRecord, disturb
from local_kubernetes.machine.kubectl import Kubectl

pytestmark = pytest.mark.slow

# Seconds after the end of a pod in which the Service may still send requests to it.
_ROUTE_SECONDS = 5.0


@pytest.fixture(scope="module")
def pair(operator: Kubectl) -> Iterator[tuple[Service, StreamTokens]]:
    with new_namespace(operator, "pair") as namespace:
        service = Service(operator, Client.start(operator, namespace), namespace, "smollm2")
        model = {"source": "builtin://smollm2-135m", "dtype": "float32"}
        engine = {"args": {"threads": 1}, "resources": {"requests": {"cpu": "250m", "memory": "1Gi"}}}
        path = ROOT / "examples" / "smollm2.yaml"
        operator.apply(manifest(path, namespace, replicas=2, model=model, engine=engine))
        wait(lambda: _is_whole(service), READY_SECONDS, service.story)
        # Streams have more tokens here, because a single rank is fast and the deletion of a pod takes a second.
        yield service, undisturbed(service, num_tokens=128)


def _is_whole(service: Service) -> bool:
    return bool(service.get().get("status", {}).get("ready") == "2/2")


def test_while_one_engine_is_gone_the_other_serves(
    pair: tuple[Service, StreamTokens], show: Callable[[str, FaultRecord], None]
) -> None:
    service, expected = pair
    survivor, victim = service.pods("head")
    assert all(pod["metadata"]["labels"].get("rayloom.dev/route") == "true" for pod in (survivor, victim))
    direct = f"http://{survivor['status']['podIP']}:8000"
    half = NUM_STREAMS // 2
    seen = disturb(
        service,
        expected,
        "one of two engines is killed",
        lambda: service.delete_pod(victim["metadata"]["name"], "--grace-period=0", "--force"),
        is_over=lambda: _is_whole(service),
        urls=[direct] * half + [service.url] * half,
        probe_timeout_s=10.0,
    )
    show("one of two engines is killed (its streams end)", seen)
    assert seen.untrue_times == [] and seen.available_s is None
    failed = [stream for stream in seen.streams if problem_of(stream, expected)]
    assert not [stream for stream in failed if stream["url"] == direct], "the other engine's streams go on"
    # Requests through the Service may fail only before its endpoints reflect the pod's end.
    known_at = seen.timeline.began_at + _ROUTE_SECONDS
    assert not [stream for stream in failed if stream["began"] > known_at]
    assert not [probe for probe in seen.failed_probes if probe[0] > known_at]
    heads = service.pods("head")
    assert len(heads) == 2 and victim["metadata"]["uid"] not in {pod["metadata"]["uid"] for pod in heads}
    assert all(pod["metadata"]["labels"].get("rayloom.dev/route") == "true" for pod in heads)
