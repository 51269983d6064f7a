"""The state of the gateway pods: status.gateway, the endpoint of clients, and the verdicts for conditions. Pure."""

from __future__ import annotations

from rayloom_operator.api.gateway.stored import NO_PORT, GatewayStatus
from rayloom_operator.api.status import Reason, stored_gateway
from rayloom_operator.decide.changes.gateway import has_front_ports, num_wanted
from rayloom_operator.decide.route import route_status
from rayloom_operator.decide.situation import Situation
from rayloom_operator.objects.companions import endpoint
from rayloom_operator.objects.gateway.companions import gateway_endpoint
from rayloom_operator.observe.observed import DeploymentProgress, Verdict, refused_pod
from rayloom_operator.observe.verdict import is_well
from rayloom_operator.resolve.resolved import Resolved

_OFF = "spec.gateway asks for no gateway pod: clients reach the engines directly."
_WITHOUT_PORT = (
    "No engine that serves has the port for gateways. A rollout brings engines with this port; the conditions "
    "Progressing and RolledBack describe the rollout."
)


def gateway_status(situation: Situation, *, is_refused: bool) -> GatewayStatus | None:
    """Returns status.gateway; None without a gateway.

    `is_refused`: the API server refused a change, so an object that was to be deleted may still exist.
    """
    found = _pods_status(situation, is_refused=is_refused)
    return None if found is None else found.model_copy(update={"route": route_status(situation)})


def _pods_status(situation: Situation, *, is_refused: bool) -> GatewayStatus | None:
    resolved, stored = situation.resolved, stored_gateway(situation.previous)
    if resolved is None or not situation.can_create:
        # This reconcile creates and deletes nothing, so the objects in the last written status still exist.
        return None if stored is None else _status_of(stored.replicas, situation)
    wanted = num_wanted(resolved)
    if is_refused and stored is not None and stored.replicas > 0 and wanted == 0:
        return stored
    if not has_front_ports(situation, resolved):
        return stored if is_refused else None
    return _status_of(wanted, situation)


def clients_endpoint(situation: Situation, resolved: Resolved) -> str:
    """Returns the clients' URL: the gateways' URL if the spec asks for gateway pods, otherwise the engines' URL.

    A service may get gateways while its engines serve. The result then stays the engines' URL until a gateway is ready
    and gateways reach all engines.
    """
    direct, through = endpoint(resolved.service), gateway_endpoint(resolved.service)
    if num_wanted(resolved) == 0:
        return direct
    if situation.previous.get("endpoint") != direct:
        return through
    revisions = [each.resolved for each in situation.revisions]
    are_reached = all(each is not None and each.service.spec.gateway is not None for each in revisions)
    return through if are_reached and _num_ready(situation) > 0 else direct


def gateway_problem(situation: Situation) -> Verdict | None:
    """Returns the reason why clients that use status.endpoint reach no engine.

    None if a gateway pod is ready, or if status.endpoint is the engines' URL.
    """
    service, resolved = situation.service, situation.resolved
    shown = situation.previous.get("endpoint") if resolved is None else clients_endpoint(situation, resolved)
    if service is None or shown != gateway_endpoint(service) or _num_ready(situation) > 0:
        return None
    message = "An engine serves, but no gateway pod takes requests yet."
    return gateway_fault(situation) or Verdict(reason=Reason.GATEWAY_NOT_READY, message=message)


def gateway_fault(situation: Situation) -> Verdict | None:
    """Returns the first fault of a gateway pod, or why no pod can be created; None while no gateway is wanted."""
    if situation.resolved is not None and num_wanted(situation.resolved) == 0:
        return None
    found = next((each.fault for each in situation.observed.gateways if each.fault is not None), None)
    progress = situation.observed.gateway_progress
    if found is None and progress is not None and progress.refusal:
        found = refused_pod(progress.refusal)
    return None if found is None else Verdict(reason=found.reason, message=f"The gateway: {found.message}")


def _num_ready(situation: Situation) -> int:
    return sum(each.is_ready for each in situation.observed.gateways)


def _has_no_port(situation: Situation) -> bool:
    """Returns whether the spec asks for the port, engines of a revision without it exist, and no engine with it serves.

    While the spec cannot be used, the last written status decides.
    """
    if situation.resolved is None:
        stored = stored_gateway(situation.previous)
        return stored is not None and stored.reason == NO_PORT
    if situation.resolved.service.spec.gateway is None:
        return False
    has_others = False
    for revision in situation.revisions:
        replicas = [each.replica for each in revision.places if each.replica is not None]
        if revision.resolved is None or revision.resolved.service.spec.gateway is not None:
            if any(is_well(each, situation.now.mono) for each in replicas):
                return False
        elif replicas:
            has_others = True
    return has_others


def _status_of(wanted: int, situation: Situation) -> GatewayStatus:
    ready, fault = _num_ready(situation), gateway_fault(situation)
    if _has_no_port(situation):
        return GatewayStatus(replicas=wanted, ready=ready, reason=NO_PORT, message=_WITHOUT_PORT)
    if wanted == 0:
        return GatewayStatus(replicas=0, ready=0, reason="Off", message=_OFF)
    if fault is not None:
        return GatewayStatus(replicas=wanted, ready=ready, reason=fault.reason, message=fault.message)
    reason, message = _progress(wanted, situation)
    return GatewayStatus(replicas=wanted, ready=ready, reason=reason, message=message)


def _progress(wanted: int, situation: Situation) -> tuple[str, str]:
    """Returns the state of gateway pods without faults, as one word and as sentences."""
    ready, progress = _num_ready(situation), situation.observed.gateway_progress
    taking = f"{ready} of {wanted} gateway pods take requests."
    if progress is not None and not progress.is_seen:
        return "Updating", "The Deployment controller has not seen the last change of the gateway's Deployment yet."
    if progress is not None and progress.num_updated < progress.num_pods:
        return _update(wanted, ready, progress)
    has_all = progress is None or progress.num_updated == wanted
    if ready >= wanted and has_all:
        return "Ready", "Every gateway pod takes requests."
    if not situation.observed.gateways:
        return "Starting", "No gateway pod exists yet."
    if ready == 0:
        return "Starting", (
            "No gateway pod takes requests yet. A gateway needs the tokenizer of the first engine that it reaches."
        )
    return "Starting", taking


def _update(wanted: int, ready: int, progress: DeploymentProgress) -> tuple[str, str]:
    """Returns the state while pods with former settings are replaced."""
    counts = (
        f"{progress.num_updated} of {wanted} gateway pods have the new settings, and "
        f"{progress.num_pods - progress.num_updated} have former ones; {ready} take requests."
    )
    if not progress.is_late:
        return "Updating", f"{counts} Each pod with former settings ends once a new one takes requests."
    advice = "Read the log of the newest gateway pod, and correct spec.gateway."
    return "ProgressDeadlineExceeded", f"{counts} No new pod became ready within the Deployment's deadline. {advice}"
