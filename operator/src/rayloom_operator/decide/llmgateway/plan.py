"""Decides which objects of an LLMGateway are applied or deleted, and at which intervals. Pure."""

from __future__ import annotations

from rayloom_operator.decide.changes.plan import Plan
from rayloom_operator.decide.llmgateway.route import route_deletions, route_objects, route_requeues
from rayloom_operator.decide.llmgateway.situation import GatewaySituation
from rayloom_operator.decide.requeue import LATE_MOUNT_CHECK_S, REAPPLY_S, REGULAR_S
from rayloom_operator.names import Manifest
from rayloom_operator.objects.llmgateway.companions import (
    gateway_account,
    gateway_budget,
    gateway_policy,
    gateway_secret,
    gateway_service,
)
from rayloom_operator.objects.llmgateway.deployment import gateway_deployment
from rayloom_operator.objects.llmgateway.models_file import models_document


def gateway_plan(situation: GatewaySituation) -> Plan:
    """Returns the changes to make now; none while the spec cannot be read, so that existing objects stay."""
    return Plan(wanted=wanted_objects(situation), deletions=tuple(route_deletions(situation)))


def wanted_objects(situation: GatewaySituation) -> tuple[Manifest, ...]:
    """Returns the objects to apply; none while the spec cannot be read, so that existing ones stay."""
    gateway = situation.gateway
    if gateway is None:
        return ()
    settings = situation.settings
    models = [each.entry for each in situation.members if each.entry is not None]
    aliases = [each.entry for each in situation.aliases if each.entry is not None]
    keys = [each.auth for each in models] + [each.auth for each in aliases]
    document = models_document(models, aliases, settings.operator_key, settings.previous_key)
    return (
        gateway_secret(gateway, document, settings.operator_key),
        gateway_account(gateway),
        gateway_service(gateway),
        gateway_budget(gateway),
        gateway_policy(gateway, settings.namespace),
        gateway_deployment(gateway, settings.engine_image, [each for each in keys if each is not None]),
        *route_objects(situation),
    )


def reapply_after_s(situation: GatewaySituation) -> float:
    """Returns the seconds until applied objects are applied again.

    Secrets are not watched. While a pod waits for a volume, the interval is shorter, because somebody may have deleted
    the Secret.
    """
    is_mounting = any(each.is_mounting for each in situation.pods)
    return LATE_MOUNT_CHECK_S if is_mounting else REAPPLY_S


def requeue_after_s(situation: GatewaySituation) -> float:
    """Returns the seconds until the next reconcile, unless an event comes before."""
    return min(reapply_after_s(situation), REGULAR_S, *route_requeues(situation))
