"""The planner's input, made of an observed service: RayClusters, pods and the answers of their engines. Pure."""

from __future__ import annotations

from rayloom_operator.api.rollout.state import RequestCounts
from rayloom_operator.api.status import Reason
from rayloom_operator.decide.recovery import Memory, has_served
from rayloom_operator.decide.rollout.inputs import Desired, EngineReplica, EngineState, View
from rayloom_operator.observe.observed import Group, Observed
from rayloom_operator.observe.verdict import is_well
from rayloom_operator.resolve.resolved import Resolved

# A lost node or head pod says nothing about the revision that ran there.
_NOT_BY_REVISION = (Reason.NODE_LOST, Reason.HEAD_LOST)


def desired_of(resolved: Resolved, revision: str) -> Desired:
    """What the spec asks for; `revision` is the spec's."""
    spec = resolved.service.spec
    return Desired(revision=revision, replicas=spec.replicas, drain_seconds=spec.drain_seconds, rollout=spec.rollout)


def view_of(seen: Observed, memory: Memory, revision: str, *, mono: float) -> View:
    """The engines of a service. `revision` is the spec's, whose failures are counted from `memory`."""
    failed = [
        each
        for each in memory.values()
        if each.revision == revision and each.failure is not None and each.failure.reason not in _NOT_BY_REVISION
    ]
    return View(
        engines=tuple(_engine(group, memory, mono) for group in seen.groups),
        num_ending=seen.num_ending,
        knows_nodes=seen.knows_nodes,
        num_crashes=sum(each.restarts for each in failed),
        cause=next((each.failure.message for each in failed if each.failure is not None), ""),
    )


def _engine(group: Group, memory: Memory, mono: float) -> EngineReplica:
    head = group.head
    answer = group.reading.status if group.reading is not None else None
    return EngineReplica(
        name=group.name,
        revision=group.revision,
        state=_state(group, memory, mono),
        is_routed=head is not None and head.is_routed,
        is_listed=group.is_found,
        is_cordoned=group.is_cordoned,
        is_tolerant=group.is_tolerant,
        num_in_flight=answer.requests.in_flight if answer is not None else 0,
        counts=answer.request_counts if answer is not None else RequestCounts(),
    )


def _state(group: Group, memory: Memory, mono: float) -> EngineState:
    head = group.head
    answer = group.reading.status if group.reading is not None else None
    if head is not None and answer is not None and answer.state == "draining":
        return "draining"
    if is_well(group, mono):
        return "well"
    if has_served(group, memory.get(group.name)):
        return "ill"
    if group.is_suspended:
        return "unschedulable"  # A queue holds it back, which is how it waits for nodes.
    if any(pod.fault is not None and pod.fault.reason is Reason.UNSCHEDULABLE for pod in group.pods):
        return "unschedulable"
    return "starting" if head is not None and head.is_running else "pending"
