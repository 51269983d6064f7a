"""Changes of a service under steady streams: no request fails, none is cut, and no more engines than it may have.

One service, one change after the other; the change of its image comes last, with two replicas. What a bad release does
is in test_bad_release.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster.interface import Cluster
from cluster.kubectl import Kubectl
from conftest import Client, new_namespace
from models import model_on_the_nodes
from plot import plotted
from release_images import NEXT, NEXT_VERSION, release
from roll import NUM_TOKENS, Roll, expect_unnoticed, is_rolled, roll, rollable
from service import Service, wait
from streams import Said, undisturbed

# Short, for there are four of them. With a request and a probe a second two engines get ten each in this time.
HOLD_SECONDS = 10


@pytest.fixture(scope="module")
def rolling(operator: Kubectl) -> Iterator[tuple[Service, Said]]:
    with new_namespace(operator, "rollout") as namespace:
        service = Service(operator, Client.start(operator, namespace), namespace, "smollm2")
        operator.apply(rollable(namespace, HOLD_SECONDS))
        service.wait_available()
        yield service, undisturbed(service, NUM_TOKENS)


def _roll(rolling: tuple[Service, Said], show: Callable[[Roll], None], what: str, most: int, **spec: Any) -> Roll:
    """Makes the change and expects that nobody noticed. `most` is replicas + maxSurge."""
    service, expected = rolling
    old = service.get()["status"]["currentRevision"]
    seen = roll(service, expected, what, lambda: service.change(**spec), is_over=is_rolled(service, old))
    expect_unnoticed(seen, show)
    assert seen.timeline.most_clusters <= most and len(seen.timeline.sampled) > HOLD_SECONDS // 2
    new = service.get()["status"]["currentRevision"]
    assert {engine.revision for engine in seen.timeline.engines.values()} == {old, new}
    assert any(at >= seen.timeline.began_at for engine in seen.timeline.of(old) for at, _ in engine.touches)
    assert seen.early_touches(old, new) == []
    return seen


def test_a_changed_argument_is_rolled_out_and_nobody_notices(
    rolling: tuple[Service, Said], show_roll: Callable[[Roll], None]
) -> None:
    service, _ = rolling
    args = {"threads": 1, "maxNumSeqs": 128}
    seen = _roll(rolling, show_roll, "an argument", 2, engine={"args": args})
    plotted(seen, "roll")
    for step in ("Starting", "Analyzing", "Promoting", "Complete"):
        assert seen.timeline.step_at(step) is not None, f"{step} was not among {seen.timeline.steps}"
        assert seen.timeline.first("event", f" {step}:") is not None
    hold_s = (seen.timeline.step_at("Promoting") or 0.0) - (seen.timeline.step_at("Analyzing") or 0.0)
    assert hold_s >= HOLD_SECONDS - 1.0
    assert service.condition("RolledBack")["status"] == "False"


@pytest.mark.slow
def test_the_same_weights_from_another_place_are_rolled_out_and_nobody_notices(
    rolling: tuple[Service, Said], show_roll: Callable[[Roll], None]
) -> None:
    service, _ = rolling
    source = f"file://{model_on_the_nodes()}"
    _roll(rolling, show_roll, "the model", 2, model={"source": source})
    assert service.get()["status"]["currentRevision"] == service.get()["status"]["updateRevision"]


@pytest.mark.slow
def test_another_image_of_two_replicas_is_rolled_out_and_nobody_notices(
    cluster: Cluster, rolling: tuple[Service, Said], show_roll: Callable[[Roll], None]
) -> None:
    service, _ = rolling
    image = release(cluster, NEXT)
    before = service.clusters()
    service.scale(2)
    wait(lambda: service.has(2), 120.0, service.story)
    assert set(before) < set(service.clusters()), "more replicas restart no engine"
    seen = _roll(rolling, show_roll, "the image, two replicas", 3, engine={"image": image})
    (new,) = {engine.revision for engine in seen.timeline.engines.values() if engine.name in service.clusters()}
    versions = [engine.answers[-1][1]["engine_version"] for engine in seen.timeline.of(new)]
    assert versions == [NEXT_VERSION] * 2
