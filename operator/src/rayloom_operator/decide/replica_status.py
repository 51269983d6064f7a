"""The entry of one engine replica in `status.groups`: its state, and its record of failures. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from rayloom_operator.api.status import GroupState, GroupStatus, Reason
from rayloom_operator.decide.causes import has_served
from rayloom_operator.decide.conditions.evidence import JudgedReplica
from rayloom_operator.decide.situation import Situation
from rayloom_operator.observe.observed import EngineReplica
from rayloom_operator.observe.verdict import silence
from rayloom_operator.times import stamp

_STATES: Mapping[Reason, GroupState] = {
    Reason.SERVING: "Serving",
    Reason.STARTING: "Starting",
    Reason.PODS_PENDING: "Pending",
    Reason.UNSCHEDULABLE: "Pending",
    Reason.RECOVERING: "Recovering",
    Reason.DRAINING: "Draining",
    Reason.GROUP_BACK_OFF: "BackOff",
}


def replica_status(judged: JudgedReplica, situation: Situation) -> GroupStatus:
    """Returns the entry. The entry's transition time changes only when its state changes."""
    place, now = judged.place, situation.now.wall
    before = situation.memory.get(place.name)
    # While the spec cannot be used, failures are not judged: the entry keeps its restarts and its failure.
    record = before if situation.resolved is None and before is not None else place
    has_failed = place.replica is not None and record.failure is not None and record.failure.uid == place.replica.uid
    state = _state(judged, before, situation, has_failed=has_failed)
    retry_at = _retry_at(judged, situation)
    return GroupStatus(
        name=place.name,
        revision=judged.revision,
        state=state,
        reason=judged.verdict.reason,
        last_transition_time=before.last_transition_time if before and before.state == state else stamp(now),
        restarts=record.restarts,
        next_retry_time=stamp(retry_at) if retry_at is not None and retry_at > now else None,
        failure=record.failure,
        nodes=_nodes(place.replica) if place.replica is not None else (),
    )


def _state(judged: JudgedReplica, before: GroupStatus | None, situation: Situation, *, has_failed: bool) -> GroupState:
    state = _STATES.get(judged.verdict.reason, "Failed")
    replica = judged.replica
    if replica is None or has_failed or state in ("Serving", "Draining"):
        return state
    # The supervisor or the kubelet may yet repair an engine that does not answer. The state `Recovering` records that
    # this engine has served. After a restart of the operator, `has_served` reads this state from the status.
    is_silent = silence(replica.reading, situation.now.mono) is not None
    return "Recovering" if is_silent and has_served(replica, before) else state


def _retry_at(judged: JudgedReplica, situation: Situation) -> datetime | None:
    if situation.resolved is None or judged.replica is not None:
        return None
    return judged.place.retry_at(situation.resolved.service.spec.recovery)


def _nodes(replica: EngineReplica) -> tuple[str, ...]:
    """Returns the nodes of the ranks, as the engine reports them; the worker pods' nodes if the engine reports none."""
    status = replica.reading.status if replica.reading is not None else None
    if status is not None and status.nodes:
        return status.nodes
    return tuple(sorted(pod.node for pod in replica.pods if pod.node and not pod.is_head))
