"""The step of a rollout and a sentence about it: the reason and the message of the condition Progressing. Pure.

A sentence contains nothing that changes while the step stays the same, so the status is written once per step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from rayloom_operator.api.rollout.state import RolloutState
from rayloom_operator.decide.rollout.inputs import Desired, View, target_revision
from rayloom_operator.decide.rollout.terminating import engines_to_move, needs_surge


class RolloutStep(StrEnum):
    """The steps of a rollout. Each is also a reason of the condition Progressing."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """The facts that choose a row of `_TABLE`, and the facts that the row's sentence mentions."""

    target: str  # revision
    update: str  # revision
    replicas: int
    is_rolling: bool  # the target revision is not the current revision
    is_settled: bool  # every engine is of the target revision, and either all serve or the rollout had ended before
    is_moving: bool
    num_others: int  # engines of other revisions than the target
    has_failed: bool
    why: str  # the failure as a sentence that ends with a space; empty where there is none
    is_paused: bool
    is_promoted: bool
    is_analyzing: bool
    unschedulable: str  # name of an unschedulable engine of the target revision; empty where there is none
    advice: str  # how to continue the rollout without a further node; empty if that is impossible


def step_and_message(desired: Desired, state: RolloutState, view: View, *, had_ended: bool) -> tuple[RolloutStep, str]:
    """Returns the step, and a sentence about it.

    `had_ended`: the rollout had ended before, and the spec has asked for no other revision or number since. Such a
    rollout stays at its last step while an engine does not serve or is recreated. The condition Degraded reports this
    engine.
    """
    facts = _facts(desired, state, view, had_ended=had_ended)
    row = next(row for row in _TABLE if row.applies(facts))
    return row.step, row.sentence(facts)


def _facts(desired: Desired, state: RolloutState, view: View, *, had_ended: bool) -> _Facts:
    target = target_revision(desired, state)
    failure = state.failure
    engines = view.of(target)
    num_others = len(view.engines) - len(engines)
    is_rolling = target != state.current_revision
    is_moving = bool(engines_to_move(desired, state, view)) or needs_surge(desired, state, view)
    has_all = len(engines) == desired.replicas and view.num_available(target) >= desired.replicas
    why = f"Revision {failure.revision} failed ({failure.reason}): {failure.message} " if failure is not None else ""
    advice = ", or roll within the room that there is: rollout.maxSurge 0 and maxUnavailable 1"
    return _Facts(
        target=target,
        update=state.update_revision,
        replicas=desired.replicas,
        is_rolling=is_rolling,
        is_settled=(has_all or had_ended) and not is_moving and not num_others,
        is_moving=is_moving,
        num_others=num_others,
        has_failed=failure is not None,
        why=why,
        is_paused=desired.rollout.paused,
        is_promoted=state.is_promoted,
        is_analyzing=state.window is not None,
        unschedulable=next((engine.name for engine in engines if engine.state == "unschedulable"), ""),
        advice=advice if is_rolling and desired.rollout.max_surge else "",
    )


@dataclass(frozen=True, slots=True)
class _Row:
    applies: Callable[[_Facts], object]
    step: RolloutStep
    sentence: Callable[[_Facts], str]


# The first row that applies gives the step.
_TABLE = (
    _Row(
        lambda facts: not facts.is_rolling and facts.is_settled and facts.has_failed,
        RolloutStep.ROLLED_BACK,
        lambda facts: (
            f"{facts.why}Every engine is of revision {facts.target} again. Change the spec to try another revision."
        ),
    ),
    _Row(
        lambda facts: not facts.is_rolling and facts.is_settled and not facts.replicas,
        RolloutStep.COMPLETE,
        lambda _: "There are no engines, because spec.replicas is 0.",
    ),
    _Row(
        lambda facts: not facts.is_rolling and facts.is_settled,
        RolloutStep.COMPLETE,
        lambda facts: f"Every engine is of revision {facts.target}.",
    ),
    _Row(
        lambda facts: not facts.is_rolling and facts.has_failed and not facts.is_moving,
        RolloutStep.ROLLING_BACK,
        lambda facts: f"{facts.why}The engines of revision {facts.target} come back.",
    ),
    _Row(
        lambda facts: facts.is_rolling and facts.has_failed,
        RolloutStep.HALTED,
        lambda facts: (
            f"{facts.why}The rollout stops here, because rollout.autoRollback is false. Change the spec to go on."
        ),
    ),
    _Row(
        lambda facts: facts.is_rolling and facts.is_paused,
        RolloutStep.PAUSED,
        lambda facts: f"The rollout of revision {facts.update} is paused until rollout.paused is false.",
    ),
    _Row(
        lambda facts: facts.unschedulable,
        RolloutStep.WAITING_FOR_CAPACITY,
        lambda facts: (
            f"Engine {facts.unschedulable} finds no node; engines that serve are left as they are. Add nodes"
            f"{facts.advice}."
        ),
    ),
    _Row(
        lambda facts: not facts.is_rolling and facts.num_others,
        RolloutStep.REPLACING,
        lambda facts: f"Engines of other revisions than {facts.target} are drained and deleted.",
    ),
    _Row(
        lambda facts: not facts.is_rolling and facts.is_moving,
        RolloutStep.MOVING,
        lambda _: "Engines on cordoned nodes are replaced by engines on other nodes, one by one.",
    ),
    _Row(
        lambda facts: not facts.is_rolling,
        RolloutStep.SCALING,
        lambda facts: f"The number of engines of revision {facts.target} becomes {facts.replicas}.",
    ),
    _Row(
        lambda facts: facts.is_promoted,
        RolloutStep.PROMOTING,
        lambda facts: f"Engines of revision {facts.update} replace the others, one by one.",
    ),
    _Row(
        lambda facts: facts.is_analyzing,
        RolloutStep.ANALYZING,
        lambda facts: f"The first engine of revision {facts.update} takes requests and is compared with the others.",
    ),
    _Row(
        lambda _: True,
        RolloutStep.STARTING,
        lambda facts: (
            f"The first engine of revision {facts.update} has to make a token before any other engine is replaced."
        ),
    ),
)
