"""Every reason of a condition, reached on a real API server, with its message and Event.

All services of the table are created at once, and each test waits for one service. `test_every_reason_has_a_scene`
fails if a new reason has no row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from api.namespaces import delete_services, llm_service, new_namespace
from local_kubernetes.machine.place import REPOSITORY
from operator_processes.process import OperatorProcess, wait_until
from rayloom_operator.api.status import FAULTS, Reason
from real_api_server.world import LLM, World
from simulated_nodes.api_client import MERGE
from simulated_nodes.pod_status import Play

_CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/llmservices.rayloom.dev"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The behaviour of a service's pods and engine, and the condition that it causes."""

    reason: Reason
    kind: str = "Available"
    says: str = ""  # a part of the condition's message
    spec: dict[str, Any] = field(default_factory=dict)
    head: Play | None = None
    worker: Play | None = None
    engine: dict[str, Any] = field(default_factory=dict)  # fields of the service's engine once the engine serves
    before: dict[str, Any] | None = None  # an object with the service's name that exists before the service
    job: Play | None = None  # behaviour of the Job that inspects the model
    loses_head: bool = False  # the service's head pod is deleted once the service serves


def _waiting(reason: str, message: str = "") -> Play:
    return Play(waiting=(reason, message))


def _refusal(reason: str, message: str) -> Play:
    """The termination message of the inspection Job for a model that the engine cannot serve."""
    return Play(ended=(78, json.dumps({"version": "v1", "error": {"reason": reason, "message": message}})))


_FILE = {"model": {"source": "file:///models/x"}}
_HUB = {"model": {"source": "hf://acme/x"}}
# An operator that is older than the CRD finds unknown fields in a spec.
_UNKNOWN_FIELD = {"fieldOfALaterVersion": "x"}

