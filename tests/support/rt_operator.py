"""Services, pods and engine answers as the operator sees them, with everything well unless a test says otherwise."""

from rayloom_operator.api import parse
from rayloom_operator.engine_status import EngineStatus, Rank
from rayloom_operator.model_facts import builtin_facts
from rayloom_operator.observed import Group, Reading, pod
from rayloom_operator.plan import Settings
from rayloom_operator.resolved import resolve

SETTINGS = Settings(engine_image="rayloom/engine:test", operator_key=b"0123456789abcdef")


def make_service(name="chat", **spec):
    return parse(
        {
            "apiVersion": "rayloom.dev/v1alpha1",
            "kind": "LLMService",
            "metadata": {"name": name, "namespace": "team", "uid": "uid-1", "generation": 3},
            "spec": {"model": {"source": "builtin://smollm2-135m"}, **spec},
        }
    )


def make_resolved(name="chat", *, image=SETTINGS.engine_image, **spec):
    service = make_service(name, **spec)
    return resolve(service, image, builtin_facts(service.spec.model))


def make_pod_document(
    name="head", *, is_head=True, engine=None, node="n1", conditions=None, route=False, ready=True, volumes=()
):
    """A Pod document; `engine` is the state of the engine's container (or a worker's), None for a running one."""
    own = engine or {"ready": True, "state": {"running": {}}}
    container = {"name": "engine" if is_head else "ray-worker", "image": "i", "containerID": "c", **own}
    labels = {"ray.io/node-type": "head" if is_head else "worker", "rayloom.dev/group": "chat-00000000-0"}
    if route:
        labels["rayloom.dev/route"] = "true"
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": labels},
        "spec": {"nodeName": node, "volumes": list(volumes)},
        "status": {
            "podIP": "10.0.0.1",
            "conditions": conditions or [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [container],
        },
    }


def make_pod(*args, mount_failure="", **kwargs):
    return pod(make_pod_document(*args, **kwargs), mount_failure)


def make_said(state="serving", token_age=1.0, reason="", nodes=("n1", "n2"), startup=()):
    return EngineStatus(
        state=state,
        reason=reason,
        startup=startup,
        model=None,
        last_token_age_seconds=token_age,
        ranks=tuple(Rank(node=node) for node in nodes),
    )


def make_reading(said=None, *, at=100.0, failing_since=None, error=""):
    return Reading(status=said, at=at, failing_since=failing_since, error=error)


def make_group(*pods, reading=None, name="chat-00000000-0", revision="00000000", refusal=""):
    return Group(name=name, revision=revision, uid="uid-cluster", pods=pods, refusal=refusal, reading=reading)
