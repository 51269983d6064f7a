"""Gives each engine replica of a service a place, and recreates replicas that have failed. Pure.

A place is a position for one engine replica: it is empty, or taken by a RayCluster. Each kind of fault is repaired by
one component: the engine replaces its ranks, the kubelet restarts containers, KubeRay recreates worker pods. If none of
these components can repair an engine replica, the replica has failed (see `causes`). Its RayCluster is then deleted and
recreated, each time after a longer back-off.

Failures are remembered between reconciles only in `status.groups`. A failure is written there first, and the next
reconcile acts on it. So the failure counts once, even if the operator stops between the write and the deletion.

A recreated replica gets a new number, and so a new name, for two reasons. First, KubeRay remembers by name which pods a
RayCluster waits for. So a new RayCluster of the old name might wait minutes for pods of the old RayCluster. Second, a
RayCluster of another name can be created before the old RayCluster is gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain, count, islice
from typing import Any

from pydantic import ValidationError

from rayloom_operator.api.recovery import Recovery
from rayloom_operator.api.status import Failure, GroupStatus, Reason
from rayloom_operator.decide.causes import cause_to_replace, has_served
from rayloom_operator.names import group_name
from rayloom_operator.observe.observed import EngineReplica, Observed, Verdict
from rayloom_operator.observe.verdict import is_well, judge
from rayloom_operator.resolve.resolved import Resolved
from rayloom_operator.times import Now, moment, stamp

# Once an engine has served for this many seconds, its restarts count from 0 again. The engine's own restart budget
# counts restarts within the same time.
_STABLE_S = 600.0
# The highest number in the name of an engine replica. After this number, numbers start at 0 again: by then the first
# names are long unused.
_MAX_NUMBER = 99
# Failures that say nothing about the engine or its revision.
NOT_BY_ENGINE = (Reason.NODE_LOST, Reason.HEAD_LOST)

Memory = Mapping[str, GroupStatus]  # name of an engine replica -> its entry in `status.groups`


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place for one engine replica. The place has the replica, if there is one, and the failures of the place's
    replicas so far."""

    name: str  # name of the replica, or of the replica to create
    replica: EngineReplica | None
    restarts: int = 0
    failure: Failure | None = None
    has_failed: bool = False  # the failure of `replica` is in the status already, so the replica is deleted now

    def retry_at(self, recovery: Recovery) -> datetime | None:
        """Returns the earliest time at which a replica may be created here again; None without a failure."""
        if self.failure is None:
            return None
        return moment(self.failure.time) + timedelta(seconds=back_off_seconds(self.restarts, recovery))


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The number of engine replicas of one revision that the rollout wants."""

    revision: str
    number: int  # number of places; if more replicas exist, there is a place for each existing replica
    # The number of empty places without a failure that may be filled now. None while the rollout's next state is not
    # written yet: then the places in the status stay, and no place is added.
    num_new: int | None
    leaving: Set[str] = frozenset()  # names of replicas that are being terminated, and so have no place


def back_off_seconds(restarts: int, recovery: Recovery) -> int:
    """Returns the seconds between a failure and the next attempt: 0, base, 2 base, 4 base, ... up to the maximum.

    After more than `restart_budget` restarts, the wait is the maximum.
    """
    if restarts > recovery.restart_budget:
        return recovery.backoff_max_seconds
    # A larger exponent changes nothing: 2 ** 17 s are more than a day, and backoffMaxSeconds is a day at most.
    growth = 0 if restarts < 2 else 2 ** min(restarts - 2, 17)
    return min(recovery.backoff_base_seconds * growth, recovery.backoff_max_seconds)


def remembered(previous: Mapping[str, Any]) -> Memory:
    """Returns the entries of `groups` in a status document, except those that this operator version cannot read."""
    found = {}
    for each in previous.get("groups", ()):
        try:
            found[each["name"]] = GroupStatus.model_validate(each, strict=False)
        except (ValidationError, KeyError):
            continue
    return found


def places(resolved: Resolved, need: Need, observed: Observed, memory: Memory, now: Now) -> tuple[Place, ...]:
    """Returns the places for engine replicas of one revision, sorted by the replica's number.

    Existing replicas get a place first, then failed replicas that are to be recreated, then up to `need.num_new` new
    replicas.
    `resolved` is the spec from which the replicas are created. A place whose RayCluster is gone gets a new name.
    """
    memory = _without_future(memory, now)
    names = _Names(service=resolved.service.metadata.name, revision=need.revision)
    existing = _existing(need, observed, memory)
    known = existing.keys() | (remembered_names(names.service, need.revision, memory) - need.leaving)
    kept, num_left = _kept(names, known, existing, memory, need, now)
    free = names.free(known | observed.taken)
    found = []
    for name in kept:
        if name in observed.taken and name not in existing:
            # The RayCluster is gone or terminating: the place gets a new name and keeps its failures.
            before = memory[name]
            successor = next(free)
            found.append(Place(name=successor, replica=None, restarts=before.restarts, failure=before.failure))
        else:
            found.append(_review(name, existing.get(name), memory.get(name), resolved, observed, now))
    for name in islice(free, num_left):
        found.append(_review(name, None, memory.get(name), resolved, observed, now))
    return tuple(sorted(found, key=lambda place: names.number(place.name) or 0))


def _without_future(memory: Memory, now: Now) -> Memory:
    """Returns `memory`, in which each failure in the future happens now.

    An operator on a machine whose clock was ahead may have written such a failure. Otherwise the replica would be
    recreated only after the clock has reached that time and the back-off is over.
    """
    later = {
        name: each.model_copy(update={"failure": each.failure.model_copy(update={"time": stamp(now.wall)})})
        for name, each in memory.items()
        if each.failure is not None and moment(each.failure.time) > now.wall
    }
    return {**memory, **later} if later else memory


def _existing(need: Need, observed: Observed, memory: Memory) -> dict[str, EngineReplica]:
    """Returns the replicas of the revision that exist and are not being terminated, by name."""
    # A failure that is recorded under the name of the successor shows that the failed RayCluster is deleted. If the
    # watch still lists that RayCluster, the watch lags.
    recorded = {
        (each.failure.uid, name) for name, each in memory.items() if each.failure is not None and each.failure.uid
    }
    return {
        replica.name: replica
        for replica in observed.replicas
        if replica.revision == need.revision
        and replica.name not in need.leaving
        and not any(uid == replica.uid and name != replica.name for uid, name in recorded)
    }


def _kept(
    names: _Names, known: Set[str], existing: Mapping[str, EngineReplica], memory: Memory, need: Need, now: Now
) -> tuple[list[str], int]:
    """Returns the names that keep their places, and the number of new places.

    `known`: the names of existing replicas, and those in `memory`.
    """

    def rank(name: str) -> tuple[bool, bool, int]:
        replica = existing.get(name)
        is_serving = replica is not None and is_well(replica, now.mono)
        return replica is None, not is_serving, names.number(name) or 0

    kept = sorted(known, key=rank)[: max(need.number, len(existing))]
    if need.num_new is None:
        return kept, 0
    # A place without a replica and without a failure has nothing to keep, so it counts as a new place.
    empty = [name for name in kept if name not in existing and memory[name].failure is None]
    for name in empty[max(need.num_new, 0) :]:
        kept.remove(name)
    num_left = min(need.number - len(kept), need.num_new - len(empty))
    return kept, max(num_left, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """The names of the engine replicas of one revision."""

    service: str
    revision: str

    def number(self, name: str) -> int | None:
        """Returns the number in a name; None if the name belongs to another revision."""
        start, _, number = name.rpartition("-")
        return int(number) if start == f"{self.service}-{self.revision}" and number.isdecimal() else None

    def free(self, taken: Set[str]) -> Iterator[str]:
        """Yields names that are not taken: first with the numbers above all used numbers, then with numbers from 0."""
        used = {number for name in taken if (number := self.number(name)) is not None}
        numbers = chain(range(max(used, default=-1) + 1, _MAX_NUMBER + 1), count())
        return (group_name(self.service, self.revision, number) for number in numbers if number not in used)


def remembered_names(service: str, revision: str, memory: Memory) -> frozenset[str]:
    """Returns the names of the engine replicas of a revision that are in `memory`."""
    names = _Names(service=service, revision=revision)
    return frozenset(name for name in memory if names.number(name) is not None)


def _review(
    name: str,
    replica: EngineReplica | None,
    before: GroupStatus | None,
    resolved: Resolved,
    observed: Observed,
    now: Now,
) -> Place:
    """Returns the place with its failures up to now. `before`: the entry of `name` in `status.groups` as last written.

    A new failure counts as a restart, unless it is no fault of the engine (`_is_fault_of_engine`). If the engine serves
    again before its RayCluster is deleted, that restart does not count. Once the engine has served for 10 minutes,
    `restarts` is 0. An engine that serves and has 0 restarts has no failure.
    """
    failure, restarts = (before.failure, before.restarts) if before is not None else (None, 0)
    if replica is None:
        return Place(name=name, replica=None, restarts=restarts, failure=failure)
    is_recorded = failure is not None and failure.uid == replica.uid
    if before is not None and failure is not None and is_well(replica, now.mono):
        if is_recorded:  # The engine serves again, and its RayCluster was not deleted yet.
            restarts = max(restarts - 1, 0)
            failure = failure.model_copy(update={"uid": ""})
        elif before.state == "Serving" and _is_older(before.last_transition_time, _STABLE_S, now):
            restarts = 0
        return Place(name=name, replica=replica, restarts=restarts, failure=failure if restarts else None)
    if is_recorded:
        return Place(name=name, replica=replica, restarts=restarts, failure=failure, has_failed=True)
    cause = cause_to_replace(replica, resolved, observed.lost_nodes, before, now=now)
    if cause is not None:
        if failure is not None and failure.reason in NOT_BY_ENGINE and cause.reason not in NOT_BY_ENGINE:
            # The record begins with the first failure of the engine itself. If it kept the lost node, the status would
            # never show why the engine fails now, and a rollout would not count this failure.
            failure, restarts = None, 0
        restarts += _is_fault_of_engine(replica, cause, before)
        first = failure or Failure(uid="", reason=cause.reason, message=cause.message, time="")
        failure = first.model_copy(update={"uid": replica.uid, "time": stamp(now.wall)})
    return Place(name=name, replica=replica, restarts=restarts, failure=failure)


def _is_fault_of_engine(replica: EngineReplica, cause: Verdict, before: GroupStatus | None) -> bool:
    """Returns whether a failure counts as a restart, after which the next ones wait longer.

    It does not count if another client deleted the head pod, for example `kubectl drain`, or if the node of an engine
    that had served is lost. The loss of a node during the engine's start counts: the start itself may have brought the
    node down, and then the next engine would do the same to the next node.
    """
    if replica.is_head_evicted:
        return False
    return cause.reason is not Reason.NODE_LOST or not has_served(replica, before)


def _is_older(time: str, seconds: float, now: Now) -> bool:
    return now.wall - moment(time) > timedelta(seconds=seconds)


def verdict_of(place: Place, recovery: Recovery, now: Now) -> Verdict:
    """Returns the verdict on the engine replica in the place. For an empty place: why it is empty."""
    failure = place.failure
    if failure is None or (place.replica is not None and failure.uid != place.replica.uid):
        return judge(place.replica, now.mono)
    cause = Verdict(reason=failure.reason, message=failure.message)
    if place.replica is not None:
        return cause
    retry_at = place.retry_at(recovery)
    if retry_at is not None and retry_at > now.wall:
        times = f"{place.restarts} times" if place.restarts > 1 else "once"
        words = f"The engine failed {times}, and is recreated as {place.name} at {stamp(retry_at)}. First failure: "
        return Verdict(reason=Reason.GROUP_BACK_OFF, message=words + cause.message)
    return Verdict(reason=Reason.RECOVERING, message=f"The engine is recreated as {place.name}. {cause.message}")
