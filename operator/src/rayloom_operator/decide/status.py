"""The status of a service, computed from what was observed. Pure.

Available comes from a token that passed through every rank a moment ago, and from the way that requests take to the
engine; pods that run prove neither. Messages hold nothing that changes by itself, so a status that says the same is
the same, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rayloom_operator.api.status import (
    FAULTS,
    Condition,
    ConditionType,
    GroupState,
    Model,
    Reason,
    Status,
    stored_rollout,
    stored_sizing,
)
from rayloom_operator.api.status import Group as GroupStatus
from rayloom_operator.decide.recovery import Memory, Slot, has_served, verdict_of
from rayloom_operator.decide.rollout.conditions import progress, rollout_conditions
from rayloom_operator.decide.rollout.planner import Step
from rayloom_operator.names import NODE_TYPE_LABEL, SERVICE_LABEL, revision_of
from rayloom_operator.objects.companions import endpoint
from rayloom_operator.observe.observed import Group, Observed, Verdict
from rayloom_operator.observe.verdict import is_well, judge, silence
from rayloom_operator.resolve.resolved import Resolved
from rayloom_operator.times import Now, stamp

_GROUP_STATES: Mapping[Reason, GroupState] = {
    Reason.SERVING: "Serving",
    Reason.STARTING: "Starting",
    Reason.PODS_PENDING: "Pending",
    Reason.UNSCHEDULABLE: "Pending",
    Reason.RECOVERING: "Recovering",
    Reason.DRAINING: "Draining",
    Reason.GROUP_BACK_OFF: "BackOff",
}
VALID = Verdict(reason=Reason.VALID, message="The spec can be used.")
SUSPENDED = Verdict(
    reason=Reason.SUSPENDED, message="spec.replicas is 0: there are no engines, and requests find none."
)
_MODEL_FAULTS = (
    Reason.MODEL_NOT_FOUND,
    Reason.MODEL_UNUSABLE,
    Reason.MODEL_NO_ACCESS,
    Reason.MODEL_GATED,
    Reason.HUB_UNREACHABLE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """An engine that is there, or is to be."""

    slot: Slot
    verdict: Verdict

    @property
    def group(self) -> Group | None:
        return self.slot.group

    @property
    def revision(self) -> str:
        return revision_of(self.slot.name)


def status(
    resolved: Resolved | None,
    accepted: Verdict,
    seen: Observed,
    slots: tuple[Slot, ...],
    step: Step | None,
    *,
    missing: Verdict | None = None,
    model: Model | None = None,
    generation: int,
    previous: Mapping[str, Any],
    memory: Memory,
    now: Now,
) -> Status:
    """The status to write.

    `accepted` is VALID, or says why nothing can be made of the spec; `missing` is why the model is not known, `model`
    what is known of it. While the spec cannot be used, or the model is not known, `resolved` and `step`, the next of a
    roll, are None and `slots`, the places for engines, are empty. `previous` is the status as it was written last, for
    times of change and for what a refused spec leaves running, `memory` the groups in it.
    """
    places, rollout = {slot.name for slot in slots}, stored_rollout(previous)
    leaving = step.state.leaving if step is not None else rollout.leaving
    # A refused spec has made nothing, unless it was accepted before.
    is_accepted = accepted.reason is Reason.VALID
    update = step.state.update_revision if step is not None else ""
    made = {rollout.update_revision, *(group.revision for group in seen.groups)} - {""}
    is_made = is_accepted or update in made
    shown = [
        _Row(slot=slot, verdict=verdict_of(slot, resolved.service.spec.recovery, now=now))
        for slot in slots
        if resolved is not None and (slot.group is not None or slot.failure is not None or is_made)
    ]
    others = [
        _Row(
            slot=Slot(name=group.name, group=group),
            verdict=_of_leaver(group, now.mono, is_leaving=group.name in leaving),
        )
        for group in seen.groups
        if group.name not in places
    ]
    if resolved is None:
        shown += [*(row for row in others if row.slot.name not in leaving), *_waiting(memory, seen)]
        others = [row for row in others if row.slot.name in leaving]
    rows = [*shown, *others]
    # One that is on its way out serves until its last request is over.
    alive = [*shown, *(row for row in others if row.verdict.reason is Reason.SERVING)]
    available = _available(alive or others)
    if not is_accepted and not any((row.group is not None and row.group.pods) or row.slot.failure for row in alive):
        available = accepted
    elif missing is not None and not any(row.group is not None for row in alive):
        available = missing
    elif resolved is not None and resolved.service.spec.replicas == 0 and not rows:
        available = SUSPENDED

    def condition(kind: ConditionType, holds: bool, because: Verdict) -> Condition:
        said: Literal["True", "False"] = "True" if holds else "False"
        before = next((old for old in previous.get("conditions", ()) if old["type"] == kind), None)
        return Condition(
            type=kind,
            status=said,
            reason=because.reason,
            message=because.message,
            observed_generation=generation,
            last_transition_time=before["lastTransitionTime"]
            if before and before["status"] == said
            else stamp(now.wall),
        )

    is_degraded, degraded = _degraded(shown, seen, available)
    loaded = missing or (SUSPENDED if available is SUSPENDED else _model(shown))
    scheduled = _scheduled(shown, available, 1 + resolved.num_pods if resolved is not None and is_made else 0)
    of_rolls = rollout_conditions(step, previous, missing or accepted)
    num_available = sum(row.verdict.reason is Reason.SERVING for row in alive)
    asked = str(resolved.service.spec.replicas) if resolved is not None else previous.get("ready", "0/1").split("/")[1]
    default_image = resolved.image if resolved is not None and resolved.service.spec.engine.image is None else ""
    heads = [row.group.head for row in alive if row.group is not None and row.group.head is not None]
    return Status(
        observed_generation=generation,
        conditions=(
            condition("Accepted", is_accepted, accepted),
            condition("ModelReady", loaded.reason is Reason.LOADED, loaded),
            condition("Scheduled", scheduled.reason is Reason.SCHEDULED, scheduled),
            condition("Available", available.reason is Reason.SERVING, available),
            condition("Degraded", is_degraded, degraded),
            *(condition(*each) for each in of_rolls),
        ),
        shape=resolved.shape if resolved is not None else previous.get("shape", ""),
        sizing=resolved.sizing if resolved is not None else stored_sizing(previous),
        model=model,
        ready=f"{num_available}/{asked}",
        loading=_loading(alive),
        endpoint=endpoint(resolved.service) if resolved is not None else previous.get("endpoint", ""),
        replicas=sum(row.group is not None for row in alive),
        ready_replicas=sum(head.is_engine_ready for head in heads),
        available_replicas=num_available,
        updated_replicas=sum(row.group is not None and row.revision == update for row in shown),
        selector=(
            f"{SERVICE_LABEL}={resolved.service.metadata.name},{NODE_TYPE_LABEL}=head"
            if resolved is not None
            else previous.get("selector", "")
        ),
        current_revision=step.state.current_revision if step is not None else previous.get("currentRevision", ""),
        update_revision=update or previous.get("updateRevision", ""),
        progress=progress(step) if step is not None else previous.get("progress", ""),
        # While nothing can be done, no deadline counts.
        rollout=step.state
        if step is not None
        else rollout.model_copy(update={"progress_time": "", "held_time": ""})
        if rollout.update_revision
        else None,
        image=default_image if is_made and step is not None else previous.get("image", ""),
        groups=tuple(_group_status(row, resolved, memory.get(row.slot.name), now) for row in rows),
    )


def _of_leaver(group: Group, now: float, *, is_leaving: bool) -> Verdict:
    """What an engine without a place does."""
    said = judge(group, now)
    is_routed = group.head is not None and group.head.is_routed
    if not is_leaving or is_routed or not is_well(group, now):
        return said
    message = f"{group.name} is to go: it gets no more requests, and finishes those that it has."
    return Verdict(reason=Reason.DRAINING, message=message)


def _waiting(memory: Memory, seen: Observed) -> Iterator[_Row]:
    """Engines that failed and are not there, while nothing can be made: what is known of them is kept."""
    there = {group.name for group in seen.groups}
    for name, before in memory.items():
        if before.failure is not None and name not in there:
            words = f"The engine {name} failed, and is made anew once the spec and its model can be used. At first: "
            because = Verdict(reason=Reason.GROUP_BACK_OFF, message=words + before.failure.message)
            slot = Slot(name=name, group=None, restarts=before.restarts, failure=before.failure)
            yield _Row(slot=slot, verdict=because)


def _available(shown: list[_Row]) -> Verdict:
    """Of an engine that serves, else of one that may soon, else of the first."""
    verdicts = [row.verdict for row in shown] or [judge(None, 0.0)]
    serving = (verdict for verdict in verdicts if verdict.reason is Reason.SERVING)
    on_its_way = (verdict for verdict in verdicts if verdict.reason not in FAULTS)
    return next(serving, next(on_its_way, verdicts[0]))


def _loading(rows: list[_Row]) -> str | None:
    """What the first engine that starts has loaded; None where none counts bytes."""
    starting = (row.group for row in rows if row.verdict.reason is Reason.STARTING and row.group is not None)
    readings = (group.reading for group in starting if group.reading is not None)
    return next((reading.start.amount for reading in readings if reading.start.amount), None)


def _degraded(shown: list[_Row], seen: Observed, available: Verdict) -> tuple[bool, Verdict]:
    """What is broken, the gravest first. An engine that starts for the first time is not."""
    pods = [*(pod for row in shown if row.group for pod in row.group.pods), *seen.leaving]
    lost = sorted({pod.node for pod in pods if pod.node in seen.lost_nodes})
    if lost:
        words = f"{', '.join(lost)} not ready: the pods there are deleted, and made on other nodes."
        return True, Verdict(reason=Reason.NODE_LOST, message=("Node " if len(lost) == 1 else "Nodes ") + words)
    ill = [row for row in shown if row.verdict.reason in FAULTS]
    ill += [row for row in shown if row.verdict.reason is Reason.RECOVERING]
    for row in ill:
        name = f"{row.slot.name}: " if len(shown) > 1 and row.slot.name not in row.verdict.message else ""
        return True, Verdict(reason=row.verdict.reason, message=name + row.verdict.message)
    young = [row for row in shown if row.verdict.reason is not Reason.SERVING]
    for slot in (row.slot for row in young):
        if slot.failure is not None:
            message = f"The engine {slot.name} was made anew, and does not serve yet. {slot.failure.message}"
            return True, Verdict(reason=Reason.RECOVERING, message=message)
    if young or not shown:
        return False, young[0].verdict if young else available
    return False, Verdict(reason=Reason.HEALTHY, message="Nothing is known to be broken.")


def _scheduled(shown: list[_Row], available: Verdict, num_pods: int) -> Verdict:
    """`num_pods` is how many an engine has; 0 while that is not known."""
    for row in shown:
        if row.group is None:
            return row.verdict
        faults = [pod.fault for pod in row.group.pods if pod.fault is not None]
        unplaced = [fault for fault in faults if fault.reason is Reason.UNSCHEDULABLE]
        if unplaced:
            return unplaced[0]
        num_placed = sum(bool(pod.node) for pod in row.group.pods)
        num_wanted = num_pods or len(row.group.pods)
        if num_placed < num_wanted or not num_wanted:
            have = f"{num_placed} of {num_wanted} pods of {row.slot.name} have a node."
            message = have if num_wanted else f"{row.slot.name} has no pods."
            return Verdict(reason=Reason.PODS_PENDING, message=message)
    return Verdict(reason=Reason.SCHEDULED, message="Every pod has a node.") if shown else available


def _model(shown: list[_Row]) -> Verdict:
    if any(row.verdict.is_loaded for row in shown):
        return Verdict(reason=Reason.LOADED, message="Every rank has loaded the model.")
    message = "The engine does not say, or not yet, that every rank has loaded the model."
    loading = Verdict(reason=Reason.LOADING, message=message)
    return next((row.verdict for row in shown if row.verdict.reason in _MODEL_FAULTS), loading)


def _group_status(row: _Row, resolved: Resolved | None, before: GroupStatus | None, now: Now) -> GroupStatus:
    group, slot, state = row.group, row.slot, _GROUP_STATES.get(row.verdict.reason, "Failed")
    nodes: tuple[str, ...] = ()
    if group is not None:
        said = group.reading.status if group.reading is not None else None
        nodes = said.nodes if said is not None else ()
        nodes = nodes or tuple(sorted(pod.node for pod in group.pods if pod.node and not pod.is_head))
    retry_at = slot.retry_at(resolved.service.spec.recovery) if resolved is not None and group is None else None
    # While the spec cannot be used nobody looks at what failed, and nothing of that is to be forgotten.
    kept = before if resolved is None and before is not None else slot
    is_given_up = group is not None and kept.failure is not None and kept.failure.uid == group.uid
    is_silent = group is not None and silence(group.reading, now.mono) is not None
    if group is not None and is_silent and not is_given_up and state not in ("Serving", "Draining"):
        # Its supervisor or kubelet may bring it back. That it has served is what the next operator judges it by.
        state = "Recovering" if has_served(group, before) else state
    return GroupStatus(
        name=slot.name,
        revision=row.revision,
        state=state,
        reason=row.verdict.reason,
        last_transition_time=before.last_transition_time if before and before.state == state else stamp(now.wall),
        restarts=kept.restarts,
        next_retry_time=stamp(retry_at) if retry_at is not None and retry_at > now.wall else None,
        failure=kept.failure,
        nodes=nodes,
    )
