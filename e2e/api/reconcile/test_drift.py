"""The operator restores its objects if others change or delete them. A changed object restarts no engine."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from api.namespaces import llm_service, new_namespace
from api.place import PLACE
from local_kubernetes.clusters.local import LocalCluster
from local_kubernetes.machine.processes import Processes
from operator_processes.process import OperatorProcess, wait_until
from real_api_server.world import LLM, World
from simulated_nodes.api_client import MERGE, Document

Make = Callable[..., dict[str, Any]]

_OTHERS = ("services", "serviceaccounts", "configmaps", "secrets")
_PATHS = {
    "Service": "/api/v1/namespaces/{}/services",
    "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "RayCluster": "/apis/ray.io/v1/namespaces/{}/rayclusters",
}


@pytest.fixture(scope="module")
def running(world: World) -> Iterator[tuple[str, str]]:
    """(namespace, name) of a serving service."""
    world.operator()
    namespace = new_namespace(world, "drift")
    world.create(llm_service(namespace, "chat"))
    world.wait_serving(namespace, "chat")
    yield namespace, "chat"
    world.delete(f"/api/v1/namespaces/{namespace}")


def test_words_of_a_spec_arrive_as_they_are(world: World, operator: OperatorProcess, namespace: str) -> None:
    # The API server parses an applied document as YAML. YAML treats some of these characters as blanks and refuses
    # others.
    words = "a \x85 b \u2028 c \x7f \U0001f600"
    document = llm_service(namespace, "chat", engine={"env": [{"name": "WORDS", "value": words}]})
    world.request("POST", f"{LLM}/namespaces/{namespace}/llmservices", document)
    world.wait_serving(namespace, "chat")
    (cluster,) = world.objects(namespace, "chat", "rayclusters").values()
    containers = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    found = [each["value"] for one in containers for each in one.get("env", ()) if each["name"] == "WORDS"]
    assert found and set(found) == {words}


def _own(world: World, where: tuple[str, str], kind: str) -> Document:
    """The only object of this kind that the operator created. KubeRay's objects do not count."""
    (one,) = _all_own(world, where, kind)
    return one


def _all_own(world: World, where: tuple[str, str], kind: str) -> list[Document]:
    uid = world.services[where]["metadata"]["uid"]
    return [
        each
        for name, each in world.objects(*where).items()
        if name.startswith(f"{kind}/") and uid in {owner["uid"] for owner in each["metadata"]["ownerReferences"]}
    ]


def _uids(world: World, where: tuple[str, str]) -> set[str]:
    return {each["metadata"]["uid"] for each in world.pods(*where)}


@pytest.mark.parametrize("kind", ["Service", "ServiceAccount"])
def test_what_is_deleted_by_hand_comes_back(kind: str, world: World, running: tuple[str, str]) -> None:
    before, pods = _own(world, running, kind), _uids(world, running)
    path = f"{_PATHS[kind].format(running[0])}/{before['metadata']['name']}"
    world.request("DELETE", path)
    wait_until(lambda: world.get(path), f"the {kind} to come back", story=world.story)
    after = _own(world, running, kind)
    assert after["metadata"]["uid"] != before["metadata"]["uid"]
    assert after["metadata"]["labels"] == before["metadata"]["labels"]
    assert _uids(world, running) == pods


_EDITS: dict[str, tuple[str, Document, Callable[[Document], object]]] = {
    "the selector of the Service": (
        "Service",
        {"spec": {"selector": {"rayloom.dev/route": "false"}}},
        lambda found: found["spec"]["selector"],
    ),
    "the port of the Service": (
        "Service",
        {"spec": {"ports": [{"name": "http", "port": 8000, "targetPort": 9999, "protocol": "TCP"}]}},
        lambda found: found["spec"]["ports"][0]["targetPort"],
    ),
    "the account's token": (
        "ServiceAccount",
        {"automountServiceAccountToken": True},
        lambda found: found["automountServiceAccountToken"],
    ),
    "a label": (
        "Service",
        {"metadata": {"labels": {"app.kubernetes.io/managed-by": "somebody"}}},
        lambda found: found["metadata"]["labels"]["app.kubernetes.io/managed-by"],
    ),
}


