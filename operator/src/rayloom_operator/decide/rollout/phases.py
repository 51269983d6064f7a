"""What a roll does, as one word and a sentence for the condition Progressing. Pure.

Sentences hold nothing that changes by itself.
"""

from __future__ import annotations

from enum import StrEnum

from rayloom_operator.api.rollout import RolloutState
from rayloom_operator.decide.rollout.counts import Order, Seen, is_one_to_surge, moved_out, target


class RolloutStep(StrEnum):
    """What a roll does. A closed list: the reasons of the condition Progressing."""

    COMPLETE = "Complete"
    SCALING = "Scaling"
    MOVING = "Moving"
    STARTING = "Starting"
    WAITING_FOR_CAPACITY = "WaitingForCapacity"
    ANALYZING = "Analyzing"
    PROMOTING = "Promoting"
    REPLACING = "Replacing"
    ROLLING_BACK = "RollingBack"
    ROLLED_BACK = "RolledBack"
    PAUSED = "Paused"
    HALTED = "Halted"


def course(order: Order, state: RolloutState, seen: Seen, *, is_at_rest: bool) -> tuple[RolloutStep, str]:
    """The step, and what it waits for. What is at rest stays so while an engine is ill, or made anew."""
    wanted, new, failure = target(order, state), state.update_revision, state.failure
    engines, num_old = seen.of(wanted), len(seen.engines) - len(seen.of(wanted))
    why = f"Revision {failure.revision} failed ({failure.reason}): {failure.message} " if failure is not None else ""
    if wanted == state.current_revision:
        moved = moved_out(order, state, seen)
        is_moving = bool(moved) or is_one_to_surge(order, state, seen)
        has_all = len(engines) == order.replicas and seen.num_available(wanted) >= order.replicas
        is_whole = (has_all or is_at_rest) and not is_moving
        if is_whole and not num_old and failure is not None:
            words = f"Every engine is of revision {wanted} again. Change the spec to try another."
            return RolloutStep.ROLLED_BACK, why + words
        if is_whole and not num_old and not order.replicas:
            return RolloutStep.COMPLETE, "There are no engines, for spec.replicas is 0."
        if is_whole and not num_old:
            return RolloutStep.COMPLETE, f"Every engine is of revision {wanted}."
        if failure is not None and not is_moving:
            return RolloutStep.ROLLING_BACK, why + f"The engines of revision {wanted} come back."
    elif failure is not None:
        return RolloutStep.HALTED, why + "The roll stops here, for rollout.autoRollback is false. Change the spec."
    elif order.rollout.paused:
        return RolloutStep.PAUSED, f"The roll to revision {new} stands still until rollout.paused is false."
    if short := next((engine for engine in engines if engine.state == "unschedulable"), None):
        words = f"Engine {short.name} finds no node, and what serves goes on. Add nodes"
        if wanted != state.current_revision and order.rollout.max_surge:
            words += ", or roll within what there is: rollout.maxSurge 0 and maxUnavailable 1"
        return RolloutStep.WAITING_FOR_CAPACITY, words + "."
    if wanted == state.current_revision:
        if num_old:
            return RolloutStep.REPLACING, f"Engines of other revisions than {wanted} go."
        if is_moving:
            words = "Engines on nodes that are being emptied are made elsewhere, one by one; then the old ones go."
            return RolloutStep.MOVING, words
        return RolloutStep.SCALING, f"The engines of revision {wanted} become {order.replicas}."
    if state.is_promoted:
        return RolloutStep.PROMOTING, f"Engines of revision {new} take the place of the others, one by one."
    if state.window is not None:
        return RolloutStep.ANALYZING, f"The first engine of revision {new} takes requests, and is compared."
    return RolloutStep.STARTING, f"The first engine of revision {new} is to make a token before any other is touched."
