"""Decides which objects of an LLMGateway are applied or deleted, and at which intervals. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rayloom_operator.api.llmgateway.spec import LLMGateway
from rayloom_operator.decide.changes.plan import Plan
from rayloom_operator.decide.changes.pod_label import PodLabel
from rayloom_operator.decide.llmgateway.pod_models import stale_after_s
from rayloom_operator.decide.llmgateway.route import route_plan, route_requeues
from rayloom_operator.decide.llmgateway.situation import GatewaySituation
from rayloom_operator.decide.requeue import LATE_MOUNT_CHECK_S, REAPPLY_S, REGULAR_S
from rayloom_operator.names import MODELS_LABEL, Manifest
from rayloom_operator.objects.llmgateway.companions import (
    gateway_account,
    gateway_budget,
    gateway_policy,
    gateway_secret,
    gateway_service,
)
from rayloom_operator.objects.llmgateway.deployment import gateway_deployment
from rayloom_operator.objects.secret_digest import with_digest_of
from rayloom_operator.objects.tls.tls_secrets import llmgateway_secret

# If a pod still has another models file after this time, somebody may have changed the Secret. The kubelet needs at
# most two minutes to bring a new file.
UNREAD_S = 150.0


def gateway_plan(situation: GatewaySituation) -> Plan:
    """Returns the changes to make now; none while the spec cannot be read, so that existing objects stay."""
    route = route_plan(situation)
    return Plan(
        wanted=wanted_objects(situation),
        labels=tuple(_outdated_pods(situation)),
        deletions=tuple(() if route is None else route.deletions()),
    )


def _outdated_pods(situation: GatewaySituation) -> Iterator[PodLabel]:
    """Yields labels for pods with an earlier models file: a changed label makes the kubelet update the file at once."""
    if situation.gateway is None:
        return
    present = situation.models_hash
    outdated = {each.name for each in situation.pod_models if each.state == "Outdated"}
    for pod in situation.pods:
        if pod.name in outdated and pod.models_label != present:
            yield PodLabel(pod=pod, name=MODELS_LABEL, value=present)


def wanted_objects(situation: GatewaySituation) -> tuple[Manifest, ...]:
    """Returns the objects to apply; none while the spec cannot be read, so that existing objects stay."""
    gateway, route = situation.gateway, route_plan(situation)
    if gateway is None or route is None:
        return ()
    settings = situation.settings
    keys = [each.entry.auth for each in situation.members if each.entry is not None]
    keys += [each.entry.auth for each in situation.aliases if each.entry is not None]
    secrets = (
        gateway_secret(gateway, situation.models_text, settings.operator_key),
        *_certificate(situation, gateway),
    )
    return (
        *secrets,
        with_digest_of(secrets, gateway_account(gateway), settings.operator_key),
        gateway_service(gateway),
        gateway_budget(gateway),
        gateway_policy(gateway, settings.namespace),
        gateway_deployment(
            gateway, settings.engine_image, [each for each in keys if each is not None], settings.pod_tls
        ),
        *route.objects(),
    )


def _certificate(situation: GatewaySituation, gateway: LLMGateway) -> tuple[Manifest, ...]:
    settings = situation.settings
    if settings.pod_tls == "off":
        return ()
    return (llmgateway_secret(gateway, settings.operator_key, settings.previous_key, situation.now.wall),)


def reapply_after_s(situation: GatewaySituation) -> float:
    """Returns the seconds until applied objects are applied again.

    Secrets are not watched. The interval is shorter while a pod waits for a volume, because somebody may have deleted
    the Secret, and while a pod has had another models file for long, because somebody may have changed the Secret.
    """
    if any(each.is_mounting for each in situation.pods):
        return LATE_MOUNT_CHECK_S
    is_late = situation.unread_s is not None and situation.unread_s >= UNREAD_S
    return UNREAD_S if is_late else REAPPLY_S


def requeue_after_s(situation: GatewaySituation) -> float:
    """Returns the seconds until the next reconcile, unless an event comes before."""
    mono = situation.now.mono
    # The state of a pod that does not answer becomes Unknown once its last answer is too old.
    looks = (stale_after_s(each, mono) for each in situation.readings.values() if each.failing_since is not None)
    unread = () if situation.unread_s is None else (UNREAD_S - situation.unread_s,)
    later: list[float] = [each for each in (*looks, *unread) if each > 0]
    return min(reapply_after_s(situation), REGULAR_S, *route_requeues(situation), *later)
