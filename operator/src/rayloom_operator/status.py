"""The status of a service, computed from what was observed. Pure; `now` is the only clock.

Available comes from a token that passed through every rank a moment ago, and from the way that requests take to the
engine; pods that run prove neither. Messages hold nothing that changes by itself, so a status that says the same is
the same, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from rayloom_operator.api import LLMService
from rayloom_operator.api_status import Condition, Reason, Status
from rayloom_operator.api_status import Group as GroupStatus
from rayloom_operator.engine_status import EngineStatus
from rayloom_operator.objects.service import endpoint
from rayloom_operator.observed import Fault, Group, Observed

# An idle engine sends a token through every rank each 10 s.
TOKEN_AGE_LIMIT_S = 15.0
# An engine that answered is believed for so long after the first answer that failed to come.
SILENCE_LIMIT_S = 5.0

_GROUP_STATES: Mapping[Reason, Literal["Pending", "Starting", "Serving", "Recovering", "Draining"]] = {
    Reason.SERVING: "Serving",
    Reason.STARTING: "Starting",
    Reason.PODS_PENDING: "Pending",
    Reason.UNSCHEDULABLE: "Pending",
    Reason.RECOVERING: "Recovering",
    Reason.DRAINING: "Draining",
}
_MODEL_FAULTS = (Reason.MODEL_NOT_FOUND, Reason.MODEL_UNUSABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a group does. It serves exactly when the reason is Serving."""

    reason: Reason
    message: str
    is_loaded: bool  # every rank has the model


def status(
    service: LLMService | None,
    problems: tuple[str, ...],
    observed: Observed,
    *,
    generation: int,
    revision: str,
    previous: Mapping[str, Any],
    now: float,
    clock: datetime,
) -> Status:
    """The status to write.

    `service` is None, and `problems` says why, while the spec cannot be used; `revision` is that of the spec, empty
    then. `previous` is the status as it was written last, for times of change and for what an unusable spec leaves
    running. `now` counts like the readings' seconds, `clock` is the time of day for the document.
    """
    shown_revision = revision or previous.get("currentRevision", "")
    groups = [group for group in observed.groups if group.revision == shown_revision]
    group = groups[0] if groups else None
    if service is None and group is None:
        verdict = Verdict(reason=Reason.INVALID_SPEC, message=_sentence(problems), is_loaded=False)
    elif group is None and observed.apply_error:
        verdict = Verdict(reason=Reason.APPLY_REFUSED, message=observed.apply_error, is_loaded=False)
    else:
        verdict = judge(group, now)

    def condition(kind: Literal["Accepted", "ModelReady", "Available"], holds: bool, because: Fault) -> Condition:
        said: Literal["True", "False"] = "True" if holds else "False"
        before = next((old for old in previous.get("conditions", ()) if old["type"] == kind), None)
        changed = clock.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return Condition(
            type=kind,
            status=said,
            reason=because.reason,
            message=because.message,
            observed_generation=generation,
            last_transition_time=before["lastTransitionTime"] if before and before["status"] == said else changed,
        )

    is_serving = verdict.reason is Reason.SERVING
    return Status(
        observed_generation=generation,
        conditions=(
            condition("Accepted", service is not None and not observed.apply_error, _acceptance(problems, observed)),
            condition("ModelReady", verdict.is_loaded, _model(verdict)),
            condition("Available", is_serving, Fault(reason=verdict.reason, message=verdict.message)),
        ),
        shape=service.spec.parallelism.shape if service is not None else previous.get("shape", ""),
        ready=f"{int(is_serving)}/1",
        endpoint=endpoint(service) if service is not None else previous.get("endpoint", ""),
        replicas=len(groups),
        ready_replicas=int(group is not None and group.head is not None and group.head.is_engine_ready),
        available_replicas=int(is_serving),
        current_revision=shown_revision,
        groups=tuple(_group_status(each, verdict if each is group else judge(each, now)) for each in observed.groups),
    )


