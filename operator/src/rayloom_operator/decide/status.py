"""The status of a service, computed from observations. Pure.

Messages contain nothing that changes with time alone, such as an age. So while the cluster stays the same, every byte
of the status stays the same.
"""

from __future__ import annotations

from rayloom_operator.api.autoscaling.stored import AutoscalingStatus
from rayloom_operator.api.sizing_status import stored_sizing
from rayloom_operator.api.status import Reason, Status, stored_autoscaling
from rayloom_operator.decide.adapters import adapter_statuses
from rayloom_operator.decide.conditions.accepted import acceptance
from rayloom_operator.decide.conditions.evidence import Evidence, JudgedReplica, gather_evidence
from rayloom_operator.decide.conditions.report import conditions
from rayloom_operator.decide.gateway import clients_endpoint, gateway_status
from rayloom_operator.decide.replica_status import replica_status
from rayloom_operator.decide.rollout.conditions import progress, rollout_status
from rayloom_operator.decide.situation import Situation
from rayloom_operator.names import NODE_TYPE_LABEL, SERVICE_LABEL


def status(situation: Situation, refusal: str = "") -> Status:
    """Returns the status to write.

    `refusal` is the API server's message if it refused an object of the plan, and empty otherwise. While nothing can be
    planned, fields about the spec keep their last written values.
    """
    evidence = gather_evidence(situation, acceptance(situation, refusal))
    previous, resolved, step = situation.previous, situation.resolved, evidence.step
    alive = evidence.alive
    update = step.state.update_revision if step is not None else previous.get("updateRevision", "")
    num_available = sum(each.verdict.reason is Reason.SERVING for each in alive)
    num_asked = str(resolved.service.spec.replicas) if resolved is not None else _asked_before(situation)
    return Status(
        observed_generation=situation.generation,
        conditions=conditions(evidence),
        shape=resolved.shape if resolved is not None else previous.get("shape", ""),
        sizing=resolved.sizing if resolved is not None else stored_sizing(previous),
        model=situation.inspection.model,
        adapters=adapter_statuses(evidence) or None,
        ready=f"{num_available}/{num_asked}",
        loading=_loading(alive),
        endpoint=clients_endpoint(situation, resolved) if resolved is not None else previous.get("endpoint", ""),
        replicas=sum(each.replica is not None for each in alive),
        ready_replicas=sum(_takes_requests(each) for each in alive),
        available_replicas=num_available,
        updated_replicas=sum(each.replica is not None and each.revision == update for each in evidence.staying),
        selector=_selector(situation),
        current_revision=step.state.current_revision if step is not None else previous.get("currentRevision", ""),
        update_revision=update,
        progress=progress(step) if step is not None else previous.get("progress", ""),
        rollout=rollout_status(evidence.step, situation.rollout),
        autoscaling=_autoscaling(situation),
        gateway=gateway_status(situation, is_refused=bool(refusal)),
        image=_image(evidence),
        groups=tuple(replica_status(each, situation) for each in (*evidence.staying, *evidence.leaving)),
    )


def _asked_before(situation: Situation) -> str:
    """Returns the number of replicas that the last usable spec asked for."""
    before: str = situation.previous.get("ready", "0/1")
    return before.split("/")[1]


def _autoscaling(situation: Situation) -> AutoscalingStatus | None:
    """Returns the scaler's new state; the last written state while the scaler makes no decision."""
    if situation.scaling is not None:
        return AutoscalingStatus.of(situation.scaling.state)
    resolved = situation.resolved
    is_off = resolved is not None and resolved.service.spec.autoscaling is None
    if is_off or "autoscaling" not in situation.previous:
        return None
    return AutoscalingStatus.of(stored_autoscaling(situation.previous))


def _loading(replicas: tuple[JudgedReplica, ...]) -> str | None:
    """Returns the loading progress of the first engine that starts; None if no engine reports bytes."""
    for each in replicas:
        if each.verdict.reason is not Reason.STARTING or each.replica is None:
            continue
        reading = each.replica.reading
        if reading is not None and reading.start.amount:
            return reading.start.amount
    return None


def _takes_requests(judged: JudgedReplica) -> bool:
    head = judged.replica.head if judged.replica is not None else None
    return head is not None and head.is_engine_ready


def _selector(situation: Situation) -> str:
    resolved = situation.resolved
    if resolved is None:
        before: str = situation.previous.get("selector", "")
        return before
    return f"{SERVICE_LABEL}={resolved.service.metadata.name},{NODE_TYPE_LABEL}=head"


def _image(evidence: Evidence) -> str:
    """Returns the default image with which the update revision is created; empty if the spec names an image."""
    resolved = evidence.situation.resolved
    if not evidence.is_made or evidence.step is None:
        before: str = evidence.situation.previous.get("image", "")
        return before
    return resolved.image if resolved is not None and resolved.service.spec.engine.image is None else ""
