"""From `kubectl apply` to tokens on real pods: two ranks on two nodes, deleted pods, a restart of the operator."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from clients.client_pod import Client
from clients.namespaces import new_namespace
from clients.service import (
    OPERATOR_NAMESPACE,
    READY_SECONDS,
    ROOT,
    STATUS_SECONDS,
    Service,
    is_ready,
    manifest,
    wait,
)
from disruptions.model_folders import claim_on_the_nodes
from local_kubernetes.machine.kubectl import Kubectl
from observers.container_view import excess, look_inside

EXAMPLE = ROOT / "examples" / "smollm2-pp2.yaml"
# Ports of a head: Ray's control store, and the engine's port for ranks.
_HEAD_PORTS = {6379, 8002}
_MUCH_MEMORY_KIB = 14 << 20
# Linux' range of ephemeral ports.
_ANY_PORT = range(32768, 61000)


@pytest.fixture(scope="module")
def pipeline(operator: Kubectl) -> Iterator[tuple[Service, float]]:
    """The service of smollm2-pp2.yaml, and the seconds from `kubectl apply` to a client's first token."""
    with new_namespace(operator, "pp2") as namespace:
        client = Client.start(operator, namespace)
        service = Service(operator, client, namespace, "smollm2-pp2")
        began = time.monotonic()
        operator.apply(manifest(EXAMPLE, namespace))
        wait(
            # A short timeout: a connection that begins while a node changes its rules for the Service hangs.
            lambda: service.chat(timeout_s=5, max_tokens=1)[0] == 200,
            READY_SECONDS,
            service.story,
        )
        yield service, time.monotonic() - began


def _seconds(later: str, earlier: str) -> float:
    form = "%Y-%m-%dT%H:%M:%SZ"
    return time.mktime(time.strptime(later, form)) - time.mktime(time.strptime(earlier, form))


def test_the_first_token_and_where_the_seconds_went(
    pipeline: tuple[Service, float], capsys: pytest.CaptureFixture[str]
) -> None:
    service, seconds = pipeline
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


def test_two_ranks_on_two_nodes_say_what_one_rank_says_here(
    pipeline: tuple[Service, float], expected: list[str]
) -> None:
    service, _ = pipeline
    assert service.tokens() == expected
    service.wait_available()
    status = service.engine_status()
    assert (status["state"], status["executor"]) == ("serving", "ray")
    assert [rank["rank"] for rank in status["ranks"]] == [0, 1]
    nodes = [rank["node"] for rank in status["ranks"]]
    assert len(set(nodes)) == 2, f"both ranks are on {nodes[0]}"
    wait(lambda: list(service.get()["status"]["groups"][0]["nodes"]) == nodes, STATUS_SECONDS, service.story)
    assert {pod["metadata"]["name"] for pod in service.pods("worker")} == {rank["host"] for rank in status["ranks"]}


def test_kubectl_get_shows_model_shape_ready_reason_rollout_url_age(pipeline: tuple[Service, float]) -> None:
    service, _ = pipeline
    wait(lambda: service.condition("Progressing")["reason"] == "Complete", STATUS_SECONDS, service.story)
    service.wait_available()
    header, row = service.kubectl("get", "llm", "--namespace", service.namespace).splitlines()
    assert header.split() == ["NAME", "MODEL", "SHAPE", "READY", "REASON", "LOADING", "ROLLOUT", "URL", "AGE"]
    assert row.split()[:6] == ["smollm2-pp2", "builtin://smollm2-135m", "TP1xPP2", "1/1", "Serving", "Complete"]
    url = row.split()[6]
    status, body = service.client.request(f"{url}/v1/models")
    assert (status, json.loads(body)["data"][0]["id"]) == (200, "smollm2-pp2")


def test_the_kv_cache_is_as_large_as_predicted(pipeline: tuple[Service, float]) -> None:
    _expect_predicted_kv_cache(pipeline[0])


def _expect_predicted_kv_cache(service: Service) -> None:
    """Compares both sizes of the KV cache, if other work leaves the node enough memory.

    The prediction for a CPU is 4 GiB. A rank that starts with less than 8 GiB of free memory allocates half of this.
    """
    predicted = service.get()["status"]["sizing"]["kvTokens"]
    cache = service.engine_status()["kv_cache"]
    measured = cache["num_blocks"] * cache["block_size"]
    found = re.search(r"MemAvailable: +(\d+) kB", service.client.python("print(open('/proc/meminfo').read())"))
    assert found is not None
    least = 0.95 if int(found[1]) > _MUCH_MEMORY_KIB else 0.0
    assert least <= measured / predicted <= 1.05, f"{predicted / measured - 1:+.1%}, {found[0]}"


