"""`kubectl scale` under steady streams, also to zero.

The deletion of a service is in test_drain.py, a node drain in test_node_drain.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from clients.client_pod import Client
from clients.load import STRIKE_AT, StreamTokens, undisturbed
from clients.namespaces import new_namespace
from clients.service import READY_SECONDS, STATUS_SECONDS, Service, wait
from disruptions.rollout_under_load import NUM_TOKENS, RolloutRecord, expect_unnoticed, failures_of, roll_out, rollable
from disruptions.running_load import running_load
from local_kubernetes.machine.kubectl import Kubectl

pytestmark = pytest.mark.slow

HOLD_SECONDS = 5


@pytest.fixture(scope="module")
def scaled(operator: Kubectl) -> Iterator[tuple[Service, StreamTokens]]:
    with new_namespace(operator, "scale") as namespace:
        service = Service(operator, Client.start(operator, namespace), namespace, "smollm2")
        operator.apply(rollable(namespace, HOLD_SECONDS))
        service.wait_available()
        yield service, undisturbed(service, NUM_TOKENS)


def test_a_second_engine_comes_and_goes_and_nobody_notices(
    scaled: tuple[Service, StreamTokens], show_rollout: Callable[[RolloutRecord], None]
) -> None:
    service, expected = scaled
    first = service.clusters()
    up = roll_out(service, expected, "scaled from 1 to 2", lambda: service.scale(2), is_over=lambda: service.has(2))
    expect_unnoticed(up, show_rollout)
    (second,) = set(service.clusters()) - set(first)
    down = roll_out(service, expected, "scaled from 2 to 1", lambda: service.scale(1), is_over=lambda: service.has(1))
    expect_unnoticed(down, show_rollout)
    assert up.timeline.most_clusters == down.timeline.most_clusters == 2
    (revision,) = {engine.revision for engine in down.timeline.engines.values()}
    gone = {engine.name for engine in down.timeline.of(revision)} - set(service.clusters())
    assert len(gone) == 1 and gone <= {*first, second}


def test_a_service_of_no_engines_finishes_its_streams_refuses_others_and_comes_back(
    scaled: tuple[Service, StreamTokens], capsys: pytest.CaptureFixture[str]
) -> None:
    service, expected = scaled
    wait(lambda: service.has(1), READY_SECONDS, service.story)
    with running_load(service, num_tokens=NUM_TOKENS, strike_at=STRIKE_AT, late_every_s=0) as running:
        service.scale(0)
        running.start_arrivals()
        running.wait_for_streams()
    assert failures_of(running.records["streams"], [], expected) == []
    wait(lambda: not service.clusters(), READY_SECONDS, service.story)
    wait(lambda: service.condition("Available")["reason"] == "Suspended", STATUS_SECONDS, service.story)
    assert service.condition("Available")["status"] == "False"
    status, words = service.chat(max_tokens=1)
    assert status in (0, 503), words
    assert status == 503 or "refused" in words, words
    service.scale(1)
    seconds = service.wait_available()
    assert undisturbed(service, NUM_TOKENS) == expected
    with capsys.disabled():
        print(f"\n  at 0 replicas: {status} {words[:80]}; Available {seconds:.1f} s after `kubectl scale --replicas 1`")