@pytest.mark.parametrize("edit", _EDITS)
def test_what_is_edited_by_hand_is_as_before(edit: str, world: World, running: tuple[str, str]) -> None:
    kind, change, field = _EDITS[edit]
    before, pods = _own(world, running, kind), _uids(world, running)
    path = f"{_PATHS[kind].format(running[0])}/{before['metadata']['name']}"
    changed = world.request("PATCH", path, change, content_type=MERGE)
    assert field(changed) != field(before)
    wait_until(lambda: field(_own(world, running, kind)) == field(before), "the old value", story=world.story)
    assert _uids(world, running) == pods


@pytest.mark.parametrize("kind", ["ConfigMap", "Secret"])
def test_what_a_head_mounts_is_there_when_a_head_starts(kind: str, world: World, running: tuple[str, str]) -> None:
    name = _own(world, running, kind)["metadata"]["name"]
    before = _own(world, running, "RayCluster")["metadata"]["uid"]
    world.request("DELETE", f"{_PATHS[kind].format(running[0])}/{name}")
    (head,) = [
        each["metadata"]["name"]
        for each in world.pods(*running)
        if each["metadata"]["labels"]["ray.io/node-type"] == "head"
    ]
    world.request("DELETE", f"/api/v1/namespaces/{running[0]}/pods/{head}")
    # The loss of the head ends the engine replica, and the next replica has objects of its own.
    world.wait_replaced(*running, {before})
    wait_until(lambda: len(_all_own(world, running, kind)) == 1, "the old one's end")
    cluster = _own(world, running, "RayCluster")["metadata"]["name"]
    assert name != _own(world, running, kind)["metadata"]["name"] in (cluster, f"{cluster}-admin")


def test_a_deleted_raycluster_is_made_again(world: World, running: tuple[str, str]) -> None:
    before, pods = _own(world, running, "RayCluster")["metadata"], _uids(world, running)
    world.request("DELETE", f"{_PATHS['RayCluster'].format(running[0])}/{before['name']}")

    def are_all_of_another() -> bool:
        # KubeRay's cache may be stale, too. Then KubeRay creates a pod for the deleted RayCluster and deletes the pod
        # again.
        clusters = {each["metadata"]["uid"] for each in _all_own(world, running, "RayCluster")} - {before["uid"]}
        found = world.pods(*running)
        owners = {owner["uid"] for each in found for owner in each["metadata"]["ownerReferences"]}
        return len(found) == 2 and not _uids(world, running) & pods and owners == clusters

    wait_until(are_all_of_another, "other pods")
    world.wait_replaced(*running, {before["uid"]})


def test_a_route_label_taken_away_by_hand_comes_back(world: World, running: tuple[str, str]) -> None:
    world.wait_serving(*running)
    pods = _uids(world, running)
    (head,) = [each for each in world.pods(*running) if each["metadata"]["labels"]["ray.io/node-type"] == "head"]
    path = f"/api/v1/namespaces/{running[0]}/pods/{head['metadata']['name']}"
    world.request("PATCH", path, {"metadata": {"labels": {"rayloom.dev/route": None}}}, content_type=MERGE)

    def is_routed() -> bool:
        found = world.get(path)
        return found is not None and found["metadata"]["labels"].get("rayloom.dev/route") == "true"

    wait_until(is_routed, "the route label", story=world.story)
    assert _uids(world, running) == pods


def test_a_service_deleted_and_recreated_at_once_gets_objects_of_its_own(
    world: World, operator: OperatorProcess, namespace: str, manifest: Make
) -> None:
    for _ in range(3):
        first = world.create(manifest())["metadata"]["uid"]
        world.request("DELETE", f"{LLM}/namespaces/{namespace}/llmservices/chat")
        second = world.create(manifest())["metadata"]["uid"]
        assert first != second
    world.wait_serving(namespace, "chat")
    assert world.services[(namespace, "chat")]["metadata"]["uid"] == second

    def owners() -> set[str]:
        found = world.objects(namespace, "chat").values()
        return {owner["uid"] for each in found for owner in each["metadata"]["ownerReferences"]}

    cluster = _own(world, (namespace, "chat"), "RayCluster")["metadata"]["uid"]
    wait_until(lambda: owners() <= {second, cluster}, "nothing of another service", story=owners)


