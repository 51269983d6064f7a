"""Decides whether an engine replica has failed (only a new RayCluster would help), and finds the cause. Pure.

The checks run in the order of `_CHECKS`. Each check is named after the failure that it detects, and the check's
docstring describes that failure. The first failure found is the cause.

Smaller faults are repaired elsewhere: the engine replaces its ranks, the kubelet restarts containers, and KubeRay
recreates worker pods. A missing model, image or node does not count as a failure. The existing replica retries by
itself, and a new replica would lack the same model, image or node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rayloom_operator.api.status import GroupStatus, Reason
from rayloom_operator.observe.observed import NEW_POD_S, EngineReplica, Pod, Reading, Verdict
from rayloom_operator.observe.verdict import SILENCE_LIMIT_S, is_well, judge, silence
from rayloom_operator.resolve.resolved import Resolved
from rayloom_operator.times import Now, moment

# The engine itself gives up after rebuildSeconds. The operator replaces the engine this many seconds later, so that
# engine and operator do not act at the same time.
_LATER_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Suspect:
    """An engine replica that does not serve, and the other inputs of the checks."""

    replica: EngineReplica
    resolved: Resolved
    lost_nodes: frozenset[str]
    before: GroupStatus | None  # the replica's entry in `status.groups` as last written; None if there is none
    now: Now

    @property
    def head(self) -> Pod | None:
        return self.replica.head


def cause_to_replace(
    replica: EngineReplica,
    resolved: Resolved,
    lost_nodes: frozenset[str],
    before: GroupStatus | None = None,
    *,
    now: Now,
) -> Verdict | None:
    """Returns the cause if the replica has failed; None while it serves, or may recover without a new RayCluster.

    `before` is the replica's entry in `status.groups` as last written.
    """
    if is_well(replica, now.mono):
        return None
    suspect = _Suspect(replica=replica, resolved=resolved, lost_nodes=lost_nodes, before=before, now=now)
    for check in _CHECKS:
        cause = check(suspect)
        if cause is not None:
            return cause
    return None


def has_served(replica: EngineReplica, before: GroupStatus | None) -> bool:
    """Returns whether the engine has finished its start-up since its containers last started.

    The engine's last answer decides this. While this operator process has no answer yet, `before` decides. `before` is
    the replica's entry in `status.groups` as last written.
    """
    head, reading = replica.head, replica.reading
    if head is None or head.running_since is None:
        return False
    if reading is not None and reading.status is not None:
        return reading.status.state != "starting"
    if before is None or before.state not in ("Serving", "Recovering", "Draining"):
        return False
    return moment(before.last_transition_time) >= head.running_since


def _head_lost(suspect: _Suspect) -> Verdict | None:
    """The head pod is gone. KubeRay recreates only worker pods."""
    replica = suspect.replica
    if not replica.is_headless or replica.head is not None:
        return None
    cause = judge(replica, suspect.now.mono)
    return replace(cause, reason=Reason.HEAD_LOST) if replica.is_head_evicted else cause


def _too_many_pods(suspect: _Suspect) -> Verdict | None:
    """Pods keep failing, and KubeRay has created many. KubeRay replaces each failed pod at once and without a limit."""
    replica, recovery = suspect.replica, suspect.resolved.service.spec.recovery
    if replica.num_new_pods <= 2 * (1 + suspect.resolved.num_pods) + recovery.restart_budget:
        return None
    words = f"KubeRay created {replica.num_new_pods} pods within {NEW_POD_S:.0f} s, because pods kept failing. "
    fault = replica.fault
    return Verdict(reason=Reason.CONTAINER_FAILED, message=words + (fault.message if fault else ""))


def _node_lost(suspect: _Suspect) -> Verdict | None:
    """The head pod's node is lost. Worker pods on lost nodes are not checked: KubeRay recreates them."""
    head = suspect.head
    if head is None or head.node not in suspect.lost_nodes:
        return None
    return Verdict(reason=Reason.NODE_LOST, message=f"Node {head.node} with head pod {head.name} is not ready.")


def _exhausted(suspect: _Suspect) -> Verdict | None:
    """The engine gave up, or a container of the head pod keeps crashing."""
    head = suspect.head
    if head is None or not head.is_exhausted or head.fault is None:
        return None
    starved = sorted(pod.name for pod in suspect.replica.pods if pod.was_starved)
    if not starved:
        return head.fault
    words = f" Memory was too little in {', '.join(starved)}: raise engine.resources.limits.memory."
    return replace(head.fault, message=head.fault.message + words)


def _unreachable(suspect: _Suspect) -> Verdict | None:
    """An engine that has served answers neither the operator nor the readiness probe of the kubelet.

    `_stuck` checks an engine that has not finished its start-up. Such an engine is never ready, so a failed readiness
    probe proves nothing.
    """
    head, reading = suspect.head, _reading_to_doubt(suspect)
    if head is None or reading is None or not has_served(suspect.replica, suspect.before):
        return None
    # The engine's supervisor replaces a hanging process after hangSeconds. The operator waits longer than that.
    patience_s = max(2 * suspect.resolved.service.spec.recovery.hang_seconds, SILENCE_LIMIT_S)
    silent_s = silence(reading, suspect.now.mono)
    if silent_s is None or silent_s < patience_s:
        return None
    words = f"The engine in pod {head.name} did not answer for {patience_s:g} s, and was not ready."
    return Verdict(reason=Reason.ENGINE_UNREACHABLE, message=words)


def _stuck(suspect: _Suspect) -> Verdict | None:
    """All pods run, and the engine has made no progress for longer than rebuildSeconds."""
    replica, head, reading = suspect.replica, suspect.head, _reading_to_doubt(suspect)
    if head is None or reading is None:
        return None
    running_since = [pod.running_since for pod in replica.pods if pod.running_since is not None]
    is_draining = reading.status is not None and reading.status.state == "draining"
    if len(running_since) < len(replica.pods) or is_draining:
        return None
    now, rebuild_s = suspect.now, suspect.resolved.service.spec.recovery.rebuild_seconds
    stuck_s = min(now.mono - reading.advanced_at, (now.wall - max(running_since)).total_seconds())
    if stuck_s < rebuild_s + _LATER_S:
        return None
    words = f"The engine in pod {head.name} made no progress for {rebuild_s} s. "
    return Verdict(reason=Reason.ENGINE_STUCK, message=words + judge(replica, now.mono).message)


def _reading_to_doubt(suspect: _Suspect) -> Reading | None:
    """Returns the engine's last reading, or None if its head pod does not run.

    Also None if the engine's container is ready but the engine does not answer the operator. In this case the kubelet
    reaches the engine, so the fault lies elsewhere, for example in a firewall or in another operator key. A new replica
    would not answer the operator either.
    """
    head, reading = suspect.head, suspect.replica.reading
    if head is None or not head.is_running or reading is None:
        return None
    if head.is_engine_ready and silence(reading, suspect.now.mono) is not None:
        return None
    return reading


_CHECKS: tuple[Callable[[_Suspect], Verdict | None], ...] = (
    _head_lost,
    _too_many_pods,
    _node_lost,
    _exhausted,
    _unreachable,
    _stuck,
)
