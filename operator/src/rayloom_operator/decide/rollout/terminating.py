"""Chooses the engines to terminate: replaced engines on cordoned nodes, and engines beyond a revision's count. Pure.

An engine is terminated in steps: it loses its route label and then its endpoint. The engine is asked to drain, and
finishes its requests. Then the engine is deleted.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta

from rayloom_operator.api.rollout.state import RolloutState
from rayloom_operator.decide.rollout.inputs import (
    IDLE,
    Desired,
    EngineState,
    ReplicaView,
    View,
    is_stopped,
    target_revision,
)
from rayloom_operator.times import moment

# kube-proxy on a node drops a removed endpoint a moment after the API server does. Until then kube-proxy may send
# requests to that endpoint.
UNLISTED_S = 2.0
# The further an engine is from serving, the earlier it is terminated. The order is from far to near.
_NEARNESS: tuple[EngineState, ...] = ("unschedulable", "pending", "starting", "ill", "draining", "well")


def engines_to_terminate(desired: Desired, state: RolloutState, view: View) -> dict[str, str]:
    """Returns name -> time at which the drain began (empty before the drain), for the engines to terminate.

    `state` has the new counts.

    Replaced engines on cordoned nodes come first. Then come engines beyond their revision's count, sorted by
    `_revision_order`, and within a revision by `_termination_order`. An available engine stays if too few engines would
    be available without it. If too few are available already, a terminating engine that can serve is taken back.
    """
    moved = engines_to_move(desired, state, view)
    surplus = [engine for engine in view.engines if engine not in moved]
    surplus.sort(key=lambda engine: (_revision_order(desired, state, engine), _termination_order(state, engine)))
    excess = Counter(engine.revision for engine in surplus)
    excess.subtract(state.counts)
    kept = _taken_back(desired, state, view)
    num_available = sum(engine.is_available for engine in view.engines)
    found: dict[str, str] = {}
    for engine in [*moved, *surplus]:
        is_surplus = engine not in moved
        is_needed = engine.is_available and num_available <= desired.min_available
        if is_needed or engine.name in kept or (is_surplus and excess[engine.revision] <= 0):
            continue
        found[engine.name] = state.terminating.get(engine.name, "")
        if engine.is_available:
            num_available -= 1
        if is_surplus:
            excess[engine.revision] -= 1
    return found


def engines_to_move(desired: Desired, state: RolloutState, view: View) -> list[ReplicaView]:
    """Returns the engines on cordoned nodes that can be terminated because `replicas` other engines remain.

    At most maxSurge engines are returned, because no more than maxSurge additional engines can have replaced them.
    Further engines on cordoned nodes may be surplus, like engines on other nodes.
    """
    if not may_move(desired, state):
        return []
    staying, cordoned = _by_node(desired, state, view)
    number = min(len(cordoned), len(staying) + len(cordoned) - desired.replicas, desired.rollout.max_surge)
    return sorted(cordoned, key=lambda engine: _termination_order(state, engine))[: max(number, 0)]


def needs_surge(desired: Desired, state: RolloutState, view: View) -> bool:
    """Returns True while an engine should be created to replace an engine on a cordoned node. Only one such engine
    is created at a time."""
    staying, cordoned = _by_node(desired, state, view)
    is_missing = len(staying) < desired.replicas and len(cordoned) > len(engines_to_move(desired, state, view))
    return may_move(desired, state) and is_missing


def is_drained(engine: ReplicaView, drained_at: str, desired: Desired, wall: datetime) -> bool:
    """Returns True once an engine has no requests, or has had `drainSeconds` to finish them.

    `drained_at` is the engine's value in `terminating`: the time at which its drain began. The time is empty before the
    drain.
    """
    if engine.state in IDLE:
        return True
    if not drained_at:
        return False
    is_empty = engine.state == "draining" and engine.num_in_flight == 0
    return is_empty or wall >= moment(drained_at) + timedelta(seconds=UNLISTED_S + desired.drain_seconds)


def may_move(desired: Desired, state: RolloutState) -> bool:
    """Returns whether engines on cordoned nodes are moved: one more engine is created, then one of them is terminated.

    No engine is moved while a rollout replaces engines, because the rollout itself needs the additional engines of
    maxSurge. The rollout terminates engines on cordoned nodes before others. But a rollout may stay paused or halted
    for weeks. So meanwhile engines of the current revision are moved, if maxSurge leaves room beside the engines of the
    other revisions.
    """
    if desired.rollout.max_surge == 0 or desired.replicas == 0:
        return False
    current = state.current_revision
    if target_revision(desired, state) == current:
        return True
    num_others = sum(number for revision, number in state.counts.items() if revision != current)
    return is_stopped(desired, state) and not state.is_promoted and num_others < desired.rollout.max_surge


def moved_revision(desired: Desired, state: RolloutState) -> str:
    """Returns the revision whose engines on cordoned nodes are moved, if `may_move`."""
    return state.current_revision if is_stopped(desired, state) else target_revision(desired, state)


def _by_node(desired: Desired, state: RolloutState, view: View) -> tuple[list[ReplicaView], list[ReplicaView]]:
    """Returns two lists of engines of `moved_revision`: available engines on nodes that are not cordoned, and serving
    or draining engines on cordoned nodes."""
    engines = view.of(moved_revision(desired, state))
    staying = [engine for engine in engines if engine.is_available and not engine.is_cordoned]
    return staying, [engine for engine in engines if engine.is_cordoned and engine.state in ("well", "draining")]


def _taken_back(desired: Desired, state: RolloutState, view: View) -> set[str]:
    """Returns the names of engines that could be available but are not, up to the number that is missing to reach
    `min_available`.

    The choice must not depend on anything that the choice changes: otherwise each reconcile would take back another
    engine.
    """
    num_missing = max(0, desired.min_available - sum(engine.is_available for engine in view.engines))
    target = target_revision(desired, state)
    able = [engine for engine in view.engines if not engine.is_available and engine.state in ("well", "draining")]
    able.sort(key=lambda engine: (engine.is_cordoned, engine.revision != target, engine.name))
    return {engine.name for engine in able[:num_missing]}


def _revision_order(desired: Desired, state: RolloutState, engine: ReplicaView) -> tuple[bool, bool, str]:
    """Returns a key that sorts engines of other revisions before those of the current and of the target revision."""
    is_target = engine.revision == target_revision(desired, state)
    return is_target, engine.revision == state.current_revision, engine.revision


def _termination_order(state: RolloutState, engine: ReplicaView) -> tuple[bool, str, bool, int, bool, int, int]:
    """Returns a key that sorts engines of one revision in the order in which they are terminated.

    Engines that are already terminating come first, with the engine that has drained for the longest at the front. Then
    come engines that do not serve, engines on cordoned nodes, the least busy engines and, among equals, the newest.
    """
    drained_at = state.terminating.get(engine.name)
    number = int(engine.name.rpartition("-")[2])
    return (
        drained_at is None,
        drained_at or "~",  # "~" sorts after every time
        engine.is_available,
        _NEARNESS.index(engine.state),
        not engine.is_cordoned,
        engine.num_in_flight,
        -number,
    )
