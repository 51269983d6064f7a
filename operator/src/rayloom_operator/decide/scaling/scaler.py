"""The scaler: how many engines a service should have, with the reason as a word and as a sentence. Pure.

| rule, in this order | the number becomes |
|---|---|
| `replicas` is 0, and another client set it | 0: the service is suspended |
| `replicas` is 0, and the scaler set it | 1 or more once a gateway holds a request, or has no tokenizer |
| a rollout replaces engines | unchanged |
| an engine is unschedulable | unchanged, or less by one of the rules that remove engines |
| outside `minReplicas` and `maxReplicas` | the nearer bound |
| the load of the panic window needs twice as many engines | as many as the load needs |
| the load of the usual window needs more engines, and no added engine still starts | as many as the load needs |
| no request for `idleSeconds`, and `minReplicas` is 0 | 0, once the stored state announces the 0 |
| the peak of the stable window needs fewer engines | as many as the peak needs, at least half |

The windows are described in `windows.py`. Each engine should have 70 % of the load of a fully used engine, because
waits grow fast beyond that share. An engine is removed only if each remaining engine then has at most 50 % of the load
of a fully used engine. So a steady load never makes the number go up and down.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from math import ceil

from rayloom_operator.api.autoscaling.state import ScalingInputs, ScalingReason, ScalingState
from rayloom_operator.decide.scaling.inputs import SCALER, Bounds, Fleet, RolloutActivity
from rayloom_operator.decide.scaling.sentences import change_sentence, state_sentence
from rayloom_operator.decide.scaling.windows import Windows, covers_window, panic_mean, stable_peak, usual_mean
from rayloom_operator.times import Now, moment, stamp

_UP_SHARE = 0.7
_DOWN_SHARE = 0.5
_PANIC_FACTOR = 2
_LONGEST_START_S = 3600.0
# While added engines start, the usual window adds no more engines. This wait ends after the longer of two times:
# _START_PATIENCE_S seconds, and _START_PATIENCE times the duration of the last start.
_START_PATIENCE_S = 600.0
_START_PATIENCE = 3
# Steady does not replace these reasons. Otherwise the status would be written again while nothing happens.
_LASTING = frozenset(
    {
        *(ScalingReason.STEADY, ScalingReason.SCALED_UP, ScalingReason.SCALED_DOWN, ScalingReason.WOKEN),
        *(ScalingReason.BOUNDED, ScalingReason.OTHER_WRITER, ScalingReason.SCALED_TO_ZERO),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    state: ScalingState  # the state to store
    seen: ScalingInputs  # the figures of this reconcile
    write: int | None = None  # the new spec.replicas; None: no change


def decide_scaling(bounds: Bounds, stored: ScalingState, fleet: Fleet, windows: Windows, now: Now) -> ScalingDecision:
    """Returns the decision. `stored` is the last written state, or an empty state before the first reconcile."""
    state = _noted(bounds, stored, fleet, now.wall)
    state = replace(state, idle_since=_idle_since(bounds, state, fleet, windows, now.wall))
    reason, number = _reason_and_number(bounds, state, fleet, windows, now)
    if number == fleet.replicas:
        if reason is ScalingReason.STEADY and state.reason in _LASTING:
            return ScalingDecision(state=state, seen=fleet.load.inputs)
        message = state_sentence(reason, number, bounds)
        # The new state also replaces a stored `desired` of 0 that was announced and not written.
        state = replace(state, desired=number, reason=reason.value, message=message)
        return ScalingDecision(state=state, seen=fleet.load.inputs)
    if number == 0 and not is_zero_announced(stored):
        message = state_sentence(ScalingReason.SCALING_TO_ZERO, 0, bounds)
        state = replace(state, desired=0, reason=ScalingReason.SCALING_TO_ZERO.value, message=message)
        return ScalingDecision(state=state, seen=fleet.load.inputs)
    state = replace(
        state,
        desired=number,
        writer=SCALER,
        reason=reason.value,
        message=change_sentence(reason, fleet.replicas, number, fleet.load.inputs, bounds),
        inputs=fleet.load.inputs,
        last_scale_time=stamp(now.wall),
        starting_since=stamp(now.wall) if number > fleet.replicas else "",
    )
    return ScalingDecision(state=state, write=number, seen=fleet.load.inputs)


def is_zero_announced(stored: ScalingState) -> bool:
    """Returns whether the scaler may have written 0. The reason ScalingToZero is stored before that write.

    So a 0 is known to be the scaler's own, even if the operator stops after the write. `managedFields` may not show who
    wrote a 0.
    """
    return stored.reason == ScalingReason.SCALING_TO_ZERO


def _noted(bounds: Bounds, stored: ScalingState, fleet: Fleet, wall: datetime) -> ScalingState:
    """Returns `stored`, updated if `replicas` was changed after that state, or if the added engines serve by now."""
    state = stored
    is_first = not stored.reason
    if is_zero_announced(stored):
        state = _own_change(bounds, state, fleet, wall) if fleet.replicas == 0 else state
    elif fleet.writer == SCALER and (not is_first or fleet.replicas == 0):
        state = _own_change(bounds, state, fleet, wall)
    elif is_first or fleet.writer:
        is_more = fleet.replicas > stored.desired
        state = replace(
            state,
            desired=fleet.replicas,
            writer=fleet.writer,
            reason=(ScalingReason.STEADY if is_first else ScalingReason.OTHER_WRITER).value,
            message=state_sentence(ScalingReason.STEADY, fleet.replicas, bounds)
            if is_first
            else state_sentence(ScalingReason.OTHER_WRITER, fleet.replicas, bounds, fleet.writer),
            last_scale_time=stored.last_scale_time if is_first else stamp(wall),
            starting_since=stamp(wall) if is_more and not fleet.has_all else "",
        )
    if state.starting_since and fleet.has_all:
        took_s = min(max((wall - moment(state.starting_since)).total_seconds(), 1.0), _LONGEST_START_S)
        state = replace(state, starting_since="", start_seconds=round(took_s))
    return state


def _idle_since(bounds: Bounds, state: ScalingState, fleet: Fleet, windows: Windows, wall: datetime) -> str:
    """Returns the time since which the service is idle, or an empty text if it has been idle for less than a window.

    If shorter idle times counted, requests that come every few seconds would cause writes of the status.
    """
    if bounds.least > 0 or not fleet.load.is_idle:
        return ""
    if state.idle_since or fleet.idle_s < windows.window_s:
        return state.idle_since
    return stamp(wall - timedelta(seconds=fleet.idle_s))


def _own_change(bounds: Bounds, stored: ScalingState, fleet: Fleet, wall: datetime) -> ScalingState:
    """Returns the state after the scaler has changed `replicas`, if the stored state lacks this change.

    The operator may have stopped between the change and the write of the status.
    """
    is_more = fleet.replicas > stored.desired
    reason = ScalingReason.SCALED_UP if is_more else ScalingReason.SCALED_DOWN
    if fleet.replicas == 0:
        reason = ScalingReason.SCALED_TO_ZERO
    return replace(
        stored,
        desired=fleet.replicas,
        writer=SCALER,
        reason=reason.value,
        message=state_sentence(ScalingReason.STEADY, fleet.replicas, bounds),
        last_scale_time=stamp(wall),
        starting_since=stamp(wall) if is_more and not fleet.has_all else "",
    )


def _reason_and_number(
    bounds: Bounds, state: ScalingState, fleet: Fleet, windows: Windows, now: Now
) -> tuple[ScalingReason, int]:
    present = fleet.replicas
    if present == 0:
        return _woken(bounds, state, fleet)
    if fleet.rollout is RolloutActivity.ROLLING:
        return ScalingReason.ROLLING_OUT, present
    bounded = _bounded(bounds, fleet)
    is_waiting = fleet.rollout is RolloutActivity.WAITING
    if bounded < present or (bounded > present and not is_waiting):
        return ScalingReason.BOUNDED, bounded
    if is_waiting:
        # Another engine would wait for a node, too. Engines that the load does not need are removed, engines without a
        # node first.
        reason, number = _fewer(bounds, state, fleet, windows, now)
        return (reason, number) if number < present else (ScalingReason.WAITING_FOR_CAPACITY, present)
    asked = _asked(state, fleet, windows, now)
    if asked > present:
        number = min(asked, bounds.most)
        return (ScalingReason.SCALED_UP, number) if number > present else (ScalingReason.AT_MAXIMUM, present)
    return _fewer(bounds, state, fleet, windows, now)


def _bounded(bounds: Bounds, fleet: Fleet) -> int:
    """Returns `replicas` within the bounds. Unproven engines stay if `replicas` becomes less, so the result is high
    enough to keep one proven engine, too.
    """
    bounded = min(max(fleet.replicas, bounds.least, 1), bounds.most)
    return max(bounded, min(fleet.replicas, fleet.replicas_for_fewer(1)))


def _woken(bounds: Bounds, state: ScalingState, fleet: Fleet) -> tuple[ScalingReason, int]:
    """Returns the number for a service without engines. A service that another client suspended is not woken."""
    if state.reason != ScalingReason.SCALED_TO_ZERO:
        return ScalingReason.SUSPENDED, 0
    if bounds.least > 0:
        return ScalingReason.BOUNDED, bounds.least
    if not fleet.held.wakes:
        return ScalingReason.SCALED_TO_ZERO, 0
    return ScalingReason.WOKEN, min(max(1, engines_for(fleet.load.engines)), bounds.most)


def _asked(state: ScalingState, fleet: Fleet, windows: Windows, now: Now) -> int:
    """Returns the `replicas` that the load needs; the present `replicas` if the load needs no more engines."""
    present = fleet.num_for_load
    asked = present
    sudden = panic_mean(fleet.samples, windows, now.mono)
    # While engines start, the length of the queue does not show whether these engines will be enough.
    usual = None if _is_starting(state, now.wall) else usual_mean(fleet.samples, windows, now.mono)
    if sudden is not None and engines_for(sudden) >= _PANIC_FACTOR * present:
        asked = engines_for(sudden)
    elif usual is not None:
        asked = engines_for(usual)
    return fleet.replicas_for_more(asked) if asked > present else fleet.replicas


def _is_starting(state: ScalingState, wall: datetime) -> bool:
    """Returns whether added engines are expected to serve soon."""
    if not state.starting_since:
        return False
    patience_s = max(_START_PATIENCE_S, _START_PATIENCE * state.start_seconds)
    return wall < moment(state.starting_since) + timedelta(seconds=patience_s)


def _fewer(bounds: Bounds, state: ScalingState, fleet: Fleet, windows: Windows, now: Now) -> tuple[ScalingReason, int]:
    present = fleet.replicas
    if not fleet.load.is_complete and covers_window(fleet.samples, windows, now.mono):
        return ScalingReason.FIGURES_MISSING, present
    peak = stable_peak(fleet.samples, windows, state.start_seconds, now.mono)
    if peak is None or not fleet.has_all_with_nodes:
        return ScalingReason.STEADY, present
    if state.idle_since and now.wall >= moment(state.idle_since) + timedelta(seconds=bounds.idle_s):
        return ScalingReason.SCALED_TO_ZERO, 0
    number = max(engines_for(peak, _DOWN_SHARE), ceil(fleet.num_for_load / 2), 1)
    if number >= fleet.num_for_load:
        return ScalingReason.STEADY, present
    number = max(fleet.replicas_for_fewer(number), bounds.least)
    return (ScalingReason.SCALED_DOWN, number) if number < present else (ScalingReason.STEADY, present)


def engines_for(load: float, share: float = _UP_SHARE) -> int:
    """Returns the number of engines for a load if each engine has at most `share` of a full load."""
    return ceil(round(load / share, 6))
