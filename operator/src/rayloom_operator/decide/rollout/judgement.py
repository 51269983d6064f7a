"""Judges the update revision by its engines: it has failed, is promoted, or is still on trial. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from rayloom_operator.api.rollout.state import AnalysisWindow, FailureReason, RolloutFailure, RolloutState
from rayloom_operator.decide.rollout.analysis import is_over, longest_s, problem, total
from rayloom_operator.decide.rollout.inputs import Desired, View, is_stopped, room, target_revision
from rayloom_operator.times import moment, stamp

# The update revision fails after this number of crashes. Once the revision has passed its analysis, a single crash may
# be chance.
_MAX_CRASHES_BEFORE_PROMOTION = 1
_MAX_CRASHES_AFTER_PROMOTION = 2


def judged(desired: Desired, state: RolloutState, view: View, wall: datetime) -> RolloutState:
    """Returns `state` after the judgement. The judgement is the first of these that applies:

    1. no judgement: no rollout runs, or it is stopped
    2. `_try_fail_by_crashes`
    3. `_try_fail_by_analysis`
    4. `_try_promote`
    5. `_try_fail_by_deadline`
    6. `_still_running`: neither failed nor passed yet
    """
    if target_revision(desired, state) == state.current_revision or is_stopped(desired, state):
        return replace(state, window=None, deadline_start_time="")
    trial = _trial(desired, state, view, wall)
    return (
        _try_fail_by_crashes(trial)
        or _try_fail_by_analysis(trial)
        or _try_promote(trial)
        or _try_fail_by_deadline(trial)
        or _still_running(trial)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """The update revision's trial up to now."""

    desired: Desired
    state: RolloutState  # the state before the judgement
    view: View
    wall: datetime
    num_available: int  # available engines of the update revision
    window: AnalysisWindow | None  # None while no analysis runs
    has_window_ended: bool
    problem: str  # the problem that the analysis found; empty if it found none
    deadline_start_time: str  # empty while the deadline does not run
    peak_available: int  # largest number of engines of the update revision that were available at once


def _trial(desired: Desired, state: RolloutState, view: View, wall: datetime) -> _Trial:
    num_available = view.num_available(state.update_revision)
    window = state.window
    analysis = desired.rollout.analysis
    has_ended = False
    found = ""
    if not state.is_promoted:
        new = total(engine.counts for engine in view.of(state.update_revision))
        old = total(engine.counts for engine in view.engines if engine.revision != state.update_revision)
        if window is None and num_available:
            window = AnalysisWindow(start_time=stamp(wall), new=new, old=old)
        if window is not None:
            has_ended = is_over(window, new, old, analysis, wall, is_behind_gateways=desired.is_behind_gateways)
            found = problem(window, new, old, analysis, is_over=has_ended)
    return _Trial(
        desired=desired,
        state=state,
        view=view,
        wall=wall,
        num_available=num_available,
        window=window,
        has_window_ended=has_ended,
        problem=found,
        deadline_start_time=_deadline_start_time(desired, state, view, wall),
        peak_available=max(num_available, state.peak_available),
    )


def _try_fail_by_crashes(trial: _Trial) -> RolloutState | None:
    limit = _MAX_CRASHES_AFTER_PROMOTION if trial.state.is_promoted else _MAX_CRASHES_BEFORE_PROMOTION
    return _failed(trial, "CrashLoop", trial.view.cause) if trial.view.num_crashes >= limit else None


def _try_fail_by_analysis(trial: _Trial) -> RolloutState | None:
    return _failed(trial, "AnalysisFailed", trial.problem) if trial.problem else None


def _try_promote(trial: _Trial) -> RolloutState | None:
    if not trial.num_available or not trial.has_window_ended:
        return None
    return replace(
        trial.state,
        is_promoted=True,
        window=None,
        deadline_start_time=stamp(trial.wall),
        peak_available=trial.peak_available,
    )


def _try_fail_by_deadline(trial: _Trial) -> RolloutState | None:
    rollout = trial.desired.rollout
    patience_s = rollout.progress_deadline_seconds
    if not trial.state.is_promoted and trial.peak_available:
        # Once an engine was available, the deadline is longer by the longest time of an analysis. The deadline stays
        # longer even while the engine does not serve for a moment and no analysis runs.
        patience_s += longest_s(rollout.analysis, is_behind_gateways=trial.desired.is_behind_gateways)
    since = trial.deadline_start_time
    if not since or trial.wall <= moment(since) + timedelta(seconds=patience_s):
        return None
    message = (
        f"No further engine served within {rollout.progress_deadline_seconds} s (rollout.progressDeadlineSeconds)."
    )
    return _failed(trial, "DeadlineExceeded", message)


def _still_running(trial: _Trial) -> RolloutState:
    return replace(
        trial.state,
        # If the engine becomes unavailable, the analysis is dropped. A new analysis begins once an engine is available.
        window=trial.window if trial.num_available else None,
        deadline_start_time=trial.deadline_start_time,
        peak_available=trial.peak_available,
    )


def _failed(trial: _Trial, reason: FailureReason, message: str) -> RolloutState:
    revision = trial.state.update_revision
    failure = RolloutFailure(revision=revision, reason=reason, message=message, time=stamp(trial.wall))
    return replace(trial.state, failure=failure, window=None, deadline_start_time="")


def _deadline_start_time(desired: Desired, state: RolloutState, view: View, wall: datetime) -> str:
    """Returns the time from which the deadline runs; empty while the rollout waits for something other than the start
    of new engines.
    """
    if _waits_for_others(desired, state, view):
        return ""
    if view.num_available(state.update_revision) > state.peak_available:
        return stamp(wall)
    return state.deadline_start_time or stamp(wall)


def _waits_for_others(desired: Desired, state: RolloutState, view: View) -> bool:
    """Returns True while the rollout waits for nodes with room, or for old engines that drain."""
    new = view.of(state.update_revision)
    if any(engine.state == "unschedulable" for engine in new):
        return True
    has_room = room(desired, view) > 0
    if not new and not has_room:
        return True
    has_all_available = state.is_promoted and view.num_available(state.update_revision) == len(new)
    has_enough = len(new) >= state.counts.get(state.update_revision, 0)
    return has_all_available and (not has_room or has_enough)
