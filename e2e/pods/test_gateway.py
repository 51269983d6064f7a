"""No stream is lost with a pod: gateways in front of two engines, then of one engine, under streams of every kind.

All tests share one service. A request may fail only if it was connected to a gateway that was killed.
"""

from __future__ import annotations

import itertools
import json
import re
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from clients.client_pod import Client
from clients.gateways import GatewayedService, uids
from clients.mixed_load import NUM_KINDS, NUM_PAIRS, MixedLoad, run_mix, sampled_request, undisturbed_mix
from clients.namespaces import new_namespace
from clients.pressure import pressure
from clients.service import READY_SECONDS, STATUS_SECONDS, wait
from disruptions.gateway_scene import GatewayScene
from disruptions.gateway_under_load import GatewayRecord
from disruptions.nodes import move_operator_off
from disruptions.releases import FAILS_SEQUENCES, NEXT, release
from disruptions.rollout_under_load import is_rolled, is_rolled_back, rollable
from disruptions.running_load import running_load
from local_kubernetes.clusters.interface import Cluster
from local_kubernetes.machine.kubectl import Kubectl

HOLD_SECONDS, MIN_REQUESTS = 5, 5
ANALYSIS_SECONDS = 20
AUTOSCALING = {"minReplicas": 0, "maxReplicas": 2, "idleSeconds": 10}
# The gateway sends a comment every 10 s while a stream waits.
SILENCE_SECONDS = 15.0
_AT_ONCE = ("--grace-period=0", "--force")
# Seconds from the end of a pod until the Service sends no more connections to it.
_ROUTE_SECONDS = 5.0
_NODE_DRAIN_SECONDS = 240


@pytest.fixture(scope="module")
def pair(operator: Kubectl) -> Iterator[tuple[GatewayedService, MixedLoad]]:
    with new_namespace(operator, "gateway") as namespace:
        service = GatewayedService(operator, Client.start(operator, namespace), namespace, "smollm2")
        spec = {"replicas": 2, "gateway": {"replicas": 2}}
        operator.apply(rollable(namespace, HOLD_SECONDS, MIN_REQUESTS, **spec))
        wait(lambda: service.has(2) and service.has_gateways(2), READY_SECONDS, service.story)
        service.wait_available()
        yield service, undisturbed_mix(service)


@pytest.fixture
def scene(pair: tuple[GatewayedService, MixedLoad], show_gateway: Callable[[GatewayRecord], None]) -> GatewayScene:
    return GatewayScene(*pair, show_gateway)


def test_streams_of_a_head_pod_that_is_deleted_at_once_continue_on_the_other_engine(scene: GatewayScene) -> None:
    service = scene.service
    head = service.pods("head")[0]
    scene.expect_unnoticed(
        "a head pod is deleted, grace 0",
        lambda: service.delete_pod(head["metadata"]["name"], *_AT_ONCE),
        scene.is_recreated(head, 2),
        late_every_s=1.0,  # pauses between streams, which leave CPU time for the start of the new engine
    )


@pytest.mark.slow
def test_streams_of_an_engine_that_drains_move_to_the_other_one(scene: GatewayScene) -> None:
    service = scene.service
    head = service.pods("head")[0]
    scene.expect_unnoticed(
        "an engine drains (its head pod is deleted)",
        lambda: service.delete_pod(head["metadata"]["name"]),
        scene.is_recreated(head, 2),
    )


@pytest.mark.slow
def test_gateways_are_replaced_and_nobody_notices(scene: GatewayScene) -> None:
    service = scene.service
    old = uids(service.gateways())
    restart = ("rollout", "restart", f"deployment/{service.name}-gateway", "--namespace", service.namespace)
    scene.expect_unnoticed(
        "gateways are restarted", lambda: service.kubectl(*restart), lambda: service.has_gateways(2, but_not=old)
    )


