"""The next step of a roll: from one revision to another, engine by engine, and back by itself. Pure.

| step | engines of the new revision | engines of the old revision | it ends when |
|---|---|---|---|
| Starting | one is made | untouched; with maxSurge 0 one goes first | it serves: a token passed, and clients find it |
| WaitingForCapacity | one finds no node | untouched | nodes have room; the deadline waits too |
| Analyzing | the one takes its share of requests | the others | the hold is over, or it has failed |
| Promoting | made up to `replicas` | go, so many as bounds and those that serve allow | none is left |
| Paused, Halted | stay | stay | `paused` is false; the spec changes |
| RollingBack | go | are taken back, or made again | all are of the old revision: RolledBack |
| Replacing | are all that is to be | go | as above, for a spec that went back: Complete |
| Moving | one more is made, for one on a node that is being emptied, which goes | there are none | none is left there |
| Scaling | made, or go | there are none | there are `replicas` that serve: Complete |

An engine goes in this order, each seen before the next: no route label, no endpoint, `POST /drain`, no request or
drainSeconds over, deletion. Until then it can be taken back, with `DELETE /drain` and the label.

What is decided is remembered first and done in the next turn, and only what both turns agree on. So an operator that
ends in between goes on where it was, and a failed revision is not tried again: only another one in the spec clears it.
An engine on a node that is being emptied goes like that once another serves in its place.
A first revision, or one of which no engine ever served, is no roll: there is nothing to protect.

How this is wired: `observe` makes `Seen`; `next_step` follows it, with `status.rollout` as memory, and its state is
written there with the rest of the status. `recovery.slots` is asked for each revision in `counts`, with that many
places and with `make` as the most that are new; engines in `leaving` have no place. `plan` turns the other fields into
routes, drains and deletions, in this order: `undrain`, `route_on`, new engines, `route_off`, `drain`, `delete`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from rayloom_operator.api.rollout import RolloutFailure, RolloutState, Window
from rayloom_operator.decide.rollout.analysis import MAX_HOLDS, is_over, problem, total
from rayloom_operator.decide.rollout.counts import (
    IDLE,
    UNFOUND_S,
    Order,
    Seen,
    is_drained,
    is_held,
    leavers,
    shares,
    target,
)
from rayloom_operator.decide.rollout.evictions import freed, holds, time_left, watched
from rayloom_operator.decide.rollout.phases import RolloutStep, course
from rayloom_operator.times import moment, stamp

# How soon to look again at an engine that drains, and at figures: one that fails requests is to be seen within 10 s.
_LOOK_S = 2.0
# One failure may be chance; an engine that has shown what it can is believed for longer.
_MAX_CRASHES = {False: 1, True: 2}  # before and after the first new engine passed its analysis


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What to do now, as names of engines, and what to remember."""

    state: RolloutState
    message: str  # of the condition Progressing; its reason is `state.step`
    make: dict[str, int]  # of each revision so many more engines
    undrain: tuple[str, ...] = ()
    route_on: tuple[str, ...] = ()
    route_off: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()
    holds_evictions: bool = False  # the service's disruption budget is to let none through
    num_freed: int = 0  # but those of so many engines
    look_again_s: float | None = None  # None: when something changes