def test_processes_have_no_rights_and_write_nowhere_but_to_their_volumes(pipeline: tuple[Service, float]) -> None:
    service, _ = pipeline
    head, *workers = [*service.pods("head"), *service.pods("worker")]
    places = [(head, "ray-head"), (head, "engine"), *((pod, "ray-worker") for pod in workers)]
    found = {(pod["metadata"]["name"], name): look_inside(service.kubectl, pod, name) for pod, name in places}
    assert {where: problems for where, each in found.items() if (problems := excess(each))} == {}
    names = {process["Name"][0] for each in found.values() for process in each.processes}
    assert {"raylet", "gcs_server", "rayloom-engine"} <= names
    # Includes the init container that KubeRay adds.
    everything = [container for pod in (head, *workers) for container in _containers(pod)]
    assert len(everything) == 6
    assert [container["name"] for container in everything if not _is_restricted(container)] == []


def test_the_operator_is_restricted_as_well(operator: Kubectl) -> None:
    pods = operator.json("get", "pods", "--namespace", OPERATOR_NAMESPACE)["items"]
    (pod,) = (each for each in pods if "deletionTimestamp" not in each["metadata"])
    assert [problem for problem in excess(look_inside(operator, pod, "operator")) if "token" not in problem] == []


def _containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def _is_restricted(container: dict[str, Any]) -> bool:
    rights = container.get("securityContext", {})
    return (
        rights.get("readOnlyRootFilesystem") is True
        and rights.get("allowPrivilegeEscalation") is False
        and rights.get("capabilities") == {"drop": ["ALL"]}
    )


def test_the_engines_account_may_do_what_everybody_may(pipeline: tuple[Service, float]) -> None:
    service, _ = pipeline

    def rights(account: str) -> str:
        groups = ["system:serviceaccounts", f"system:serviceaccounts:{service.namespace}", "system:authenticated"]
        user = f"--as=system:serviceaccount:{service.namespace}:{account}"
        asked = ("auth", "can-i", "--list", "--namespace", service.namespace, user)
        return service.kubectl(*asked, *(f"--as-group={group}" for group in groups))

    accounts = {pod["spec"]["serviceAccountName"] for kind in ("head", "worker") for pod in service.pods(kind)}
    assert accounts == {f"{service.name}-rayloom"}
    assert rights(*accounts) == rights("an-account-that-is-not-there")


def test_others_reach_the_ports_of_the_policy_and_no_other_that_a_pod_opens(pipeline: tuple[Service, float]) -> None:
    service, _ = pipeline
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


def test_ray_asks_for_its_token(pipeline: tuple[Service, float]) -> None:
    service, _ = pipeline
    address = f"{service.pods('head')[0]['status']['podIP']}:6379"
    worker = service.pods("worker")[0]["metadata"]["name"]
    command = ("exec", "--namespace", service.namespace, worker, "--container", "ray-worker", "--", "env")

    def ask(*environment: str) -> str:
        return service.kubectl(*command, *environment, "python3", "-c", _ASK_RAY, address).strip()

    # On a busy machine a request may take longer than Ray's own limits, so it is tried again.
    wait(lambda: ask().isdigit(), STATUS_SECONDS, ask)
    for environment in (("--unset=RAY_AUTH_TOKEN", "RAY_AUTH_MODE=disabled"), ("RAY_AUTH_TOKEN=a-guess",)):

        def is_refused(environment: tuple[str, ...] = environment) -> bool:
            answer = ask(*environment)
            assert not answer.isdigit(), f"an answer without the token: {environment}"
            return "InvalidAuthToken" in answer

        wait(is_refused, STATUS_SECONDS, ask)


def test_a_restarted_operator_recreates_nothing(pipeline: tuple[Service, float]) -> None:
    service, _ = pipeline
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

    The number is the generation for objects with a status, since other controllers write the status.
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
    pipeline: tuple[Service, float], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    service, _ = pipeline
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


_HEAD_LIMITS = {"cpu": "2", "memory": "2Gi"}
_SETTINGS = {"RAY_AUTH_MODE": "disabled", "RAYLOOM_ALIVE_FILE": "/nowhere", "FROM_SETTINGS": "yes"}
_FROM_SECRET = {"name": "PASSPHRASE", "valueFrom": {"secretKeyRef": {"name": "template", "key": "passphrase"}}}


