"""The rollout planner: replaces the engines of one revision by engines of another, and rolls back by itself. Pure.

| step | engines of the new revision | engines of the old revision | end of the step |
|---|---|---|---|
| Starting | one is created | stay; with maxSurge 0 one is terminated first | the new one is available |
| WaitingForCapacity | one is unschedulable | stay | a node has room; until then the deadline does not run |
| Analyzing | one gets its share of requests | get the other requests | the analysis is over: passed or failed |
| Promoting | created up to `replicas` | terminated, as maxUnavailable allows | no old engine is left: Complete |
| Paused, Halted | stay | stay, or move off cordoned nodes | `paused` is false (Paused); the spec changes (Halted) |
| RollingBack | are terminated | are taken back, or recreated | all engines are of the old revision: RolledBack |
| Replacing: the spec went back | are terminated | stay, or are recreated | all are of the old revision: Complete |
| Moving | one more is created, one on a cordoned node is terminated | none exist | no engine is on a cordoned node |
| Scaling | are created or terminated | none exist | `replicas` are available: Complete |

Examples with two replicas. Each letter is an engine that exists: `a` of the old revision, `b` of the new one. A capital
letter is an available engine.

    maxSurge 1          AA -> AAb      -> AAB       -> aAB -> AB -> ABb -> ABB -> aBB -> BB -> BB
    maxUnavailable 0          Starting    Analyzing    Promoting                               Complete

    maxSurge 0          AA -> aA -> A -> Ab -> AB        -> aB -> B -> Bb -> BB
    maxUnavailable 1          Starting         Analyzing    Promoting        Complete

    b crashes           AA -> AAb      -> AAb         -> AA
                              Starting    RollingBack    RolledBack

An engine is terminated in five steps. Each step begins only after the step before is confirmed:

1. its head pod loses the route label
2. no EndpointSlice lists its address any more
3. `POST /drain`
4. it has no requests left, or drainSeconds are over
5. its RayCluster is deleted

Until step 5 the engine can be taken back: by `DELETE /drain` and the route label.

The planner knows earlier reconciles only from the state in `status.rollout`. A reconcile that changes this
state changes no engine: it writes the state, and another reconcile follows at once. If a reconcile leaves the state
unchanged, it carries out what the state says. So the operator may stop at any moment: the next operator process
makes the same decision. A failed revision stays failed until the spec asks for another revision. While no engine of the
current revision has ever served, there is nothing to protect. In this case a new revision replaces the current revision
without a rollout.

Data flow: `view_of` makes the `View`; `next_step` decides; `revision_places` gives each revision its places for
engines; `plan` turns the step into changes, in this order: `undrain`, `route_on`, new engines, `route_off`, `drain`,
`delete`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from rayloom_operator.api.rollout.state import RolloutState
from rayloom_operator.decide.rollout.evictions import evictable, hold_seconds_left, holds_evictions
from rayloom_operator.decide.rollout.inputs import Desired, ReplicaView, View, is_stopped, room, target_revision
from rayloom_operator.decide.rollout.phases import RolloutStep, step_and_message
from rayloom_operator.decide.rollout.terminating import UNLISTED_S, is_drained
from rayloom_operator.decide.rollout.transitions import next_state
from rayloom_operator.times import moment, stamp

# The interval of reconciles during an analysis or a drain. A revision that fails requests must be noticed within 10 s.
_REQUEUE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The changes to make now, as names of engines, and the state to store."""

    state: RolloutState
    is_stored: bool  # `state` is already in the status; if not, it is written first and there are no changes
    message: str  # message of the condition Progressing, whose reason is `state.step`
    make: dict[str, int] = field(default_factory=dict)  # revision -> number of engines to create
    undrain: tuple[str, ...] = ()
    route_on: tuple[str, ...] = ()
    route_off: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()
    holds_evictions: bool = False  # the service's disruption budget allows no evictions ...
    num_evictable: int = 0  # ... except of the pods of this many engines
    requeue_after_s: float | None = None  # None: no reconcile is needed before the next event


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A step, and the input from which the planner computed the step."""

    desired: Desired
    view: View
    step: Step


def next_step(desired: Desired, stored: RolloutState, view: View, wall: datetime) -> Step:
    """Returns the next step. `stored` is the last written state, or an empty state before the first reconcile.

    If the new state differs from `stored`, the step has no changes: the state must be written before the operator acts
    on it.
    """
    state = next_state(desired, stored, view, wall)
    had_ended = _had_ended(stored, state)
    name, message = step_and_message(desired, state, view, had_ended=had_ended)
    if name != state.step:
        state = replace(state, step=name, step_time=stamp(wall))
    step = Step(
        state=state,
        is_stored=state == stored,
        message=message,
        holds_evictions=holds_evictions(desired, state, view, wall),
        num_evictable=len(evictable(state, view)),
        requeue_after_s=0.0,
    )
    return _with_changes(step, desired, view, wall) if step.is_stored else step


def _had_ended(stored: RolloutState, state: RolloutState) -> bool:
    """Returns True if the stored rollout had ended, and the spec has asked for no other revision or number since."""
    is_same = (
        stored.counts == state.counts
        and stored.current_revision == state.current_revision
        and stored.update_revision == state.update_revision
        and stored.failure == state.failure
    )
    return is_same and stored.step in (RolloutStep.COMPLETE, RolloutStep.ROLLED_BACK)


def _with_changes(step: Step, desired: Desired, view: View, wall: datetime) -> Step:
    """Returns `step` with the changes that the step's state requires."""
    state = step.state
    barred = _barred(desired, state, view)
    terminating = [engine for engine in view.engines if engine.name in state.terminating]
    staying = [engine for engine in view.engines if engine.name not in state.terminating]
    unlisted = [engine for engine in terminating if not engine.is_routed and not engine.is_listed]
    delete = [engine.name for engine in unlisted if is_drained(engine, state.terminating[engine.name], desired, wall)]
    return replace(
        step,
        make=_missing(desired, state, view),
        undrain=tuple(engine.name for engine in staying if engine.state == "draining"),
        route_on=tuple(
            engine.name
            for engine in staying
            if engine.state == "well" and not engine.is_routed and engine.name not in barred
        ),
        route_off=tuple(
            engine.name
            for engine in view.engines
            if engine.is_routed and (engine.name in state.terminating or engine.name in barred)
        ),
        drain=tuple(engine.name for engine in unlisted if _may_drain(engine, state, wall)),
        delete=tuple(delete),
        num_evictable=len(evictable(state, view).difference(delete)),
        requeue_after_s=min(_requeue_times(desired, state, wall), default=None),
    )


