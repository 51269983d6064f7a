"""Which engines a service is to have, and which of them are beyond help and are made anew. Pure.

One healer for each fault: the engine replaces its ranks, the kubelet starts containers that end, KubeRay makes worker
pods. What is left is an engine that none of them brings back; its RayCluster is deleted, and another made in its place,
each time later than the last. A model, image or place that is not there is no such case: that is asked for again
by itself, and a new engine would find the same.

All memory is `status.groups`. A failure is written there first and acted on in the next turn, so that an operator that
ends in between counts it once.

A successor has a number of its own. KubeRay remembers by name which pods it waits for, and when a RayCluster comes
back under its name at once it may wait for the old one's, minutes long. It also need not wait for the old one's end.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import chain, count, islice
from typing import Any

from pydantic import ValidationError

from rayloom_operator.api.recovery import Recovery
from rayloom_operator.api.status import Failure, Reason
from rayloom_operator.api.status import Group as GroupStatus
from rayloom_operator.names import group_name
from rayloom_operator.observe.observed import NEW_POD_S, Group, Observed, Verdict
from rayloom_operator.observe.verdict import SILENCE_LIMIT_S, is_well, judge, silence
from rayloom_operator.resolve.resolved import Resolved
from rayloom_operator.times import Now, moment, stamp

# An engine that served for so long begins with a clean record. The engine's own budget counts over the same time.
_STABLE_S = 600.0
# Numbers of engines go up to this, and then begin anew: long after an engine went, its name is another's.
_MAX_NUMBER = 99
# The engine gives up by itself after rebuildSeconds. The operator comes later, lest both act.
_LATER_S = 30.0

Memory = Mapping[str, GroupStatus]  # by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A place for one engine: the group that has it, if any, and what became of those before."""

    name: str
    group: Group | None
    restarts: int = 0
    failure: Failure | None = None
    is_condemned: bool = False  # its group is to be deleted, and that is written down

    def retry_at(self, recovery: Recovery) -> datetime | None:
        """When the next group may be made; None when none has failed."""
        if self.failure is None:
            return None
        return moment(self.failure.time) + timedelta(seconds=back_off_seconds(self.restarts, recovery))


def back_off_seconds(restarts: int, recovery: Recovery) -> int:
    """How long after its last failure an engine is made anew: 0, base, 2 base, 4 base, ... and never above the maximum,
    which it is at once after `restart_budget` times."""
    if restarts > recovery.restart_budget:
        return recovery.backoff_max_seconds
    # 2 ** 17 s are more than a day.
    growth = 0 if restarts < 2 else 2 ** min(restarts - 2, 17)
    return min(recovery.backoff_base_seconds * growth, recovery.backoff_max_seconds)


def remembered(previous: Mapping[str, Any]) -> Memory:
    """The groups in a status document. What another version wrote and this one cannot read is as good as not there."""
    found = {}
    for each in previous.get("groups", ()):
        try:
            found[each["name"]] = GroupStatus.model_validate(each, strict=False)
        except (ValidationError, KeyError):
            continue
    return found


def slots(
    resolved: Resolved,
    revision: str,
    seen: Observed,
    memory: Memory,
    *,
    number: int,
    num_new: int,
    leaving: Set[str] = frozenset(),
    now: Now,
) -> tuple[Slot, ...]:
    """The places for engines of one revision, by number: those that are there, those that failed and are made anew, and
    `num_new` at most for new ones; `number` in all, or as many as are there.

    One whose engine went gets another name. Engines in `leaving` have no place. `resolved` is the spec's.
    """
    service = resolved.service.metadata.name
    # What failed under one name and is remembered under the next was seen by a cache that lags.
    ended = {(each.failure.uid, name) for name, each in memory.items() if each.failure is not None and each.failure.uid}
    mine = {
        group.name: group
        for group in seen.groups
        if group.revision == revision
        and group.name not in leaving
        and not any(uid == group.uid and name != group.name for uid, name in ended)
    }
    known = mine.keys() | (remembered_names(service, revision, memory) - leaving)

    def rank(name: str) -> tuple[int, int]:
        group, place = mine.get(name), _number(service, revision, name) or 0
        return (2 if group is None else 0 if is_well(group, now.mono) else 1), place

    kept = sorted(known, key=rank)[: max(number, len(mine))]
    # Of what went without a failure nothing is known that a new one could not do without.
    empty = [name for name in kept if name not in mine and memory[name].failure is None]
    for name in empty[max(num_new, 0) :]:
        kept.remove(name)
    missing = min(number - len(kept), num_new - len(empty))
    used = {place for name in known | seen.taken if (place := _number(service, revision, name)) is not None}
    numbers = chain(range(max(used, default=-1) + 1, _MAX_NUMBER + 1), count())
    free = (group_name(service, revision, place) for place in numbers if place not in used)
    names = {name: next(free) if name in seen.taken and name not in mine else name for name in kept}
    names |= {name: name for name in islice(free, max(missing, 0))}
    return tuple(
        _review(name, mine.get(name), memory.get(before), resolved, seen, now)
        if name == before
        else _successor(name, memory[before])
        for before, name in sorted(names.items(), key=lambda each: _number(service, revision, each[1]) or 0)
    )


def _successor(name: str, before: GroupStatus) -> Slot:
    return Slot(name=name, group=None, restarts=before.restarts, failure=before.failure)


def remembered_names(service: str, revision: str, memory: Memory) -> frozenset[str]:
    """Of the remembered groups those of a revision."""
    return frozenset(name for name in memory if _number(service, revision, name) is not None)


def _number(service: str, revision: str, name: str) -> int | None:
    """The number in the name of a group of this revision; None in any other name."""
    start, _, number = name.rpartition("-")
    return int(number) if start == f"{service}-{revision}" and number.isdecimal() else None