SCENES = {
    "valid": Scene(reason=Reason.VALID, kind="Accepted", says="can be used"),
    "invalid-spec": Scene(
        reason=Reason.INVALID_SPEC, kind="Accepted", says="fieldOfALaterVersion", spec=_UNKNOWN_FIELD
    ),
    "not-allowed": Scene(
        reason=Reason.NOT_ALLOWED,
        kind="Accepted",
        says="'/srv' is a path on nodes, and this operator allows only /models",
        spec={"model": {"source": "file:///srv"}},
    ),
    "apply-refused": Scene(
        reason=Reason.APPLY_REFUSED,
        kind="Accepted",
        says="the Service apply-refused exists and is not ours; delete it",
        before={"apiVersion": "v1", "kind": "Service", "spec": {"ports": [{"port": 80}]}},
    ),
    "loaded": Scene(reason=Reason.LOADED, kind="ModelReady"),
    "loading": Scene(reason=Reason.LOADING, kind="ModelReady", engine={"state": "starting"}),
    "not-found": Scene(
        reason=Reason.MODEL_NOT_FOUND,
        kind="ModelReady",
        says="There is no model",
        head=Play(ended=(78, "There is no model at file:///models/x")),
    ),
    "not-mounted": Scene(
        reason=Reason.MODEL_NOT_FOUND,
        kind="ModelReady",
        says="Put the model at this path on every node",
        spec=_FILE,
        job=Play(mount_failure='MountVolume.SetUp failed for volume "model" : /models/x is not a directory'),
    ),
    "unusable": Scene(
        reason=Reason.MODEL_UNUSABLE,
        kind="ModelReady",
        says="9 attention heads",
        head=Play(ended=(78, "9 attention heads cannot be shared by 2 ranks")),
    ),
    "serving": Scene(reason=Reason.SERVING),
    "starting": Scene(reason=Reason.STARTING, says="load", engine={"state": "starting", "nodes": []}),
    "pods-pending": Scene(reason=Reason.PODS_PENDING, head=_waiting("ContainerCreating")),
    "unschedulable": Scene(
        reason=Reason.UNSCHEDULABLE,
        says="Insufficient cpu",
        spec={"engine": {"resources": {"requests": {"cpu": "1000000"}}}},
    ),
    "image-pull": Scene(
        reason=Reason.IMAGE_PULL_FAILED,
        says="Check spec.engine.image",
        head=_waiting("ImagePullBackOff", "Back-off pulling image"),
    ),
    "container": Scene(
        reason=Reason.CONTAINER_FAILED,
        says="cannot start: CreateContainerConfigError",
        head=_waiting("CreateContainerConfigError", "container has runAsNonRoot and image will run as root"),
    ),
    "ray-ended": Scene(
        reason=Reason.CONTAINER_FAILED, says="exit code 1", head=Play(ended=(1, "GCS"), container="ray-head")
    ),
    "worker-oom": Scene(reason=Reason.CONTAINER_FAILED, says="OOMKilled, exit code 137", worker=Play(is_oom=True)),
    "engine-ended": Scene(
        reason=Reason.ENGINE_FAILED, says="gave up: rank 0 kept dying", head=Play(ended=(70, "rank 0 kept dying"))
    ),
    "engine-failed": Scene(
        reason=Reason.ENGINE_FAILED, says="restart budget", engine={"state": "failed", "reason": "restart budget"}
    ),
    "unreachable": Scene(reason=Reason.ENGINE_UNREACHABLE, says="admin port", engine={"is_silent": True}),
    "stopped": Scene(reason=Reason.TOKENS_STOPPED, says="which rank", engine={"token_age": 20.0}),
    "adapter-failed": Scene(
        reason=Reason.ADAPTER_FAILED,
        kind="Degraded",
        says="0/1 engines",
        spec={
            "model": {
                "source": "builtin://smollm2-135m",
                "adapters": [{"name": "sql", "source": "file:///models/adapters/sql"}],
            }
        },
        engine={"broken_adapters": {"/models/adapters/sql": "adapter_config.json does not exist"}},
    ),
    "recovering": Scene(
        reason=Reason.RECOVERING, says="rank 1", engine={"state": "recovering", "reason": "rank 1 was lost"}
    ),
    "draining": Scene(reason=Reason.DRAINING, engine={"is_draining": True}),
    "does-not-fit": Scene(
        reason=Reason.DOES_NOT_FIT, kind="Accepted", spec={"engine": {"resources": {"limits": {"memory": "400Mi"}}}}
    ),
    "inspecting": Scene(
        reason=Reason.INSPECTING,
        kind="ModelReady",
        spec=_FILE,
        job=_waiting("ContainerCreating"),
        says="A Job inspects",
    ),
    "no-access": Scene(
        reason=Reason.MODEL_NO_ACCESS,
        kind="ModelReady",
        spec=_HUB,
        job=_refusal("NoAccess", "the hub wants a token"),
        says="the hub wants a token",
    ),
    "gated": Scene(
        reason=Reason.MODEL_GATED,
        kind="ModelReady",
        spec=_HUB,
        job=_refusal("Gated", "accept its terms"),
        says="its terms",
    ),
    "unsupported": Scene(
        reason=Reason.MODEL_UNSUPPORTED,
        kind="ModelReady",
        spec=_HUB,
        job=_refusal("Unsupported", "no Mamba"),
        says="Mamba",
    ),
    "hub-unreachable": Scene(
        reason=Reason.HUB_UNREACHABLE,
        kind="ModelReady",
        spec=_HUB,
        job=_refusal("Unreachable", "no way"),
        says="no way",
    ),
    "inspection-failed": Scene(
        reason=Reason.INSPECTION_FAILED,
        kind="ModelReady",
        spec=_HUB,
        job=Play(ended=(1, "Traceback")),
        says="Traceback",
    ),
    "scheduled": Scene(reason=Reason.SCHEDULED, kind="Scheduled"),
    "suspended": Scene(reason=Reason.SUSPENDED, spec={"replicas": 0}),
    "complete": Scene(reason=Reason.COMPLETE, kind="Progressing", says="Every engine is of revision"),
    "scaling": Scene(reason=Reason.SCALING, kind="Progressing", head=_waiting("ContainerCreating")),
    "not-rolled-back": Scene(reason=Reason.NOT_ROLLED_BACK, kind="RolledBack"),
    "not-paused": Scene(reason=Reason.NOT_PAUSED, kind="Paused"),
    "healthy": Scene(reason=Reason.HEALTHY, kind="Degraded"),
    "head-lost": Scene(reason=Reason.HEAD_LOST, kind="Degraded", says="head pod", loses_head=True),
    "back-off": Scene(
        reason=Reason.GROUP_BACK_OFF, says="gave up: rank 1 kept dying", head=Play(ended=(70, "rank 1 kept dying"))
    ),
}


