"""The quick start's page, and its service on real pods: two ranks on two nodes, deleted pods, a restarted operator."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from clients.client_pod import Client
from clients.service import OPERATOR_NAMESPACE, READY_SECONDS, ROOT, STATUS_SECONDS, Service, is_ready, wait
from local_kubernetes.clusters.interface import Cluster
from local_kubernetes.machine.kubectl import Kubectl
from observers.container_view import containers_of, excess, is_restricted, look_inside
from observers.kv_cache import expect_predicted_kv_cache
from rt_blocks import blocks_of

PAGE = ROOT / "docs" / "quickstart-kubernetes.md"
# Ports of a head: Ray's control store, and the engine's port for ranks.
_HEAD_PORTS = {6379, 8002}
# Linux' range of ephemeral ports.
_ANY_PORT = range(32768, 61000)


@dataclass(frozen=True)
class Quickstart:
    """The page's service, and the outputs of the page's shell blocks before the block that deletes the service."""

    service: Service
    first_token_s: float  # seconds from `kubectl apply` to a client's first token
    outputs: list[str]


@pytest.fixture(scope="module")
def quickstart(cluster: Cluster, operator: Kubectl) -> Iterator[Quickstart]:
    """Runs the page's shell blocks, unchanged and one after the other. The last block runs after the tests."""
    install, start, ask, delete = [block.text for block in blocks_of(ROOT, PAGE) if block.language == "bash"]
    socket.create_server(("127.0.0.1", 18000)).close()  # the bind fails while another process listens at the port
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "PATH": path}
    with _clean_default(operator):
        outputs = [_run(install, environment)]
        service = Service(operator, Client.start(operator, "default"), "default", "smollm2-pp2")
        began = time.monotonic()
        outputs.append(_run(start, environment))
        # A short timeout: a connection that begins while a node changes its rules for the Service hangs.
        wait(lambda: service.chat(timeout_s=5, max_tokens=1)[0] == 200, READY_SECONDS, service.story)
        first_token_s = time.monotonic() - began
        outputs.append(_run(ask, environment))
        yield Quickstart(service, first_token_s, outputs)
        _run(delete, environment)


@contextlib.contextmanager
def _clean_default(operator: Kubectl) -> Iterator[None]:
    """Removes the page's objects and the client's pod from the namespace `default`, before the block and after it."""

    def clean() -> None:
        operator("delete", "llm", "--all", "--namespace", "default", timeout_s=180)
        operator("delete", "pod", "client", "--namespace", "default", "--ignore-not-found", timeout_s=180)
        pods = ("pods", "--namespace", "default", "--selector", "rayloom.dev/service")
        operator("wait", "--for=delete", *pods, "--timeout=180s", timeout_s=200)

    clean()
    try:
        yield
    finally:
        clean()


def _run(text: str, environment: dict[str, str]) -> str:
    command = ["bash", "-euo", "pipefail", "-c", text]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=600)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also ends a port-forward that the block has started
    assert process.returncode == 0, f"{text}\n{output}"
    return output


@pytest.fixture(scope="module")
def service(quickstart: Quickstart) -> Service:
    return quickstart.service


def test_the_page_on_kubernetes_works_as_printed(quickstart: Quickstart) -> None:
    assert "Serving" in quickstart.outputs[1]
    assert "Paris" in quickstart.outputs[2]


def _seconds(later: str, earlier: str) -> float:
    form = "%Y-%m-%dT%H:%M:%SZ"
    return time.mktime(time.strptime(later, form)) - time.mktime(time.strptime(earlier, form))


def test_the_first_token_and_where_the_seconds_went(quickstart: Quickstart, capsys: pytest.CaptureFixture[str]) -> None:
    service, seconds = quickstart.service, quickstart.first_token_s
    created = service.get()["metadata"]["creationTimestamp"]
    rows = []
    for pod in [*service.pods("head"), *service.pods("worker")]:
        times = {item["type"]: item["lastTransitionTime"] for item in pod["status"]["conditions"]}
        containers = pod["status"]["containerStatuses"]
        started = max(item["state"]["running"]["startedAt"] for item in containers)
        name = pod["metadata"]["labels"]["ray.io/node-type"]
        rows.append((f"{name} pod scheduled", _seconds(times["PodScheduled"], created)))
        rows.append((f"{name} containers started", _seconds(started, created)))
    status = service.engine_status()
    phases = [(phase["name"], phase["seconds"]) for phase in status["startup"]]
    assert {"discover", "reserve", "start_ranks", "load", "rendezvous", "warm_up"} <= {name for name, _ in phases}
    with capsys.disabled():
        print(f"\n  kubectl apply -> first token at a client: {seconds:.1f} s (images present)")
        for name, value in rows:
            print(f"    {name:<28} after {value:5.0f} s")
        for name, value in phases:
            print(f"    engine: {name:<20} took  {value:5.2f} s")


