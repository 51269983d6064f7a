"""Makes the planner's input from an observed service: RayClusters, pods and the answers of their engines. Pure."""

from __future__ import annotations

from rayloom_operator.api.rollout.state import RequestCounts
from rayloom_operator.api.status import Reason
from rayloom_operator.decide.causes import has_served
from rayloom_operator.decide.recovery import NOT_BY_ENGINE, Memory
from rayloom_operator.decide.rollout.inputs import Desired, EngineState, ReplicaView, View
from rayloom_operator.observe.observed import EngineReplica, Observed
from rayloom_operator.observe.verdict import is_well
from rayloom_operator.resolve.resolved import Resolved


def desired_of(resolved: Resolved, revision: str) -> Desired:
    """Returns the part of the spec that the planner uses. `revision` is the revision of this spec."""
    spec = resolved.service.spec
    return Desired(
        revision=revision,
        replicas=spec.replicas,
        drain_seconds=spec.drain_seconds,
        rollout=spec.rollout,
        is_behind_gateways=spec.gateway is not None,
    )


def view_of(observed: Observed, memory: Memory, revision: str, *, mono: float) -> View:
    """Returns the engines of a service. `revision`: the spec's revision, whose failures are counted from `memory`."""
    failed = [
        each
        for each in memory.values()
        if each.revision == revision and each.failure is not None and each.failure.reason not in NOT_BY_ENGINE
    ]
    return View(
        engines=tuple(_engine(replica, memory, mono) for replica in observed.replicas),
        num_ending=observed.num_ending,
        knows_nodes=observed.knows_nodes,
        num_crashes=sum(each.restarts for each in failed),
        cause=next((each.failure.message for each in failed if each.failure is not None), ""),
    )


def _engine(replica: EngineReplica, memory: Memory, mono: float) -> ReplicaView:
    head = replica.head
    answer = replica.reading.status if replica.reading is not None else None
    return ReplicaView(
        name=replica.name,
        revision=replica.revision,
        state=_state(replica, memory, mono),
        is_routed=head is not None and head.is_routed,
        is_listed=replica.is_found,
        is_cordoned=replica.is_cordoned,
        is_tolerant=replica.is_tolerant,
        num_in_flight=answer.requests.unfinished if answer is not None else 0,
        counts=answer.request_counts if answer is not None else RequestCounts(),
    )


def _state(replica: EngineReplica, memory: Memory, mono: float) -> EngineState:
    head = replica.head
    answer = replica.reading.status if replica.reading is not None else None
    if head is not None and answer is not None and answer.state == "draining":
        return "draining"
    if is_well(replica, mono):
        return "well"
    if has_served(replica, memory.get(replica.name)):
        return "ill"
    if replica.is_suspended:
        return "unschedulable"  # The RayCluster waits in a queue, such as Kueue's, until nodes have room.
    if any(pod.fault is not None and pod.fault.reason is Reason.UNSCHEDULABLE for pod in replica.pods):
        return "unschedulable"
    return "starting" if head is not None and head.is_running else "pending"
