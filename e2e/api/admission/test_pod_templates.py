"""Every field of spec.podTemplate reaches the pods that KubeRay creates, and the API server refuses mistakes in it.

The examples of docs/pod-template.md are applied without changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from api.admission.whole_templates import CLUSTER_OBJECTS, TEMPLATES
from local_kubernetes.machine.place import REPOSITORY
from operator_processes.process import OperatorProcess, wait_for
from rayloom_operator.api.pod_template.template import PodTemplates
from rayloom_operator.api.status import Reason
from real_api_server.world import World
from rt_blocks import blocks_of

Make = Callable[..., dict[str, Any]]
Document = dict[str, Any]

_PAGE = REPOSITORY / "docs" / "pod-template.md"
_EXAMPLES = [block for block in blocks_of(REPOSITORY, _PAGE) if block.language == "yaml"]
# Keys that identify an element of a list.
_KEYS = ("mountPath", "devicePath", "name", "ip", "key", "topologyKey", "prefix")


@pytest.fixture(scope="module", autouse=True)
def cluster_objects(world: World) -> Iterator[None]:
    for path, document in CLUSTER_OBJECTS:
        world.delete(f"{path}/{document['metadata']['name']}")
        world.request("POST", path, document)
    yield
    for path, document in CLUSTER_OBJECTS:
        world.delete(f"{path}/{document['metadata']['name']}")


def _pods(world: World, namespace: str, name: str) -> dict[str, Document]:
    """Waits until head pod and worker pod exist. Returns type -> pod."""

    def both() -> dict[str, Document] | None:
        found = {each["metadata"]["labels"]["ray.io/node-type"]: each for each in world.pods(namespace, name)}
        return found if found.keys() == {"head", "worker"} else None

    def story() -> str:
        return f"{world.services.get((namespace, name), {}).get('status')}\n{world.story()}"

    return wait_for(both, f"the pods of {name}", story=story)


def _missing(wanted: Any, found: Any, path: str) -> Iterator[str]:
    """The paths of those values of `wanted` that `found` lacks. `found` may have additional values."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key, value in wanted.items():
            yield from _missing(value, found.get(key), f"{path}.{key}")
    elif isinstance(wanted, list) and isinstance(found, list):
        for each in wanted:
            key = next((key for key in _KEYS if isinstance(each, dict) and key in each), None)
            same = [other for other in found if key is not None and other.get(key) == each[key]]
            if key is not None and same:
                yield from _missing(each, same[0], f"{path}[{each[key]}]")
            elif all(list(_missing(each, other, path)) for other in found):
                yield f"{path}: no {each} in {found}"
    elif wanted != found:
        yield f"{path}: {found!r} instead of {wanted!r}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_field_reaches_the_pods(
    name: str, world: World, operator: OperatorProcess, namespace: str, manifest: Make
) -> None:
    template = TEMPLATES[name]
    world.create(manifest(name, podTemplate=template))
    pods = _pods(world, namespace, name)
    for kind in ("head", "worker"):
        wanted = template[kind]
        assert list(_missing(wanted, pods[kind], kind)) == []
        # The operator's own containers, labels and users are kept.
        names = [each["name"] for each in pods[kind]["spec"]["containers"]]
        assert names[: 2 if kind == "head" else 1] == (["ray-head", "engine"] if kind == "head" else ["ray-worker"])
        assert pods[kind]["metadata"]["labels"]["rayloom.dev/service"] == name
        security = pods[kind]["spec"]["securityContext"]
        given = wanted["spec"].get("securityContext", {})
        assert security.get("runAsUser") == (None if name == "of-the-cluster" else given.get("runAsUser", 1000))
    world.wait(namespace, name, "Accepted", Reason.VALID)


def _given(document: Any) -> set[str]:
    """Paths of all fields, without the indices of lists."""
    if isinstance(document, list):
        return {path for each in document for path in _given(each)}
    if not isinstance(document, dict):
        return set()
    return {path for key, each in document.items() for path in (key, *(f"{key}.{inner}" for inner in _given(each)))}


def _fields(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        key = field.alias or name
        yield key
        inner = _model(field.annotation)
        if inner is not None:
            yield from (f"{key}.{path}" for path in _fields(inner))


def _model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model, get_args(annotation))), None)


def test_no_field_is_left_out() -> None:
    given = {path for template in TEMPLATES.values() for path in _given(template)}
    assert [path for path in _fields(PodTemplates) if path not in given] == []


def test_pods_in_the_nodes_network_have_a_node_each(
    world: World, operator: OperatorProcess, namespace: str, manifest: Make
) -> None:
    template = {kind: {"spec": {"hostNetwork": True}} for kind in ("head", "worker")}
    world.create(manifest(podTemplate=template))
    world.wait_serving(namespace, "chat")
    pods = _pods(world, namespace, "chat")
    assert {each["spec"]["nodeName"] for each in pods.values()} == {"standin-a", "standin-b"}
    assert {each["spec"]["dnsPolicy"] for each in pods.values()} == {"ClusterFirstWithHostNet"}
    # There is no third node, so the second service cannot be scheduled.
    world.create(manifest("second", podTemplate=template))
    world.wait(namespace, "second", "Available", Reason.UNSCHEDULABLE)