def test_two_ranks_on_two_nodes_say_what_one_rank_says_here(service: Service, expected: list[str]) -> None:
    assert service.tokens() == expected
    service.wait_available()
    status = service.engine_status()
    assert (status["state"], status["executor"]) == ("serving", "ray")
    assert [rank["rank"] for rank in status["ranks"]] == [0, 1]
    nodes = [rank["node"] for rank in status["ranks"]]
    assert len(set(nodes)) == 2, f"both ranks are on {nodes[0]}"
    wait(lambda: list(service.get()["status"]["groups"][0]["nodes"]) == nodes, STATUS_SECONDS, service.story)
    assert {pod["metadata"]["name"] for pod in service.pods("worker")} == {rank["host"] for rank in status["ranks"]}


def test_kubectl_get_shows_model_shape_ready_reason_rollout_url_age(service: Service) -> None:
    wait(lambda: service.condition("Progressing")["reason"] == "Complete", STATUS_SECONDS, service.story)
    service.wait_available()
    header, row = service.kubectl("get", "llm", "--namespace", service.namespace).splitlines()
    assert header.split() == ["NAME", "MODEL", "SHAPE", "READY", "REASON", "LOADING", "ROLLOUT", "URL", "AGE"]
    assert row.split()[:6] == ["smollm2-pp2", "builtin://smollm2-135m", "TP1xPP2", "1/1", "Serving", "Complete"]
    url = row.split()[6]
    status, body = service.client.request(f"{url}/v1/models")
    assert (status, json.loads(body)["data"][0]["id"]) == (200, "smollm2-pp2")


def test_the_kv_cache_is_as_large_as_predicted(service: Service) -> None:
    expect_predicted_kv_cache(service)


def test_processes_have_no_rights_and_write_nowhere_but_to_their_volumes(service: Service) -> None:
    head, *workers = [*service.pods("head"), *service.pods("worker")]
    places = [(head, "ray-head"), (head, "engine"), *((pod, "ray-worker") for pod in workers)]
    found = {(pod["metadata"]["name"], name): look_inside(service.kubectl, pod, name) for pod, name in places}
    assert {where: problems for where, each in found.items() if (problems := excess(each))} == {}
    names = {process["Name"][0] for each in found.values() for process in each.processes}
    assert {"raylet", "gcs_server", "rayloom-engine"} <= names
    # Includes the init container that KubeRay adds.
    everything = [container for pod in (head, *workers) for container in containers_of(pod)]
    assert len(everything) == 6
    assert [container["name"] for container in everything if not is_restricted(container)] == []


def test_the_operator_is_restricted_as_well(operator: Kubectl) -> None:
    pods = operator.json("get", "pods", "--namespace", OPERATOR_NAMESPACE)["items"]
    (pod,) = (each for each in pods if "deletionTimestamp" not in each["metadata"])
    assert [problem for problem in excess(look_inside(operator, pod, "operator")) if "token" not in problem] == []


def test_the_engines_account_may_do_what_everybody_may(service: Service) -> None:

    def rights(account: str) -> str:
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{service.namespace}", "system:authenticated"]
        user = f"--as=system:serviceaccount:{service.namespace}:{account}"
        asked = ("auth", "can-i", "--list", "--namespace", service.namespace, user)
        return service.kubectl(*asked, *(f"--as-group={group}" for group in groups))

    accounts = {pod["spec"]["serviceAccountName"] for kind in ("head", "worker") for pod in service.pods(kind)}
    assert accounts == {f"{service.name}-rayloom"}
    assert rights(*accounts) == rights("an-account-that-is-not-there")


def test_others_reach_the_ports_of_the_policy_and_no_other_that_a_pod_opens(service: Service) -> None:
    listed = service.kubectl.json("get", "networkpolicies", "--namespace", service.namespace)["items"]
    (policy,) = [each["spec"] for each in listed]
    label = {"matchLabels": {"rayloom.dev/service": service.name}}
    assert (policy["podSelector"], policy["policyTypes"]) == (label, ["Ingress"])
    *outside, inside = policy["ingress"]
    assert inside == {"from": [{"podSelector": label}]}, "the pods reach each other at every port"
    allowed = {("tcp", port["port"]) for rule in outside for port in rule["ports"]}
    assert allowed == {("tcp", 8000), ("tcp", 8001)}
    opened: set[tuple[str, int]] = set()
    # The pods have more open ports, which only pods of the same service can reach: Ray's ports, and those of the ranks.
    # Gloo, in the ranks, uses ephemeral ports.
    for kind, container, others in (("head", "engine", _HEAD_PORTS), ("worker", "ray-worker", set(_ANY_PORT))):
        for pod in service.pods(kind):
            assert pod["metadata"]["labels"].items() >= label["matchLabels"].items()
            ports = look_inside(service.kubectl, pod, container).ports
            known = _ray_ports(pod) | others
            assert ports - allowed - {("tcp", port) for port in known} == set()
            opened |= ports
    assert allowed < opened
    assert {("tcp", 6379), ("tcp", 6380), ("tcp", 8002)} <= opened - allowed
    assert ("tcp", 8265) not in opened, "the dashboard"