@pytest.mark.slow
def test_the_death_of_a_gateway_ends_only_its_connections_and_their_repeats_get_the_same_answers(
    scene: GatewayScene,
) -> None:
    service = scene.service
    victim, survivor = service.gateways()
    urls = [f"http://{pod['status']['podIP']}:8000" for pod in (victim, survivor)]
    seen = scene.expect_unnoticed(
        "a gateway is killed (its clients repeat)",
        lambda: service.delete_pod(victim["metadata"]["name"], *_AT_ONCE),
        lambda: service.has_gateways(2, but_not=uids([victim])),
        urls=[*urls * NUM_PAIRS, *urls[::-1] * NUM_PAIRS],  # each gateway has one stream of each kind
        repeat_url=service.url,
    )
    first = [stream for stream in seen.repeated if not stream["is_late"]]
    assert [stream["url"] for stream in first] == [urls[0]] * NUM_KINDS, "the other gateway's streams go on"
    assert {stream["index"] % NUM_KINDS for stream in first} == set(range(NUM_KINDS)), "every kind was repeated"
    assert all(stream["broken"][0]["tokens"] for stream in first), "every answer had begun"
    # Later connections may break only while the Service still lists the killed pod.
    known_at = seen.timeline.began_at + _ROUTE_SECONDS
    assert not [stream for stream in seen.repeated if stream["began"] > known_at]


@pytest.mark.slow
def test_a_key_names_the_answer_of_a_request_without_a_seed_at_every_gateway(scene: GatewayScene) -> None:
    service = scene.service
    (path, body), headers = sampled_request(service.name), {"Idempotency-Key": uuid.uuid4().hex}
    urls = [f"http://{pod['status']['podIP']}:8000{path}" for pod in service.gateways()]
    answers = [json.loads(service.client.request(url, body, headers=headers)[1]) for url in urls]
    other = json.loads(service.client.request(urls[0], body)[1])
    one, two, third = (answer["choices"] for answer in (*answers, other))
    assert one == two and answers[0]["id"] == answers[1]["id"]
    assert one[0]["text"] != third[0]["text"], "without the key the answer is another one"


@pytest.mark.slow
def test_an_argument_is_rolled_out_and_nobody_notices(scene: GatewayScene) -> None:
    service = scene.service
    old = service.get()["status"]["currentRevision"]
    scene.expect_unnoticed(
        "an argument is rolled out",
        lambda: service.change(engine={"args": {"threads": 1, "maxNumSeqs": 128}}),
        is_rolled(service, old),
        seconds=600.0,
    )


@pytest.mark.slow
def test_a_release_that_fails_the_requests_of_gateways_is_taken_back_and_nobody_notices(
    scene: GatewayScene, cluster: Cluster
) -> None:
    service = scene.service
    image = release(cluster, FAILS_SEQUENCES)
    old = service.get()["status"]["currentRevision"]
    kept = set(service.clusters())
    # Gateways find the new engine in DNS only some seconds after its analysis began.
    analysis = {"analysis": {"holdSeconds": ANALYSIS_SECONDS, "minRequests": MIN_REQUESTS}}
    scene.expect_unnoticed(
        "a release fails its requests, and is rolled back",
        lambda: service.change(engine={"image": image}, rollout=analysis),
        is_rolled_back(service, old),
        seconds=600.0,
    )
    assert set(service.clusters()) == kept
    words = service.condition("RolledBack")
    assert (words["status"], words["reason"]) == ("True", "AnalysisFailed"), words
    found = re.search(r"(\d+) of (\d+) requests failed in the new revision, 0 of \d+ in the old", words["message"])
    assert found is not None and found[1] == found[2] != "0", words["message"]


@pytest.mark.slow
def test_another_image_of_engines_and_gateways_is_rolled_out_and_nobody_notices(
    scene: GatewayScene, cluster: Cluster
) -> None:
    service = scene.service
    image = release(cluster, NEXT)
    old, gateways = service.get()["status"]["currentRevision"], uids(service.gateways())
    is_rolled_out = is_rolled(service, old)
    analysis = {"analysis": {"holdSeconds": HOLD_SECONDS, "minRequests": MIN_REQUESTS}}
    scene.expect_unnoticed(
        "another image is rolled out",
        lambda: service.change(engine={"image": image}, rollout=analysis),
        lambda: is_rolled_out() and service.has_gateways(2, but_not=gateways),
        seconds=600.0,
    )
    images = {pod["spec"]["containers"][0]["image"] for pod in (*service.pods("head"), *service.gateways())}
    assert images == {image}