def _review(
    name: str,
    group: Group | None,
    before: GroupStatus | None,
    resolved: Resolved,
    seen: Observed,
    now: Now,
) -> Slot:
    failure, restarts = (before.failure, before.restarts) if before is not None else (None, 0)
    if group is None:
        return Slot(name=name, group=None, restarts=restarts, failure=failure)
    is_counted = failure is not None and failure.uid == group.uid
    if before is not None and failure is not None and is_well(group, now.mono):
        serving_for = now.wall - moment(before.last_transition_time)
        if is_counted:  # It came back before anything was done.
            restarts, failure = max(restarts - 1, 0), failure.model_copy(update={"uid": ""})
        elif before.state == "Serving" and serving_for > timedelta(seconds=_STABLE_S):
            restarts = 0
        return Slot(name=name, group=group, restarts=restarts, failure=failure if restarts else None)
    cause = None if is_counted else cause_to_replace(group, resolved, seen.lost_nodes, before, now=now)
    if cause is not None:
        # Whoever told the pod to go, such as a drain of its node, had no complaint of the engine.
        restarts += not group.is_told_to_go
        first = failure or Failure(uid="", reason=cause.reason, message=cause.message, time="")
        failure = first.model_copy(update={"uid": group.uid, "time": stamp(now.wall)})
    return Slot(name=name, group=group, restarts=restarts, failure=failure, is_condemned=is_counted)


def cause_to_replace(
    group: Group,
    resolved: Resolved,
    lost_nodes: frozenset[str],
    before: GroupStatus | None = None,
    *,
    now: Now,
) -> Verdict | None:
    """Why the group is beyond help; None while somebody else may bring it back.

    `before` is what is remembered of the group.
    """
    head, reading, recovery = group.head, group.reading, resolved.service.spec.recovery
    if is_well(group, now.mono):
        return None
    if group.is_headless and head is None:
        cause = judge(group, now.mono)
        return replace(cause, reason=Reason.HEAD_LOST) if group.is_told_to_go else cause
    if group.num_new_pods > 2 * (1 + resolved.num_pods) + recovery.restart_budget:
        # KubeRay makes a pod in place of one that failed at once, however often.
        fault = group.fault
        words = f"KubeRay made {group.num_new_pods} pods within {NEW_POD_S:.0f} s, for others kept failing. "
        return Verdict(reason=Reason.CONTAINER_FAILED, message=words + (fault.message if fault else ""))
    if head is None:
        return None
    if head.node in lost_nodes:
        return Verdict(reason=Reason.NODE_LOST, message=f"Node {head.node} with head pod {head.name} is not ready.")
    if head.is_spent and head.fault is not None:
        starved = sorted(pod.name for pod in group.pods if pod.was_starved)
        words = (
            f" Memory was too little in {', '.join(starved)}: raise engine.resources.limits.memory." if starved else ""
        )
        return replace(head.fault, message=head.fault.message + words)
    if reading is None or not head.is_running:
        return None
    silent_s = silence(reading, now.mono)
    if silent_s is not None and head.is_engine_ready:
        # Its kubelet reaches it. What keeps it from us (a firewall, another key) would keep its successor from us.
        return None
    # The engine's supervisor replaces what hangs within hangSeconds. The operator comes later, lest both act. While it
    # starts an engine is never ready, so nobody bears witness, and there is nothing to lose by waiting.
    patience_s = max(2 * recovery.hang_seconds, SILENCE_LIMIT_S)
    if silent_s is not None and has_served(group, before) and silent_s >= patience_s:
        words = f"The engine in pod {head.name} did not answer for {patience_s:g} s, and was not ready."
        return Verdict(reason=Reason.ENGINE_UNREACHABLE, message=words)
    running = [pod.running_since for pod in group.pods if pod.running_since is not None]
    if len(running) < len(group.pods) or (reading.status is not None and reading.status.state == "draining"):
        return None
    stuck_s = min(now.mono - reading.advanced_at, (now.wall - max(running)).total_seconds())
    if stuck_s >= recovery.rebuild_seconds + _LATER_S:
        words = f"The engine in pod {head.name} neither served nor got on for {recovery.rebuild_seconds} s. "
        return Verdict(reason=Reason.ENGINE_STUCK, message=words + judge(group, now.mono).message)
    return None


def has_served(group: Group, before: GroupStatus | None) -> bool:
    """Whether the engine was beyond its start since its containers were started: it said so, or, where this operator
    has not heard it yet, an earlier one wrote so."""
    head, reading = group.head, group.reading
    if head is None or head.running_since is None:
        return False
    if reading is not None and reading.status is not None:
        return reading.status.state != "starting"
    if before is None or before.state not in ("Serving", "Recovering", "Draining"):
        return False
    return moment(before.last_transition_time) >= head.running_since


def verdict_of(slot: Slot, recovery: Recovery, *, now: Now) -> Verdict:
    """What the slot's engine does, or why there is none."""
    if slot.failure is None or (slot.group is not None and slot.failure.uid != slot.group.uid):
        return judge(slot.group, now.mono)
    cause = Verdict(reason=slot.failure.reason, message=slot.failure.message)
    if slot.group is not None:
        return cause
    retry_at = slot.retry_at(recovery)
    if retry_at is not None and retry_at > now.wall:
        times = f"{slot.restarts} times" if slot.restarts > 1 else "once"
        words = f"The engine failed {times}, and is made anew as {slot.name} at {stamp(retry_at)}. At first: "
        return Verdict(reason=Reason.GROUP_BACK_OFF, message=words + cause.message)
    return Verdict(reason=Reason.RECOVERING, message=f"The engine is made anew as {slot.name}. {cause.message}")