def next_step(order: Order, memory: RolloutState, seen: Seen, clock: datetime) -> Step:
    """The next step. `memory` is the state of the last step that was written; an empty one is as good as none."""
    state = memory if memory.update_revision else _first(order, seen)
    state = _completed(order, _judged(order, _retargeted(order, state, seen), seen, clock), seen)
    state = state.model_copy(update={"counts": shares(order, state, seen)})
    state = state.model_copy(update={"leaving": _with_drains(memory, leavers(order, state, seen), seen, clock)})
    is_roll = state.update_revision != state.current_revision
    state = state.model_copy(update={"roll_time": (state.roll_time or stamp(clock)) if is_roll else ""})
    state = watched(order, memory, state, seen, clock)
    step, message = course(order, state, seen, is_at_rest=_is_at_rest(memory, state))
    if step != state.step:
        state = state.model_copy(update={"step": step, "step_time": stamp(clock)})
    # What only one of the two has is not written yet, or no longer wanted.
    sure = memory.leaving.keys() & state.leaving.keys()
    going = [engine for engine in seen.engines if engine.name in sure]
    staying = [engine for engine in seen.engines if engine.name not in memory.leaving.keys() | state.leaving.keys()]
    barred = _barred(order, memory, seen) & _barred(order, state, seen)
    unlisted = [engine for engine in going if not engine.is_routed and not engine.is_listed]
    drained_at = {name: memory.leaving[name] for name in sure if memory.leaving[name]}
    doomed = tuple(e.name for e in unlisted if is_drained(e, drained_at.get(e.name, ""), order, clock))
    return Step(
        state=state,
        message=message,
        make=_missing(order, memory, state, seen),
        undrain=tuple(each.name for each in staying if each.state == "draining"),
        route_on=tuple(e.name for e in staying if e.state == "well" and not e.is_routed and e.name not in barred),
        route_off=tuple(e.name for e in seen.engines if e.is_routed and (e.name in sure or e.name in barred)),
        drain=tuple(
            e.name
            for e in unlisted
            if e.name in drained_at
            and e.state in ("well", "ill")
            and clock >= moment(drained_at[e.name]) + timedelta(seconds=UNFOUND_S)
        ),
        delete=doomed,
        holds_evictions=holds(order, state, seen, clock),
        num_freed=len(freed(state, seen).difference(doomed)),
        look_again_s=0.0 if state != memory else min(_looks(order, state, seen, clock), default=None),
    )


def _is_at_rest(memory: RolloutState, state: RolloutState) -> bool:
    """Whether a roll had come to its end, and nobody asks for anything else: what fails then is recovered."""
    same = ("counts", "current_revision", "update_revision", "failure")
    is_same = all(getattr(memory, name) == getattr(state, name) for name in same)
    return memory.step in (RolloutStep.COMPLETE, RolloutStep.ROLLED_BACK) and is_same


def _first(order: Order, seen: Seen) -> RolloutState:
    """A state for what is there, when none was written or it was lost: of several revisions the one that serves."""
    counts = Counter(engine.revision for engine in seen.engines)
    current = max(sorted(counts), key=seen.num_available, default=order.revision)
    if not seen.num_available(current):
        current = order.revision
    return RolloutState(current_revision=current, update_revision=order.revision, counts=dict(counts))


def _retargeted(order: Order, state: RolloutState, seen: Seen) -> RolloutState:
    """The state after what the spec says now."""
    changes: dict[str, object] = {}
    if state.update_revision != order.revision:
        changes = {"update_revision": order.revision, "is_promoted": False, "window": None, "failure": None}
        changes |= {"progress_time": "", "most_well": 0, "roll_time": ""}
    if seen.num_available(state.current_revision):
        changes["has_served"] = True
    elif not state.has_served:
        changes["current_revision"] = order.revision
    return state.model_copy(update=changes)


def _judged(order: Order, state: RolloutState, seen: Seen, clock: datetime) -> RolloutState:
    """The state after what the new revision's engines have shown."""
    asked, revision = order.rollout, state.update_revision
    if target(order, state) == state.current_revision or is_held(order, state):
        return state.model_copy(update={"window": None, "progress_time": ""})
    num_well, window = seen.num_available(revision), state.window
    since = state.progress_time or stamp(clock)
    if num_well > state.most_well:
        since = stamp(clock)
    if _is_excused(order, state, seen):
        since = ""
    most_well = max(num_well, state.most_well)

    def failed(reason: Literal["AnalysisFailed", "CrashLoop", "DeadlineExceeded"], message: str) -> RolloutState:
        failure = RolloutFailure(revision=revision, reason=reason, message=message, time=stamp(clock))
        return state.model_copy(update={"failure": failure, "window": None, "progress_time": ""})

    if seen.num_crashes >= _MAX_CRASHES[state.is_promoted]:
        return failed("CrashLoop", seen.cause)
    if not state.is_promoted:
        new = total(engine.figures for engine in seen.of(revision))
        old = total(engine.figures for engine in seen.engines if engine.revision != revision)
        if window is None and num_well:
            window = Window(time=stamp(clock), new=new, old=old)
        has_end = window is not None and is_over(window, new, old, asked.analysis, clock)
        if window is not None and (message := problem(window, new, old, asked.analysis, is_over=has_end)):
            return failed("AnalysisFailed", message)
        if not num_well:
            window = None
        elif has_end:
            progress = {"is_promoted": True, "window": None, "progress_time": stamp(clock), "most_well": most_well}
            return state.model_copy(update=progress)
    patience_s = asked.progress_deadline_seconds
    if not state.is_promoted and most_well:
        # Also while the one that is compared is ill for a moment.
        patience_s += MAX_HOLDS * asked.analysis.hold_seconds
    if since and clock > moment(since) + timedelta(seconds=patience_s):
        words = (
            f"No further engine served within {asked.progress_deadline_seconds} s (rollout.progressDeadlineSeconds)."
        )
        return failed("DeadlineExceeded", words)
    return state.model_copy(update={"window": window, "progress_time": since, "most_well": most_well})


