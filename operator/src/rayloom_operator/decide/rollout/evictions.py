"""The eviction hold: while it lasts, the service's PodDisruptionBudget lets no pod be evicted. Pure.

`kubectl drain` asks for evictions at the moment in which it cordons the node, so they are held before any node is
cordoned. The planner then surges another engine, and the engine on the cordoned node loses its route, drains and is
deleted. The hold lasts for as long as that makes progress.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta

from rayloom_operator.api.rollout.state import RolloutState
from rayloom_operator.decide.rollout.inputs import Desired, ReplicaView, View, room, target_revision
from rayloom_operator.decide.rollout.terminating import is_drained
from rayloom_operator.times import moment, stamp

# A node may get room for another engine within this time; after it, evictions wait no longer.
_NO_CAPACITY_S = 30


def with_eviction_hold(
    desired: Desired, stored: RolloutState, state: RolloutState, view: View, wall: datetime
) -> RolloutState:
    """Returns `state` with the times of the eviction hold.

    Evictions wait for engines to move from the one on; from the other on, no node has room for these engines.
    """
    if not any(_is_guarded(desired, state, engine, wall) for engine in view.engines):
        return replace(state, eviction_hold_time="", no_capacity_time="")
    new_names = state.terminating.keys() - stored.terminating.keys()
    has_moved_on = any(engine.is_cordoned and engine.name in new_names for engine in view.engines)
    hold_time = stamp(wall) if has_moved_on or not state.eviction_hold_time else state.eviction_hold_time
    no_capacity_time = state.no_capacity_time or stamp(wall)
    if _is_moving(desired, state, view, wall):
        no_capacity_time = ""
    return replace(state, eviction_hold_time=hold_time, no_capacity_time=no_capacity_time)


def holds_evictions(desired: Desired, state: RolloutState, view: View, wall: datetime) -> bool:
    """Returns True while the budget lets no pod be evicted but those of `evictable` engines.

    `state` has the times of the hold.
    """
    if state.eviction_hold_time:
        return all(left_s > 0 for left_s in hold_seconds_left(desired, state, wall))
    # An engine that tolerates a cordon is not moved, and without nodes to read the planner sees no cordon.
    is_any_tolerant = any(engine.is_tolerant for engine in view.engines)
    return desired.rollout.max_surge > 0 and view.knows_nodes and not is_any_tolerant


def evictable(state: RolloutState, view: View) -> frozenset[str]:
    """Returns engines on cordoned nodes whose pods may be evicted at once, for they do not serve.

    Empty while evictions wait for another engine: a budget cannot tell the pods of two engines apart.
    """
    return frozenset(engine.name for engine in view.engines if engine.is_cordoned and not state.eviction_hold_time)


def hold_seconds_left(desired: Desired, state: RolloutState, wall: datetime) -> Iterator[float]:
    """Yields the seconds until the hold ends, for each reason; none while no eviction waits for an engine."""
    patience_s = desired.rollout.progress_deadline_seconds + desired.drain_seconds
    for time, seconds in ((state.eviction_hold_time, patience_s), (state.no_capacity_time, _NO_CAPACITY_S)):
        if time:
            yield (moment(time) + timedelta(seconds=seconds) - wall).total_seconds()


def _is_guarded(desired: Desired, state: RolloutState, engine: ReplicaView, wall: datetime) -> bool:
    """Returns True for an engine on a cordoned node that serves, or finishes its requests.

    With maxSurge 0 no engine could take its place, so none is guarded.
    """
    has_requests = engine.state in ("well", "draining")
    drained_at = state.terminating.get(engine.name, "")
    is_over = is_drained(engine, drained_at, desired, wall)
    return desired.rollout.max_surge > 0 and engine.is_cordoned and has_requests and not is_over


def _is_moving(desired: Desired, state: RolloutState, view: View, wall: datetime) -> bool:
    """Returns True while evictions wait for an engine that starts, drains or is analysed, or that has room to start."""
    engines = [engine for engine in view.of(target_revision(desired, state)) if not engine.is_cordoned]
    if any(engine.state == "unschedulable" for engine in engines):
        return False
    terminating = state.terminating
    is_starting = any(not engine.is_available for engine in engines if engine.name not in terminating)
    is_draining = any(
        engine.name in terminating and not is_drained(engine, terminating[engine.name], desired, wall)
        for engine in view.engines
    )
    return is_starting or room(desired, view) > 0 or is_draining or state.window is not None
