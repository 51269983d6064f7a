"""How many engines of each revision there are to be, and which of them are to go. Pure.

Like the replicas of a Deployment's ReplicaSets: each revision has a number, and what is above it goes. Two bounds hold
in every step: no more than `replicas + maxSurge` engines, and by our doing no fewer than `replicas - maxUnavailable`
that serve.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal, TypeAlias

from rayloom_operator.api.rollout import Figures, Rollout, RolloutState
from rayloom_operator.times import moment

EngineState: TypeAlias = Literal[
    "pending",  # no process of it runs; also after its container ended
    "unschedulable",  # the same, for a pod of it finds no node
    "starting",  # it has not served yet
    "well",  # a token passed through every rank a moment ago
    "ill",  # it has served and does not; it may hold requests
    "draining",  # it takes no new requests
]
# Nodes hear that an engine is in no EndpointSlice a moment after the API server; until then new requests may come.
UNFOUND_S = 2.0
# Such an engine has no requests.
IDLE: tuple[EngineState, ...] = ("pending", "unschedulable", "starting")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One RayCluster that is to be there, as the planner sees it. Not to be confused with `observed.Group`, of which
    it is made."""

    name: str
    revision: str
    state: EngineState
    is_routed: bool = False  # its head pod carries the route label
    is_listed: bool = False  # an EndpointSlice of the service has its address
    is_cordoned: bool = False  # a pod of it is on a node that is being emptied
    is_tolerant: bool = False  # the same of one that tolerates that, so nothing is gained by moving
    num_in_flight: int = 0  # requests
    figures: Figures = field(default_factory=Figures)

    @property
    def is_available(self) -> bool:
        return self.state == "well" and self.is_routed and self.is_listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the spec asks for."""

    revision: str
    replicas: int
    drain_seconds: int
    rollout: Rollout

    @property
    def most(self) -> int:
        """Engines that may exist."""
        return self.replicas + self.rollout.max_surge

    @property
    def least(self) -> int:
        """Engines that are to serve, as far as it is ours to say."""
        return max(0, self.replicas - self.rollout.max_unavailable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What there is of a service."""

    engines: tuple[Engine, ...] = ()
    num_ending: int = 0  # RayClusters that are being deleted; they take room until they are gone
    # How often an engine of the spec's revision failed of its own, not of its node, since it last served well.
    num_crashes: int = 0
    cause: str = ""  # of the first of these
    knows_nodes: bool = True  # that a node is being emptied would be known

    def of(self, revision: str) -> list[Engine]:
        return [engine for engine in self.engines if engine.revision == revision]

    def num_available(self, revision: str) -> int:
        return sum(engine.is_available for engine in self.of(revision))


def target(order: Order, state: RolloutState) -> str:
    """The revision that all engines are to have in the end."""
    is_undone = state.failure is not None and order.rollout.auto_rollback
    return state.current_revision if is_undone else state.update_revision


def is_held(order: Order, state: RolloutState) -> bool:
    """Whether a roll stands still. The way back to the current revision is always open."""
    is_rolling = target(order, state) != state.current_revision
    return is_rolling and (order.rollout.paused or state.failure is not None)


def shares(order: Order, state: RolloutState, seen: Seen) -> dict[str, int]:
    """How many engines each revision is to have; those with none are left out."""
    replicas, wanted, current = order.replicas, target(order, state), state.current_revision
    before, num_available = state.counts.get(wanted, 0), seen.num_available(wanted)
    has_stopped = is_held(order, state)
    is_proven = wanted == current or (state.is_promoted and not has_stopped)
    if not state.is_promoted and wanted != current:
        # Where there are more than may be, as after `replicas` fell, what has yet to prove itself goes first.
        before = min(before, max(1, order.most - min(replicas, len(seen.of(current)))))
    if has_stopped:
        new = min(before, replicas)
        most_old, least_old = min(replicas, order.most - new), replicas - new
    elif is_proven:
        new, most_old, least_old = replicas, max(0, order.least - num_available), 0
        if wanted == current:
            # The others have failed, or nobody wants them any more: only for what they serve they are still there.
            most_old = min(most_old, sum(e.is_available and e.revision != wanted for e in seen.engines))
    else:
        # One proves itself first. With maxSurge 0 an old one makes room for it, otherwise all stay; more than one there
        # are when the spec went back to a revision that still runs.
        new = min(max(before, 1), replicas)
        most_old = min(replicas, order.most - new)
        least_old = min(replicas - num_available, most_old)
    new += is_one_to_surge(order, state, seen)

    def rank(revision: str) -> tuple[bool, bool, bool, str]:
        # What has proven itself is kept the longest, and what has failed goes first. Before any of that, once all that
        # is missing is time, goes what does not serve: it would hold the room that the wanted ones need.
        is_useless = is_proven and not seen.num_available(revision)
        return is_useless, revision != current, revision == state.update_revision, revision

    counts, left = {wanted: new}, most_old
    # Once nobody wants the others, what counts is who serves, not what was decided of them.
    others = state.counts if wanted != current else {e.revision: seen.num_available(e.revision) for e in seen.engines}
    for revision in sorted({current, *others} - {wanted}, key=rank):
        number = others.get(revision, 0)
        # Until the new one has proven itself, all that is left of the current revision is worth a place; of one in
        # between only what serves.
        if not is_proven and not state.is_promoted and revision == current:
            number = max(number, len(seen.of(current)))
        elif not is_proven and not has_stopped:
            number = seen.num_available(revision)
        counts[revision] = min(number, left)
        left -= counts[revision]
    if (missing := least_old - (most_old - left)) > 0:
        counts[current] = counts.get(current, 0) + missing
    return {revision: number for revision, number in counts.items() if number > 0}