def _template(*containers: str, **fields: Any) -> dict[str, Any]:
    mount = {"name": "settings", "mountPath": "/etc/settings", "readOnly": True}
    common = {"env": [_FROM_SECRET], "envFrom": [{"configMapRef": {"name": "template"}}], "volumeMounts": [mount]}
    return {
        "metadata": {"labels": {"team": "search"}, "annotations": {"example.com/of-the-template": "yes"}},
        "spec": {
            "volumes": [{"name": "settings", "configMap": {"name": "template"}}],
            "containers": [{"name": name, **common, **fields} for name in containers],
        },
    }


def _templates_and_what_they_name(namespace: str) -> tuple[dict[str, Any], ...]:
    """The pod templates of a service, then a Secret and a ConfigMap."""
    metadata = {"name": "template", "namespace": namespace}
    head = _template("ray-head", "engine", resources={"limits": _HEAD_LIMITS})
    return (
        {"head": head, "worker": _template("ray-worker")},
        {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"passphrase": "open sesame"}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": _SETTINGS},
    )


@pytest.fixture(scope="module")
def others(operator: Kubectl) -> Iterator[dict[str, Service]]:
    """Name -> service of two examples that start at the same time."""
    with new_namespace(operator, "others") as namespace, claim_on_the_nodes(operator, namespace, "models", "smollm2"):
        client = Client.start(operator, namespace)
        model = {"source": "builtin://smollm2-135m", "dtype": "float32"}
        templates, *named = _templates_and_what_they_name(namespace)
        operator.apply(
            *named,
            manifest(ROOT / "examples" / "pvc-model.yaml", namespace),
            manifest(ROOT / "examples" / "smollm2-tp3.yaml", namespace, model=model, podTemplate=templates),
        )
        yield {name: Service(operator, client, namespace, name) for name in ("from-claim", "smollm2-tp3")}


def test_one_rank_serves_a_model_of_a_claim(operator: Kubectl, others: dict[str, Service]) -> None:
    service = others["from-claim"]
    service.wait_available()
    # A shorter question has two almost equally likely answers in bfloat16, and the result would depend on the
    # processor.
    question = "What is the capital of France? Answer in one sentence."
    status, body = service.chat(messages=[{"role": "user", "content": question}])
    assert status == 200 and "Paris" in body, body
    assert len(service.engine_status()["ranks"]) == 1
    _expect_predicted_kv_cache(service)
    jobs = operator.json("get", "pods", "--namespace", service.namespace, "--selector", "job-name")["items"]
    assert jobs and all(_is_restricted(container) for pod in jobs for container in _containers(pod))


def test_three_ranks_of_one_pod_say_what_one_rank_says_here(others: dict[str, Service], expected: list[str]) -> None:
    service = others["smollm2-tp3"]
    service.wait_available()
    assert service.tokens() == expected
    ranks = service.engine_status()["ranks"]
    (pod,) = service.pods("worker")
    assert [(rank["rank"], rank["host"]) for rank in ranks] == [
        (number, pod["metadata"]["name"]) for number in range(3)
    ]
    assert service.get()["status"]["shape"] == "TP3xPP1"
    _expect_predicted_kv_cache(service)


def test_what_a_pod_template_says_is_so_inside_the_containers(operator: Kubectl, others: dict[str, Service]) -> None:
    service = others["smollm2-tp3"]
    service.wait_available()
    (head,), (worker,) = service.pods("head"), service.pods("worker")
    for pod, containers in ((head, ("ray-head", "engine")), (worker, ("ray-worker",))):
        assert pod["metadata"]["labels"]["team"] == "search"
        assert pod["metadata"]["annotations"]["example.com/of-the-template"] == "yes"
        for name in containers:
            command = ("exec", "--namespace", service.namespace, pod["metadata"]["name"], "--container", name, "--")
            variables = dict(line.split("=", 1) for line in operator(*command, "env").splitlines() if "=" in line)
            assert (variables["PASSPHRASE"], variables["FROM_SETTINGS"]) == ("open sesame", "yes")
            # The ConfigMap has other values for these variables.
            assert variables["RAY_AUTH_MODE"] == "token" and variables["RAYLOOM_ALIVE_FILE"] != "/nowhere"
            assert operator(*command, "cat", "/etc/settings/FROM_SETTINGS") == "yes"
    limits = {each["name"]: each["resources"]["limits"] for each in head["spec"]["containers"]}
    assert limits == {"ray-head": _HEAD_LIMITS, "engine": _HEAD_LIMITS}
