"""The conditions of a service, in the order in which the status lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, Literal

from rayloom_operator.api.status import Condition
from rayloom_operator.decide.conditions.accepted import accepted
from rayloom_operator.decide.conditions.available import available
from rayloom_operator.decide.conditions.degraded import degraded
from rayloom_operator.decide.conditions.evidence import Evidence, Finding
from rayloom_operator.decide.conditions.model_ready import model_ready
from rayloom_operator.decide.conditions.scheduled import scheduled
from rayloom_operator.decide.rollout.conditions import rollout_conditions
from rayloom_operator.times import stamp

_CONDITIONS: tuple[Callable[[Evidence], Finding], ...] = (accepted, model_ready, scheduled, available, degraded)


def conditions(evidence: Evidence) -> tuple[Condition, ...]:
    """Returns all conditions: those about engine replicas, then those about the rollout."""
    situation = evidence.situation
    return tuple(
        condition(each, situation.previous, situation.generation, situation.now.wall) for each in _findings(evidence)
    )


def condition(finding: Finding, previous: Mapping[str, Any], generation: int, now: datetime) -> Condition:
    """Returns the condition with its timestamps. The transition time changes only when the condition's status changes.

    `previous` is the last written status.
    """
    status: Literal["True", "False"] = "True" if finding.holds else "False"
    written = next((each for each in previous.get("conditions", ()) if each["type"] == finding.type), None)
    time = stamp(now)
    if written is not None and written["status"] == status:
        time = written["lastTransitionTime"]
    return Condition(
        type=finding.type,
        status=status,
        reason=finding.because.reason,
        message=finding.because.message,
        observed_generation=generation,
        last_transition_time=time,
    )


def _findings(evidence: Evidence) -> Iterator[Finding]:
    for judge in _CONDITIONS:
        yield judge(evidence)
    situation = evidence.situation
    # `unplanned`: why no step can be planned. A refusal takes precedence over the inspection's verdict. The refusal may
    # be of the spec, of KubeRay, or of an object such as the inspection Job.
    unplanned = (situation.inspection.verdict if evidence.is_accepted else None) or evidence.accepted
    for finding in rollout_conditions(evidence.step, situation.previous, unplanned):
        yield Finding(*finding)
