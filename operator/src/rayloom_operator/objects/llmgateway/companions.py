"""Builds the Service, ServiceAccount, Secret, PodDisruptionBudget and NetworkPolicy of an LLMGateway."""

from __future__ import annotations

from rayloom_operator import names
from rayloom_operator.api.llmgateway.spec import LLMGateway
from rayloom_operator.names import Manifest
from rayloom_operator.objects.companions import admin_token
from rayloom_operator.objects.gateway.companions import secret
from rayloom_operator.objects.gateway.pods import budget, http_service
from rayloom_operator.objects.guards import from_clients, from_operator, ingress_policy
from rayloom_operator.objects.llmgateway import identity
from rayloom_operator.objects.llmgateway.models_file import MODELS_KEY


def gateway_service(gateway: LLMGateway) -> Manifest:
    """The Service for clients."""
    return http_service(identity.metadata(gateway), identity.selector(gateway))


def gateway_account(gateway: LLMGateway) -> Manifest:
    """The ServiceAccount of the gateway pods. It has no permissions, and its token is not mounted."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": identity.metadata(gateway),
        "automountServiceAccountToken": False,
    }


def gateway_budget(gateway: LLMGateway) -> Manifest:
    """The PodDisruptionBudget of the gateway pods."""
    return budget(identity.metadata(gateway), identity.selector(gateway), gateway.spec.replicas)


def gateway_policy(gateway: LLMGateway, operator_namespace: str = "") -> Manifest:
    """The NetworkPolicy: the API port is open to everyone, and the admin port to the operator. Egress is open."""
    rules = [from_clients(), from_operator(operator_namespace)]
    return ingress_policy(identity.metadata(gateway), identity.selector(gateway), rules)


def gateway_secret(gateway: LLMGateway, models: str, operator_key: bytes) -> Manifest:
    """The Secret with the models file, whose content is `models`, and the token of the admin port."""
    meta = gateway.metadata
    content = {
        MODELS_KEY: models,
        names.TOKEN_KEY: admin_token(operator_key, meta.namespace, meta.uid, identity.object_name(meta.name)),
    }
    return secret(identity.metadata(gateway, identity.secret_name(gateway)), content)