def test_reserved_variables_are_out_of_reach_of_env_from(
    world: World, operator: OperatorProcess, namespace: str, manifest: Make
) -> None:
    data = {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": "192.0.2.1:6379", "RAYLOOM_ALIVE_FILE": "/x", "MINE": "1"}
    config = {"metadata": {"name": "settings"}, "data": data}
    world.request("POST", f"/api/v1/namespaces/{namespace}/configmaps", config)
    source = [{"configMapRef": {"name": "settings"}}]
    containers = {"head": ("ray-head", "engine"), "worker": ("ray-worker",)}
    template = {
        kind: {"spec": {"containers": [{"name": name, "envFrom": source} for name in names]}}
        for kind, names in containers.items()
    }
    world.create(manifest(podTemplate=template))
    pods = _pods(world, namespace, "chat")
    for kind, names in containers.items():
        for container in pods[kind]["spec"]["containers"][: len(names)]:
            assert container["envFrom"] == source
            # If a name is in `env` and in `envFrom`, the value in `env` counts.
            variables = [each["name"] for each in container["env"]]
            assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS", "RAYLOOM_ALIVE_FILE"} <= set(variables)
            assert len(set(variables)) == len(variables)
            (mode,) = [each["value"] for each in container["env"] if each["name"] == "RAY_AUTH_MODE"]
            assert mode == "token"


_MISTAKES: dict[str, tuple[Document, str, Reason, str]] = {
    # Messages of the API server about the RayCluster, whose CRD has every field of a pod.
    "a-misspelt-probe": (
        {"containers": [{"name": "a", "image": "i", "readinessProbe": {"tcpSockt": {"port": 1}}}]},
        "Accepted",
        Reason.APPLY_REFUSED,
        "tcpSockt",
    ),
    "an-unknown-kind-of-volume": (
        {"volumes": [{"name": "a", "s3": {"bucket": "b"}}]},
        "Accepted",
        Reason.APPLY_REFUSED,
        "s3",
    ),
    "affinity-of-a-wrong-type": (
        {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": 5}}}},
        "Accepted",
        Reason.APPLY_REFUSED,
        "nodeSelectorTerms",
    ),
    # Messages of the API server about the pods. KubeRay forwards these messages.
    "no-such-runtime": ({"runtimeClassName": "none-such"}, "Available", Reason.CONTAINER_FAILED, "none-such"),
    "no-such-priority": ({"priorityClassName": "none-such"}, "Available", Reason.CONTAINER_FAILED, "none-such"),
    "no-source-of-a-variable": (
        {"containers": [{"name": "ray-worker", "env": [{"name": "A", "valueFrom": {}}]}]},
        "Available",
        Reason.CONTAINER_FAILED,
        "must specify one of",
    ),
    # Messages of the operator.
    "a-capability": (
        {"containers": [{"name": "ray-worker", "securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}]},
        "Accepted",
        Reason.NOT_ALLOWED,
        "let whoever runs the operator add SYS_ADMIN to podTemplate.allow",
    ),
    "a-path-of-the-node": (
        {"volumes": [{"name": "a", "hostPath": {"path": "/etc"}}]},
        "Accepted",
        Reason.NOT_ALLOWED,
        "'/etc' is a path on nodes, and this operator allows only /models",
    ),
}


@pytest.mark.parametrize("name", _MISTAKES)
def test_a_mistake_that_only_the_cluster_can_find_is_named_in_a_condition(
    name: str, world: World, operator: OperatorProcess, namespace: str, manifest: Make
) -> None:
    spec, kind, reason, sentence = _MISTAKES[name]
    world.create(manifest(name, podTemplate={"worker": {"spec": spec}}))
    world.wait(namespace, name, kind, reason, sentence)
    assert operator.is_alive


def test_a_template_that_is_refused_leaves_the_engines_that_run(
    world: World, operator: OperatorProcess, namespace: str, manifest: Make
) -> None:
    world.create(manifest())
    world.wait_serving(namespace, "chat")
    before = {each["metadata"]["uid"] for each in world.pods(namespace, "chat")}
    spec, kind, reason, _ = _MISTAKES["a-misspelt-probe"]
    world.create(manifest(podTemplate={"worker": {"spec": spec}}))
    world.wait(namespace, "chat", kind, reason)
    world.create(manifest(podTemplate={"worker": {"spec": _MISTAKES["a-capability"][0]}}))
    world.wait(namespace, "chat", "Accepted", Reason.NOT_ALLOWED)
    assert {each["metadata"]["uid"] for each in world.pods(namespace, "chat")} == before
    assert world.condition(namespace, "chat", "Available")["status"] == "True"


@pytest.mark.parametrize("block", _EXAMPLES, ids=[block.name for block in _EXAMPLES])
def test_an_example_of_the_page_is_accepted_and_makes_its_pods(
    block: Any, world: World, operator: OperatorProcess, namespace: str
) -> None:
    document = yaml.safe_load(block.text)
    document["metadata"]["namespace"] = namespace
    # The embedded model needs no inspection. With its 9 attention heads, most values of parallelism are impossible.
    document["spec"]["model"] = {"source": "builtin://smollm2-135m"}
    document["spec"].pop("parallelism", None)
    for each in ("head", "worker"):
        spec = document["spec"]["podTemplate"].get(each, {}).get("spec", {})
        if "runtimeClassName" in spec:
            spec["runtimeClassName"] = CLUSTER_OBJECTS[0][1]["metadata"]["name"]
    world.create(document)
    name = document["metadata"]["name"]
    pods = _pods(world, namespace, name)
    for kind, pod in pods.items():
        assert list(_missing(document["spec"]["podTemplate"].get(kind, {}), pod, kind)) == []
