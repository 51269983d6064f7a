"""The transitions of the rollout state, from one reconcile to the next. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import datetime

from rayloom_operator.api.rollout.state import RolloutState
from rayloom_operator.decide.rollout.counts import revision_counts
from rayloom_operator.decide.rollout.evictions import with_eviction_hold
from rayloom_operator.decide.rollout.inputs import IDLE, Desired, View, is_stopped, target_revision
from rayloom_operator.decide.rollout.judgement import judged
from rayloom_operator.decide.rollout.terminating import engines_to_terminate
from rayloom_operator.times import stamp


def next_state(desired: Desired, stored: RolloutState, view: View, wall: datetime) -> RolloutState:
    """Returns the state after `stored`, without the step's name. Each function gets the result of the function before:

    1. `_try_begin`: no state is stored yet
    2. `_try_retarget`: the spec has another revision
    3. `_try_settle`: the current revision has served; if it has never served, the spec's revision becomes the current
       revision
    4. `judged`: the update revision has failed, or passed its analysis
    5. `_try_complete`: every engine is of the update revision
    6. `revision_counts`: how many engines each revision should have
    7. `engines_to_terminate`: engines beyond these counts or on cordoned nodes, with the times at which drains began
    8. `_with_start_time`: the time at which the rollout began
    9. `with_eviction_hold`: the times of the eviction hold

    The new state then lists the revisions that it no longer needs. The next reconcile deletes their stored specs and
    empties this list.
    """
    state = _try_begin(desired, stored, view) or stored
    state = _try_retarget(desired, state) or state
    state = _try_settle(desired, state, view) or state
    state = judged(desired, state, view, wall)
    state = _try_complete(desired, state, view) or state
    state = replace(state, counts=revision_counts(desired, state, view))
    terminating = engines_to_terminate(desired, state, view)
    state = replace(state, terminating=_with_drain_times(terminating, stored, view, wall))
    state = _with_start_time(state, wall)
    state = with_eviction_hold(desired, stored, state, view, wall)
    return replace(state, retired=tuple(sorted(stored.revisions - state.revisions)))


def _try_begin(desired: Desired, stored: RolloutState, view: View) -> RolloutState | None:
    """Returns a state made from the existing engines if no state is stored (at first, or after a loss); else None.

    The current revision is the revision with the most available engines, or the spec's if no engine is available.
    """
    if stored.update_revision:
        return None
    counts = Counter(engine.revision for engine in view.engines)
    current = max(sorted(counts), key=view.num_available, default=desired.revision)
    if not view.num_available(current):
        current = desired.revision
    return RolloutState(current_revision=current, update_revision=desired.revision, counts=dict(counts))


def _try_retarget(desired: Desired, state: RolloutState) -> RolloutState | None:
    """Returns a state with the spec's revision as its update revision, which is not judged yet.

    Returns None if the update revision is the spec's revision already.
    """
    if state.update_revision == desired.revision:
        return None
    return replace(
        state,
        update_revision=desired.revision,
        is_promoted=False,
        window=None,
        failure=None,
        deadline_start_time="",
        peak_available=0,
        start_time="",
    )


def _try_settle(desired: Desired, state: RolloutState, view: View) -> RolloutState | None:
    if view.num_available(state.current_revision):
        return replace(state, has_served=True)
    return None if state.has_served else replace(state, current_revision=desired.revision)


def _try_complete(desired: Desired, state: RolloutState, view: View) -> RolloutState | None:
    """Returns a state with the update revision as its current revision, once all engines are of that revision and
    serve; None before."""
    update = state.update_revision
    is_rolling = target_revision(desired, state) != state.current_revision and not is_stopped(desired, state)
    is_proven = state.is_promoted or desired.replicas == 0
    has_others = len(view.of(update)) < len(view.engines)
    if not is_rolling or not is_proven or has_others or view.num_available(update) < desired.replicas:
        return None
    return replace(
        state,
        current_revision=update,
        has_served=desired.replicas > 0,
        deadline_start_time="",
        peak_available=0,
        is_promoted=False,
        window=None,
    )


def _with_drain_times(terminating: dict[str, str], stored: RolloutState, view: View, wall: datetime) -> dict[str, str]:
    """Returns `terminating` with the time at which each engine left the Service's endpoints.

    `drainSeconds` begin UNLISTED_S (`terminating.py`) after this time. The time is empty while clients may still reach
    the engine.
    """
    times = dict(terminating)
    for engine in view.engines:
        if engine.name not in times:
            continue
        if engine.is_routed or engine.is_listed:
            # An EndpointSlice may list an engine late, after the engine has lost its route label. So an earlier time is
            # dropped here.
            times[engine.name] = ""
        elif engine.name in stored.terminating and engine.state not in IDLE:
            times[engine.name] = times[engine.name] or stamp(wall)
    return times


def _with_start_time(state: RolloutState, wall: datetime) -> RolloutState:
    is_rollout = state.update_revision != state.current_revision
    return replace(state, start_time=(state.start_time or stamp(wall)) if is_rollout else "")
