"""Services, pods and answers of engines, as the operator reads them. By default all of them are healthy."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace

from rayloom_operator.api.rollout.state import RolloutState
from rayloom_operator.api.shipped_facts import builtin_facts
from rayloom_operator.api.spec import parse
from rayloom_operator.api.status import Reason, stored_rollout
from rayloom_operator.decide.changes.plan import plan
from rayloom_operator.decide.conditions.accepted import VALID
from rayloom_operator.decide.permissions import Permissions
from rayloom_operator.decide.recovery import remembered
from rayloom_operator.decide.rollout.planner import next_step
from rayloom_operator.decide.rollout.revisions import revision_places
from rayloom_operator.decide.rollout.view import desired_of, view_of
from rayloom_operator.decide.settings import Settings
from rayloom_operator.decide.situation import Situation
from rayloom_operator.decide.status import status
from rayloom_operator.engines.progress import NO_PROGRESS
from rayloom_operator.engines.status import EngineStatus, Rank, Requests
from rayloom_operator.names import group_name
from rayloom_operator.observe.observed import EngineReplica, Observed, Reading, Verdict
from rayloom_operator.observe.pods import pod
from rayloom_operator.resolve.resolved import resolve
from rayloom_operator.resolve.revision import revision
from rayloom_operator.times import Now

NOW = 110.0  # seconds by the event loop's clock, as in readings
CLOCK = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
SETTINGS = Settings(
    engine_image="rayloom/engine:test",
    operator_key=b"0123456789abcdef",
    permissions=Permissions(host_paths=("/models",)),
)


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
    name="head",
    *,
    is_head=True,
    engine=None,
    node="n1",
    conditions=None,
    route=False,
    ready=True,
    volumes=(),
    deletion_grace=None,
    owner="uid-cluster",
    started="2026-01-01T00:00:00Z",
    phase="Running",
    ip="10.0.0.1",
):
    """A Pod document. `engine`: state of the engine's or the worker's container; None: it runs.

    The container has run since `started`. With `deletion_grace`, in seconds, the pod is being deleted.
    """
    own = engine or {"ready": True, "state": {"running": {"startedAt": started}}}
    container = {"name": "engine" if is_head else "ray-worker", "image": "i", "containerID": "c", **own}
    labels = {"ray.io/node-type": "head" if is_head else "worker", "rayloom.dev/group": "chat-00000000-0"}
    if route:
        labels["rayloom.dev/route"] = "true"
    meta = {"name": name, "namespace": "team", "uid": f"uid-{name}", "labels": labels}
    meta["ownerReferences"] = [{"uid": owner}]
    if deletion_grace is not None:
        meta |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": deletion_grace}
    return {
        "metadata": meta,
        "spec": {"nodeName": node, "volumes": list(volumes)},
        "status": {
            "phase": phase,
            "podIP": ip,
            "conditions": conditions or [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [container],
        },
    }


def make_pod(*args, mount_failure="", **kwargs):
    return pod(make_pod_document(*args, **kwargs), mount_failure)


def waiting(reason, message=""):
    return {"ready": False, "containerID": "", "state": {"waiting": {"reason": reason, "message": message}}}


def crashed(code, message=""):
    last = {"terminated": {"exitCode": code, "message": message, "reason": "Error"}}
    return {"ready": False, "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": last}


def restarted(code, message=""):
    return crashed(code, message) | {"state": {"running": {}}}


def make_said(state="serving", token_age=1.0, reason="", nodes=("n1", "n2"), startup=(), work_age=None, **requests):
    return EngineStatus(
        state=state,
        reason=reason,
        startup=startup,
        model=None,
        last_token_age_seconds=token_age,
        last_work_age_seconds=work_age,
        ranks=tuple(Rank(node=node) for node in nodes),
        requests=Requests(**requests),
    )


def make_reading(said=None, *, at=100.0, failing_since=None, error="", advanced_at=100.0, start=NO_PROGRESS):
    return Reading(status=said, at=at, failing_since=failing_since, error=error, advanced_at=advanced_at, start=start)


def make_group(*pods, reading=None, name="chat-00000000-0", uid="uid-cluster", refusal="", **facts):
    revision = name.split("-")[1]
    is_found = any(each.is_head and each.is_routed for each in pods)
    facts = {"is_headless": False, "num_new_pods": 0, "is_found": is_found, **facts}
    return EngineReplica(name=name, revision=revision, uid=uid, pods=pods, refusal=refusal, reading=reading, **facts)


def make_serving(resolved, number=0, **facts):
    """A serving engine replica of the spec's revision, with pods on the nodes n1 (head) and n2."""
    name = group_name(resolved.service.metadata.name, revision(resolved), number)
    pods = (make_pod(f"head{number}", route=True), make_pod(f"worker{number}", is_head=False, node="n2"))
    facts = {"reading": make_reading(make_said()), "uid": f"uid-{number}", **facts}
    return make_group(*facts.pop("pods", pods), name=name, **facts)


