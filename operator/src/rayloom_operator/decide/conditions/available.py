"""Available: a token passed through every rank of an engine a moment ago, and requests reach that engine.

Running pods alone do not prove this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rayloom_operator.api.autoscaling.state import ScalingReason
from rayloom_operator.api.status import FAULTS, Reason, stored_autoscaling
from rayloom_operator.decide.conditions.evidence import Evidence, Finding, JudgedReplica
from rayloom_operator.decide.gateway import gateway_problem
from rayloom_operator.observe.observed import Verdict
from rayloom_operator.observe.verdict import judge

SUSPENDED = Verdict(
    reason=Reason.SUSPENDED, message="spec.replicas is 0: there are no engines, and requests find none."
)


SCALED_TO_ZERO = Verdict(
    reason=Reason.SCALED_TO_ZERO,
    message="There were no requests, so there are no engines. A gateway holds the first request, which starts one.",
)


def availability(evidence: Evidence) -> Verdict:
    """Returns the verdict of the first check that applies; if none applies, the verdict on the best replica.

    Other conditions use this verdict while no replica is wanted.
    """
    for check in _CHECKS:
        verdict = check(evidence)
        if verdict is not None:
            return verdict
    return _best(evidence.alive or evidence.leaving)


def available(evidence: Evidence) -> Finding:
    verdict = availability(evidence)
    if verdict.reason is Reason.SERVING:
        verdict = gateway_problem(evidence.situation) or verdict
    return Finding("Available", verdict.reason is Reason.SERVING, verdict)


def without_engines(evidence: Evidence) -> Verdict | None:
    """Returns the verdict on a service that has no engines because `spec.replicas` is 0; None for other services."""
    verdict = availability(evidence)
    return verdict if verdict in (SUSPENDED, SCALED_TO_ZERO) else None


def _spec_unusable(evidence: Evidence) -> Verdict | None:
    """The spec cannot be used, and no replica of an earlier spec runs or has failed."""
    if evidence.is_accepted:
        return None
    for each in evidence.alive:
        if each.place.failure is not None or (each.replica is not None and each.replica.pods):
            return None
    return evidence.accepted


def _model_unknown(evidence: Evidence) -> Verdict | None:
    """No replica exists, and the inspection of the model has no result."""
    if any(each.replica is not None for each in evidence.alive):
        return None
    return evidence.situation.inspection.verdict


def _suspended(evidence: Evidence) -> Verdict | None:
    resolved = evidence.situation.resolved
    if resolved is None or resolved.service.spec.replicas > 0 or evidence.staying or evidence.leaving:
        return None
    scaling = evidence.situation.scaling
    reason = stored_autoscaling(evidence.situation.previous).reason if scaling is None else scaling.state.reason
    is_scalers = reason in (ScalingReason.SCALED_TO_ZERO, ScalingReason.SCALING_TO_ZERO)
    return SCALED_TO_ZERO if is_scalers else SUSPENDED


_CHECKS: tuple[Callable[[Evidence], Verdict | None], ...] = (_spec_unusable, _model_unknown, _suspended)


def _best(replicas: Sequence[JudgedReplica]) -> Verdict:
    """Returns the verdict on a replica that serves, else on a replica without a fault, else on the first replica."""
    verdicts = [each.verdict for each in replicas] or [judge(None, 0.0)]
    for verdict in verdicts:
        if verdict.reason is Reason.SERVING:
            return verdict
    for verdict in verdicts:
        if verdict.reason not in FAULTS:
            return verdict
    return verdicts[0]