def judge(group: Group | None, now: float) -> Verdict:
    """What the group does now, from the surest sign to the weakest: the engine's word, pods, the absence of both."""
    if group is None or not group.pods:
        return _pending("KubeRay makes the pods of the engine. If this stays, see whether KubeRay's operator runs.")
    head, reading = group.head, group.reading
    if head is None:
        return _pending("The head pod is gone, and KubeRay makes another.")
    silent_since = reading.failing_since if reading is not None else None
    silence = 0.0 if silent_since is None else now - silent_since
    # The failed answer of an engine that has ended is explained by its pod better than by its last word.
    is_believed = silent_since is None or (silence < SILENCE_LIMIT_S and group.fault is None)
    if reading is not None and reading.status is not None and is_believed:
        return _engine_verdict(group, reading.status)
    if group.fault is not None:
        return Verdict(reason=group.fault.reason, message=group.fault.message, is_loaded=False)
    if reading is not None and head.is_engine_ready and silence >= SILENCE_LIMIT_S:
        return Verdict(
            reason=Reason.ENGINE_UNREACHABLE,
            message=f"The engine in pod {head.name} does not answer on its admin port: {reading.error}",
            is_loaded=False,
        )
    waiting = [pod.name for pod in group.pods if not pod.is_running]
    if waiting:
        return _pending(f"Waiting for pods to start: {', '.join(sorted(waiting))}.")
    return Verdict(reason=Reason.STARTING, message="The engine starts.", is_loaded=False)


def _engine_verdict(group: Group, said: EngineStatus) -> Verdict:
    head = group.head
    assert head is not None  # its engine was asked
    is_loaded = said.last_token_age_seconds is not None

    def verdict(reason: Reason, message: str) -> Verdict:
        return Verdict(reason=reason, message=message, is_loaded=is_loaded)

    match said.state:
        case "failed":
            return verdict(Reason.ENGINE_FAILED, f"The engine failed: {said.reason}")
        case "draining":
            return verdict(Reason.DRAINING, "The engine finishes its requests and takes no more.")
        case "recovering":
            return verdict(Reason.RECOVERING, f"The engine replaces lost ranks; requests wait. {said.reason}".strip())
        case "starting":
            # What keeps the ranks' pods from running is what the engine waits for.
            if group.fault is not None:
                return verdict(group.fault.reason, group.fault.message)
            phase = next((phase.name.replace("_", " ") for phase in said.startup if not phase.finished), "")
            return verdict(Reason.STARTING, f"The engine starts: {phase}." if phase else "The engine starts.")
    if said.last_token_age_seconds is None:
        return verdict(Reason.STARTING, "The engine makes its first token.")
    if said.last_token_age_seconds >= TOKEN_AGE_LIMIT_S:
        return verdict(
            Reason.TOKENS_STOPPED,
            f"No token has passed through every rank for {TOKEN_AGE_LIMIT_S:.0f} s; /status of pod {head.name} says "
            "which rank stands still.",
        )
    if not head.is_ready or not head.is_routed:
        return verdict(Reason.STARTING, f"The engine serves; requests reach it once pod {head.name} is ready.")
    return verdict(Reason.SERVING, "A token passes through every rank, and requests reach the engine.")


def _pending(message: str) -> Verdict:
    return Verdict(reason=Reason.PODS_PENDING, message=message, is_loaded=False)


def _acceptance(problems: tuple[str, ...], observed: Observed) -> Fault:
    if problems:
        return Fault(reason=Reason.INVALID_SPEC, message=_sentence(problems))
    if observed.apply_error:
        return Fault(reason=Reason.APPLY_REFUSED, message=observed.apply_error)
    return Fault(reason=Reason.VALID, message="The spec can be used.")


def _model(verdict: Verdict) -> Fault:
    if verdict.is_loaded:
        return Fault(reason=Reason.LOADED, message="Every rank has loaded the model.")
    if verdict.reason in _MODEL_FAULTS:
        return Fault(reason=verdict.reason, message=verdict.message)
    return Fault(
        reason=Reason.LOADING, message="The engine does not say, or not yet, that every rank has loaded the model."
    )


def _group_status(group: Group, verdict: Verdict) -> GroupStatus:
    nodes = group.reading.status.nodes if group.reading is not None and group.reading.status is not None else ()
    return GroupStatus(
        name=group.name,
        revision=group.revision,
        state=_GROUP_STATES.get(verdict.reason, "Failed"),
        reason=verdict.reason,
        nodes=nodes or tuple(sorted(pod.node for pod in group.pods if pod.node and not pod.is_head)),
    )


def _sentence(problems: tuple[str, ...]) -> str:
    return "; ".join(problems)