def _ray_ports(pod: dict[str, Any]) -> set[int]:
    """The ports and the port range in the arguments of the pod's `ray start`."""
    named = {flag: int(port) for flag, port in re.findall(r"--([a-z-]*port)=(\d+)", json.dumps(pod["spec"]))}
    return {*named.values(), *range(named["min-worker-port"], named["max-worker-port"] + 1)}


_ASK_RAY = """
import sys
from ray._raylet import GcsClient
try:
    print(len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=20)))
except Exception as error:
    print(error)
"""


def test_ray_asks_for_its_token(service: Service) -> None:
    address = f"{service.pods('head')[0]['status']['podIP']}:6379"
    worker = service.pods("worker")[0]["metadata"]["name"]
    command = ("exec", "--namespace", service.namespace, worker, "--container", "ray-worker", "--", "env")

    def ask(*environment: str) -> str:
        return service.kubectl(*command, *environment, "python3", "-c", _ASK_RAY, address).strip()

    # On a busy machine a request may take longer than Ray's own limits. So the request is repeated.
    wait(lambda: ask().isdigit(), STATUS_SECONDS, ask)
    for environment in (("--unset=RAY_AUTH_TOKEN", "RAY_AUTH_MODE=disabled"), ("RAY_AUTH_TOKEN=a-guess",)):

        def is_refused(environment: tuple[str, ...] = environment) -> bool:
            answer = ask(*environment)
            assert not answer.isdigit(), f"an answer without the token: {environment}"
            return "InvalidAuthToken" in answer

        wait(is_refused, STATUS_SECONDS, ask)


def test_a_restarted_operator_recreates_nothing(service: Service) -> None:
    service.wait_available()
    before = _objects(service)
    assert len([name for name in before if name.startswith("pod/")]) == 3
    operators = ("get", "pods", "--namespace", OPERATOR_NAMESPACE)
    old = {pod["metadata"]["uid"] for pod in service.kubectl.json(*operators)["items"]}
    service.kubectl("delete", "pods", "--all", "--namespace", OPERATOR_NAMESPACE, timeout_s=180)

    def is_back() -> bool:
        pods = service.kubectl.json(*operators)["items"]
        return [is_ready(pod) for pod in pods if pod["metadata"]["uid"] not in old] == [True]

    wait(is_back, READY_SECONDS, lambda: service.kubectl(*operators))
    # Only the operator sets this label. If the label is restored, the new operator has reconciled the service.
    head = service.pods("head")[0]["metadata"]["name"]
    service.kubectl("label", "pod", head, "--namespace", service.namespace, "rayloom.dev/route-")
    wait(
        lambda: "rayloom.dev/route" in service.pods("head")[0]["metadata"]["labels"],
        STATUS_SECONDS,
        lambda: json.dumps(service.get(), indent=1),
    )
    service.wait_available()
    assert _objects(service) == before


def _objects(service: Service) -> dict[str, tuple[str, str]]:
    """Each object of the service -> its uid, and a number that changes with each write.

    The number is the generation for RayClusters and pods, because other controllers write their status. For other
    objects it is the resourceVersion.
    """
    found = {}
    selector = f"rayloom.dev/service={service.name}"
    for kind in ("raycluster", "service", "configmap", "secret", "serviceaccount", "pod"):
        listed = service.kubectl.json("get", kind, "--namespace", service.namespace, "--selector", selector)
        for metadata in [item["metadata"] for item in listed["items"]]:
            version = metadata.get("generation", 0) if kind in ("raycluster", "pod") else metadata["resourceVersion"]
            found[f"{kind}/{metadata['name']}"] = (metadata["uid"], str(version))
    return found


@pytest.mark.slow  # test_faults.py tests the same under streams
def test_a_deleted_worker_pod_is_replaced_and_the_service_is_available_again(
    service: Service, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    service.wait_available()
    before = service.engine_status()
    head = service.pods("head")[0]["metadata"]["uid"]
    victim = service.pods("worker")[0]["metadata"]["name"]
    began = time.monotonic()
    service.kubectl("delete", "pod", victim, "--namespace", service.namespace, "--wait=false")

    def is_rebuilt() -> bool:
        status = service.engine_status()
        return bool(status["state"] == "serving" and status["epoch"] > before["epoch"])

    wait(is_rebuilt, READY_SECONDS, service.story)
    service.wait_available()
    seconds = time.monotonic() - began
    assert service.tokens() == expected
    after = service.engine_status()
    assert victim not in {rank["host"] for rank in after["ranks"]}
    kept = {rank["host"]: rank["pid"] for rank in before["ranks"] if rank["host"] != victim}
    assert kept.items() <= {rank["host"]: rank["pid"] for rank in after["ranks"]}.items(), "the other rank lives on"
    assert service.pods("head")[0]["metadata"]["uid"] == head
    with capsys.disabled():
        print(f"\n  worker pod deleted -> Available again with tokens flowing: {seconds:.1f} s")
