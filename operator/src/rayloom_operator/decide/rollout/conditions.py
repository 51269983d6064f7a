"""The conditions of rollouts (Progressing, RolledBack, Paused), and the rollout state for the status to store. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from rayloom_operator.api.rollout.state import RolloutState
from rayloom_operator.api.rollout.stored import RolloutStatus
from rayloom_operator.api.status import ConditionType, Reason
from rayloom_operator.decide.rollout.phases import RolloutStep
from rayloom_operator.decide.rollout.planner import Step
from rayloom_operator.observe.observed import Verdict

# A rollout stays in one of these steps until the spec changes.
_AT_REST = (RolloutStep.COMPLETE, RolloutStep.ROLLED_BACK, RolloutStep.PAUSED, RolloutStep.HALTED)

# (type of the condition, whether the condition holds, verdict with the condition's reason and message)
RolloutCondition: TypeAlias = tuple[ConditionType, bool, Verdict]


def rollout_conditions(step: Step | None, previous: Mapping[str, Any], because: Verdict) -> Iterator[RolloutCondition]:
    """Yields the conditions of rollouts.

    `step` is None while nothing can be planned. Then `because` gives the reason, and RolledBack and Paused stay as they
    are in `previous`, the last written status.
    """
    if step is None:
        yield from _as_before(previous, because)
        return
    failure = step.state.failure
    name = RolloutStep(step.state.step)
    yield "Progressing", name not in _AT_REST, Verdict(reason=Reason(name), message=step.message)
    if failure is not None:
        message = (
            f"Revision {failure.revision} failed, and is not tried again before the spec changes. {failure.message}"
        )
        yield "RolledBack", True, Verdict(reason=Reason(failure.reason), message=message)
    else:
        message = "No revision has failed since the spec was changed."
        yield "RolledBack", False, Verdict(reason=Reason.NOT_ROLLED_BACK, message=message)
    if name is RolloutStep.PAUSED:
        yield "Paused", True, Verdict(reason=Reason.PAUSED, message=step.message)
    else:
        yield "Paused", False, Verdict(reason=Reason.NOT_PAUSED, message="No rollout is paused.")


def progress(step: Step) -> str:
    """Returns `status.progress`, a text for people: the step and, if a revision failed, the reason."""
    state = step.state
    return state.step if state.failure is None else f"{state.step}: {state.failure.reason}"


def rollout_status(step: Step | None, stored: RolloutState) -> RolloutStatus | None:
    """Returns the rollout state to write. None before the first reconcile.

    `step` is None while nothing can be planned. Then the deadline does not run, and no eviction is held.
    """
    if step is not None:
        return RolloutStatus.of(step.state)
    if not stored.update_revision:
        return None
    return RolloutStatus.of(replace(stored, deadline_start_time="", eviction_hold_time=""))


def _as_before(previous: Mapping[str, Any], because: Verdict) -> Iterator[RolloutCondition]:
    known = {each["type"]: each for each in previous.get("conditions", ())}
    # While nothing can be planned, Progressing is False, with one exception: a wait for the inspection of the model
    # counts as progress.
    is_progressing = because.reason is Reason.INSPECTING
    yield "Progressing", is_progressing, because
    first: dict[ConditionType, Verdict] = {
        "RolledBack": Verdict(reason=Reason.NOT_ROLLED_BACK, message="No revision has failed."),
        "Paused": Verdict(reason=Reason.NOT_PAUSED, message="No rollout is paused."),
    }
    for kind, verdict in first.items():
        before = known.get(kind)
        if before is None or before["reason"] not in frozenset(Reason):
            yield kind, False, verdict
        else:
            verdict = Verdict(reason=Reason(before["reason"]), message=before["message"])
            yield kind, before["status"] == "True", verdict
