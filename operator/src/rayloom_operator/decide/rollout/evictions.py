"""Whether evictions are held, above all while engines move away from nodes that are being emptied. Pure.

`kubectl drain` asks for evictions in the moment in which it cordons, so they are held before there is a node to empty.
Then another engine is surged, and the old one loses its route, drains and goes. Until then the service's disruption
budget lets no pod of it through, so long as that gets on.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from rayloom_operator.api.rollout import RolloutState
from rayloom_operator.decide.rollout.counts import Order, Seen, is_drained, target
from rayloom_operator.times import moment, stamp

# For how long no room for another engine may be a chance.
_SHORT_S = 30


def watched(order: Order, memory: RolloutState, state: RolloutState, seen: Seen, clock: datetime) -> RolloutState:
    """The state with the times since when evictions wait for engines to move, and since when there is no room for what
    would let them through."""
    if not _has_guarded(order, state, seen, clock):
        return state.model_copy(update={"held_time": "", "short_time": ""})
    gets_further = any(e.is_cordoned and e.name in state.leaving.keys() - memory.leaving.keys() for e in seen.engines)
    held_time = stamp(clock) if gets_further or not state.held_time else state.held_time
    short_time = "" if _gets_on(order, state, seen, clock) else state.short_time or stamp(clock)
    return state.model_copy(update={"held_time": held_time, "short_time": short_time})


def holds(order: Order, state: RolloutState, seen: Seen, clock: datetime) -> bool:
    """Whether evictions are to wait. `state` is that of `watched`. Those of engines in `freed` need not."""
    if state.held_time:
        return all(left_s > 0 for left_s in time_left(order, state, clock))
    # Nobody would move what tolerates to be there, nor hear of a drain.
    return order.rollout.max_surge > 0 and seen.knows_nodes and not any(e.is_tolerant for e in seen.engines)


def freed(state: RolloutState, seen: Seen) -> frozenset[str]:
    """Engines on nodes that are being emptied which may go as they are, for they do not serve. While others there are
    waited for these wait as well: a budget does not tell them apart."""
    return frozenset(engine.name for engine in seen.engines if engine.is_cordoned and not state.held_time)


def time_left(order: Order, state: RolloutState, clock: datetime) -> Iterator[float]:
    """Seconds after which evictions are held no longer; none of them while no engine is waited for."""
    patience_s = order.rollout.progress_deadline_seconds + order.drain_seconds
    for time, seconds in ((state.held_time, patience_s), (state.short_time, _SHORT_S)):
        if time:
            yield (moment(time) + timedelta(seconds=seconds) - clock).total_seconds()


def _has_guarded(order: Order, state: RolloutState, seen: Seen, clock: datetime) -> bool:
    """Whether an engine that would be evicted serves, or finishes what it has. With maxSurge 0 nothing could take its
    place."""
    return order.rollout.max_surge > 0 and any(
        engine.is_cordoned
        and engine.state in ("well", "draining")
        and not is_drained(engine, state.leaving.get(engine.name, ""), order, clock)
        for engine in seen.engines
    )


def _gets_on(order: Order, state: RolloutState, seen: Seen, clock: datetime) -> bool:
    """Whether there is an engine to wait for, to come or to go; or room to make one."""
    wanted = [engine for engine in seen.of(target(order, state)) if not engine.is_cordoned]
    if any(engine.state == "unschedulable" for engine in wanted):
        return False
    is_coming = any(not engine.is_available for engine in wanted if engine.name not in state.leaving)
    has_room = order.most > len(seen.engines) + seen.num_ending
    leaving = state.leaving
    is_going = any(e.name in leaving and not is_drained(e, leaving[e.name], order, clock) for e in seen.engines)
    return is_coming or has_room or is_going or state.window is not None
