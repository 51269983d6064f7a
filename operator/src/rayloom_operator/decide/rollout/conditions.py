"""What the status says of rolls: the conditions Progressing, RolledBack and Paused. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rayloom_operator.api.status import ConditionType, Reason
from rayloom_operator.decide.rollout.phases import RolloutStep
from rayloom_operator.decide.rollout.planner import Step
from rayloom_operator.observe.observed import Verdict

# What rests until somebody changes the spec.
_AT_REST = (RolloutStep.COMPLETE, RolloutStep.ROLLED_BACK, RolloutStep.PAUSED, RolloutStep.HALTED)

Said = tuple[ConditionType, bool, Verdict]


def rollout_conditions(step: Step | None, previous: Mapping[str, Any], because: Verdict) -> Iterator[Said]:
    """Type, whether it holds, and why. `step` is None while nothing can be planned: `because` of the spec, or the
    model. Then what `previous`, the status as it was written last, says of rolls goes on to hold."""
    if step is None:
        yield from _as_before(previous, because)
        return
    state, failure = step.state, step.state.failure
    word = RolloutStep(state.step)
    yield "Progressing", word not in _AT_REST, Verdict(reason=Reason(word), message=step.message)
    if failure is not None:
        words = f"Revision {failure.revision} failed, and is not tried again before the spec changes. {failure.message}"
        yield "RolledBack", True, Verdict(reason=Reason(failure.reason), message=words)
    else:
        message = "No revision has failed since the spec was changed."
        yield "RolledBack", False, Verdict(reason=Reason.NOT_ROLLED_BACK, message=message)
    if word is RolloutStep.PAUSED:
        yield "Paused", True, Verdict(reason=Reason.PAUSED, message=step.message)
    else:
        yield "Paused", False, Verdict(reason=Reason.NOT_PAUSED, message="No roll is paused.")


def progress(step: Step) -> str:
    """The step, and of a revision that failed why, for people."""
    state = step.state
    return state.step if state.failure is None else f"{state.step}: {state.failure.reason}"


def _as_before(previous: Mapping[str, Any], because: Verdict) -> Iterator[Said]:
    known = {each["type"]: each for each in previous.get("conditions", ())}
    rest = {
        "Progressing": because,
        "RolledBack": Verdict(reason=Reason.NOT_ROLLED_BACK, message="No revision has failed."),
        "Paused": Verdict(reason=Reason.NOT_PAUSED, message="No roll is paused."),
    }
    kinds: tuple[ConditionType, ...] = ("Progressing", "RolledBack", "Paused")
    for kind in kinds:
        before = known.get(kind)
        if before is None or before["reason"] not in frozenset(Reason):
            yield kind, kind == "Progressing" and because.reason is Reason.INSPECTING, rest[kind]
            continue
        # While nothing can be planned, nothing progresses; but what waits for the model's facts is to go on.
        is_on_its_way = because.reason is Reason.INSPECTING
        holds = is_on_its_way if kind == "Progressing" else before["status"] == "True"
        verdict = Verdict(reason=Reason(before["reason"]), message=before["message"])
        yield kind, holds, because if kind == "Progressing" else verdict
