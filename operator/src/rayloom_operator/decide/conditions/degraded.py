"""Degraded: something is broken, though other engine replicas may serve. The gravest fault is the reason.

An engine that starts for the first time is not broken.
"""

from __future__ import annotations

from collections.abc import Callable

from rayloom_operator.api.status import FAULTS, Reason
from rayloom_operator.decide.adapters import adapter_fault
from rayloom_operator.decide.conditions.available import availability
from rayloom_operator.decide.conditions.evidence import Evidence, Finding, JudgedReplica
from rayloom_operator.decide.gateway import gateway_fault
from rayloom_operator.decide.route import route_problem
from rayloom_operator.observe.observed import Verdict

_HEALTHY = Verdict(reason=Reason.HEALTHY, message="Nothing is known to be broken.")


def degraded(evidence: Evidence) -> Finding:
    for check in _CHECKS:
        verdict = check(evidence)
        if verdict is not None:
            return Finding("Degraded", True, verdict)
    return Finding("Degraded", False, _sound(evidence))


def _node_lost(evidence: Evidence) -> Verdict | None:
    observed = evidence.situation.observed
    own = [pod for each in evidence.staying if each.replica is not None for pod in each.replica.pods]
    lost = sorted({pod.node for pod in (*own, *observed.terminating_pods)} & observed.lost_nodes)
    if not lost:
        return None
    which = "Node" if len(lost) == 1 else "Nodes"
    message = f"{which} {', '.join(lost)} not ready: the pods there are deleted, and recreated on other nodes."
    return Verdict(reason=Reason.NODE_LOST, message=message)


def _faulty(evidence: Evidence) -> Verdict | None:
    for each in evidence.staying:
        if each.verdict.reason in FAULTS:
            return _named(each, evidence)
    return None


def _gateway_faulty(evidence: Evidence) -> Verdict | None:
    return gateway_fault(evidence.situation)


def _route_faulty(evidence: Evidence) -> Verdict | None:
    return route_problem(evidence.situation)


def _recovering(evidence: Evidence) -> Verdict | None:
    for each in evidence.staying:
        if each.verdict.reason is Reason.RECOVERING:
            return _named(each, evidence)
    return None


def _recreated(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if a replica was recreated after a failure, and does not serve yet."""
    for each in evidence.staying:
        failure = each.place.failure
        if failure is not None and each.verdict.reason is not Reason.SERVING:
            message = f"The engine {each.place.name} was recreated, and does not serve yet. {failure.message}"
            return Verdict(reason=Reason.RECOVERING, message=message)
    return None


_CHECKS: tuple[Callable[[Evidence], Verdict | None], ...] = (
    _node_lost,
    _faulty,
    _gateway_faulty,
    _route_faulty,
    _recovering,
    _recreated,
    adapter_fault,
)


def _named(judged: JudgedReplica, evidence: Evidence) -> Verdict:
    """Returns the replica's verdict, with the replica's name in the message if the service has several replicas."""
    verdict, name = judged.verdict, judged.place.name
    is_named = len(evidence.staying) == 1 or name in verdict.message
    return Verdict(reason=verdict.reason, message=verdict.message if is_named else f"{name}: {verdict.message}")


def _sound(evidence: Evidence) -> Verdict:
    """Returns the verdict of the first replica that does not serve yet; Healthy if all replicas serve."""
    if not evidence.staying:
        return availability(evidence)
    for each in evidence.staying:
        if each.verdict.reason is not Reason.SERVING:
            return each.verdict
    return _HEALTHY