@pytest.fixture(scope="module")
def stage(world: World) -> Iterator[str]:
    """The namespace with the services of all scenes."""
    namespace = new_namespace(world, "conditions")
    definition = world.request("GET", _CRD)
    versions = definition["spec"]["versions"]
    known = versions[0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    known |= {name: {"type": "string"} for name in _UNKNOWN_FIELD}
    world.request("PATCH", _CRD, {"spec": {"versions": versions}}, content_type=MERGE)
    try:
        wait_until(lambda: _keeps_unknown_fields(world, namespace), "the changed CRD to take effect")
        world.operator()
        for name, scene in SCENES.items():
            for role, play in (("head", scene.head), ("worker", scene.worker), ("job", scene.job)):
                if play is not None:
                    world.play(namespace, name, role, play)
            if scene.before is not None:
                meta = {"metadata": {"name": name, "namespace": namespace}}
                path = f"/api/v1/namespaces/{namespace}/{scene.before['kind'].lower()}s"
                world.request("POST", path, scene.before | meta)
            _create(world, llm_service(namespace, name, **scene.spec))
        for name, scene in SCENES.items():
            if scene.engine:
                world.wait(namespace, name, "Available", Reason.SERVING)
                world.engine(namespace, name, **scene.engine)
            if scene.loses_head:
                world.wait(namespace, name, "Available", Reason.SERVING)
                (head,) = [pod for pod in world.pods(namespace, name) if _is_head(pod)]
                world.delete(f"/api/v1/namespaces/{namespace}/pods/{head['metadata']['name']}")
        yield namespace
    finally:
        for name in _UNKNOWN_FIELD:
            del known[name]
        world.request("PATCH", _CRD, {"spec": {"versions": versions}}, content_type=MERGE)
        wait_until(lambda: not _keeps_unknown_fields(world, namespace), "the restored CRD to take effect")
        delete_services(world, namespace)


def _create(world: World, manifest: dict[str, Any], **options: str) -> dict[str, Any]:
    path = f"{LLM}/namespaces/{manifest['metadata']['namespace']}/llmservices"
    return world.request("POST", path, manifest, fieldValidation="Ignore", **options)


def _keeps_unknown_fields(world: World, namespace: str) -> bool:
    """False while the API server still prunes the field of a later version."""
    spec = _create(world, llm_service(namespace, "never-made", **_UNKNOWN_FIELD), dryRun="All")["spec"]
    return all(name in spec for name in _UNKNOWN_FIELD)


def _is_head(pod: dict[str, Any]) -> bool:
    return bool(pod["metadata"]["labels"].get("ray.io/node-type") == "head")


@pytest.mark.parametrize("name", SCENES)
def test_the_reason_and_its_sentence(name: str, stage: str, world: World) -> None:
    scene = SCENES[name]
    found = world.wait_seen(stage, name, scene.kind, scene.reason, scene.says)
    generation = world.services[(stage, name)]["metadata"]["generation"]
    assert found["observedGeneration"] == generation
    if scene.reason in FAULTS:
        assert found["status"] == str(scene.kind == "Degraded")

        def warnings() -> set[str]:
            events = world.request("GET", f"/apis/events.k8s.io/v1/namespaces/{stage}/events")["items"]
            own = [each for each in events if each["regarding"].get("name") == name and each["type"] == "Warning"]
            return {each["reason"] for each in own}

        # Shortly after it writes the status, the operator also creates an Event if the condition reports a fault.
        wait_until(lambda: scene.reason in warnings(), f"an Event {scene.reason}", story=world.story)


def test_every_reason_has_a_scene() -> None:
    # The first two reasons concern whole clusters: test_drift.py and the last test here cover them. The third reason
    # needs 40 s without an event: tests/operator_unit/test_recovery.py covers it.
    others = {Reason.UNSUPPORTED_KUBERAY, Reason.NODE_LOST, Reason.ENGINE_STUCK}
    # Other files cover the following reasons. `of_rolls`: test_rolls.py and test_node_drains.py cover all but the last
    # two; scaling/test_to_zero.py and gateway/test_gateway.py cover these two. `of_gateways`: gateway/test_route.py and
    # gateway/test_llmgateway.py cover them.
    of_rolls = {
        *(Reason.WAITING_FOR_CAPACITY, Reason.ANALYZING, Reason.PROMOTING, Reason.MOVING, Reason.REPLACING),
        *(Reason.ROLLING_BACK, Reason.ROLLED_BACK, Reason.PAUSED, Reason.HALTED),
        *(Reason.ANALYSIS_FAILED, Reason.CRASH_LOOP, Reason.DEADLINE_EXCEEDED),
        *(Reason.SCALED_TO_ZERO, Reason.GATEWAY_NOT_READY),
    }
    of_gateways = {
        *(Reason.ROUTE_NOT_ACCEPTED, Reason.ROUTE_REFUSED, Reason.GATEWAY_API_MISSING),
        *(Reason.NO_MODELS, Reason.NO_GATEWAY_PORT, Reason.NAME_CONFLICT, Reason.TARGET_MISSING, Reason.KEYS_DIFFER),
        *(Reason.KEYS_MISSING, Reason.MODELS_REFUSED, Reason.READING_MODELS),
    }
    assert {scene.reason for scene in SCENES.values()} == set(Reason) - others - of_rolls - of_gateways


def test_every_status_of_the_session_is_told_by_the_closed_list(stage: str, world: World) -> None:
    assert {reason for _, _, reason in set(world.seen)} <= set(Reason)


def test_the_simulated_engine_speaks_the_schema_of_the_real_one(stage: str, world: World) -> None:
    schema = json.loads((REPOSITORY / "schemas" / "status.v1.json").read_text())
    world.wait(stage, "serving", "Available", Reason.SERVING)
    engine = world.newest_engine(stage, "serving")
    Draft202012Validator(schema).validate(engine.document())


def test_the_operator_told_the_engine_who_it_is(stage: str, world: World) -> None:
    world.wait(stage, "serving", "Available", Reason.SERVING)
    assert world.newest_engine(stage, "serving").num_asked > 0


def test_the_pods_of_a_lost_node_are_made_on_another_one_and_the_node_is_named(
    namespace: str, world: World, operator: OperatorProcess
) -> None:
    world.create(llm_service(namespace, "chat", parallelism={"pipeline": 2}, recovery={"nodeLossSeconds": 1}))
    world.wait_serving(namespace, "chat")
    worker = next(pod for pod in world.pods(namespace, "chat") if not _is_head(pod))
    node = worker["spec"]["nodeName"]
    world.do(world.kubelets.lose(node))
    try:
        assert world.wait_seen(namespace, "chat", "Degraded", Reason.NODE_LOST, node)["status"] == "True"
        wait_until(
            lambda: all(pod["spec"].get("nodeName") != node for pod in world.pods(namespace, "chat")),
            "pods on the other node",
        )
        world.wait_serving(namespace, "chat")
    finally:
        world.bring_back(node)