def test_hands_off_a_service_that_was_deleted(
    world: World, operator: OperatorProcess, namespace: str, manifest: Make
) -> None:
    world.create(manifest())
    world.wait_serving(namespace, "chat")
    world.request("DELETE", f"{LLM}/namespaces/{namespace}/llmservices/chat")
    wait_until(lambda: not world.objects(namespace, "chat") and not world.pods(namespace, "chat"), "all to go")


_RAY_CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/rayclusters.ray.io"


@pytest.fixture
def kuberay_definition(world: World) -> Iterator[Document]:
    """The CRD of RayClusters, restored after the test."""
    definition = world.request("GET", _RAY_CRD)
    yield definition
    _reinstall(world, definition)


def _reinstall(world: World, definition: Document) -> None:
    """Restores KubeRay and its CRD, as a new installation would."""
    wait_until(
        lambda: "deletionTimestamp" not in (world.get(_RAY_CRD) or definition)["metadata"], "the end of a deletion"
    )
    _put(world, _bare(definition))

    def is_established() -> bool:
        status = (world.get(_RAY_CRD) or {}).get("status") or {}
        return any((each["type"], each["status"]) == ("Established", "True") for each in status.get("conditions") or ())

    wait_until(is_established, "the definition to be established")
    # KubeRay's informer backs off while its CRD does not exist.
    Processes(PLACE.state).stop("kuberay")
    LocalCluster(PLACE).up("api")


def _put(world: World, definition: Document) -> None:
    options = {"content_type": "application/apply-patch+yaml", "fieldManager": "kubectl", "force": "true"}
    world.request("PATCH", _RAY_CRD, definition, **options)


def test_kuberay_removed_while_services_run_and_back_again(
    world: World, operator: OperatorProcess, namespace: str, manifest: Make, kuberay_definition: Document
) -> None:
    world.create(manifest())
    world.wait_serving(namespace, "chat")
    kept = {name for name in world.objects(namespace, "chat") if name.split("/")[0] in ("Service", "ServiceAccount")}
    began = operator.proxy.log[-1].at
    world.request("DELETE", _RAY_CRD)
    accepted = world.wait(namespace, "chat", "Accepted", "UnsupportedKubeRay")
    assert "KubeRay" in accepted["message"]
    assert operator.is_alive
    # The API server deletes the RayClusters before their definition. If the operator sees this first, it also deletes
    # what was left of the engine: its Secret and its ConfigMap.
    deleted = [each.path for each in operator.proxy.writes(namespace, began) if each.method == "DELETE"]
    assert [
        path for path in deleted if not re.search(r"/(secrets|configmaps)/chat-[0-9a-f]+-\d+(-admin)?$", path)
    ] == []
    present = set(world.objects(namespace, "chat", *_OTHERS))
    assert kept - {name for name in kept if name.endswith("-head-svc")} <= present
    _reinstall(world, kuberay_definition)
    world.wait_serving(namespace, "chat")


def test_an_old_kuberay_is_reported_and_running_engines_stay(
    world: World, operator: OperatorProcess, namespace: str, manifest: Make, kuberay_definition: Document
) -> None:
    world.create(manifest())
    world.wait_serving(namespace, "chat")
    pods = _uids(world, (namespace, "chat"))
    old = _bare(kuberay_definition)
    for version in old["spec"]["versions"]:
        version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"].pop("authOptions", None)
    _put(world, old)
    accepted = world.wait(namespace, "chat", "Accepted", "UnsupportedKubeRay")
    assert "1.6" in accepted["message"]
    assert world.condition(namespace, "chat", "Available")["status"] == "True"
    _put(world, _bare(kuberay_definition))
    world.wait(namespace, "chat", "Accepted", "Valid")
    assert _uids(world, (namespace, "chat")) == pods


def _bare(definition: Document) -> Document:
    """The CRD as a manifest, without the fields that the API server sets."""
    meta = {"name": definition["metadata"]["name"], "annotations": definition["metadata"].get("annotations", {})}
    return copy.deepcopy({key: definition[key] for key in ("apiVersion", "kind", "spec")} | {"metadata": meta})