def _is_excused(order: Order, state: RolloutState, seen: Seen) -> bool:
    """Whether the roll waits for something else than its new engines: nodes with room, or old engines that drain."""
    new, wanted = seen.of(state.update_revision), state.counts.get(state.update_revision, 0)
    has_room = len(seen.engines) + seen.num_ending < order.most
    is_short = any(engine.state == "unschedulable" for engine in new)
    is_served = state.is_promoted and seen.num_available(state.update_revision) == len(new)
    return is_short or (is_served and not has_room) or (not new and not has_room) or (is_served and len(new) >= wanted)


def _completed(order: Order, state: RolloutState, seen: Seen) -> RolloutState:
    """The state once every engine is of the new revision and serves."""
    revision = state.update_revision
    is_rolling = target(order, state) != state.current_revision and not is_held(order, state)
    is_proven = state.is_promoted or order.replicas == 0
    if not is_rolling or not is_proven or len(seen.of(revision)) < len(seen.engines):
        return state
    if seen.num_available(revision) < order.replicas:
        return state
    changes = {"current_revision": revision, "has_served": order.replicas > 0, "progress_time": "", "most_well": 0}
    return state.model_copy(update=changes | {"is_promoted": False, "window": None})


def _with_drains(memory: RolloutState, leaving: dict[str, str], seen: Seen, clock: datetime) -> dict[str, str]:
    """The engines that are to go, with the time from which those count their drain that no client finds any more."""
    for engine in seen.engines:
        if engine.name in leaving and (engine.is_routed or engine.is_listed):
            leaving[engine.name] = ""  # Also one that was listed late, after its label was taken away.
        elif engine.name in leaving and engine.name in memory.leaving and engine.state not in IDLE:
            leaving[engine.name] = leaving[engine.name] or stamp(clock)
    return leaving


def _barred(order: Order, state: RolloutState, seen: Seen) -> set[str]:
    """A first engine that failed its analysis and is kept, for `autoRollback` is false: nobody is sent to it."""
    if not is_held(order, state) or state.failure is None or state.is_promoted:
        return set()
    others = [engine for engine in seen.engines if engine.revision != state.update_revision]
    has_enough = sum(engine.is_available for engine in others) >= order.least
    return {engine.name for engine in seen.of(state.update_revision)} if has_enough else set()


def _missing(order: Order, memory: RolloutState, state: RolloutState, seen: Seen) -> dict[str, int]:
    """How many engines to make of each revision, as far as there may be more. While the first new one has not proven
    itself, the old ones come first."""
    room = order.most - len(seen.engines) - seen.num_ending
    first = target(order, state) if state.is_promoted else state.current_revision
    found = {}
    for revision in sorted(state.counts, key=lambda each: (each != first, each)):
        wanted = min(memory.counts.get(revision, 0), state.counts[revision])
        number = min(wanted - len(seen.of(revision)), room)
        if number > 0:
            found[revision] = number
            room -= number
    return found


def _looks(order: Order, state: RolloutState, seen: Seen, clock: datetime) -> Iterator[float]:
    if state.window is not None or state.leaving:
        yield _LOOK_S
    yield from (max(left_s, _LOOK_S) for left_s in time_left(order, state, clock) if left_s > 0)
    if state.progress_time:
        since = moment(state.progress_time) + timedelta(seconds=order.rollout.progress_deadline_seconds)
        yield max((since - clock).total_seconds(), _LOOK_S)
