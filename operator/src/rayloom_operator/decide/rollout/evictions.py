"""The eviction hold: while it lasts, the service's PodDisruptionBudget lets no pod be evicted. Pure.

`kubectl drain` requests evictions as soon as it has cordoned the node. So evictions are held in advance, before any
node is cordoned. Once a node is cordoned, the planner creates an additional engine elsewhere (maxSurge). Then the
engine on the cordoned node loses its route, drains and is deleted. The hold lasts as long as this replacement makes
progress.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta

from rayloom_operator.api.rollout.state import RolloutState
from rayloom_operator.decide.rollout.inputs import Desired, ReplicaView, View, is_stopped, room
from rayloom_operator.decide.rollout.terminating import is_drained, may_move, moved_revision
from rayloom_operator.times import moment, stamp

# Evictions wait this many seconds for a node with room for another engine.
_NO_CAPACITY_S = 30


def with_eviction_hold(
    desired: Desired, stored: RolloutState, state: RolloutState, view: View, wall: datetime
) -> RolloutState:
    """Returns `state` with the two times of the eviction hold; both are empty while no eviction has to wait.

    `eviction_hold_time`: the time at which evictions began to wait for an engine to move. `no_capacity_time`: the time
    at which the move stopped, because no node had room; empty while engines can move.
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
    """Returns True while the PodDisruptionBudget protects all pods except the pods of `evictable` engines.

    `state` has the times that `with_eviction_hold` sets.
    """
    if state.eviction_hold_time:
        return all(left_s > 0 for left_s in hold_seconds_left(desired, state, wall))
    # Evictions are held in advance only if the planner would move the engine. The planner does not move an engine that
    # tolerates a cordon. Without the right to read nodes, the operator does not notice a cordon.
    is_any_tolerant = any(engine.is_tolerant for engine in view.engines)
    return desired.rollout.max_surge > 0 and view.knows_nodes and not is_any_tolerant


def evictable(state: RolloutState, view: View) -> frozenset[str]:
    """Returns the names of the engines on cordoned nodes, if the pods of these engines may be evicted at once.

    Empty while evictions wait for any engine to move: the budget cannot tell the pods of two engines apart.
    """
    return frozenset(engine.name for engine in view.engines if engine.is_cordoned and not state.eviction_hold_time)


def hold_seconds_left(desired: Desired, state: RolloutState, wall: datetime) -> Iterator[float]:
    """Yields the remaining seconds of each limit of the hold: of the whole wait, and of the wait for capacity.

    While no eviction waits for an engine to move, yields nothing. While engines can move, yields only the first limit.
    """
    patience_s = desired.rollout.progress_deadline_seconds + desired.drain_seconds
    for time, seconds in ((state.eviction_hold_time, patience_s), (state.no_capacity_time, _NO_CAPACITY_S)):
        if time:
            yield (moment(time) + timedelta(seconds=seconds) - wall).total_seconds()


def _is_guarded(desired: Desired, state: RolloutState, engine: ReplicaView, wall: datetime) -> bool:
    """Returns True if evictions wait for this engine: it is on a cordoned node, and serves or finishes its requests.

    With maxSurge 0 no additional engine could replace this engine, so evictions do not wait.
    """
    has_requests = engine.state in ("well", "draining")
    drained_at = state.terminating.get(engine.name, "")
    is_over = is_drained(engine, drained_at, desired, wall)
    return desired.rollout.max_surge > 0 and engine.is_cordoned and has_requests and not is_over


def _is_moving(desired: Desired, state: RolloutState, view: View, wall: datetime) -> bool:
    """Returns True while the move of engines makes progress: an engine starts, drains or is analysed, or there is room
    to create one. False while an engine is unschedulable, and while a stopped rollout moves none of the engines on
    cordoned nodes.
    """
    of_moved = view.of(moved_revision(desired, state))
    engines = [engine for engine in of_moved if not engine.is_cordoned]
    if any(engine.state == "unschedulable" for engine in engines):
        return False
    terminating = state.terminating
    is_starting = any(not engine.is_available for engine in engines if engine.name not in terminating)
    is_draining = any(
        engine.name in terminating and not is_drained(engine, terminating[engine.name], desired, wall)
        for engine in view.engines
    )
    # A stopped rollout creates an engine only to move one of the current revision.
    has_moves = may_move(desired, state) and len(engines) < len(of_moved)
    may_create = has_moves or not is_stopped(desired, state)
    has_room = may_create and room(desired, view) > 0
    return is_starting or has_room or is_draining or state.window is not None
