"""Chooses the engines to terminate: those on cordoned nodes that others have replaced, and those above a count. Pure.

An engine is terminated in steps: no route label, no endpoint, `POST /drain`, no request left, deletion.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta

from rayloom_operator.api.rollout.state import RolloutState
from rayloom_operator.decide.rollout.inputs import IDLE, Desired, EngineState, ReplicaView, View, target_revision
from rayloom_operator.times import moment

# kube-proxy on every node learns of a removed endpoint a moment after the API server; new requests may come until then.
UNLISTED_S = 2.0
# An engine that does not serve is missed the less, the further it is from serving.
_NEARNESS: tuple[EngineState, ...] = ("unschedulable", "pending", "starting", "ill", "draining", "well")


def engines_to_terminate(desired: Desired, state: RolloutState, view: View) -> dict[str, str]:
    """Returns the names of the engines to terminate, with the times at which their drains began.

    `state` has the new counts.

    Engines on cordoned nodes come first, then surplus ones: of unwanted revisions before wanted ones, and of one
    revision in `_termination_order`. An available engine stays where too few would be available without it; where too
    few are, a terminating engine that can serve is taken back.
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
    """Returns engines on cordoned nodes without which `replicas` engines are available; at most maxSurge of them.

    The surge makes room for no more: further engines on cordoned nodes are surplus like any other.
    """
    if not _may_move(desired, state):
        return []
    staying, cordoned = _by_node(desired, state, view)
    number = min(len(cordoned), len(staying) + len(cordoned) - desired.replicas, desired.rollout.max_surge)
    return sorted(cordoned, key=lambda engine: _termination_order(state, engine))[: max(number, 0)]


def needs_surge(desired: Desired, state: RolloutState, view: View) -> bool:
    """Returns True while another engine shall be made in place of one on a cordoned node; one at a time."""
    staying, cordoned = _by_node(desired, state, view)
    is_missing = len(staying) < desired.replicas and len(cordoned) > len(engines_to_move(desired, state, view))
    return _may_move(desired, state) and is_missing


def is_drained(engine: ReplicaView, drained_at: str, desired: Desired, wall: datetime) -> bool:
    """Returns True once an engine has no requests, or had `drainSeconds` to finish them.

    `drained_at` is the engine's value in `terminating`: empty before its drain.
    """
    if engine.state in IDLE:
        return True
    if not drained_at:
        return False
    is_empty = engine.state == "draining" and engine.num_in_flight == 0
    return is_empty or wall >= moment(drained_at) + timedelta(seconds=UNLISTED_S + desired.drain_seconds)


def _may_move(desired: Desired, state: RolloutState) -> bool:
    # A rollout uses the surge itself, and terminates engines on cordoned nodes first.
    is_rolling = target_revision(desired, state) != state.current_revision
    return desired.rollout.max_surge > 0 and desired.replicas > 0 and not is_rolling


def _by_node(desired: Desired, state: RolloutState, view: View) -> tuple[list[ReplicaView], list[ReplicaView]]:
    """Returns engines of the target revision: available ones on other nodes, and able ones on cordoned nodes."""
    engines = view.of(target_revision(desired, state))
    staying = [engine for engine in engines if engine.is_available and not engine.is_cordoned]
    return staying, [engine for engine in engines if engine.is_cordoned and engine.state in ("well", "draining")]


def _taken_back(desired: Desired, state: RolloutState, view: View) -> set[str]:
    """Returns engines that could serve and do not, as many as are missing from `min_available`.

    The choice depends on nothing that it changes itself. Otherwise each reconcile would take back another engine.
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

    Terminating ones come first, the one that drains for the longest before all, then those that do not serve, those on
    cordoned nodes, the least busy ones, and of equal ones the newest.
    """
    drained_at = state.terminating.get(engine.name)
    number = int(engine.name.rpartition("-")[2])
    return (
        drained_at is None,
        drained_at or "~",  # after every time
        engine.is_available,
        _NEARNESS.index(engine.state),
        not engine.is_cordoned,
        engine.num_in_flight,
        -number,
    )
