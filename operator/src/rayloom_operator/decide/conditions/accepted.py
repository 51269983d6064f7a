"""Accepted: the spec can be used."""

from __future__ import annotations

from rayloom_operator.api.status import Reason
from rayloom_operator.decide.conditions.evidence import Evidence, Finding
from rayloom_operator.decide.situation import Situation
from rayloom_operator.observe.observed import Verdict

VALID = Verdict(reason=Reason.VALID, message="The spec can be used.")


def acceptance(situation: Situation, refusal: str) -> Verdict:
    """Returns VALID, or why the spec cannot be used.

    `refusal` is the API server's message if it refused an object of the plan, and empty otherwise.
    """
    if situation.accepted.reason is not Reason.VALID:
        return situation.accepted
    if refusal:
        return Verdict(reason=Reason.APPLY_REFUSED, message=refusal)
    if situation.kuberay_problem:
        return Verdict(reason=Reason.UNSUPPORTED_KUBERAY, message=situation.kuberay_problem)
    return VALID


def accepted(evidence: Evidence) -> Finding:
    return Finding("Accepted", evidence.is_accepted, evidence.accepted)
