"""The status of a service, computed from what was observed. Pure; `now` is the only clock.

Available comes from a token that passed through every rank a moment ago, and from the way that requests take to the
engine; pods that run prove neither. Messages hold nothing that changes by itself, so a status that says the same is
the same, byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from rayloom_operator.api_status import Condition, ConditionType, GroupState, Reason, Status
from rayloom_operator.api_status import Group as GroupStatus
from rayloom_operator.engine_status import EngineStatus
from rayloom_operator.objects.companions import endpoint
from rayloom_operator.observed import Group, Pod, Reading, Verdict
from rayloom_operator.resolved import Resolved

# An idle engine sends a token through every rank each 10 s.
TOKEN_AGE_LIMIT_S = 15.0
# An engine that answered is believed for so long after the first answer that failed to come.
SILENCE_LIMIT_S = 5.0
# Healthy engines are asked each 5 s. An older answer is no news of anything, whatever became of its successors.
STALE_S = 20.0
# What an engine that recovers says when it has lost no rank, but one stands still.
STALLED = re.compile(r"has not advanced for|no step has ended for")

_GROUP_STATES: Mapping[Reason, GroupState] = {
    Reason.SERVING: "Serving",
    Reason.STARTING: "Starting",
    Reason.PODS_PENDING: "Pending",
    Reason.UNSCHEDULABLE: "Pending",
    Reason.RECOVERING: "Recovering",
    Reason.DRAINING: "Draining",
}
_MODEL_FAULTS = (Reason.MODEL_NOT_FOUND, Reason.MODEL_UNUSABLE)


def status(
    resolved: Resolved | None,
    problems: tuple[str, ...],
    groups: tuple[Group, ...],
    refusal: str = "",
    *,
    generation: int,
    revision: str,
    previous: Mapping[str, Any],
    now: float,
    clock: datetime,
) -> Status:
    """The status to write.

    `resolved` is None, and `problems` says why, while the spec cannot be used; `revision` is that of the spec, empty
    then. `refusal` is what the API server said when it refused an object of ours. `previous` is the status as it was
    written last, for times of change and for what an unusable or refused spec leaves running. `now` counts like the
    readings' seconds, `clock` is the time of day for the document.
    """
    old_revision = previous.get("currentRevision", "")
    is_made = bool(revision) and (not refusal or any(group.revision == revision for group in groups))
    shown_revision = revision if is_made else old_revision
    shown = [group for group in groups if group.revision == shown_revision]
    group = shown[0] if shown else None
    default_image = resolved.image if resolved is not None and resolved.service.spec.engine.image is None else ""
    accepted = Verdict(reason=Reason.VALID, message="The spec can be used.")
    if problems:
        accepted = Verdict(reason=Reason.INVALID_SPEC, message="; ".join(problems))
    elif refusal:
        accepted = Verdict(reason=Reason.APPLY_REFUSED, message=refusal)
    # What is refused leaves running what there was.
    is_accepted = accepted.reason is Reason.VALID
    verdict = accepted if group is None and not is_accepted else judge(group, now)

    def condition(kind: ConditionType, holds: bool, because: Verdict) -> Condition:
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
            condition("Accepted", is_accepted, accepted),
            condition("ModelReady", verdict.is_loaded, _model(verdict)),
            condition("Available", is_serving, verdict),
        ),
        shape=resolved.shape if resolved is not None else previous.get("shape", ""),
        ready=f"{int(is_serving)}/1",
        endpoint=endpoint(resolved.service) if resolved is not None else previous.get("endpoint", ""),
        replicas=len(shown),
        ready_replicas=int(group is not None and group.head is not None and group.head.is_engine_ready),
        available_replicas=int(is_serving),
        current_revision=shown_revision,
        image=default_image if is_made else previous.get("image", ""),
        groups=tuple(_group_status(each, verdict if each is group else judge(each, now)) for each in groups),
    )


def judge(group: Group | None, now: float) -> Verdict:
    """What the group does now, from the surest sign to the weakest: the engine's word, pods, the absence of both."""
    head, reading = (group.head, group.reading) if group is not None else (None, None)
    if group is None or head is None:
        if group is not None and group.fault is not None:
            return group.fault
        if group is not None and group.pods:
            return _pending("The head pod is gone, and KubeRay makes another.")
        return _pending("KubeRay makes the pods of the engine. If this stays, see whether KubeRay's operator runs.")
    silence = _silence(reading, now)
    # The failed answer of an engine that has ended is explained by its pod better than by its last word.
    is_believed = silence is None or (silence < SILENCE_LIMIT_S and group.fault is None)
    if reading is not None and reading.status is not None and is_believed:
        return _engine_verdict(group, head, reading.status)
    if group.fault is not None:
        return group.fault
    if reading is not None and head.is_engine_ready and silence is not None and silence >= SILENCE_LIMIT_S:
        error = reading.error or f"its last answer is older than {STALE_S:.0f} s"
        message = f"The engine in pod {head.name} does not answer on its admin port: {error}"
        return Verdict(reason=Reason.ENGINE_UNREACHABLE, message=message)
    waiting = [pod.name for pod in group.pods if not pod.is_running]
    if waiting:
        return _pending(f"Waiting for pods to start: {', '.join(sorted(waiting))}.")
    return Verdict(reason=Reason.STARTING, message="The engine starts.")


