"""Scheduled: every pod has a node."""

from __future__ import annotations

from rayloom_operator.api.status import Reason
from rayloom_operator.decide.conditions.available import availability
from rayloom_operator.decide.conditions.evidence import Evidence, Finding, JudgedReplica
from rayloom_operator.observe.observed import Verdict

_SCHEDULED = Verdict(reason=Reason.SCHEDULED, message="Every pod has a node.")


def scheduled(evidence: Evidence) -> Finding:
    verdict = _verdict(evidence)
    return Finding("Scheduled", verdict.reason is Reason.SCHEDULED, verdict)


def _verdict(evidence: Evidence) -> Verdict:
    # A rollout may change the parallelism, so each revision has its own number of pods.
    num_pods = {
        each.revision: 1 + each.resolved.num_pods for each in evidence.situation.revisions if each.resolved is not None
    }
    for each in evidence.staying:
        verdict = _unscheduled(each, num_pods.get(each.revision, 0))
        if verdict is not None:
            return verdict
    return _SCHEDULED if evidence.staying else availability(evidence)


def _unscheduled(judged: JudgedReplica, num_pods: int) -> Verdict | None:
    """Returns why a pod of the replica has no node; None if all pods have a node.

    `num_pods` is the number of pods that the replica should have, or 0 while that is unknown.
    """
    replica = judged.replica
    if replica is None:
        return judged.verdict
    for pod in replica.pods:
        if pod.fault is not None and pod.fault.reason is Reason.UNSCHEDULABLE:
            return pod.fault
    num_placed = sum(bool(pod.node) for pod in replica.pods)
    num_wanted = num_pods or len(replica.pods)
    if num_wanted == 0:
        return Verdict(reason=Reason.PODS_PENDING, message=f"{replica.name} has no pods.")
    if num_placed < num_wanted:
        message = f"{num_placed} of {num_wanted} pods of {replica.name} have a node."
        return Verdict(reason=Reason.PODS_PENDING, message=message)
    return None
