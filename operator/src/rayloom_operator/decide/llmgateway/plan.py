"""Decides which objects of an LLMGateway are applied or deleted, and when again. Pure."""

from __future__ import annotations

from rayloom_operator.decide.changes.plan import Plan
from rayloom_operator.decide.llmgateway.route import route_deletions, route_objects, route_requeues
from rayloom_operator.decide.llmgateway.situation import GatewaySituation
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

# Secrets are not watched, so all objects are applied again at this interval: more often while a pod waits for a volume,
# because somebody may have deleted the Secret.
_REAPPLY_S = 1800.0
_REAPPLY_WHILE_MOUNTING_S = 10.0
_REGULAR_S = 300.0


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
    document = models_document(models, aliases, settings.operator_key)
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
    """Returns the seconds until applied objects are applied again."""
    is_mounting = any(each.is_mounting for each in situation.pods)
    return _REAPPLY_WHILE_MOUNTING_S if is_mounting else _REAPPLY_S


def requeue_after_s(situation: GatewaySituation) -> float:
    """Returns the seconds until the next reconcile, unless an event comes before."""
    return min(reapply_after_s(situation), _REGULAR_S, *route_requeues(situation))