def _silence(reading: Reading | None, now: float) -> float | None:
    """For how many seconds the engine has not answered; None while it answers, or was not asked."""
    if reading is None:
        return None
    if reading.failing_since is not None:
        return now - reading.failing_since
    return now - reading.at if now - reading.at > STALE_S else None


def _engine_verdict(group: Group, head: Pod, said: EngineStatus) -> Verdict:
    age = said.last_token_age_seconds
    is_stopped = age is not None and age >= TOKEN_AGE_LIMIT_S

    def verdict(reason: Reason, message: str) -> Verdict:
        is_loaded = age is not None and reason is not Reason.RECOVERING
        return Verdict(reason=reason, message=message, is_loaded=is_loaded)

    if said.state == "failed":
        return verdict(Reason.ENGINE_FAILED, f"The engine failed: {said.reason}")
    if said.state == "draining":
        return verdict(Reason.DRAINING, "The engine finishes its requests and takes no more.")
    if is_stopped and (said.state == "serving" or STALLED.search(said.reason)):
        return verdict(
            Reason.TOKENS_STOPPED,
            f"No token has passed through every rank for {TOKEN_AGE_LIMIT_S:.0f} s; /status of pod {head.name} says "
            "which rank stands still.",
        )
    if said.state in ("starting", "recovering") and group.workers_fault is not None:
        # What keeps the ranks' pods from running is what the engine waits for. What ended its own container before
        # is over: it answers.
        return group.workers_fault
    if said.state == "recovering":
        return verdict(Reason.RECOVERING, f"The engine replaces lost ranks; requests wait. {said.reason}".strip())
    if said.state == "starting":
        phase = next((phase.name.replace("_", " ") for phase in said.startup if not phase.finished), "")
        return verdict(Reason.STARTING, f"The engine starts: {phase}." if phase else "The engine starts.")
    if age is None:
        return verdict(Reason.STARTING, "The engine makes its first token.")
    if not head.is_ready or not head.is_routed:
        return verdict(Reason.STARTING, f"The engine serves; requests reach it once pod {head.name} is ready.")
    return verdict(Reason.SERVING, "A token passes through every rank, and requests reach the engine.")


def _pending(message: str) -> Verdict:
    return Verdict(reason=Reason.PODS_PENDING, message=message)


def _model(verdict: Verdict) -> Verdict:
    if verdict.is_loaded:
        return Verdict(reason=Reason.LOADED, message="Every rank has loaded the model.")
    if verdict.reason in _MODEL_FAULTS:
        return verdict
    message = "The engine does not say, or not yet, that every rank has loaded the model."
    return Verdict(reason=Reason.LOADING, message=message)


def _group_status(group: Group, verdict: Verdict) -> GroupStatus:
    nodes = group.reading.status.nodes if group.reading is not None and group.reading.status is not None else ()
    return GroupStatus(
        name=group.name,
        revision=group.revision,
        state=_GROUP_STATES.get(verdict.reason, "Failed"),
        reason=verdict.reason,
        nodes=nodes or tuple(sorted(pod.node for pod in group.pods if pod.node and not pod.is_head)),
    )