@pytest.mark.slow
def test_the_loss_of_a_node_with_engine_and_gateway_ends_only_that_gateways_connections(
    scene: GatewayScene, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    service = scene.service
    lost = service.pods("head")[0]["spec"]["nodeName"]
    (kept,) = set(cluster.node_names()) - {lost}
    _move_client_to(service, kept)
    move_operator_off(service.kubectl, lost)
    wait(lambda: _are_spread(service), READY_SECONDS, service.story)
    address = {pod["spec"]["nodeName"]: f"http://{pod['status']['podIP']}:8000" for pod in service.gateways()}
    urls = [address[lost], address[kept]]

    def is_over() -> bool:
        heads = [pod for pod in service.pods("head") if "deletionTimestamp" not in pod["metadata"]]
        return all(pod["spec"].get("nodeName") == kept for pod in heads) and service.has(2)

    try:
        seen = scene.expect_unnoticed(
            "a node is lost (clients of its gateway repeat)",
            lambda: cluster.stop_node(lost),
            is_over,
            urls=[*urls * NUM_PAIRS, *urls[::-1] * NUM_PAIRS],
            repeat_url=service.url,
        )
    finally:
        cluster.start_node(lost)
    first = [stream for stream in seen.streams if not stream["is_late"]]
    broken = [stream for stream in first if stream["broken"]]
    assert {stream["url"] for stream in broken} == {address[lost]}, "the other gateway's streams go on"
    wait(lambda: service.has_gateways(2) and service.has(2), READY_SECONDS, service.story)
    noticed = [seen.timeline.seconds(stream["broken"][0]["at"]) for stream in broken]
    repeated = [seen.timeline.seconds(stream["ended"]) for stream in broken]
    others = [seen.timeline.seconds(stream["ended"]) for stream in first if not stream["broken"]]
    with capsys.disabled():
        print(
            f"\n  a node is lost: {len(broken)} of {len(first)} connections broke, noticed after {min(noticed):.1f} to "
            f"{max(noticed):.1f} s; repeats end after {max(repeated):.1f} s, other streams after {max(others):.1f} s"
        )


@pytest.mark.slow
def test_a_drained_node_costs_nobody_anything(scene: GatewayScene, cluster: Cluster) -> None:
    service = scene.service
    client = service.kubectl.json("get", "pod", service.client.name, "--namespace", service.namespace)
    (node,) = set(cluster.node_names()) - {client["spec"]["nodeName"]}
    limit = f"--timeout={_NODE_DRAIN_SECONDS}s"
    command = ("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", limit)
    drains: list[Future[str]] = []

    def is_over() -> bool:
        # `result` raises the error of a failed drain.
        return drains[0].done() and bool(drains[0].result()) and service.has(2) and service.has_gateways(2)

    with ThreadPoolExecutor(1) as thread:
        try:
            scene.expect_unnoticed(
                "a node is drained",
                lambda: drains.append(thread.submit(service.kubectl, *command, timeout_s=_NODE_DRAIN_SECONDS + 30)),
                is_over,
                seconds=_NODE_DRAIN_SECONDS + 60.0,
            )
        finally:
            service.kubectl("uncordon", node)


@pytest.mark.slow
def test_one_of_two_engines_is_removed_and_nobody_notices(scene: GatewayScene) -> None:
    service = scene.service
    scene.expect_unnoticed("scaled from 2 to 1", lambda: service.scale(1), lambda: service.has(1))


@pytest.mark.slow
def test_streams_of_the_only_engine_wait_for_the_next_one(scene: GatewayScene) -> None:
    service = scene.service
    if not service.has(1):
        service.scale(1)
        wait(lambda: service.has(1), READY_SECONDS, service.story)
    (head,) = service.pods("head")
    seen = scene.expect_unnoticed(
        "the only head pod is deleted, grace 0",
        lambda: service.delete_pod(head["metadata"]["name"], *_AT_ONCE),
        scene.is_recreated(head, 1),
    )
    assert seen.pause_s > 2.0, "no engine served meanwhile"


@pytest.mark.slow
def test_an_idle_service_has_no_engine_and_a_request_waits_for_the_next_one(
    scene: GatewayScene, capsys: pytest.CaptureFixture[str]
) -> None:
    service = scene.service
    gateways = uids(service.gateways())
    service.change(autoscaling=AUTOSCALING)
    idle_s = wait(lambda: _is_at_zero(service), READY_SECONDS, service.story)
    assert uids(service.gateways()) == gateways and service.has_gateways(2)
    (stream,) = run_mix(service, scene.load.requests()[:1])
    assert scene.load.problem_of(stream) == ""
    first_s, comments = stream["times"][0] - stream["began"], [text for _, text in stream["comments"]]
    with capsys.disabled():
        print(
            f"\n  zero after {idle_s:.1f} s (idleSeconds {AUTOSCALING['idleSeconds']}); zero to the first token: "
            f"{first_s:.1f} s; X-Rayloom-Cold-Start: {stream['cold_start']}; comments meanwhile: {comments}"
        )
    (told,) = [float(found[1]) for each in comments if (found := re.fullmatch(r"cold start ([\d.]+)", each))]
    assert 0 < float(stream["cold_start"]) <= told <= first_s
    silence = [stream["began"], *(at for at, _ in stream["comments"])]
    assert max(later - earlier for earlier, later in itertools.pairwise(silence)) < SILENCE_SECONDS
    wait(lambda: service.get()["status"]["autoscaling"]["reason"] == "Woken", STATUS_SECONDS, service.story)


@pytest.mark.slow
def test_load_adds_an_engine_and_its_end_removes_it_and_nobody_notices(
    scene: GatewayScene, capsys: pytest.CaptureFixture[str]
) -> None:
    service = scene.service
    service.change(autoscaling=AUTOSCALING)
    had_two: list[float] = []
    with running_load(service, **pressure(service.name)) as more:

        def is_over() -> bool:
            if not had_two and service.has(2):
                had_two.append(time.time())
                more.stop()
            return bool(had_two) and service.has(1)

        seen = scene.expect_unnoticed("autoscaled from 1 to 2 and back", more.start_arrivals, is_over, seconds=600.0)
    assert [each["failure"] for each in more.records["streams"] if each["failure"]] == []
    with capsys.disabled():
        print(
            f"\n  2 engines {seen.timeline.seconds(had_two[0]):.1f} s after the load, 1 engine "
            f"{seen.over_at - had_two[0]:.1f} s after its end; "
            f"{len(more.records['streams'])} further requests, 0 failed"
        )


@pytest.mark.slow
def test_streams_in_bfloat16_continue_with_the_same_tokens(
    scene: GatewayScene, show_gateway: Callable[[GatewayRecord], None]
) -> None:
    service = scene.service
    service.change(model={"dtype": "bfloat16"}, replicas=2, autoscaling=None)
    wait(
        lambda: service.has(2) and service.condition("Progressing")["reason"] == "Complete",
        READY_SECONDS,
        service.story,
    )
    other = GatewayScene(service, undisturbed_mix(service), show_gateway)
    assert other.load.answers != scene.load.answers, "these are other numbers"
    head = service.pods("head")[0]
    other.expect_unnoticed(
        "a head pod is deleted, grace 0, bfloat16",
        lambda: service.delete_pod(head["metadata"]["name"], *_AT_ONCE),
        other.is_recreated(head, 2),
    )


def _is_at_zero(service: GatewayedService) -> bool:
    is_said = service.condition("Available")["reason"] == "ScaledToZero"
    return is_said and not service.pods("head") and not service.pods("worker")


def _move_client_to(service: GatewayedService, node: str) -> None:
    """Replaces the client's pod by a pod on this node. The old pod would block a drain: it has no controller."""
    service.kubectl("delete", "pod", service.client.name, "--namespace", service.namespace)
    service.client = Client.start(service.kubectl, service.namespace, service.client.name, node)


def _are_spread(service: GatewayedService) -> bool:
    """True if the ready gateways are on two nodes. If both are on one node, deletes one of them."""
    pods = service.gateways()
    is_spread = len({pod["spec"].get("nodeName") for pod in pods}) == 2
    if service.has_gateways(2) and not is_spread:
        service.delete_pod(pods[0]["metadata"]["name"])
    return is_spread and service.has_gateways(2)
