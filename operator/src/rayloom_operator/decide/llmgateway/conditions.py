"""The conditions of an LLMGateway: Accepted, Available, Degraded and Progressing. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rayloom_operator.api.status import Condition, Reason
from rayloom_operator.decide.conditions.evidence import Finding
from rayloom_operator.decide.conditions.report import condition
from rayloom_operator.decide.llmgateway.pod_models import PodModels
from rayloom_operator.decide.llmgateway.route import route_problem
from rayloom_operator.decide.llmgateway.situation import GatewaySituation
from rayloom_operator.observe.observed import Verdict, refused_pod

_SERVING = Verdict(reason=Reason.SERVING, message="A gateway pod is ready, and a selected service is available.")
_NOT_READY = Verdict(reason=Reason.GATEWAY_NOT_READY, message="No gateway pod takes requests yet.")
_HEALTHY = Verdict(reason=Reason.HEALTHY, message="Every gateway pod is healthy, and no service or alias is refused.")
_SUSPENDED = Verdict(reason=Reason.SUSPENDED, message="spec.replicas is 0, so there are no gateway pods.")
_COMPLETE = Verdict(
    reason=Reason.COMPLETE, message="Every gateway pod has the present settings and the present list of models."
)
_NO_MODELS = Verdict(
    reason=Reason.NO_MODELS,
    message="spec.services selects no LLMService of this namespace: add its labels to an LLMService, or change "
    "spec.services.",
)
# Reasons of refused names: the spec of the LLMGateway or of a service has to change.
_REFUSED_NAMES = (
    Reason.NO_GATEWAY_PORT,
    Reason.NAME_CONFLICT,
    Reason.INVALID_SPEC,
    Reason.TARGET_MISSING,
    Reason.KEYS_DIFFER,
)
_REFUSED_ADVICE = (
    "If the image of the pods is of another release than the operator, set spec.image to one of the operator's release."
)
# Reasons for which Progressing is True. DEADLINE_EXCEEDED is left out: it means that the Deployment's rollout makes no
# progress.
_IN_PROGRESS = (Reason.STARTING, Reason.REPLACING, Reason.READING_MODELS)


def gateway_conditions(situation: GatewaySituation, refusal: str) -> tuple[Condition, ...]:
    """Returns all conditions. `refusal`: the API server's message if it refused an object, and empty otherwise."""
    accepted = situation.accepted
    if refusal and accepted.reason is Reason.VALID:
        accepted = Verdict(reason=Reason.APPLY_REFUSED, message=refusal)
    available = _available(situation, accepted)
    degraded = _degraded(situation)
    progressing = _progressing(situation)
    findings = (
        Finding("Accepted", accepted.reason is Reason.VALID, accepted),
        Finding("Available", available.reason is Reason.SERVING, available),
        Finding("Degraded", degraded.reason is not Reason.HEALTHY, degraded),
        Finding("Progressing", progressing.reason in _IN_PROGRESS, progressing),
    )
    return tuple(condition(each, situation.previous, situation.generation, situation.now.wall) for each in findings)


def _available(situation: GatewaySituation, accepted: Verdict) -> Verdict:
    gateway = situation.gateway
    if situation.num_ready == 0:
        if accepted.reason is not Reason.VALID:
            return accepted
        if gateway is not None and gateway.spec.replicas == 0:
            return _SUSPENDED
        fault = _pod_fault(situation)
        if fault is not None:
            return fault
    if gateway is None:
        # The operator cannot read the spec. The gateway pods still serve the names of the last valid spec.
        return accepted
    reached = [each for each in situation.members if each.entry is not None]
    if any(each.state == "Serving" for each in reached):
        return _SERVING if situation.num_ready > 0 else _NOT_READY
    if reached:
        first = reached[0]
        return Verdict(reason=first.reason, message=f"No selected service serves. {first.service}: {first.message}")
    refused = " ".join(each.message for each in situation.members)
    return Verdict(reason=Reason.NO_MODELS, message=refused) if refused else _NO_MODELS


def _degraded(situation: GatewaySituation) -> Verdict:
    fault = _pod_fault(situation)
    if fault is not None:
        return fault
    faults = [(each.reason, each.message) for each in situation.members]
    faults += [(each.reason, each.message) for each in situation.aliases]
    faults = [(reason, message) for reason, message in faults if reason in _REFUSED_NAMES]
    route = route_problem(situation)
    if route is not None:
        faults.insert(0, (route.reason, route.message))
    faults += [(Reason.KEYS_MISSING, each.message) for each in situation.key_faults]
    faults += [(Reason.MODELS_REFUSED, each) for each in _refusals(situation.pod_models)]
    if not faults:
        return _HEALTHY
    return Verdict(reason=faults[0][0], message=" ".join(message for _, message in faults))


def _progressing(situation: GatewaySituation) -> Verdict:
    gateway, progress = situation.gateway, situation.progress
    if gateway is None:
        return situation.accepted
    wanted, ready = gateway.spec.replicas, situation.num_ready
    if progress is not None and not progress.is_seen:
        message = "The Deployment controller has not seen the last change yet."
        return Verdict(reason=Reason.REPLACING if situation.pods else Reason.STARTING, message=message)
    if progress is not None and progress.num_updated < progress.num_pods:
        counts = f"{progress.num_updated} of {wanted} gateway pods have the present settings; {ready} take requests."
        if progress.is_late:
            advice = "No new pod became ready within the Deployment's deadline: read the log of the newest gateway pod."
            return Verdict(reason=Reason.DEADLINE_EXCEEDED, message=f"{counts} {advice}")
        return Verdict(reason=Reason.REPLACING, message=counts)
    if wanted == 0:
        return _SUSPENDED
    if ready < wanted or progress is None or progress.num_updated != wanted:
        return Verdict(reason=Reason.STARTING, message=f"{ready} of {wanted} gateway pods take requests.")
    return _reading(situation.pod_models)


def _reading(pods: Sequence[PodModels]) -> Verdict:
    """Returns a verdict that says how many gateway pods have read the present models file, or that all have read it."""
    names = {state: [each.name for each in pods if each.state == state] for state in ("Current", "Outdated", "Unknown")}
    counts = f"{len(names['Current'])} of {len(pods)} gateway pods have read the present list of models."
    if names["Outdated"]:
        return Verdict(
            reason=Reason.READING_MODELS,
            message=f"{counts} The kubelet brings it to {', '.join(names['Outdated'])} within two minutes at most.",
        )
    if names["Unknown"]:
        counts += f" The operator cannot ask {', '.join(names['Unknown'])}: status.pods says why."
    if len(names["Current"]) < len(pods):
        return Verdict(reason=Reason.COMPLETE, message=f"Every gateway pod has the present settings. {counts}")
    return _COMPLETE


def _refusals(pods: Sequence[PodModels]) -> list[str]:
    """Returns a sentence for each different refusal of the models file, with the names of the pods."""
    by_message: dict[str, list[str]] = {}
    for each in pods:
        if each.state == "Refused":
            by_message.setdefault(each.message, []).append(each.name)
    return [f"{', '.join(names)}: {message.rstrip('.')}. {_REFUSED_ADVICE}" for message, names in by_message.items()]


def _pod_fault(situation: GatewaySituation) -> Verdict | None:
    """Returns the first fault of a gateway pod, or why no pod can be created."""
    found = next((each.fault for each in situation.pods if each.fault is not None), None)
    if found is None and situation.progress is not None and situation.progress.refusal:
        found = refused_pod(situation.progress.refusal)
    return found
