"""What the planner of rolls sees of a service: its engines, made of RayClusters, pods and readings. Pure."""

from __future__ import annotations

from rayloom_operator.api.rollout import Figures
from rayloom_operator.api.status import Reason
from rayloom_operator.decide.causes import has_served
from rayloom_operator.decide.recovery import Memory
from rayloom_operator.decide.rollout.counts import Engine, EngineState, Order, Seen
from rayloom_operator.observe.observed import EngineReplica, Observed
from rayloom_operator.observe.verdict import is_well
from rayloom_operator.resolve.resolved import Resolved

_OF_OTHERS = (Reason.NODE_LOST, Reason.HEAD_LOST)


def order_of(resolved: Resolved, revision: str) -> Order:
    """What the spec asks for."""
    spec = resolved.service.spec
    return Order(revision=revision, replicas=spec.replicas, drain_seconds=spec.drain_seconds, rollout=spec.rollout)


def look(seen: Observed, memory: Memory, revision: str, *, now: float) -> Seen:
    """The engines of a service. `revision` is the spec's, whose failures are counted from `memory`."""
    # A lost node or pod says nothing about what ran there.
    failed = [
        each
        for each in memory.values()
        if each.revision == revision and each.failure is not None and each.failure.reason not in _OF_OTHERS
    ]
    return Seen(
        engines=tuple(_engine(group, memory, now) for group in seen.replicas),
        num_ending=seen.num_ending,
        knows_nodes=seen.knows_nodes,
        num_crashes=sum(each.restarts for each in failed),
        cause=next((each.failure.message for each in failed if each.failure is not None), ""),
    )


def _engine(group: EngineReplica, memory: Memory, now: float) -> Engine:
    head, said = group.head, group.reading.status if group.reading is not None else None
    return Engine(
        name=group.name,
        revision=group.revision,
        state=_state(group, memory, now),
        is_routed=head is not None and head.is_routed,
        is_listed=group.is_found,
        is_cordoned=group.is_cordoned,
        is_tolerant=group.is_tolerant,
        num_in_flight=said.requests.in_flight if said is not None else 0,
        figures=said.figures if said is not None else Figures(),
    )


def _state(group: EngineReplica, memory: Memory, now: float) -> EngineState:
    head, said = group.head, group.reading.status if group.reading is not None else None
    if head is not None and said is not None and said.state == "draining":
        return "draining"
    if is_well(group, now):
        return "well"
    if has_served(group, memory.get(group.name)):
        return "ill"
    if group.is_suspended:
        return "unschedulable"  # in a queue, which is how it waits for nodes
    if any(pod.fault is not None and pod.fault.reason is Reason.UNSCHEDULABLE for pod in group.pods):
        return "unschedulable"
    return "starting" if head is not None and head.is_running else "pending"