def _may_drain(engine: ReplicaView, state: RolloutState, wall: datetime) -> bool:
    """Returns True once the unlisted engine may be asked to drain.

    A draining engine refuses requests. So the engine drains only once no node sends it new requests any more.
    """
    unlisted_at = state.terminating[engine.name]
    has_requests = engine.state in ("well", "ill")
    return has_requests and unlisted_at != "" and wall >= moment(unlisted_at) + timedelta(seconds=UNLISTED_S)


def _barred(desired: Desired, state: RolloutState, view: View) -> set[str]:
    """Returns the names of engines that get no requests, because their revision failed before it was proven.

    Such engines stay only if `autoRollback` is false. Empty if fewer than `min_available` other engines are available.
    """
    if not is_stopped(desired, state) or state.failure is None or state.is_promoted:
        return set()
    others = [engine for engine in view.engines if engine.revision != state.update_revision]
    has_enough = sum(engine.is_available for engine in others) >= desired.min_available
    return {engine.name for engine in view.of(state.update_revision)} if has_enough else set()


def _missing(desired: Desired, state: RolloutState, view: View) -> dict[str, int]:
    """Returns how many engines of each revision to create now, within the room that there is.

    The current revision comes first until the update revision is promoted.
    """
    num_left = room(desired, view)
    first = target_revision(desired, state) if state.is_promoted else state.current_revision
    found = {}
    for revision in sorted(state.counts, key=lambda each: (each != first, each)):
        number = min(state.counts[revision] - len(view.of(revision)), num_left)
        if number > 0:
            found[revision] = number
            num_left -= number
    return found


def _requeue_times(desired: Desired, state: RolloutState, wall: datetime) -> Iterator[float]:
    """Yields delays in seconds. After each of these delays, the next step may have changed without an event."""
    if state.window is not None or state.terminating:
        yield _REQUEUE_S
    yield from (max(left_s, _REQUEUE_S) for left_s in hold_seconds_left(desired, state, wall) if left_s > 0)
    if state.deadline_start_time:
        deadline_s = timedelta(seconds=desired.rollout.progress_deadline_seconds)
        yield max((moment(state.deadline_start_time) + deadline_s - wall).total_seconds(), _REQUEUE_S)