def moved_out(order: Order, state: RolloutState, seen: Seen) -> list[Engine]:
    """Engines whose nodes are being emptied, and without which as many serve as are to.

    No more than may be surged; what is above that is surplus like any other.
    """
    if not _may_move(order, state):
        return []
    here, there = _served(order, state, seen)
    number = min(len(there), len(here) + len(there) - order.replicas, order.rollout.max_surge)
    return sorted(there, key=lambda each: _departure(state, each))[: max(number, 0)]


def is_one_to_surge(order: Order, state: RolloutState, seen: Seen) -> bool:
    """Whether an engine is to be made for one whose node is being emptied; one at a time."""
    here, there = _served(order, state, seen)
    is_missed = len(here) < order.replicas and len(there) > len(moved_out(order, state, seen))
    return _may_move(order, state) and is_missed


def _may_move(order: Order, state: RolloutState) -> bool:
    # A roll has its own use for the room; what it takes away first are those that would be moved.
    return order.rollout.max_surge > 0 and order.replicas > 0 and target(order, state) == state.current_revision


def _served(order: Order, state: RolloutState, seen: Seen) -> tuple[list[Engine], list[Engine]]:
    """The engines of the wanted revision that serve, and those that do or could on nodes that are being emptied."""
    engines = seen.of(target(order, state))
    here = [engine for engine in engines if engine.is_available and not engine.is_cordoned]
    return here, [engine for engine in engines if engine.is_cordoned and engine.state in ("well", "draining")]


# Of those that do not serve, the one that has the furthest to go is missed the least.
_NEARNESS: tuple[EngineState, ...] = ("unschedulable", "pending", "starting", "ill", "draining", "well")


def _departure(state: RolloutState, engine: Engine) -> tuple[bool, str, bool, int, bool, int, int]:
    """By this order engines go."""
    drained_at, number = state.leaving.get(engine.name), int(engine.name.rpartition("-")[2])
    is_safe = not engine.is_cordoned
    near = _NEARNESS.index(engine.state)
    return drained_at is None, drained_at or "~", engine.is_available, near, is_safe, engine.num_in_flight, -number


def leavers(order: Order, state: RolloutState, seen: Seen) -> dict[str, str]:
    """Which engines are to go, with the times at which drains began. `state` has the new counts.

    Those that are on their way already come first, the furthest first, then those that do not serve, then those whose
    node is being emptied, then the least busy, of equal ones the newest. One that serves stays while there would be too
    few without it; and where too few serve, one comes back that could, although it drains.
    """
    found: dict[str, str] = {}
    num_missed = max(0, order.least - sum(engine.is_available for engine in seen.engines))
    # By what does not depend on who leaves, lest another one comes back in each turn.
    able = [engine for engine in seen.engines if not engine.is_available and engine.state in ("well", "draining")]
    able.sort(key=lambda each: (each.is_cordoned, each.revision != target(order, state), each.name))
    kept = {engine.name for engine in able[:num_missed]}
    wanted = target(order, state)
    num_available = sum(engine.is_available for engine in seen.engines)
    moved = moved_out(order, state, seen)

    def goes(engine: Engine) -> bool:
        nonlocal num_available
        if engine.name in kept or (engine.is_available and num_available <= order.least):
            return False
        num_available -= engine.is_available
        found[engine.name] = state.leaving.get(engine.name, "")
        return True

    for engine in moved:
        goes(engine)
    revisions = {engine.revision for engine in seen.engines}
    for revision in sorted(revisions, key=lambda each: (each == wanted, each == state.current_revision, each)):
        engines = sorted((e for e in seen.of(revision) if e not in moved), key=lambda each: _departure(state, each))
        excess = len(engines) - state.counts.get(revision, 0)
        for engine in engines:
            excess -= excess > 0 and goes(engine)
    return found


def is_drained(engine: Engine, drained_at: str, order: Order, clock: datetime) -> bool:
    """Whether an engine has no requests any more, or had its time to finish them; `drained_at` as in `leaving`."""
    if engine.state in IDLE:
        return True
    if not drained_at:
        return False
    is_empty = engine.state == "draining" and engine.num_in_flight == 0
    return is_empty or clock >= moment(drained_at) + timedelta(seconds=UNFOUND_S + order.drain_seconds)