def settled(resolved):
    """The rollout state of a service whose spec has not changed since the first reconcile."""
    current = revision(resolved)
    counts = {current: resolved.service.spec.replicas} if resolved.service.spec.replicas else {}
    return RolloutState(current_revision=current, update_revision=current, counts=counts)


def make_situation(resolved=None, observed=None, **facts):
    """Returns a situation, as a reconcile gathers it. By default it is the situation of a settled service."""
    defaults = {
        "now": Now(CLOCK, NOW),
        "settings": SETTINGS,
        "generation": 3,
        "previous": {},
        "memory": {},
        "rollout": settled(resolved) if resolved else RolloutState(),
        "service": resolved.service if resolved else None,
        "accepted": VALID,
    }
    return Situation(**defaults | {"resolved": resolved, "observed": observed or Observed(), **facts})


def observed(groups=(), endpoints=None, **facts):
    """The observations of a reconcile. `endpoints`: as in `turn`."""
    if endpoints is not None:
        groups = [replace(each, is_found=each.head is not None and each.head.ip in endpoints) for each in groups]
    return Observed(replicas=tuple(groups), **facts)


def rollout_step(resolved, groups, *, own, previous, now, clock, **facts):
    """The decision of the rollout planner, `next_step`. Its arguments are those of `turn`."""
    rollout, seen = stored_rollout(previous), observed(groups, **facts)
    return _rollout_step(resolved, own, seen, remembered(previous), rollout, Now(clock, now))[1]


def _rollout_step(resolved, own, seen, memory, rollout, now):
    """The state before the step, and the step."""
    desired = desired_of(resolved, own)
    view = view_of(seen, memory, own, mono=now.mono)
    if not rollout.update_revision:
        # The state that the first reconcile would have written, but without terminating engines.
        rollout = replace(next_step(desired, settled(resolved), view, now.wall).state, terminating={})
    return rollout, next_step(desired, rollout, view, now.wall)


def turn(
    resolved,
    groups=(),
    *,
    previous=None,
    old=(),
    own=None,
    endpoints=None,
    problems=(),
    refusal="",
    now=NOW,
    clock=CLOCK,
    **facts,
):
    """Decides like one reconcile. Returns `situation`, `slots`, `step`, `plan`, `status` and `document`.

    `document`: the status as it is written.

    `previous`: the document of the previous reconcile. By default it is the document of the spec's first reconcile.
    `old`: the resolved specs of earlier revisions, or revision -> resolved spec. `own`: the revision of `resolved`, if
    it is known. `endpoints`: the addresses that clients find; None: the addresses of head pods with the route label.
    """
    previous, seen, now = previous or {}, observed(groups, endpoints, **facts), Now(clock, now)
    memory, rollout, step, parts = remembered(previous), stored_rollout(previous), None, ()
    if resolved:
        rollout, step = _rollout_step(resolved, own or revision(resolved), seen, memory, rollout, now)
        made_from = old if isinstance(old, Mapping) else {revision(each): each for each in old}
        parts = revision_places(resolved, made_from, seen, memory, rollout, step, now=now)
    accepted = Verdict(reason=Reason.INVALID_SPEC, message="; ".join(problems)) if problems else VALID
    situation = make_situation(
        resolved,
        seen,
        now=now,
        previous=previous,
        memory=memory,
        rollout=rollout,
        accepted=accepted,
        step=step,
        revisions=parts,
    )
    said = status(situation, refusal)
    document = said.model_dump(mode="json", by_alias=True, exclude_none=True)
    return SimpleNamespace(
        slots=situation.places, step=step, plan=plan(situation), status=said, document=document, situation=situation
    )


def conditions(document):
    """type -> (status, reason)."""
    return {each["type"]: (each["status"], each["reason"]) for each in document["conditions"]}
